"""The type checkers are installed where ``make check`` runs, which is where these tests run."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("mypy") and find_spec("pyright") else ["test_uses.py"]
