"""A membership while it is being changed, and what is to be done about it."""

from __future__ import annotations

from dataclasses import replace

from edl_hvd.driver.membership import happenings
from edl_hvd.driver.membership.state import Membership, Slot


class Draft:
    """Collects the changes of one call of :func:`~edl_hvd.driver.membership.turn.advance`.

    Attributes:
        membership: With all changes so far.
        actions: What is to be done, in order.
        now_s: The moment of the call.
    """

    def __init__(self, membership: Membership, now_s: float) -> None:
        self.membership = membership
        self.actions: list[happenings.Action] = []
        self.now_s = now_s

    def act(self, action: happenings.Action) -> None:
        self.actions.append(action)

    def change(self, **changes: object) -> None:
        self.membership = replace(self.membership, **changes)  # type: ignore[arg-type]

    def set(self, worker: str, state: str | None = None, **changes: object) -> None:
        slot = self.membership.slots.get(worker, Slot())
        if state is not None:
            changes.update(state=state, since_s=self.now_s)
        slots = {**self.membership.slots, worker: replace(slot, **changes)}  # type: ignore[arg-type]
        self.change(slots=slots)

    def set_phase(self, phase: str) -> None:
        self.change(world=replace(self.membership.world, phase=phase, since_s=self.now_s))

    def age(self, worker: str) -> float:
        return self.now_s - self.membership.slots[worker].since_s

    def ask_change(self) -> None:
        self.set_phase("changing")
        self.act(happenings.AskChange(self.membership.world.generation))

    def dismiss(self, worker: str, save: bool = False, left_s: float | None = None) -> None:
        slot = self.membership.slots[worker]
        self.set(worker, "dismissed")
        self.act(happenings.Dismiss(worker, slot.life, save, left_s))

    def kill(self, worker: str, reason: str) -> None:
        slot = self.membership.slots[worker]
        self.set(worker, "dying")
        self.act(happenings.Kill(worker, slot.life, reason))
        if slot.state == "member":
            self.leave_world(worker)

    def end(self, code: int, reason: str = "") -> None:
        end = happenings.End(code, reason)
        self.change(end=end)
        self.act(end)

    def leave_world(self, worker: str) -> None:
        """A member is gone: the others must not wait for it."""
        world = self.membership.world
        if world.phase != "broken":
            self.set_phase("broken")
        if self.membership.having("member"):
            self.act(happenings.TellGone(world.generation, worker))
