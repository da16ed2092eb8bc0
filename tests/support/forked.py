"""Processes that are forked from one which has made the imports, each with the environment of who starts it.

``multiprocessing`` has one such server in a process of tests. It keeps the environment of its first user, so what one
test has set would reach the processes of all later ones.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any


class _Process(ForkServerProcess):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._variables = dict(os.environ)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def process_context(*preload: str) -> ForkServerContext:
    """Forks processes from one that has imported these modules and has neither threads nor servers.

    The modules are imported once, when the first process is started.
    """
    context = _Context()
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(preload))
    return context
