"""Files of what workers print, and lines that are cut from it, where something fails."""

from __future__ import annotations

from pathlib import Path

from edl_hvd.driver.workers.output import Lines, OutputFiles


def test_a_full_disk_is_told_once_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "worker.a.0").mkdir()
    (tmp_path / "worker.a.0" / "stdout").symlink_to("/dev/full")
    told: list[str] = []
    with OutputFiles(str(tmp_path), told.append) as files:
        files.write("a:0", "stderr", b"one\n")
        files.write("a:0", "stdout", b"two\n")
        files.write("a:0", "stdout", b"three\n")
        files.write("a:1", "stdout", b"four\n")
    assert told == [
        f"what workers print is not kept in {tmp_path} any more: No space left on device; the job goes on, and a run "
        "with another --output-filename keeps it again"
    ]
    assert (tmp_path / "worker.a.0" / "stderr").read_text() == "one\n"
    assert not (tmp_path / "worker.a.1").exists()


def test_a_folder_that_is_gone_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "worker.a.0").write_text("a file is in its place")
    told: list[str] = []
    with OutputFiles(str(tmp_path), told.append) as files:
        files.write("a:0", "stdout", b"one\n")
        files.write("a:0", "stdout", b"two\n")
    assert len(told) == 1
    assert "File exists" in told[0]


def test_lines_whose_reader_gives_up_are_not_given_twice() -> None:
    lines = Lines()
    assert next(iter(lines.feed(b"one\ntwo\nthr"))) == b"one\n"
    assert list(lines.feed(b"ee\n")) == [b"three\n"]
