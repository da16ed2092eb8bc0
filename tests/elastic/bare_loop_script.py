"""A loop of one's own without an optimizer: it ends when a second worker has joined. Argument: the hosts file."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import edl_hvd

edl_hvd.init()
state = edl_hvd.State(count=0)


@edl_hvd.elastic
def train(state: edl_hvd.State) -> None:
    while edl_hvd.size() < 2:
        if state.count == 1:
            Path(sys.argv[1]).write_text("localhost slots=2\n")
        time.sleep(0.01)
        state.count += 1
        state.commit()


train(state)
print(f"rank {edl_hvd.rank()} has counted to {state.count}", flush=True)
