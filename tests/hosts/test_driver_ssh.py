"""Workers behind a real ssh server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import re
import secrets
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from children import CollectedOutput, command_lines, end, gone, launcher, lives, python, run, shell
from ssh_hosts import HOSTS, SSH, SSHD, serve

from edl_hvd.driver.network import is_local
from edl_hvd.driver.workers.launcher import Launcher, Program
from edl_hvd.driver.workers.process import Exit, WorkerProcess
from edl_hvd.driver.workers.ssh import Ssh

pytestmark = pytest.mark.skipif(
    SSHD is None or SSH is None, reason="no ssh server on this machine (apt-get install openssh-server)"
)
HOST = HOSTS[0]
WORKER = f"{HOST}:0"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("ssh")) as server:
        yield server


@pytest.fixture(autouse=True)
def _ssh_first_in_path(server, monkeypatch):
    monkeypatch.setenv("PATH", f"{server.tools}{os.pathsep}{os.environ['PATH']}")


async def start(
    words: tuple[str, ...], output: CollectedOutput, ssh: Ssh | None = None, host: str = HOST
) -> WorkerProcess:
    return await launcher(words, output, local=False, ssh=ssh).start(f"{host}:0", {})


def outcome_of(words: tuple[str, ...], ssh: Ssh | None = None, host: str = HOST) -> tuple[Exit, CollectedOutput]:
    output = CollectedOutput()

    async def follow():
        return await (await start(words, output, ssh, host)).wait()

    return asyncio.run(follow()), output


def test_lines_arrive_by_stream_and_everything_that_was_written_does(server):
    before = len(server.logins())
    code = (
        "import sys; [print(n, file=f) for n in range(20_000) for f in (sys.stdout, sys.stderr)]; print('end', end='')"
    )
    exit_, output = outcome_of(python(code))
    assert exit_ == Exit(0, None)
    numbers = b"".join(b"%d\n" % n for n in range(20_000))
    assert (output.text(), output.text("stderr")) == (numbers + b"end", numbers)
    assert server.logins()[before:] == [HOST]


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_exit_code_is_the_workers_and_not_that_of_ssh(code):
    exit_, _ = outcome_of(python(f"import sys; sys.exit({code})"))
    assert exit_ == Exit(code, None)


def test_the_signal_is_the_workers():
    exit_, output = outcome_of(python("import os; os.kill(os.getpid(), 9)"))
    assert (exit_, exit_.text) == (Exit(None, signal.SIGKILL), "killed by SIGKILL")
    assert output.heard == []


def test_a_grandchild_that_keeps_the_output_open_does_not_hold_the_end_back():
    exit_, output = outcome_of(shell("sleep 1000 & echo grandchild $!"))
    assert exit_ == Exit(0, None)
    grandchild = int(output.text().split()[1])
    assert lives(grandchild), "a worker that ends well may leave something running"
    end(grandchild)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_terminate_and_kill_reach_the_worker_and_its_children(how):
    async def test():
        output = CollectedOutput()
        ignore = "" if how == signal.SIGTERM else "trap '' TERM;"
        process = await start(shell(f"{ignore} sleep 1000 & echo grandchild $!; echo worker $$; wait"), output)
        worker, grandchild = await output.number("worker"), await output.number("grandchild")
        process.terminate()
        if how == signal.SIGKILL:
            process.kill()
        exit_ = await process.wait()
        assert (exit_, exit_.text) == (Exit(None, how), f"killed by {how.name}")
        await gone(worker)
        await gone(grandchild)

    run(test)


TOLD = """if True:
    import json, os
    print(json.dumps({name.hex(): value.hex() for name, value in os.environb.items()}))
"""


def test_variables_arrive_exactly_and_those_of_this_login_do_not():
    every_byte = os.fsdecode(bytes(range(1, 256)))
    quotes = ' it\'s "quoted" $HOME `id` \\ \n\n !x #\t* ~ '
    environment = {"PATH": os.environ["PATH"], "ONE": every_byte, "DISPLAY": "here:0", "HOME": "/here", "LC_ALL": "C"}
    output = CollectedOutput()

    async def test():
        starts = launcher(python(TOLD), output, local=False, environment=environment)
        assert await (await starts.start(WORKER, {"TWO": quotes})).wait() == Exit(0, None)

    run(test)
    told = json.loads(output.text())
    told = {os.fsdecode(bytes.fromhex(name)): os.fsdecode(bytes.fromhex(value)) for name, value in told.items()}
    assert (told["ONE"], told["TWO"], told["PYTHONUNBUFFERED"]) == (every_byte, quotes, "1")
    assert told["PATH"] == os.environ["PATH"]
    assert told["HOME"] == pwd.getpwuid(os.getuid()).pw_dir, "the login's own"
    assert not {"DISPLAY", "LC_ALL"} & told.keys()


def test_no_command_line_on_either_host_shows_a_variable():
    secret = secrets.token_hex()

    async def test():
        output = CollectedOutput()
        environment = {"PATH": os.environ["PATH"], "FOR_ALL": secret}
        starts = launcher(shell("sleep 1000 & echo worker $$; wait"), output, False, environment)
        process = await starts.start(WORKER, {"FOR_ONE": secret})
        worker = await output.number("worker")
        assert secret.encode() in Path(f"/proc/{worker}/environ").read_bytes()
        lines = command_lines()
        assert HOST.encode() in lines
        assert secret.encode() not in lines
        process.kill()
        await process.wait()

    run(test)


ORPHAN = """if True:
    import os, sys
    print("worker", os.getpid(), flush=True)
    open({fifo!r}).read()
    for stream in sys.stdout, sys.stderr:
        for _ in range(50_000):
            print("x" * 99, file=stream, flush=True)
    open({fifo!r}, "w").write("wrote all")
