"""All that is mended, in the order in which the edits are made: some have anchors that earlier ones have put there."""

from __future__ import annotations

from edl_hvd.build.edits.death_watch import DEATH_WATCH
from edl_hvd.build.edits.gloo_handshake import KEYED_HELLO
from edl_hvd.build.edits.gloo_mesh import ONE_MESH
from edl_hvd.build.edits.gloo_transport import NO_EXCEPTION_ESCAPES, NO_WAIT_FOR_A_TURN, ONE_PAIR_FAILS_ALL
from edl_hvd.build.edits.gpu import NCCL_WAITS_END, SUMS_BEFORE_ABORTS
from edl_hvd.build.edits.launcher import ANY_THREADS_SIGNAL
from edl_hvd.build.edits.operations import FAILED_INIT, FIRST_FAILURE, REVISION_AND_ABORT
from edl_hvd.build.edits.release import Mend
from edl_hvd.build.edits.tensor_queue import CLOSED_QUEUE, NO_PYTHON_LOCK

MENDS: tuple[Mend, ...] = (
    REVISION_AND_ABORT,
    FIRST_FAILURE,
    FAILED_INIT,
    CLOSED_QUEUE,
    NO_PYTHON_LOCK,
    ONE_PAIR_FAILS_ALL,
    NO_EXCEPTION_ESCAPES,
    ONE_MESH,
    NO_WAIT_FOR_A_TURN,
    KEYED_HELLO,
    DEATH_WATCH,
    NCCL_WAITS_END,
    SUMS_BEFORE_ABORTS,
    ANY_THREADS_SIGNAL,
)
