"""Tar files with samples that know who they are, and reads that are counted over all processes."""

from __future__ import annotations

import io
import itertools
import tarfile
from pathlib import Path

from edl_hvd.tar_samples import TarSamples


def write_shards(folder: Path, counts: list[int], suffix: str = "tar") -> list[str]:
    """Sample n of all is ``{"number": b"n", "more.txt": …}``."""
    numbers = itertools.count()
    paths = [folder / f"{shard:04d}.{suffix}" for shard in range(len(counts))]
    for path, count in zip(paths, counts, strict=True):
        with tarfile.open(path, "w:gz" if suffix.endswith("gz") else "w") as tar:
            for number in itertools.islice(numbers, count):
                add(tar, f"some.folder/{number:06d}.number", b"%d" % number)
                add(tar, f"some.folder/{number:06d}.more.txt", b"x" * (number % 2000))
    return [str(path) for path in paths]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def number_of(sample: dict[str, bytes]) -> int:
    return int(sample["number"])


class CountedReads:
    """``read`` of an ``ElasticShards``: notes in a file, from whatever process, each opening and each sample read.

    Without ``skip``, as a stream over a network would be read, unless ``skips``.
    """

    def __init__(self, log: Path, skips: bool = False) -> None:
        self.log = log
        self.skips = skips
        log.touch()

    def __call__(self, shard: str):
        self._note(f"open {shard}\n")
        samples = TarSamples(shard)
        return samples if self.skips else self._stream(samples)

    def _stream(self, samples):
        for sample in samples:
            self._note("sample\n")
            yield sample

    def _note(self, line: str) -> None:
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(line)

    def counted(self) -> tuple[int, int]:
        """Openings and samples read so far."""
        lines = self.log.read_text().splitlines()
        return sum(line.startswith("open") for line in lines), sum(line == "sample" for line in lines)
