"""``--start-timeout``: a host that takes a login and then does nothing keeps nobody waiting."""

from __future__ import annotations

import asyncio
import os

import pytest
from children import CollectedOutput, pretend_ssh, python

from edl_hvd.driver.workers.launcher import Launcher, Program
from edl_hvd.driver.workers.process import Exit
from edl_hvd.driver.workers.ssh import Ssh


def outcome_of(code: str, start_timeout_s: float) -> tuple[Exit, bytes]:
    """How a worker on another host ends."""
    output = CollectedOutput()
    program = Program(python(code), {"PATH": os.environ["PATH"]}, "/")

    async def follow() -> Exit:
        launcher = Launcher(program, Ssh(), lambda host: False, output.take, start_timeout_s)
        return await (await launcher.start("b:0", {})).wait()

    return asyncio.run(follow()), output.text()


@pytest.fixture
def ssh_that(tmp_path, monkeypatch):
    """Pretends an ssh that does something first."""

    def pretend(before: str) -> None:
        tools = pretend_ssh(tmp_path / "tools", "sh", before)
        monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")

    return pretend


def test_a_host_that_does_not_let_a_worker_be_started_is_given_up(ssh_that):
    ssh_that("echo 'please wait' >&2; sleep 1000")
    exit_, _ = outcome_of("print('never')", start_timeout_s=0.3)
    assert exit_.text == "ssh could not connect to host b within 0.3 s (--start-timeout): please wait"
    assert exit_.certain, "no worker was started"


def test_a_worker_that_was_started_in_time_may_take_as_long_as_it_likes(ssh_that):
    ssh_that("sleep 0.1")
    # It ends long after the allowance is over.
    exit_, said = outcome_of("import time; time.sleep(2.5); print('done')", start_timeout_s=1.5)
    assert (exit_, said) == (Exit(0, None), b"done\n")
