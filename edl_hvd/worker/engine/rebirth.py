"""Replacing the image of this process, when Horovod's cannot be saved.

When a peer dies inside the few milliseconds of ``hvd.init()``, the call cannot be left: its thread waits
in native code and, after the Gloo timeout, aborts the process. Rarely a collective or ``hvd.shutdown()``
waits as long, or for ever (see ``departures.py``). The remedy is to run the same command again in the
same process (``execve``): the launcher sees no exit, the process number stays, the output goes where it
went. The state is written to memory-backed files before and read back after.
"""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import NoReturn

from edl_hvd.settings import PastLife

logger = logging.getLogger(__name__)

_FOLDER = os.getcwd()  # the command's paths are relative to where it was started


def be_reborn(environment: Mapping[str, str], past: PastLife, reason: str) -> NoReturn:
    """Start this process's command anew. Does not return.

    Args:
        environment: The variables this process was started with.
        past: What the next life is to know.
        reason: For the log.
    """
    logger.warning("Horovod cannot leave a broken world (%s); running this process anew", reason)
    os.chdir(_FOLDER)
    for child in multiprocessing.active_children():
        child.kill()  # data loader workers watch for their parent's death, and it does not die
    _close_on_exec()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**environment, "EDL_HVD_PAST_LIFE": json.dumps(asdict(past))})


def _close_on_exec() -> None:
    # Gloo opens its sockets without the flag. Left open, they would hide this worker's end from its peers.
    for name in os.listdir("/dev/fd"):
        descriptor = int(name)
        if descriptor > 2:
            with suppress(OSError):
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFD)
                fcntl.fcntl(descriptor, fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)
