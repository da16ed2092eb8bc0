"""Samples of one tar file: their order, what is passed over, and files that are damaged."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from shards import add, number_of, write_shards

import edl_hvd
from edl_hvd.errors import UsageError


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_samples_of_a_tar_file_come_in_order_and_can_be_passed_over(tmp_path, suffix):
    (path,) = write_shards(tmp_path, [50], suffix)
    assert [number_of(sample) for sample in edl_hvd.TarSamples(path)] == list(range(50))
    samples = edl_hvd.TarSamples(path)
    assert number_of(next(samples)) == 0
    assert samples.skip(30) == 30
    sample = next(samples)
    assert sample == {"__key__": b"some.folder/000031", "number": b"31", "more.txt": b"x" * 31}
    assert samples.skip(100) == 18
    assert list(samples) == []


def test_folders_and_links_are_no_samples(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            odd = tarfile.TarInfo("odd")
            odd.type, odd.linkname = kind, "x"
            tar.addfile(odd)
        add(tar, "x.number", b"1")
    assert list(edl_hvd.TarSamples(tmp_path / "a.tar")) == [{"__key__": b"x", "number": b"1"}]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_shard_that_is_cut_off_is_named(tmp_path, suffix):
    (path,) = write_shards(tmp_path, [50], suffix)
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UsageError, match=rf"0000\.{suffix}' cannot be read as a tar file"):
        list(edl_hvd.TarSamples(path))


def test_a_file_that_is_no_tar_file_or_missing_is_named(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"no tar file" * 100)
    for name in ("a.tar", "missing.tar"):
        with pytest.raises(UsageError, match=f"{name}' cannot be read as a tar file"):
            edl_hvd.TarSamples(tmp_path / name)


def test_a_file_that_comes_twice_in_a_sample_is_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add(tar, "x.number", b"1")
        add(tar, "x.number", b"2")
    with pytest.raises(UsageError, match=r"a\.tar' has 'x\.number' twice"):
        list(edl_hvd.TarSamples(tmp_path / "a.tar"))
