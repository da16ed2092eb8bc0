"""Samples from tar files, as WebDataset and others lay them out."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Iterator

from edl_hvd.errors import StorageError, UsageError
from edl_hvd.storage.remote_file import is_url, open_remote

_HEADER_BYTES = 16 * 1024
# What a jump asks of the block that is in memory: a header and some of what follows.

_UNREADABLE = (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError)


class TarSamples(Iterator[dict[str, bytes]]):
    """The samples of one tar file from front to back; ``read`` of an :class:`~edl_hvd.ElasticShards`.

    Consecutive files that share their name up to the first dot are one sample, as in WebDataset: ``a/0001.jpg`` and
    ``a/0001.seg.png`` give ``{"__key__": b"a/0001", "jpg": …, "seg.png": …}``, with the files' bytes. Folders and links
    are skipped. Compressed files (gzip, bzip2, xz) can be read, too. In a plain file, samples that are not wanted are
    skipped without their bytes being read.

    A file behind a URL is read in blocks of 256 KiB to 2 MiB, one of which is in memory, and a block that holds no
    wanted byte is not fetched. A broken connection is made again, and the file goes on at the byte where it broke. The
    file must not be replaced while a job reads it. ``gs://`` and ``az://`` cannot be read in processes that are forked
    after their parent has used them.

    Any process may use it, such as a loader's. Not collective; blocks while it reads.

    Args:
        path: Path of a file on this machine; or a URL of https, http, or any storage that checkpoints can go to, such
            as ``s3://bucket/train-0000.tar``. Credentials come from the same sources as there.

    Raises:
        UsageError: The file is not a whole tar file, or a sample has two files of one kind.
        StorageError: What is behind the URL cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file = io.BufferedReader(open_remote(self._path), _HEADER_BYTES) if is_url(self._path) else None
        if self._file is not None:
            self._file.peek(1)  # tarfile would take an error for a kind of file that it is not, and try another kind
        try:
            self._tar = tarfile.open(self._path, fileobj=self._file)  # noqa: SIM115  # closed by close()
            self._next = self._member()
        except StorageError:
            raise
        except _UNREADABLE as error:
            raise self._unreadable(error) from error

    def __next__(self) -> dict[str, bytes]:
        if self._next is None:
            self.close()
            raise StopIteration
        sample = {"__key__": _split(self._next.name)[0].encode()}
        try:
            for member, kind in self._files():
                if kind in sample:
                    raise UsageError(f"the shard {self._path!r} has {member.name!r} twice; expected each file once")
                file = self._tar.extractfile(member)
                sample[kind] = file.read() if file is not None else b""
        except StorageError:
            raise
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        return sample

    def skip(self, count: int) -> int:
        """Skip samples without reading their bytes.

        Args:
            count: Number of samples to skip, at least 0.

        Returns:
            The number of samples skipped; less than ``count`` at the end of the file.

        Raises:
            UsageError: The file is not a whole tar file.
        """
        passed = 0
        try:
            while self._next is not None and passed < count:
                for _ in self._files():
                    pass
                passed += 1
        except StorageError:
            raise
        except _UNREADABLE as error:
            raise self._unreadable(error) from error
        return passed

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._tar.close()
        if self._file is not None:
            self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_tar"):
            self.close()

    def _files(self) -> Iterator[tuple[tarfile.TarInfo, str]]:
        """The files of the sample that comes next, each with its kind."""
        key = _split(self._next.name)[0] if self._next is not None else ""
        while self._next is not None and _split(self._next.name)[0] == key:
            yield self._next, _split(self._next.name)[1]
            self._next = self._member()

    def _member(self) -> tarfile.TarInfo | None:
        while (member := self._tar.next()) is not None and not member.isfile():
            pass
        self._tar.members = []  # type: ignore[attr-defined]  # it would remember all of them
        return member

    def _unreadable(self, error: Exception) -> UsageError:
        return UsageError(
            f"the shard {self._path!r} cannot be read as a tar file ({error}); expected a whole one, plain or "
            "compressed with gzip, bzip2 or xz"
        )


def _split(name: str) -> tuple[str, str]:
    """
    >>> _split("a.b/0001.seg.png")
    ('a.b/0001', 'seg.png')
    """
    folder, slash, file = name.rpartition("/")
    stem, _, kind = file.partition(".")
    return folder + slash + stem, kind
