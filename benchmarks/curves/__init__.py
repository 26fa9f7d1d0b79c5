"""Curves: how cost grows with one quantity. ``python -m benchmarks.curves`` measures them."""
