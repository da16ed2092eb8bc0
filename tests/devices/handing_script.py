"""Two states in one process, on different devices: one takes over the other's, follows it, and comes back to a commit.

    python handing_script.py LIBRARY

Prints, as JSON, how often the state was what it had to be, bit for bit and on the devices of the script; and after
which of these, and between which devices, it was not.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import far_device
import torch
from torch import nn
from training_script import PLACES, Network

import edl_hvd
from edl_hvd.worker import process
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous


class Average:
    """An object of a script's own, which keeps the tensors that it is given."""

    def __init__(self, like: torch.Tensor) -> None:
        self.values = [like.detach().clone()]

    def update(self, value: torch.Tensor) -> None:
        self.values = [*self.values[-2:], 0.9 * self.values[-1] + 0.1 * value.detach()]

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        self.values = state["values"]


class Holder:
    """A model, an optimizer, and what goes with them, on some devices."""

    def __init__(self, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Network(*PLACES[device])
        plain = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=False)
        self.optimizer = edl_hvd.DistributedOptimizer(plain, self.model.named_parameters())
        average = Average(self.model.body[0].weight)
        self.state = edl_hvd.State(
            model=self.model, optimizer=self.optimizer, average=average, scale=average.values[0].mean()
        )
        self.store = self.state._runtime.store

    def move(self, light: bool = True) -> None:
        """One step, and its commit."""
        torch.manual_seed(self.store.step)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(torch.randint(50, (16, 4))), torch.randint(3, (16,))).backward()
        self.optimizer.step()
        self.touch()
        self.store.step += 1
        self.store.save(self.store.commit + 1, light=light)

    def touch(self) -> None:
        self.state.average.update(self.model.body[0].weight)
        self.state.scale = 2 * self.state.scale

    def places(self) -> dict[str, str]:
        return {name: tensor.device.type for name, tensor in self.store.live(0)[1].items()}

    def holds_that_of(self, other: Holder) -> bool:
        (plain, tensors), (others_plain, others) = self.store.live(0), other.store.live(0)
        return plain == others_plain and all(torch.equal(tensors[name].cpu(), others[name].cpu()) for name in others)


def handed(source: str, target: str) -> Iterator[tuple[str, bool]]:
    """After what, and whether the state was right."""
    giver, taker, model = Holder(source, 1), Holder(target, 2), Holder(target, 3)
    for holder in (giver, model):
        for _ in range(4):
            holder.move()
    places = model.places()  # where a script on the target's devices has all of it

    def is_right() -> bool:
        return taker.holds_that_of(giver) and taker.places() == places

    plain, tensors = giver.store.export()
    taker.store.load(plain, {name: tensor.cpu().clone() for name, tensor in tensors.items()})
    yield "taken over", is_right()

    giver.move()
    plain, tensors = giver.store.export()
    taker.store.apply_delta(plain, {name: tensor.cpu().clone() for name, tensor in tensors.items()})
    yield "followed", is_right()

    for light in (True, False):
        giver.move(light)
        taker.move(light)
        taker.touch()
        taker.store.restore()
        yield f"back at a commit, light={light}", is_right()


def main() -> None:
    found = [
        (is_right, f"{what}, from {source} to {target}")
        for source, target in itertools.product(PLACES, repeat=2)
        for what, is_right in handed(source, target)
    ]
    wrong = [what for is_right, what in found if not is_right]
    print(json.dumps({"wrong": wrong, "right": len(found) - len(wrong)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    far_device.use(Path(sys.argv[1]))
    edl_hvd.init()
    process.current().joined = SoloRendezvous().join(-1, -1, dict)
    main()
