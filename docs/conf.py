"""How Sphinx makes the site of ``make docs`` from these documents and the package's docstrings, without a network."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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
# A file of the repository outside of the documents becomes a part of the site when a page links to it.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
add_module_names = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
nitpicky = False


def read_from_the_root(app: Any, relative: Path, parent: str, content: list[str]) -> None:
    """Make the links of README.md, CHANGELOG.md and CONTRIBUTING.md those of a page in this folder."""
    up = "../" * (1 + parent.count("/"))
    here = up.removeprefix("../")
    for place, text in enumerate(content):
        text = re.sub(r"\]\((?!https?:|#|docs/)", f"]({up}", text)
        content[place] = text.replace("](docs/", f"]({here}")


def setup(app: Any) -> None:
    """Register the above with Sphinx."""
    app.connect("include-read", read_from_the_root)
