"""What a discovery script of a user's may print, how it may fail, and that it never outlives its time."""

from __future__ import annotations

import os
import select
import shlex
import threading
from pathlib import Path

import pytest
from descriptors import no_descriptor_left
from waiting import soon

from edl_hvd.discovery.sources.script import LONGEST_ANSWER_BYTES, STDERR_CHARACTERS, Script
from edl_hvd.errors import DiscoveryError
from edl_hvd.hosts import HostSlots


def printing(text: str) -> str:
    return f"printf %s {shlex.quote(text)}"


def is_running(process_id: int) -> bool:
    """A zombie is none: its parent, which is not us, has yet to take note of its end."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for_end(process_id: int) -> None:
    """Of a process that is no child of ours; a signal that was sent takes a moment to work."""
    try:
        process = os.pidfd_open(process_id)
    except ProcessLookupError:
        return
    select.select([process], [], [])
    os.close(process)


class ClockOf:
    """Time that stands still until a file is there, and then flies: one look at it is far behind the next."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._now_s = 0.0

    def wall_s(self) -> float:
        return self.monotonic_s()

    def monotonic_s(self) -> float:
        self._now_s += 1e9 if self._file.exists() else 0.0
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        raise AssertionError("nobody sleeps here")


def test_hosts_with_and_without_slots_are_read_in_the_order_printed():
    script = Script(printing("node-2:4\nnode-1\n\n 10.0.0.7:1 \n"), default_slots=8)
    assert script.answer().hosts == (HostSlots("node-2", 4), HostSlots("node-1", 8), HostSlots("10.0.0.7", 1))


def test_a_last_line_without_newline_and_the_same_line_twice_are_forgiven():
    assert Script(printing("a:1\na:1\nb:2")).answer().hosts == (HostSlots("a", 1), HostSlots("b", 2))


def test_the_command_is_the_shells_with_arguments_variables_and_pipes(monkeypatch, tmp_path):
    program = tmp_path / "find hosts"
    program.write_text('#!/bin/sh\nprintf "%s:%s\\n" "$1" "$2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("SLOTS_HERE", "3")
    command = f"{shlex.quote(str(program))} 'a' \"$SLOTS_HERE\" | sed s/a/b/"
    assert Script(command).answer().hosts == (HostSlots("b", 3),)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo early >&2; echo no cloud today >&2; exit 3", "ended with exit code 3: early no cloud today"),
        ("echo a:1; exit 1", "ended with exit code 1"),
        ("kill -9 $$", "was ended by SIGKILL"),
        ("/no/such/program", "ended with exit code 127: .*/no/such/program"),
        ("true", "printed no host and ended with exit code 0"),
        ("echo; echo sad >&2", "printed no host .* no hosts to print: sad"),
        ("echo a:1; echo oops", "'oops' names no slots; expected 'host:slots', or --slots-per-host"),
        ("echo a:b", "'a:b' is not understood"),
        ("echo a:1:2", "'a:1:2' is not understood"),
        ("echo a:0", "'a' has 0 slots"),
        ("echo two words:1", "'two words' is not usable"),
        ("echo a:1; echo a:2", "printed a twice, with different slots"),
        (r"printf '\377\376:1\n'", "printed something that is not text"),
        ("echo 'a:1\0'", "cannot be started"),
    ],
)
def test_what_cannot_be_trusted_is_no_answer(command, words):
    with pytest.raises(DiscoveryError, match=words) as raised:
        Script(command).answer()
    assert "\n" not in str(raised.value)


def test_a_stray_word_is_a_host_only_where_slots_need_not_be_named():
    assert Script("echo oops", default_slots=1).answer().hosts == (HostSlots("oops", 1),)


def test_of_a_long_complaint_the_end_is_told():
    command = f"head -c 100000 /dev/zero | tr '\\0' x >&2; echo {'y' * 50} >&2; exit 1"
    with pytest.raises(DiscoveryError) as raised:
        Script(command).answer()
    assert str(raised.value).endswith("y" * 50)
    assert len(str(raised.value)) < len(command) + STDERR_CHARACTERS + 100


def test_a_script_that_prints_without_end_is_stopped():
    with pytest.raises(DiscoveryError, match=f"printed more than {LONGEST_ANSWER_BYTES} bytes"):
        Script("yes a:1").answer()


def test_a_script_that_hangs_is_killed_with_all_that_it_started(tmp_path):
    ids = tmp_path / "ids"
    command = f"sleep 1000 & echo $! $$ > {ids}.part; echo thinking >&2; mv {ids}.part {ids}; wait"
    with pytest.raises(DiscoveryError, match="did not end within 10 s and was killed"):
        Script(command, clock=ClockOf(ids)).answer()
    child, shell = map(int, ids.read_text().split())
    wait_for_end(shell)
    wait_for_end(child)


def test_a_child_left_in_the_background_with_the_pipes_open_is_not_waited_for(tmp_path):
    command = f"sleep 1000 & echo $! > {tmp_path}/id; echo a:1; echo fine >&2"
    try:
        assert Script(command, clock=ClockOf(tmp_path / "never")).answer().hosts == (HostSlots("a", 1),)
        assert is_running(int((tmp_path / "id").read_text())), "it is the user's, and may be meant to live"
    finally:
        os.kill(int((tmp_path / "id").read_text()), 9)


def test_a_script_that_closes_its_output_and_goes_on_is_waited_for():
    assert Script("echo a:1; exec >&- 2>&-; sleep 0.05").answer().hosts == (HostSlots("a", 1),)


def test_each_question_runs_it_anew_and_leaves_nothing_open(tmp_path):
    script = Script(f"echo x >> {tmp_path}/runs; echo a:$(wc -l < {tmp_path}/runs)")
    assert script.answer().hosts == (HostSlots("a", 1),)
    with no_descriptor_left():
        assert [script.answer().hosts[0].slots for _ in range(3)] == [2, 3, 4]


def test_closing_kills_the_script_that_runs_and_lets_no_other_run(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = Script(f"echo $$ > {fifo}; exec sleep 1000", clock=ClockOf(tmp_path / "never"))
    reasons: list[str] = []

    def ask() -> None:
        try:
            script.answer()
        except DiscoveryError as error:
            reasons.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    process_id = int(fifo.read_text())
    script.close()
    soon(asking)
    assert not is_running(process_id)
    assert "was ended by SIGKILL" in reasons[0]
    with pytest.raises(DiscoveryError, match="because the job is ending"):
        script.answer()
