"""The version of the package, read by the build as well."""

from __future__ import annotations

__all__ = ("__version__",)

__version__ = "0.3.0"
