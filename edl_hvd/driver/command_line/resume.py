"""What a command line that goes on with an earlier job leaves unsaid, taken from that job's folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from edl_hvd.driver.command_line.flags import FlagReader, with_present_names
from edl_hvd.driver.job_folder.files import RECORD, look
from edl_hvd.errors import PlatformError, UsageError

HOST_FLAGS = ("--hosts", "--hostfile", "--host-discovery-script", "--discover", "--agents-port")
_OF_ONE_RUN = ("--job-dir", "--resume", "--record", "--take-over")


def complete(flags: FlagReader, command: Sequence[str]) -> tuple[str, ...]:
    """The command to run. Where none is given it is the earlier one, and ``flags`` gets the flags that went with it.

    Flags that are given again replace the earlier ones; one that says where the hosts are replaces all that do.

    Raises:
        UsageError: There is nothing to go on with, so that nothing more can be said of this command line.
    """
    if not flags.is_on("--resume"):
        return tuple(command)
    path = flags.given.get("--job-dir")
    if not path:
        raise UsageError("--resume has nothing to go on without --job-dir; give the --job-dir of the job that stopped")
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    try:
        view = look(folder)
    except PlatformError as error:
        raise UsageError(f"--resume: {error}") from error
    if view is None:
        raise UsageError(
            f"--resume has nothing to go on in --job-dir {folder}, which has no {RECORD}; give the --job-dir of the "
            "job that stopped, or leave --resume out"
        )
    if command:
        return tuple(command)
    if os.getcwd() != view.record.folder:
        raise UsageError(
            f"--resume takes the command from {folder / RECORD}, and it was typed in {view.record.folder}; go there "
            f"first (cd {shlex.quote(view.record.folder)}), or give the command"
        )
    flags.given = {**_still_valid(view.record.flags, flags.given), **flags.given}
    return view.record.command


def _still_valid(flags: Sequence[tuple[str, ...]], given: Mapping[str, str]) -> dict[str, str]:
    replaced = HOST_FLAGS if any(flag in given for flag in HOST_FLAGS) else ()
    earlier = {name: value for name, value in flags if name not in (*replaced, *_OF_ONE_RUN)}
    return dict(with_present_names(earlier).given)
