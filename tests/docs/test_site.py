"""The documentation as a site: it builds without a warning, has every public name, and needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from documents import REPOSITORY

import edl_hvd

CAPTIONS = ["Start", "How to train", "How to run jobs", "Reference", "Background"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages. A link or an anchor that leads nowhere is a warning, and fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", str(REPOSITORY / "docs"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


class Loads(HTMLParser):
    """What a browser loads for a page, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get("src") if tag in ("script", "img", "iframe", "source", "video") else None
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev", "index", "search"):
            address = values.get("href")
        if address:
            self.found.append(address)


def loaded_by(page: str) -> list[str]:
    reader = Loads()
    reader.feed(page)
    return reader.found


def test_every_public_name_has_its_place(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    names = {f"edl_hvd.{name}" for name in edl_hvd.__all__ if name not in ("distill", "errors", "metrics")}
    names |= {f"edl_hvd.errors.{name}" for name in ("EdlHvdError", "UsageError", "StorageError", "EdlHvdWarning")}
    names |= {f"edl_hvd.distill.{name}" for name in edl_hvd.distill.__all__}
    names |= {f"edl_hvd.metrics.{name}" for name in ("AUC", "Accuracy", "Max", "Mean", "Min", "Sum")}
    assert {name for name in names if f'id="{name}"' not in text} == set()


def test_a_browser_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html")]
    assert len(pages) > 30
    elsewhere = {address for page in pages for address in loaded_by(page.read_text()) if re.match(r"\w+:|//", address)}
    assert {address for address in elsewhere if not address.startswith("data:")} == set()
    for style in site.rglob("*.css"):
        assert re.findall(r"url\(\s*['\"]?(?:https?:|//)", style.read_text()) == [], style
        assert not re.search(r"@import\s+(?:url\()?['\"]?(?:https?:|//)", style.read_text()), style


def test_navigation_is_by_purpose_and_has_every_document(site: Path) -> None:
    index = (site / "index.html").read_text()
    captions = re.findall(r'<p class="caption"[^>]*><span class="caption-text">([^<]+)</span>', index)
    assert captions == CAPTIONS
    documents = [path.stem for path in (REPOSITORY / "docs").glob("*.md") if path.stem != "index"]
    assert [name for name in documents if f'href="{name}.html"' not in index] == []


@pytest.mark.parametrize(
    ("page", "addresses"),
    [
        ('<script src="https://cdn.example.com/a.js"></script>', ["https://cdn.example.com/a.js"]),
        ('<link rel="stylesheet" href="//fonts.example.com/b.css">', ["//fonts.example.com/b.css"]),
        ('<a href="https://example.com">a</a><link rel="canonical" href="https://example.com">', []),
    ],
)
def test_the_rule_sees_what_a_browser_loads(page: str, addresses: list[str]) -> None:
    assert loaded_by(page) == addresses
