"""What the mended Horovod offers beyond the release; see ``build/edits/``."""

from __future__ import annotations

import ctypes

from horovod.torch import mpi_lib_v2

from edl_hvd.build.edits.release import REVISION
from edl_hvd.errors import PlatformError

_library = ctypes.CDLL(mpi_lib_v2.__file__)


def require() -> None:
    """Called before a world is joined.

    Raises:
        PlatformError: The installed Horovod is not mended, or by another version of edl_hvd.
    """
    found = _library.horovod_mended_revision() if hasattr(_library, "horovod_mended_revision") else 0
    if found != REVISION:
        has = f"mended to revision {found}" if found else "not mended"
        raise PlatformError(
            f"the installed Horovod is {has}, and revision {REVISION} is needed, because workers that come and go "
            "meet defects of the release; run: edl-hvd build-horovod"
        )


def abort(on: bool) -> None:
    """Give the world up: while it is on, every wait in Horovod ends with an error, and no world forms.

    Any thread, any time: while Horovod starts, in a collective, and while it shuts down. Does not block.
    """
    _library.horovod_abort(ctypes.c_bool(on))


def watch_death(connection: int) -> bool:
    """Have a thread hold this connection until the process begins to end; the caller then closes its own descriptor.

    The system frees the memory of a killed process before it ends its connections, but not before it ends that one,
    unless the thread that holds it is the last one of the process to end.

    Returns:
        Whether it is held: Linux 5.9 and newer can, where nothing forbids it.
    """
    return _library.horovod_watch_death(ctypes.c_int(connection)) == 0


def end_death_watch() -> None:
    """The process ends in order, which every connection that is held says before it ends."""
    _library.horovod_end_death_watch()
