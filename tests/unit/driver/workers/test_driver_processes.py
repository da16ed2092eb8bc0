"""Workers as processes: here, and behind an ssh that only pretends, with each shell that may be ``sh`` there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import (
    WORKER,
    CollectedOutput,
    command_lines,
    end,
    gone,
    launcher,
    lives,
    outcome_of,
    pretend_ssh,
    python,
    run,
    shell,
)

from edl_hvd.driver.workers.output import Lines
from edl_hvd.driver.workers.process import Exit
from edl_hvd.driver.workers.ssh import exportable


@pytest.fixture(params=["here", "dash", "bash"])
def local(request, tmp_path, monkeypatch):
    """Whether the worker is local; if not, ssh is pretended, with this shell on the other side."""
    if request.param != "here":
        if shutil.which(request.param) is None:
            pytest.skip(f"no {request.param} on this machine")
        monkeypatch.setenv("PATH", f"{pretend_ssh(tmp_path / 'tools', request.param)}{os.pathsep}{os.environ['PATH']}")
    return request.param == "here"


# --- output ---


def test_lines_arrive_by_stream_and_the_last_one_needs_no_newline(local):
    exit_, output, _ = outcome_of(shell("echo one; echo two >&2; printf 'th\\nree'; printf last >&2"), local)
    assert exit_ == Exit(0, None)
    assert [line for _, stream, line in output.heard if stream == "stdout"] == [b"one\n", b"th\n", b"ree"]
    assert output.text("stderr") == b"two\nlast"
    assert {worker for worker, _, _ in output.heard} == {WORKER}


def test_everything_a_worker_wrote_before_its_end_arrives_in_order(local):
    count = 100_000
    _, output, last_lines = outcome_of(python(f"for n in range({count}): print('line', n)"), local)
    assert output.text() == b"".join(f"line {n}\n".encode() for n in range(count))
    assert last_lines == [f"line {n}" for n in range(count - 20, count)]


def test_a_line_longer_than_64_kib_comes_in_pieces(local):
    _, output, _ = outcome_of(python("import sys; sys.stdout.write('x' * 200_000 + '\\nend')"), local)
    assert output.text() == b"x" * 200_000 + b"\nend"
    assert max(len(line) for _, _, line in output.heard) <= 64 * 1024


def test_a_line_is_whole_however_it_is_read():
    text = b"one\n\ntwo\r\n" + b"y" * 70_000 + b"\nrest"
    for step in (7, 1000, len(text)):
        lines = Lines()
        found = [line for start in range(0, len(text), step) for line in lines.feed(text[start : start + step])]
        assert found == [b"one\n", b"\n", b"two\r\n", b"y" * 65_536, b"y" * (70_000 - 65_536) + b"\n"]
        assert lines.rest() == b"rest"
        assert lines.rest() == b""


def test_a_worker_is_not_buffered(local):
    """It could not answer otherwise: it ends only after what it printed has been seen."""

    async def test():
        output = CollectedOutput()
        process = await launcher(python("import time; print('pid', 7); time.sleep(1000)"), output, local).start(
            WORKER, {}
        )
        await output.number("pid")
        process.kill()
        await process.wait()

    run(test)


def test_a_grandchild_that_keeps_the_output_open_does_not_hold_the_end_back(local):
    exit_, output, _ = outcome_of(shell("sleep 1000 & echo grandchild $!"), local)
    grandchild = int(output.text().split()[1])
    assert exit_ == Exit(0, None)
    assert lives(grandchild), "a worker that ends well may leave something running"
    end(grandchild)


def test_what_a_crashed_worker_leaves_behind_is_killed(local):
    async def test():
        output = CollectedOutput()
        process = await launcher(shell("sleep 1000 & echo grandchild $!; exit 3"), output, local).start(WORKER, {})
        assert (await process.wait()).text == "exit code 3"
        await gone(await output.number("grandchild"))

    run(test)


# --- ends ---


@pytest.mark.parametrize("code", [0, 3, 127, 255])
def test_the_exit_code_is_the_workers(local, code):
    exit_, _, _ = outcome_of(python(f"import sys; sys.exit({code})"), local)
    assert exit_ == Exit(code, None)
    assert exit_.text == f"exit code {code}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_the_signal_is_the_workers(local, number):
    exit_, output, _ = outcome_of(python(f"import os; os.kill(os.getpid(), {int(number)})"), local)
    assert exit_ == Exit(None, number)
    assert exit_.text == f"killed by {number.name}"
    assert output.heard == [], "no shell says what has happened"


def test_a_signal_without_a_name_is_told_by_its_number():
    assert Exit(None, 40).text == "killed by signal 40"


def test_terminate_reaches_grandchildren(local):
    async def test():
        output = CollectedOutput()
        process = await launcher(shell("sleep 1000 & echo grandchild $!; wait"), output, local).start(WORKER, {})
        grandchild = await output.number("grandchild")
        process.terminate()
        assert await process.wait() == Exit(None, signal.SIGTERM)
        await gone(grandchild)
        process.terminate()  # says nothing to anybody any more
        process.kill()

    run(test)


def test_a_worker_may_do_something_when_it_is_told_to_end(local):
    async def test():
        output = CollectedOutput()
        code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(75)); print('pid', 1); signal.pause()"
        process = await launcher(python(code), output, local).start(WORKER, {})
        await output.number("pid")
        process.terminate()
        assert (await process.wait()).code == 75

    run(test)


def test_kill_reaches_grandchildren_that_ignore_everything_else(local):
    async def test():
        output = CollectedOutput()
        words = shell("trap '' TERM; sleep 1000 & echo grandchild $!; wait")
        process = await launcher(words, output, local).start(WORKER, {})
        grandchild = await output.number("grandchild")
        process.terminate()
        process.kill()
        assert await process.wait() == Exit(None, signal.SIGKILL)
        await gone(grandchild)

    run(test)


def test_a_worker_that_is_killed_at_once_does_not_run(local):
    async def test():
        output = CollectedOutput()
        process = await launcher(shell("sleep 1000"), output, local).start(WORKER, {})
        process.kill()
        assert await process.wait() == Exit(None, signal.SIGKILL)

    run(test)


def test_waiting_may_be_given_up_and_taken_up_again(local):
    async def test():
        process = await launcher(shell("sleep 1000"), CollectedOutput(), local).start(WORKER, {})
        waiting = asyncio.ensure_future(process.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        process.kill()
        assert await asyncio.gather(process.wait(), process.wait()) == [Exit(None, signal.SIGKILL)] * 2

    run(test)


SUPPORT = Path(__file__).parents[4] / "tests" / "support"
DRIVER = """\
import asyncio, sys
sys.path.insert(0, {folder!r})
from children import CollectedOutput, launcher, python

