"""A script in which a call of Horovod's own ``init()`` was left: before edl_hvd's, after it, or instead of it."""

import sys

import quick_start  # noqa: F401

# isort: split
import horovod.torch as hvd

import edl_hvd

where = sys.argv[1]
if where == "after":
    edl_hvd.init()
hvd.init()
if where == "before":
    edl_hvd.init()
if where == "instead":
    sys.exit(0)


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    """Is never entered."""


train(edl_hvd.State(count=0))
