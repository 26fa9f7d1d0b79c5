"""``pytest`` as a program that is forked from a process that has imported the package.

Modules that are imported cannot be rewritten to explain a failed assertion. Hypothesis asks the garbage collector who
refers to an object, and is not answered for objects that were frozen before the fork.
"""

from __future__ import annotations

import sys

import pytest

__all__ = ()

if __name__ == "__main__":
    sys.exit(pytest.main(["--assert=plain", "-p", "no:hypothesispytest", *sys.argv[1:]]))
