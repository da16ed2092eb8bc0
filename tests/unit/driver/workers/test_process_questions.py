"""Asking a worker's process what state it is in and where it stands: here, and behind an ssh that only pretends."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from children import CollectedOutput, launcher, pretend_ssh, python, run, shell

from edl_hvd.driver.workers.process import WorkerProcess
from edl_hvd.driver.workers.stacks import place_in

HANG = """if True:
    import ctypes, faulthandler, os, signal, threading
    faulthandler.register(signal.SIGQUIT, file=2)
    print("worker", os.getpid(), flush=True)
    def augment():
        {hang}
    augment()
"""
ASLEEP = HANG.format(hang="threading.Event().wait()")
DEADLOCK = "lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, bytes(64); lock(mutex); lock(mutex)"
HOLDS_THE_LOCK = HANG.format(hang=DEADLOCK)
DEAF = ASLEEP.replace("faulthandler.register(signal.SIGQUIT, file=2)", "signal.signal(signal.SIGQUIT, signal.SIG_IGN)")
# What py-spy prints, and to whom it was asked for.
SPY = """#!/bin/sh
echo "Process $5"
echo 'Thread 7 (idle): "MainThread"'
echo '    augment (/job/train.py:71)'
echo "$*" >{asked}
"""


@pytest.fixture(params=["here", "dash", "bash"])
def local(request, tmp_path, monkeypatch):
    """Whether the worker is local; if not, ssh is pretended, with this shell on the other side. Nobody has py-spy."""
    folders = [folder for folder in os.environ["PATH"].split(os.pathsep) if shutil.which("py-spy", path=folder) is None]
    if request.param != "here":
        if shutil.which(request.param) is None:
            pytest.skip(f"no {request.param} on this machine")
        folders.insert(0, str(pretend_ssh(tmp_path / "tools", request.param)))
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    return request.param == "here"


@pytest.fixture
def spy(local, tmp_path, monkeypatch):
    """A py-spy on every host; the file says for what it was asked."""
    folder = tmp_path / "spy"
    folder.mkdir()
    (folder / "py-spy").write_text(SPY.format(asked=folder / "asked"))
    (folder / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{folder}")
    return folder / "asked"


def ask(words: tuple[str, ...], local: bool, question, environment: dict[str, str] | None = None) -> CollectedOutput:
    """Start a worker, put a question to it once it has told its number, and end it."""
    output = CollectedOutput()

    async def test() -> None:
        process = await launcher(words, output, local, environment).start("b:0", {})
        try:
            await question(process, await output.number("worker"))
        finally:
            process.kill()
            await process.wait()

    run(test)
    return output


async def state_of(process: WorkerProcess, pid: int) -> str:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    process.ask_state(pid, answer.set_result)
    return await answer


async def until_state(process: WorkerProcess, pid: int, letters: str) -> None:
    while await state_of(process, pid) not in letters:
        await asyncio.sleep(0.01)


def test_a_process_that_is_stopped_is_told_from_one_that_runs(local):
    async def question(process: WorkerProcess, pid: int) -> None:
        await until_state(process, pid, "SR")
        os.kill(pid, signal.SIGSTOP)
        await until_state(process, pid, "T")
        os.kill(pid, signal.SIGCONT)
        await until_state(process, pid, "SR")

    output = ask(python(ASLEEP), local, question)
    assert output.text("stderr") == b"", "answers are not part of the output"


def test_the_worker_may_be_a_child_of_the_command(local):
    """A shell that waits for the worker does not stop with it."""

    async def question(process: WorkerProcess, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await until_state(process, pid, "T")
        await until_state(process, 0, "S")

    ask(shell("sleep 1000 & echo worker $!; wait"), local, question)


def test_a_number_from_within_a_container_is_not_taken_for_a_process_of_this_host(local):
    async def question(process: WorkerProcess, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        for stranger in (os.getpid(), 2**30):
            await until_state(process, stranger, "T")

    ask(python(ASLEEP), local, question)


async def stack_of(process: WorkerProcess, pid: int) -> list[str]:
    """Once it hangs; it has just been started."""
    while "augment" not in "".join(lines := await process.stack(pid)):
        pass
    return lines


@pytest.mark.parametrize(
    ("code", "place"), [(ASLEEP, " in wait, called from "), (HOLDS_THE_LOCK, "<string>:6 in augment")]
)
def test_the_stack_is_part_of_the_output_and_names_the_place(local, code, place):
    lines: list[str] = []

    async def question(process: WorkerProcess, pid: int) -> None:
        lines.extend(await stack_of(process, pid))

    output = ask(python(code), local, question)
    assert place in place_in(lines)
    assert "\n".join(lines) in output.text("stderr").decode()


INITIALISED = HANG.replace("faulthandler.register(signal.SIGQUIT, file=2)", """
    from edl_hvd.worker.process import _print_stacks_on_sigquit
    {before}
    _print_stacks_on_sigquit()""")  # fmt: skip


@pytest.mark.parametrize(
    ("handler", "answers"), [("SIG_DFL", True), ("SIG_IGN", True), ("lambda number, frame: print('mine')", False)]
)
def test_a_worker_shows_its_stack_unless_its_script_has_a_use_for_the_signal(handler, answers):
    """A shell makes what it starts in the background ignore SIGQUIT."""
    handler = f"signal.{handler}" if answers else handler
    code = INITIALISED.format(before=f"signal.signal(signal.SIGQUIT, {handler})", hang="threading.Event().wait()")

    async def question(process: WorkerProcess, pid: int) -> None:
        assert (place_in(await stack_of(process, pid) if answers else await process.stack(pid)) != "") == answers

    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[4])}
    ask(python(code), True, question, environment)


def test_a_worker_that_does_not_answer_is_not_waited_for(local):
    async def question(process: WorkerProcess, pid: int) -> None:
        began_s = time.monotonic()
        assert await process.stack(pid) == []
        assert time.monotonic() - began_s < 5.0

    ask(python(DEAF), local, question)


def test_py_spy_is_asked_where_there_is_one(local, spy):
    async def question(process: WorkerProcess, pid: int) -> None:
        lines = await process.stack(pid, stopped=True)
        assert place_in(lines) == "train.py:71 in augment"
        assert spy.read_text() == f"dump --nonblocking --full-filenames --pid {pid}\n"

    output = ask(python(ASLEEP), local, question)
    assert b"augment (/job/train.py:71)" in output.text("stderr")


def test_where_py_spy_may_not_look_the_worker_is_asked_itself(local, spy):
    tool = spy.with_name("py-spy")
    tool.write_text("#!/bin/sh\necho 'Error: Permission Denied' >&2\nexit 1\n")

    async def question(process: WorkerProcess, pid: int) -> None:
        assert " in wait" in place_in(await stack_of(process, pid))

    ask(python(ASLEEP), local, question)


def test_a_stopped_worker_is_not_woken_for_its_stack(local):
    async def question(process: WorkerProcess, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await until_state(process, pid, "T")
        assert await process.stack(pid, stopped=True) == []
        assert await state_of(process, pid) == "T"
        pending = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "ShdPnd" in line)
        assert int(pending.split()[1], 16) == 0, "no signal waits for it to wake"

    ask(python(ASLEEP), local, question)


def test_a_process_that_has_ended_has_no_state_and_no_stack(local):
    async def test() -> None:
        process = await launcher(shell("true"), CollectedOutput(), local).start("b:0", {})
        await process.wait()
        assert await process.stack(process.pid) == []

    run(test)
