"""How Sphinx makes the site of ``make docs`` from these documents and the package's docstrings, without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.ext import napoleon
from sphinx.ext.napoleon import GoogleDocstring

import edl_hvd

project = "edl_hvd"
release = edl_hvd.__version__
author = "the authors of edl_hvd"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = "edl_hvd"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

# Links to headings, with the anchors that GitHub gives them; a link without its heading fails the build.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
nitpicky = False


class Docstring(GoogleDocstring):
    """A docstring of Google's form, also of a property, which napoleon reads as "TYPE: description"."""

    def __init__(self, lines: Any, config: Any = None, app: Any = None, what: str = "object", *more: Any) -> None:
        super().__init__(lines, config, app, "method" if what == "property" else what, *more)


def read_from_the_root(app: Any, relative: Path, parent: str, content: list[str]) -> None:
    """Make the links of README.md, CHANGELOG.md and CONTRIBUTING.md those of a page in this folder."""
    for place, text in enumerate(content):
        text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", text)
        content[place] = text.replace("](docs/", "](")


def setup(app: Any) -> None:
    """Register the above with Sphinx."""
    napoleon.GoogleDocstring = Docstring
    app.connect("include-read", read_from_the_root)
