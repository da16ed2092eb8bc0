"""What is computed of the package's metadata; setup.cfg has the rest.

A package index shows README.md without the files beside it. With the address of a published repository in
EDL_HVD_PROJECT_URL, such as https://github.com/OWNER/NAME, the links of its text lead there; without it they are
plain text.
"""

import os
import re
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|#)([^)\s]+)\)")


def text_for_an_index(text: str, url: str) -> str:
    """README.md with absolute links, or without relative ones where no address is known."""

    def absolute(link: "re.Match[str]") -> str:
        image, words, target = link.groups()
        if not url:
            return "" if image else words
        return f"{image}[{words}]({url}/{'raw' if image else 'blob'}/main/{target})"

    return _LINK.sub(absolute, text)


_url = os.environ.get("EDL_HVD_PROJECT_URL", "").rstrip("/")
setup(
    long_description=text_for_an_index(Path(__file__).with_name("README.md").read_text(encoding="utf-8"), _url),
    long_description_content_type="text/markdown",
    project_urls={
        "Source": _url,
        "Documentation": f"{_url}/blob/main/docs/overview.md",
        "Changelog": f"{_url}/blob/main/CHANGELOG.md",
    }
    if _url
    else {},
)
