"""``python -m nsqext``."""

from __future__ import annotations

from nsqext.cli import main

if __name__ == "__main__":
    main()