"""


def parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def session_server(process: int) -> int:
    """The sshd that serves the session in which the process runs."""
    while Path(f"/proc/{process}/comm").read_text().strip() not in ("sshd", "sshd-session"):
        process = parent(process)
    return process


@pytest.mark.parametrize("victim", ["ssh", "sshd"])
def test_a_worker_outlives_its_connection_and_may_print(tmp_path, victim):
    """No signal reaches it, and ten megabytes of output find a place."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def test():
        output = CollectedOutput()
        process = await start(python(ORPHAN.format(fifo=str(fifo))), output)
        worker = await output.number("worker")
        try:
            end(process.pid if victim == "ssh" else session_server(worker))
            exit_ = await process.wait()
            assert not exit_.certain
            how = {"ssh": r"\(killed by SIGKILL\)", "sshd": r"\(exit code 255\).*"}[victim]
            assert re.fullmatch(f"ssh lost the connection to host {HOST} {how}; the worker may still run", exit_.text)
            assert lives(worker)
            await asyncio.to_thread(fifo.write_text, "the connection is gone")
            assert await asyncio.to_thread(fifo.read_text) == "wrote all"
        finally:
            with contextlib.suppress(ProcessLookupError):
                end(worker)

    run(test)


def test_the_supervisor_ends_with_its_worker_when_nobody_listens(tmp_path):
    async def test():
        output = CollectedOutput()
        process = await start(shell("echo worker $$; exec sleep 1000"), output)
        worker = await output.number("worker")
        watching = parent(worker)
        end(process.pid)
        await process.wait()
        end(worker)
        await gone(watching)

    run(test)


# --- what can go wrong ---


def test_a_refused_connection_is_told_in_one_sentence():
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # nobody listens
        exit_, _ = outcome_of(shell("true"), Ssh(port=taken.getsockname()[1]))
    assert exit_.code == 255
    assert exit_.certain
    assert exit_.text.startswith(f"ssh could not connect to host {HOST} (exit code 255): ssh: connect to host {HOST}")
    assert exit_.text.endswith("Connection refused")


def test_an_unknown_host_is_told_in_one_sentence():
    exit_, output = outcome_of(shell("true"), host="no-such-host.invalid")
    assert exit_.text.startswith(
        "ssh could not connect to host no-such-host.invalid (exit code 255): ssh: Could not res"
    )
    assert b"Could not resolve hostname" in output.text("stderr")


def test_a_key_that_the_host_does_not_know_is_told_in_one_sentence(tmp_path, server, monkeypatch):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    configuration = (server.tools.parent / "ssh_config").read_text()
    without_key = "".join(line for line in configuration.splitlines(True) if not line.startswith("IdentityFile"))
    (tmp_path / "ssh_config").write_text(without_key)
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nexec {SSH} -F {tmp_path}/ssh_config "$@"\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    exit_, _ = outcome_of(shell("true"), Ssh(identity_file=str(tmp_path / "key")))
    assert re.fullmatch(rf"ssh could not connect to host {HOST} \(exit code 255\): .*Permission denied.*", exit_.text)
    exit_, _ = outcome_of(shell("true"), Ssh(identity_file=str(server.tools.parent / "user_key")))
    assert exit_ == Exit(0, None)


def test_a_host_whose_key_has_changed_is_refused(tmp_path, server, monkeypatch):
    known = server.tools.parent / "known_hosts"
    _, kind, _ = known.read_text().splitlines()[0].split(" ")
    other = (server.tools.parent / "user_key.pub").read_text().split()[1]
    before = known.read_text()
    port = re.findall(r"Port (\d+)", (server.tools.parent / "ssh_config").read_text())[0]
    known.write_text(f"[{HOSTS[1]}]:{port} {kind} {other}\n")
    try:
        exit_, _ = outcome_of(shell("true"), host=HOSTS[1])
    finally:
        known.write_text(before)
    assert exit_.text.endswith("Host key verification failed.")


def test_what_the_host_lacks_is_told_in_one_sentence():
    exit_, _ = outcome_of(("pyhton", "train.py"))
    assert (exit_.code, exit_.text) == (127, f"host {HOST} finds no program 'pyhton'")


def test_many_workers_of_a_host_start_at_once(server):
    async def test():
        output = CollectedOutput()
        program = Program(shell("true"), {"PATH": os.environ["PATH"]}, "/")
        starts = Launcher(program, Ssh(), is_local, output.take)
        processes = await asyncio.gather(*(starts.start(f"{HOST}:{slot}", {}) for slot in range(16)))
        assert [await process.wait() for process in processes] == [Exit(0, None)] * 16

    before = len(server.logins())
    run(test)
    assert server.logins()[before:] == [HOST] * 16
