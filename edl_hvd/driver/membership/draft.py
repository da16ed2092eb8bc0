"""A membership while it is being changed, and what is to be done about it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from edl_hvd.driver.membership import events
from edl_hvd.driver.membership.state import EMPTY, Membership, PublishedWorld, Slot, SlotState, WorldPhase, with_changes


class Draft:
    """Collects the changes of one transition (``transition.py``).

    A change is applied when somebody looks at ``membership``. So hundreds of changes that nobody looks at in between
    copy the membership once, and what was looked at does not change any more.

    Attributes:
        actions: What is to be done, in order.
        now_s: The moment of the transition.
    """

    def __init__(self, membership: Membership, now_s: float) -> None:
        self.actions: list[events.Action] = []
        self.now_s = now_s
        self._membership = membership
        self._slots: dict[str, Slot] | None = None
        self._moved: set[str] = set()
        self._changes: dict[str, Any] = {}
        self._generation = 0
        self._unformed: set[str] | None = None  # of the members; ``None`` for those that the world tells

    @property
    def membership(self) -> Membership:
        """With all changes so far."""
        if self._slots is not None:
            self._changes["slots"], self._slots = self._slots, None
        if self._unformed is not None:
            self._changes["world"] = self.world
        if self._changes:
            self._membership, self._changes = self._membership.changed(self._changes, self._moved), {}
            self._moved = set()
        return self._membership

    @property
    def world(self) -> PublishedWorld:
        """That of the membership."""
        world: PublishedWorld = self._changes.get("world", self._membership.world)
        if self._unformed is not None:
            world = replace(world, formed=frozenset(world.members) - self._unformed)
            self._changes["world"], self._unformed = world, None
        return world

    def slot(self, worker: str) -> Slot | None:
        """One of the membership's."""
        slots = self._membership.slots if self._slots is None else self._slots
        return slots.get(worker)

    def act(self, action: events.Action) -> None:
        self.actions.append(action)

    def change(self, **changes: object) -> None:
        self._changes.update(changes)

    def set(self, worker: str, state: SlotState | None = None, **changes: object) -> None:
        slots = self._slots
        if slots is None:
            slots = self._slots = dict(self._membership.slots)
        if state is not None:
            changes["state"], changes["since_s"] = state, self.now_s
            self._moved.add(worker)
        slots[worker] = with_changes(slots.get(worker, EMPTY), changes)

    def set_all(self, workers: Collection[str], state: SlotState) -> None:
        """``set`` for several workers."""
        slots = self._slots = dict(self.membership.slots)
        changes = {"state": state, "since_s": self.now_s}
        self._moved = set(workers)
        for worker in workers:
            slots[worker] = with_changes(slots[worker], changes)

    def note_formed(self, worker: str, generation: int) -> None:
        """A member of this generation's world has started Horovod; the world runs once all have."""
        if self._unformed is None:
            world = self.world
            self._generation, self._unformed = world.generation, set(world.members) - world.formed
        if generation == self._generation and worker in self._unformed:
            self._unformed.remove(worker)
            if not self._unformed and self.world.phase == "forming":
                self.set_phase("running")

    def set_phase(self, phase: WorldPhase) -> None:
        self.change(world=replace(self.world, phase=phase, since_s=self.now_s))

    def age(self, worker: str) -> float:
        return self.now_s - self.membership.slots[worker].since_s

    def request_resize(self) -> None:
        self.set_phase("changing")
        self.act(events.RequestResize(self.world.generation))

    def shut_down(self, worker: str, save: bool = False, left_s: float | None = None) -> None:
        slot = self.membership.slots[worker]
        self.set(worker, "terminating")
        self.act(events.ShutDownWorker(worker, slot.incarnation, save, left_s))

    def kill(self, worker: str, reason: str) -> None:
        slot = self.membership.slots[worker]
        self.set(worker, "dying")
        self.act(events.Kill(worker, slot.incarnation, reason))
        if slot.state == "member":
            self.leave_world(worker)

    def end(self, code: int, reason: str = "") -> None:
        end = events.End(code, reason)
        self.change(end=end)
        self.act(end)

    def leave_world(self, worker: str) -> None:
        """A member is gone: the others must not wait for it."""
        world = self.world
        if world.phase != "broken":
            self.set_phase("broken")
        if self.membership.having("member"):
            self.act(events.NotifyPeerLost(world.generation, worker))
