"""Workers that cannot be started: every reason is named. And which hosts are local."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from children import WORKER, CollectedOutput, launcher, outcome_of, pretend_ssh, run, shell

from edl_hvd.driver.network import is_local, own_addresses
from edl_hvd.driver.workers.process import Exit
from edl_hvd.driver.workers.ssh import Ssh, Supervisor
from edl_hvd.errors import PlatformError, UsageError


def test_a_program_that_is_not_here_is_named():
    with pytest.raises(UsageError, match=r"b:0 could not be started with 'pyhton train\.py' .*No such file.*'pyhton'"):
        outcome_of(("pyhton", "train.py"), local=True)


def test_a_folder_that_is_not_here_is_named():
    with pytest.raises(UsageError, match=r"No such file.*'/no/folder'"):
        outcome_of(shell("true"), local=True, folder="/no/folder")


@pytest.mark.parametrize("name", ["dash", "bash"])
def test_what_another_host_lacks_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PATH", f"{pretend_ssh(tmp_path / 'tools', name)}{os.pathsep}{os.environ['PATH']}")
    exit_, output, _ = outcome_of(("pyhton", "train.py"), local=False)
    assert (exit_.code, exit_.text) == (127, "host b finds no program 'pyhton'")
    exit_, output, _ = outcome_of(shell("true"), local=False, folder="/no/folder")
    assert exit_.text == "host b has no folder '/no/folder' that can be entered; expected the same folder as here"
    assert exit_.certain
    assert output.heard == []


def test_without_ssh_it_is_said_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlatformError, match=r"cannot run 'ssh'.*openssh-client"):
        outcome_of(shell("true"), local=False, environment={"PATH": "/usr/bin"})


def test_a_variable_that_no_shell_can_export_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"'A-B'.*expected letters"):
        Supervisor("b", ("true",), "/", {"A-B": "1"}, 1, lambda stream, line: None)


@pytest.mark.parametrize("name", ["dash", "bash"])
def test_a_script_that_breaks_off_on_its_way_starts_nothing(tmp_path, name):
    started = tmp_path / "started"
    supervisor = Supervisor("b", ("touch", str(started)), "/", {"PATH": os.environ["PATH"]}, 1, lambda *_: None)
    environment = {**os.environ, "PATH": f"{pretend_ssh(tmp_path / 'tools', name)}{os.pathsep}{os.environ['PATH']}"}

    def deliver(count: int) -> None:
        words = ["sh", "-c", supervisor.command]
        subprocess.run(words, input=supervisor.script[:count], env=environment, capture_output=True, check=False)

    for count in range(0, len(supervisor.script) - 1, 97):
        deliver(count)
        assert not started.exists(), count
    deliver(len(supervisor.script))
    assert started.exists()


def greeting_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str = "") -> None:
    tools = pretend_ssh(tmp_path / "tools", "sh", f"echo Welcome; echo 'Authorised only' >&2; {after}")
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")


def test_greetings_are_no_output_of_the_worker(tmp_path, monkeypatch):
    greeting_ssh(tmp_path, monkeypatch)
    _, output, last_lines = outcome_of(shell("echo out; echo error >&2"), local=False)
    assert (output.text(), output.text("stderr")) == (b"out\n", b"error\n")
    assert sorted(last_lines) == ["error", "out"]


def test_what_was_said_before_a_login_failed_is_passed_on(tmp_path, monkeypatch):
    greeting_ssh(tmp_path, monkeypatch, "printf 'b: Permission denied.\\r\\n' >&2; exit 255")
    exit_, output, last_lines = outcome_of(shell("true"), local=False)
    assert exit_ == Exit(255, None, "ssh could not connect to host b (exit code 255): b: Permission denied.")
    assert last_lines == ["Welcome", "Authorised only", "b: Permission denied."]
    assert output.text("stderr") == b"Authorised only\nb: Permission denied.\r\n"


def test_an_ssh_that_leads_nowhere_is_killed_in_the_end(tmp_path, monkeypatch):
    greeting_ssh(tmp_path, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr("edl_hvd.driver.workers.remote_process._CUT_AFTER_S", 0.01)

    async def test():
        process = await launcher(shell("true"), CollectedOutput(), local=False).start(WORKER, {})
        process.kill()
        exit_ = await process.wait()
        assert (exit_.signal, exit_.certain) == (signal.SIGKILL, True)
        assert exit_.text.startswith("ssh could not connect to host b (killed by SIGKILL)")

    run(test)


def test_few_logins_to_a_host_are_under_way_at_a_time(tmp_path, monkeypatch):
    """An ssh server refuses some when there are many."""
    logins, counts = tmp_path / "logins", tmp_path / "counts"
    logins.mkdir()
    before = f"mkdir {logins}/$$; ls {logins} | wc -l >>{counts}; sleep 0.1; rmdir {logins}/$$"
    monkeypatch.setenv("PATH", f"{pretend_ssh(tmp_path / 'tools', 'sh', before)}{os.pathsep}{os.environ['PATH']}")

    async def test():
        starts = launcher(shell("true"), CollectedOutput(), local=False)
        processes = await asyncio.gather(*(starts.start(f"b:{slot}", {}) for slot in range(12)))
        assert [exit_.code for exit_ in await asyncio.gather(*(process.wait() for process in processes))] == [0] * 12

    run(test)
    found = [int(count) for count in counts.read_text().split()]
    assert len(found) == 12
    assert max(found) <= 4


def test_ssh_is_told_port_and_key_and_never_asks():
    words = Ssh(2222, "/keys/id").command("b", "true")
    assert words[-6:] == ["-p", "2222", "-i", "/keys/id", "b", "true"]
    assert "BatchMode=yes" in words
    assert Ssh().command("b", "true")[-2:] == ["b", "true"]
    assert not {"-p", "-i"} & set(Ssh().command("b", "true"))


def test_a_word_that_breaks_off_with_the_connection_means_nothing():
    heard = []
    supervisor = Supervisor("b", ("true",), "/", {}, 1, lambda stream, line: heard.append(line))
    token = re.findall(rb"token=(\w+)", supervisor.script)[0]
    supervisor.take("stdout", token + b" begins\n")
    supervisor.take("stderr", b"motd" + token + b" begins\n")
    supervisor.take("stderr", b"last words")
    supervisor.take("stderr", b"Timeout, server b not responding.\r\n")
    supervisor.take("stderr", token + b" ended 1")
    exit_ = supervisor.exit(255)
    assert (exit_.code, exit_.certain) == (255, False)
    assert exit_.text == (
        "ssh lost the connection to host b (exit code 255): Timeout, server b not responding.; the worker may still run"
    )
    assert heard == [b"last words", b"Timeout, server b not responding.\r\n"]


# --- which hosts are local ---


def test_own_addresses_are_those_of_the_interfaces():
    psutil = pytest.importorskip("psutil")
    interfaces = psutil.net_if_addrs().values()
    assert own_addresses() == {entry.address for entries in interfaces for entry in entries if entry.family.value == 2}


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", False),
        ("192.0.2.77", False),
        ("no-such-host.invalid", False),
        ("a..b", False),
    ],
)
def test_a_host_is_local_when_an_interface_has_its_address(host, local):
    assert is_local(host) == local


def test_the_machines_own_name_is_local_with_debians_address_too(monkeypatch):
    monkeypatch.setattr("socket.gethostbyname", lambda host: "127.0.1.1")
    monkeypatch.setattr("socket.gethostname", lambda: "this-one")
    assert is_local("this-one")
    assert not is_local("another")
