"""What the ranks of a world do together about its checkpoints, and end in together. Every function is collective."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

import torch

from edl_hvd.clock import Clock
from edl_hvd.errors import OwnedError, StorageError
from edl_hvd.worker.commits.agreement import broadcast_json
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.engine.collectives import Collectives
from edl_hvd.worker.saving.durable import Checkpoints
from edl_hvd.world import World

logger = logging.getLogger(__name__)

_FINAL_ATTEMPTS = 3
_POLL_S = 0.05


def own(checkpoints: Checkpoints, collectives: Collectives, world: World, owners: list[int]) -> None:
    """Make the job the owner of its checkpoint URL, unless a member knows that it is. Blocks.

    Args:
        checkpoints: Of this rank.
        collectives: Of the world.
        world: Which one.
        owners: The owner that each rank knows, 0 for none.

    Raises:
        OwnedError: On every rank: another job owns the URL.
        StorageError: On every rank: the storage does not answer.
    """
    number = max(owners)
    if checkpoints.wanted and not number:
        found = {"owner": 0, "owned": False, "error": ""}
        if world.rank == 0:
            try:
                found["owner"] = checkpoints.take_url()
            except Exception as error:  # told to every rank, which then all end with it
                logger.error("%s", error)
                found.update(owned=isinstance(error, OwnedError), error=str(error))
        found = broadcast_json(collectives, found, 0, world.rank)
        if found["error"]:
            raise (OwnedError if found["owned"] else StorageError)(found["error"])
        number = int(found["owner"])
    checkpoints.own(number, speaks=world.rank == 0)


def stop(checkpoints: Checkpoints, collectives: Collectives, world: World) -> NoReturn:
    """End the job on every rank with the reason that one of them has.

    Raises:
        StorageError: Always.
    """
    reasons = collectives.gather_integers([bool(checkpoints.stop_reason)])
    root = next((rank for rank, [has_one] in enumerate(reasons) if has_one), 0)
    raise StorageError(broadcast_json(collectives, checkpoints.stop_reason, root, world.rank))


def write_last(
    checkpoints: Checkpoints, store: StateStore, begin: Callable[[], None], collectives: Collectives, world: World,
    clock: Clock,
) -> None:  # fmt: skip
    """Have the state of a finished training in storage. Blocks.

    Args:
        checkpoints: Of this rank.
        store: Holds it.
        begin: Begins a checkpoint of it.
        collectives: Of the world.
        world: Which one.
        clock: Waits.

    Raises:
        StorageError: On every rank: it could not be written.
    """

    def is_behind() -> bool:
        behind = world.rank == 0 and checkpoints.written_step < store.step
        return bool(collectives.allreduce(torch.tensor([int(behind)]), "max").item())

    def wait_for_writers() -> None:
        checkpoints.hurry()
        while collectives.allreduce(torch.tensor([int(checkpoints.busy)]), "max").item():
            clock.sleep(_POLL_S)
        checkpoints.report()
        if collectives.allreduce(torch.tensor([bool(checkpoints.stop_reason)], dtype=torch.int64), "max").item():
            stop(checkpoints, collectives, world)

    for _ in range(_FINAL_ATTEMPTS):
        wait_for_writers()
        if not is_behind():
            return
        begin()
    wait_for_writers()
    if is_behind():
        raise StorageError(
            f"training is complete, but its last checkpoint could not be written to {checkpoints.url} in "
            f"{_FINAL_ATTEMPTS} attempts; see the log and the checkpoint_failed events"
        )
