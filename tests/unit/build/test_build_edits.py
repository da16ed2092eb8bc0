"""Changes to Horovod's release: the right one, whole, or none."""

import tarfile
from pathlib import Path

import pytest

from edl_hvd.build.edits.mends import MENDS
from edl_hvd.build.edits.release import RELEASE_SHA256, REVISION, Edit, Mend, mend, unpack
from edl_hvd.errors import BuildError


def mend_of(*edits: Edit) -> Mend:
    return Mend("a defect", "", "a test", edits)


def test_edits_are_made_at_their_anchors(tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text("one\ntwo\nthree\n")
    edits = [
        Edit("a.cc", "two\n", "2\n"),
        Edit("a.cc", "one\n", "1\n", "before"),
        Edit("a.cc", "three", "3", "instead"),
    ]
    mend(tmp_path, [mend_of(*edits)])
    assert (tmp_path / "a.cc").read_text() == "1\none\ntwo\n2\n3\n"


@pytest.mark.parametrize("source", ["nothing of it\n", "two\ntwo\n"])
def test_an_anchor_that_is_not_there_once_is_named_and_nothing_is_changed(tmp_path: Path, source: str) -> None:
    (tmp_path / "a.cc").write_text("one\n")
    (tmp_path / "b.cc").write_text(source)
    with pytest.raises(BuildError, match=r"b\.cc was expected to have the line 'two' once, and has it [02] times"):
        mend(tmp_path, [mend_of(Edit("a.cc", "one", "1")), mend_of(Edit("b.cc", "two\n", "2"))])
    assert (tmp_path / "a.cc").read_text() == "one\n"
    assert (tmp_path / "b.cc").read_text() == source


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"a\.cc cannot be read"):
        mend(tmp_path, [mend_of(Edit("a.cc", "one", "1"))])


def test_another_archive_than_the_release_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    (tmp_path / "setup.py").write_text("")
    with tarfile.open(archive, "w:gz") as content:
        content.add(tmp_path / "setup.py", "horovod-0.28.1/setup.py")
    with pytest.raises(BuildError, match=f"expected {RELEASE_SHA256}; nothing was installed; delete the file"):
        unpack(archive, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_every_mend_says_what_it_mends_and_what_shows_it() -> None:
    assert REVISION >= 1
    for one in MENDS:
        assert one.defect
        assert one.edits
        assert Path(__file__).parents[3].joinpath(one.shown_by).is_file(), one.shown_by
