"""Changes to the sources of Horovod's release, made before it is compiled.

A release is taken only with the hash that is written here, and an edit is made only where its anchor stands exactly
once. So the result is always the same, or there is none.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edl_hvd.errors import BuildError

RELEASE = "0.28.1"
RELEASE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

REVISION = 6
# ``horovod_mended_revision()`` of the built library tells it; it rises with every change of an edit.


@dataclass(frozen=True)
class Edit:
    """One place of one file.

    Attributes:
        path: Of the file, inside the release.
        anchor: Text that stands exactly once in the file.
        text: What is put there.
        where: Its place by the anchor, or that it replaces it.
    """

    path: str
    anchor: str
    text: str
    where: Literal["after", "before", "instead"] = "after"

    def apply(self, source: str) -> str:
        """The file's new text.

        Raises:
            BuildError: The anchor is not there, or not only once.
        """
        count = source.count(self.anchor)
        if count != 1:
            raise BuildError(
                f"Horovod {RELEASE} cannot be mended: {self.path} was expected to have the line "
                f"{self.anchor.strip().splitlines()[0]!r} once, and has it {count} times; nothing was installed; "
                "use the release from the package index, unchanged"
            )
        replacement = {
            "after": self.anchor + self.text,
            "before": self.text + self.anchor,
            "instead": self.text,
        }[self.where]
        return source.replace(self.anchor, replacement)


@dataclass(frozen=True)
class Mend:
    """A defect of Horovod's or Gloo's, and the edits that end it.

    Attributes:
        defect: What happens without.
        issue: Where it is known upstream; empty where it is not.
        shown_by: The test or benchmark that shows it.
        edits: In this order.
    """

    defect: str
    issue: str
    shown_by: str
    edits: tuple[Edit, ...]


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the release into ``folder``, and return the folder with its ``setup.py``.

    Raises:
        BuildError: It is another archive than the release.
    """
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != RELEASE_SHA256:
        raise BuildError(
            f"{archive} is not the release of Horovod {RELEASE}: its SHA-256 is {digest}, expected {RELEASE_SHA256}; "
            f"nothing was installed; delete the file, or ask your package index for horovod-{RELEASE}.tar.gz of PyPI"
        )
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data") if hasattr(tarfile, "data_filter") else content.extractall(folder)
    return folder / f"horovod-{RELEASE}"


def mend(folder: Path, mends: Iterable[Mend]) -> None:
    """Apply all edits to the unpacked release, or none.

    Raises:
        BuildError: A file is missing, or an anchor is not there once.
    """
    changed: dict[str, str] = {}
    for edit in (edit for one in mends for edit in one.edits):
        if edit.path not in changed:
            try:
                changed[edit.path] = (folder / edit.path).read_text(encoding="utf-8")
            except OSError as error:
                raise BuildError(
                    f"Horovod {RELEASE} cannot be mended: {edit.path} cannot be read ({error.strerror}); nothing was "
                    "installed; use the release from the package index, unchanged"
                ) from error
        changed[edit.path] = edit.apply(changed[edit.path])
    for path, text in changed.items():
        (folder / path).write_text(text, encoding="utf-8")
