"""Sphinx configuration. Every warning is an error in ``make docs`` and ``make check``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext import NsqError, __version__
from nsqext.client.settings_help import TITLE

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "nsqext"
author = "nsqext contributors"
copyright = "nsqext contributors"
release = __version__
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"nsqext {release}"
html_logo = "pictures/logo.svg"
html_favicon = "pictures/logo.svg"
html_static_path = ["_static"]
html_css_files = ["front.css"]
# pages have no link to their source
html_copy_source = False

# the copy button copies commands, without prompts and output
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp"
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# `single` backticks in docstrings name Python objects
default_role = "py:obj"
# the name alone of `Message` fits the client's and the blocking one's
suppress_warnings = ["ref.python"]
autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def link_to_troubleshooting(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Append to the docstring of an error a link to its causes and remedies."""
    if (
        what in ("class", "exception")
        and isinstance(obj, type)
        and issubclass(obj, NsqError)
        and obj.__module__ == "nsqext.errors"
    ):
        target = f"{obj.__name__} <../../troubleshooting.html#{obj.__name__.lower()}>"
        lines.extend(["", f"Causes and remedies: `{target}`__", ""])


def leave_out_settings(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Leave the settings out of the docstring of a client: they have a page of their own."""
    if TITLE in lines:
        del lines[lines.index(TITLE) :]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", leave_out_settings)
    app.connect("autodoc-process-docstring", link_to_troubleshooting)
