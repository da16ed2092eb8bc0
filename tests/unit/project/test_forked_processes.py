"""Processes of tests have the environment of the test that starts them, and not that of an earlier one."""

from __future__ import annotations

import os

import pytest
from forked import process_context
from waiting import soon

NAME = "EDL_HVD_TEST_OF_FORKED"


def _answer(queue: object) -> None:
    queue.put(os.environ.get(NAME))  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", ["first", "second", None])
def test_each_process_has_the_present_environment(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if value is not None:
        monkeypatch.setenv(NAME, value)
    context = process_context("os")
    with context.Pool(1) as pool:
        assert pool.apply(os.getenv, (NAME,)) == value
    queue = context.SimpleQueue()
    process = context.Process(target=_answer, args=(queue,))
    process.start()
    soon(process)
    assert queue.get() == value