async def main():
    output = CollectedOutput()
    process = await launcher(python({worker!r}), output, {local}).start("b:0", {{}})
    print(await output.number("pid"), flush=True)
    await process.wait()

asyncio.run(main())
"""
ORPHAN = """\
import os, sys
print("pid", os.getpid(), flush=True)
open({fifo!r}).read()
for stream in sys.stdout, sys.stderr:
    for _ in range({lines}):
        print("x" * 99, file=stream, flush=True)
open({fifo!r}, "w").write("wrote all")
"""


def test_a_worker_outlives_a_killed_driver_and_may_print(local, tmp_path):
    """Here half a megabyte per stream, elsewhere as much as it likes."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    worker = ORPHAN.format(fifo=str(fifo), lines=5_000 if local else 50_000)
    code = DRIVER.format(folder=str(SUPPORT), worker=worker, local=local)
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with driver:
        assert driver.stdout is not None
        orphan = int(driver.stdout.readline())
        driver.kill()
    try:
        fifo.write_text("the driver is dead")
        assert fifo.read_text() == "wrote all"
    finally:
        with contextlib.suppress(ProcessLookupError):
            end(orphan)


# --- what a worker is given ---

TOLD = "import os; print(' '.join(os.environb.get(n, b'none').hex() or 'empty' for n in (b'ONE', b'TWO', b'THREE')))"


