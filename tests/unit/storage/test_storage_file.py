"""What a folder does beyond the contract of every storage."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from edl_hvd.errors import ObjectMissingError, StorageError
from edl_hvd.storage import StoredObject
from edl_hvd.storage.file import FileStorage


def _everything_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_opening_and_reading_create_nothing(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path / "run")
    assert storage.list() == []
    with pytest.raises(ObjectMissingError):
        storage.read("key")
    assert not (tmp_path / "run").exists()


def test_deleting_leaves_no_empty_folder(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.write("a/b/c/one", b"1")
    storage.write("a/two", b"2")
    storage.delete("a/b/c/one")
    assert _everything_under(tmp_path) == [".partial", "a", "a/two"]
    storage.delete("a/two")
    assert _everything_under(tmp_path) == [".partial"]


def test_a_write_that_fails_leaves_nothing_behind_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = FileStorage(tmp_path)
    storage.write("key", b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)
    for write in (storage.write, storage.write_new):
        with pytest.raises(StorageError, match=r"key.*No space left on device"):
            write("key", b"new")
    monkeypatch.undo()
    assert _everything_under(tmp_path) == [".partial", "key"]
    assert storage.read("key") == b"old"


@pytest.mark.parametrize("verb", ["write", "write_new"])
def test_a_folder_that_another_process_removes_again_and_again_is_made_anew(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``mkdir`` finds it there, and a moment later it is gone: that is not the object's name being taken."""
    storage = FileStorage(tmp_path)
    storage.write("other", b"1")
    real, refusals = os.mkdir, iter([FileExistsError(errno.EEXIST, "File exists")] * 4)

    def mkdir(path: str | Path, mode: int = 0o777) -> None:
        refusal = next(refusals, None)
        if refusal:
            raise refusal
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    getattr(storage, verb)("folder/key", b"2")
    assert storage.read("folder/key") == b"2"


def test_a_file_in_the_way_of_a_folder_is_a_storage_error(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    storage.write("key", b"1")
    for write in (storage.write, storage.write_new):
        with pytest.raises(StorageError, match="key/below"):
            write("key/below", b"2")
    with pytest.raises(ObjectMissingError):
        storage.read("key/below")
    storage.delete("key/below")
    assert not storage.exists("key/below")
    with pytest.raises(StorageError, match="cannot write"):
        FileStorage(tmp_path / "key").write("below", b"3")
    assert FileStorage(tmp_path / "key").list() == []


def test_what_killed_writers_left_is_invisible_and_removed_after_an_hour(tmp_path: Path) -> None:
    old, young = tmp_path / ".partial" / "old", tmp_path / ".partial" / "young"
    old.parent.mkdir()
    for partial in (old, young):
        partial.write_bytes(b"half")
    os.utime(old, (os.stat(young).st_mtime - 3700,) * 2)
    storage = FileStorage(tmp_path)
    assert storage.list() == []
    storage.write("key", b"1")
    assert _everything_under(tmp_path) == [".partial", ".partial/young", "key"]


def test_what_cannot_be_removed_of_what_killed_writers_left_stops_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ".partial"
    folder.mkdir()
    (folder / "folder").mkdir()
    for name in ("busy", "old"):
        (folder / name).write_bytes(b"half")
    for left in folder.iterdir():
        os.utime(left, (left.stat().st_mtime - 3700,) * 2)
    unlink = Path.unlink

    def unlink_unless_busy(path: Path, missing_ok: bool = False) -> None:
        if path.name == "busy":  # as a file of NFS that a process has open
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_unless_busy)
    FileStorage(tmp_path).write("key", b"1")
    assert _everything_under(tmp_path) == [".partial", ".partial/busy", ".partial/folder", "key"]


def test_contents_are_flushed_before_the_name_appears_and_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must find a complete file under the name, or no such name."""
    storage = FileStorage(tmp_path)
    storage.write("folder/other", b"")
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def record_sync(descriptor: int) -> None:
        calls.append("sync " + os.readlink(f"/proc/self/fd/{descriptor}").replace(str(tmp_path), "").split("/")[1])
        fsync(descriptor)

    def record_link(source: Path, target: Path) -> None:
        calls.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "link", record_link)
    storage.write_new("folder/key", b"1")
    assert calls == ["sync .partial", "link", "sync folder"]


def test_what_is_no_file_is_listed_and_removed_but_never_read(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    storage = FileStorage(tmp_path / "run")
    storage.write("folder/file", b"1")
    folder = tmp_path / "run" / "folder"
    (folder / "link").symlink_to(outside / "precious")
    (folder / "link to a folder").symlink_to(outside)
    (folder / "link to itself").symlink_to("link to itself")
    (folder / "link upwards").symlink_to("..")
    os.mkfifo(folder / "pipe")
    names = ["link", "link to a folder", "link to itself", "link upwards", "pipe"]
    assert [entry.key for entry in storage.list()] == ["folder/file", *(f"folder/{name}" for name in names)]
    for name in names:
        kind = "a pipe" if name == "pipe" else "a symbolic link"
        assert not storage.exists(f"folder/{name}")
        with pytest.raises(ObjectMissingError, match=f"folder/{name}' in .*: there is no file, but {kind}"):
            storage.read(f"folder/{name}")
    for entry in storage.list("folder/"):
        storage.delete(entry.key)
    assert storage.list() == []
    assert (outside / "precious").read_bytes() == b"precious"


def test_the_root_and_a_folder_in_it_may_be_links_to_another_disk(tmp_path: Path) -> None:
    for name in ("disk", "larger disk"):
        (tmp_path / name).mkdir()
    (tmp_path / "run").symlink_to("disk")
    (tmp_path / "disk" / "checkpoints").symlink_to(tmp_path / "larger disk")
    storage = FileStorage(tmp_path / "run")
    storage.write("checkpoints/10/key", b"1")
    assert storage.read("checkpoints/10/key") == (tmp_path / "larger disk" / "10" / "key").read_bytes() == b"1"
    assert storage.list() == storage.list("checkpoints/") == [StoredObject("checkpoints/10/key", 1)]
    assert storage.exists("checkpoints/10/key")
