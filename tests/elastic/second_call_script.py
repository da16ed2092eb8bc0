"""Calls an elastic function once for each of two folds."""

from __future__ import annotations

import edl_hvd

edl_hvd.init()
for fold in range(2):

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(2):
            pass

    train(edl_hvd.State())
    print(f"fold {fold} is trained", flush=True)