def test_variables_arrive_exactly_whatever_is_in_them(local):
    every_byte = os.fsdecode(bytes(range(1, 256)))
    quotes = ' it\'s "quoted" $HOME `id` \\ \n\n !x #\t* ~ '
    environment = {"PATH": os.environ["PATH"], "ONE": every_byte, "TWO": "overridden"}
    output = CollectedOutput()

    async def test():
        process = await launcher(python(TOLD), output, local, environment).start(WORKER, {"TWO": quotes, "THREE": ""})
        assert await process.wait() == Exit(0, None)

    run(test)
    one, two, three = output.text().split()
    assert bytes.fromhex(one.decode()) == os.fsencode(every_byte)
    assert bytes.fromhex(two.decode()) == os.fsencode(quotes)
    assert three == b"empty"


@pytest.mark.parametrize(
    ("of_all", "seen"), [({}, "3"), ({"CUDA_VISIBLE_DEVICES": "7"}, "3"), ({"CUDA_VISIBLE_DEVICES": ""}, "")]
)
def test_a_worker_sees_its_own_gpu_unless_all_are_hidden(of_all, seen, local):
    environment = {"PATH": os.environ["PATH"], **of_all}
    output = CollectedOutput()

    async def test():
        code = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES', ''))"
        own = {"CUDA_VISIBLE_DEVICES": "3"}
        process = await launcher(python(code), output, local, environment).start(WORKER, own)
        assert await process.wait() == Exit(0, None)

    run(test)
    # What hides the GPUs of this machine is not taken along to another host.
    assert output.text().decode() == f"{seen if local else '3'}\n"


def test_words_arrive_exactly(local):
    words = ("a b", "", "it's", '"', "$HOME", "\\n", "two\nlines", "*", "ünï")
    _, output, _ = outcome_of((*python("import sys; print(ascii(sys.argv[1:]))"), *words), local)
    assert output.text().decode() == ascii(list(words)) + "\n"


def test_no_command_line_shows_a_variable(local):
    secret = secrets.token_hex()

    async def test():
        output = CollectedOutput()
        environment = {"PATH": os.environ["PATH"], "FOR_ALL": secret}
        words = shell('sleep 1000 & echo "pid $$"; wait')
        process = await launcher(words, output, local, environment).start(WORKER, {"FOR_ONE": secret})
        worker = await output.number("pid")
        assert secret.encode() in Path(f"/proc/{worker}/environ").read_bytes()
        assert secret.encode() not in command_lines()
        process.kill()
        await process.wait()

    run(test)


@pytest.fixture
def interruptible():
    """As in a terminal: a shell starts what runs in the background with SIGINT ignored, and that is inherited."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_worker_runs_in_its_folder_and_group_with_nothing_to_read_and_may_be_interrupted(local, tmp_path):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    code = """if True:
        import os, signal, sys
        assert sys.stdin.read() == ""
        assert os.getpgid(0) == os.getsid(0) == os.getpid()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        print(os.getcwd())
    """
    exit_, output, last_lines = outcome_of(python(code), local, folder=folder)
    assert exit_ == Exit(0, None), last_lines
    assert output.text() == f"{folder}\n".encode()


def test_a_worker_elsewhere_holds_nothing_of_the_connection(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{pretend_ssh(tmp_path / 'tools', 'sh')}{os.pathsep}{os.environ['PATH']}")
    code = "import os; print([n for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}')])"
    _, output, _ = outcome_of(python(code), local=False)
    assert output.text() == b"[]\n"


def test_only_what_means_something_on_another_host_is_sent_there():
    stays = {"SSH_AUTH_SOCK", "DISPLAY", "PWD", "OLDPWD", "SHLVL", "TERM", "LANG", "LC_ALL", "HOME", "USER", "_",
             "UID", "CUDA_VISIBLE_DEVICES", "BASH_FUNC_module%%", "IFS", "with-dash", "1ST", "ä", ""}  # fmt: skip
    goes = {
        "PATH",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "HOROVOD_LOG_LEVEL",
        "EDL_HVD_CHECKPOINT",
        "AWS_PROFILE",
        "x",
        "_A",
    }
    assert exportable(dict.fromkeys(stays | goes, "1")) == dict.fromkeys(goes, "1")
