"""Hosts as people and batch systems write them down."""

from __future__ import annotations

import pytest

from edl_hvd.discovery.sources.hostfile import FixedHosts, parse_host_list, read_hostfile
from edl_hvd.errors import UsageError
from edl_hvd.hosts import HostSlots


def test_hostfiles_of_horovod_and_mpi_are_read(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# nodes\nnode-1 slots=4\nnode-2:2   # two\n\nnode-3 slots = 1 max-slots=8\n"
        "node-4\tmax_slots=2\nnode-1\r\nnode-5"
    )
    expected = {"node-1": 7, "node-2": 2, "node-3": 1, "node-4": 3, "node-5": 3}
    assert {entry.host: entry.slots for entry in read_hostfile(str(path), default_slots=3)} == expected
    assert [entry.host for entry in read_hostfile(str(path))] == [f"node-{number}" for number in range(1, 6)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["it cannot be read: No such file or directory; expected lines such as 'node-1 slots=4'"]),
        (b"", ["it lists no host; expected a line such as 'node-1 slots=4'"]),
        (b"# only\n", ["it lists no host; expected a line such as 'node-1 slots=4'"]),
        (b"\xff\xfe\x00", ["it is no text file (invalid start byte); expected lines such as 'node-1 slots=4'"]),
        (b"localhost slots=x\na:1\nme@b slots=1\n", ["line 1: host line 'localhost:x'", "line 3: host name 'me@b'"]),
    ],
)
def test_a_hostfile_that_is_missing_or_malformed_is_refused_line_by_line(tmp_path, content, words):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read_hostfile(str(path))
    told = str(raised.value).split("\n")
    assert len(told) == len(words)
    assert all(line.startswith(word) for line, word in zip(told, words, strict=True))


def test_a_list_of_hosts_is_read_as_people_write_it():
    assert parse_host_list("b:2, a") == (HostSlots("b", 2), HostSlots("a", 1))
    with pytest.raises(UsageError, match=r"'b:x' is not understood.*\n.*'c c' is not usable"):
        parse_host_list("a,b:x,c c")


def test_fixed_hosts_are_always_the_same():
    assert FixedHosts((HostSlots("a", 1),)).answer().hosts == (HostSlots("a", 1),)
