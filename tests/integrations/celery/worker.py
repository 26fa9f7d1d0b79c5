"""`celery` as a program that is forked: ``worker.py WORDS`` is ``celery WORDS``."""

from __future__ import annotations

import sys
import warnings

from celery.__main__ import main

if __name__ == "__main__":
    warnings.resetwarnings()  # Celery is not free of them
    sys.exit(main())
