"""One turn of the membership: take in what happened, then decide what follows."""

from __future__ import annotations

from dataclasses import replace

from edl_hvd.driver import happenings
from edl_hvd.driver.membership import LIVE, Membership, Slot, World, host_of

SAVED = 75  # EX_TEMPFAIL: "run me again"
UNUSABLE = 2  # what was asked for cannot be started, as for a wrong flag
_LONGEST_BACKOFF_S = 60.0


class Turn:
    """Collects the changes of one call of ``advance``; see there.

    Attributes:
        membership: With all changes so far.
        actions: What is to be done, in order.
    """

    def __init__(self, membership: Membership, now_s: float) -> None:
        self.membership = membership
        self.actions: list[happenings.Action] = []
        self._now_s = now_s

    # --- taking in what happened ---

    def take(self, happening: happenings.Happening) -> None:
        if isinstance(happening, happenings.HostsFound):
            self._change(hosts=happening.hosts)
        elif isinstance(happening, happenings.DrainAsked):
            self._drain(happening)
        elif isinstance(happening, happenings.News):
            slot = self.membership.slots.get(happening.worker)
            # Late news of an earlier life of this slot concerns nobody.
            if slot is not None and slot.state != "empty" and slot.life == happening.life:
                self._hear(happening, slot)

    def _drain(self, asked: happenings.DrainAsked) -> None:
        deadline_s = self._now_s + asked.notice_s
        known = self.membership.drains.get(asked.target, deadline_s)
        self._change(drains={**self.membership.drains, asked.target: min(known, deadline_s)})

    def _hear(self, happening: happenings.News, slot: Slot) -> None:
        worker = happening.worker
        if isinstance(happening, happenings.Ready) and slot.state in ("starting", "ready", "member"):
            self._set(worker, "ready", step=happening.step, follows=0, warm=0)
            if slot.state == "member" and self.membership.world.phase in ("forming", "running"):
                self._leave_world(worker)  # a collective of it has failed before anybody died
        elif isinstance(happening, happenings.Warm):
            if slot.state == "ready":
                self._set(worker, "ready", warm=happening.generation)
        elif isinstance(happening, happenings.Formed):
            self._note_formed(worker, happening.generation)
        elif isinstance(happening, happenings.Raised):
            self._set(worker, raised=(happening.step, happening.error))
        elif isinstance(happening, happenings.Done):
            self._set(worker, done=True)
            if self.membership.finishing_s is None:
                self._change(finishing_s=self._now_s)
        elif isinstance(happening, happenings.Exited):
            self._bury(happening, slot)
        elif isinstance(happening, happenings.Lost) and slot.state != "dying":
            self._kill(worker, happening.reason)

    def _note_formed(self, worker: str, generation: int) -> None:
        world = self.membership.world
        if world.generation == generation and worker in world.members:
            world = replace(world, formed=world.formed | {worker})
            self._change(world=world)
            if world.phase == "forming" and world.formed >= set(world.members):
                self._set_phase("running")

    def _bury(self, exited: happenings.Exited, slot: Slot) -> None:
        worker = exited.worker
        self._set(worker, "empty", done=False, raised=None, step=-1)
        if slot.state == "member" and not slot.done:
            self._leave_world(worker)
        if slot.state == "dismissed" or (slot.done and exited.clean):
            return
        if self.membership.finishing_s is not None:
            # The training is complete and saved; only an error of the script's own still counts.
            if slot.done:
                self._end(1, f"{worker} failed after the training was complete: {exited.how}")
            return
        self._note_crash(worker, slot, exited)

    def _leave_world(self, worker: str) -> None:
        """A member is gone: the others must not wait for it."""
        world = self.membership.world
        if world.phase != "broken":
            self._set_phase("broken")
        if self.membership.having("member"):
            self.actions.append(happenings.TellGone(world.generation, worker))

    def _note_crash(self, worker: str, slot: Slot, exited: happenings.Exited) -> None:
        rules, membership = self.membership.rules, self.membership
        proved = self._now_s - slot.born_s > rules.steady_s
        pause_s = rules.backoff_s if proved or not slot.backoff_s else slot.backoff_s
        self._set(worker, not_before_s=self._now_s + pause_s, backoff_s=min(2 * pause_s, _LONGEST_BACKOFF_S))
        host = host_of(worker)
        recent = [at_s for at_s in membership.failures.get(host, ()) if self._now_s - at_s <= rules.failure_window_s]
        recent.append(self._now_s)
        if len(recent) >= rules.host_failures:
            self._change(aside={**membership.aside, host: self._now_s + rules.cooldown_s})
            self.actions.append(happenings.SetAside(host, rules.cooldown_s, exited.how))
            recent = []
        self._change(failures={**membership.failures, host: tuple(recent)})
        if slot.state == "starting" and membership.world.generation == 0:
            self._note_false_start(exited)
        elif slot.raised is not None:
            self._note_error(worker, *slot.raised)

    def _note_false_start(self, exited: happenings.Exited) -> None:
        """Nothing has ever trained. When nobody gets to the training function, nobody will."""
        rules, worker, how = self.membership.rules, exited.worker, exited.how
        if not exited.began and not rules.hosts_are_fixed:
            return  # it is set aside; one that has just been switched on lets nobody in yet
        starts = self.membership.false_starts + 1
        self._change(false_starts=starts)
        if starts < rules.same_error_limit or self.membership.having("ready"):
            return
        if exited.began:
            self._end(1, f"{starts} workers ended before they reached the training function, {worker} with {how}")
        elif not self.membership.having("starting"):
            self._end(UNUSABLE, f"no worker could be started, {worker} because {how}")

    def _note_error(self, worker: str, step: int, error: str) -> None:
        """The same error of all, or again and again, is the script's; another try would not help."""
        known_step, known_error, workers = self.membership.repeated
        workers = (*workers, worker) if (step, error) == (known_step, known_error) else (worker,)
        self._change(repeated=(step, error, workers))
        members = self.membership.world.members
        if len(members) > 1 and set(workers) >= set(members):
            self._end(1, f"every worker failed at step {step}: {error}")
        elif len(workers) >= self.membership.rules.same_error_limit:
            self._end(1, f"step {step} failed {len(workers)} times in a row: {error}")

    # --- deciding ---

    def decide(self) -> None:
        if self.membership.end is not None:
            return
        self._enforce_bounds()
        if self.membership.finishing_s is not None:
            self._finish()
            return
        self._spawn()
        if self.membership.having("member"):
            self._reshape()
        else:
            self._regroup()

    def _enforce_bounds(self) -> None:
        rules, world = self.membership.rules, self.membership.world
        for worker in self.membership.having("starting"):
            if self._age(worker) > rules.start_s:
                self._kill(worker, f"it was not ready {rules.start_s:.0f} s after its start")
        for worker in self.membership.having("dismissed"):
            if self._age(worker) > rules.farewell_s:
                self._kill(worker, f"it did not end within {rules.farewell_s:.0f} s of being sent home")
        members = self.membership.having("member")
        if world.phase == "running" or not members:
            return
        since_s = world.since_s
        if world.phase == "changing":  # its steps may be long, but once one has left, the others follow
            left = [self.membership.slots[name].since_s for name in world.members if name not in members]
            if not left:
                return
            since_s = max(world.since_s, min(left))
        if self._now_s - since_s > rules.regroup_s:
            for worker in members:
                if world.phase != "forming" or worker not in world.formed:
                    self._kill(worker, f"it was stuck for {rules.regroup_s:.0f} s while the others waited for it")

    def _finish(self) -> None:
        membership = self.membership
        assert membership.finishing_s is not None
        late = self._now_s - membership.finishing_s > membership.rules.regroup_s
        for worker in membership.having("starting", "ready"):
            self._dismiss(worker)
        if late:
            for worker in membership.having("member", "dismissed"):
                self._kill(worker, "it did not end although the training is complete")
        if not self.membership.having(*LIVE):
            self._end(0)

    def _spawn(self) -> None:
        membership = self.membership
        wanted = membership.wanted(self._now_s)
        # Those who are about to leave do not count: their successors have to start before they can go.
        alive = set(membership.having("starting", "ready", "member")) & set(wanted)
        room = membership.rules.max_np + membership.rules.spares - len(alive)
        for worker in wanted:
            slot = membership.slots.get(worker, Slot())
            if room > 0 and slot.state == "empty" and slot.not_before_s <= self._now_s:
                room -= 1
                self._set(worker, "starting", life=slot.life + 1, born_s=self._now_s, step=-1, done=False, raised=None)
                self.actions.append(happenings.Spawn(worker, slot.life + 1))

    def _reshape(self) -> None:
        """There is a world; should it change?"""
        membership, rules, now_s = self.membership, self.membership.rules, self._now_s
        wanted = set(membership.wanted(now_s))
        running = membership.world.phase == "running"
        # One that has just left a world may be the only one to hold the state, until the next one runs.
        for worker in membership.having("starting", "ready") if running else membership.having("starting"):
            if worker not in wanted:
                self._dismiss(worker)
        if not running:
            return
        members = membership.having("member")
        leavers = [worker for worker in members if worker not in wanted]
        stayers = len(members) - len(leavers)
        room = rules.max_np - stayers
        self._let_follow(room, members)
        newcomers = [worker for worker in self.membership.having("ready") if self._can_join(worker)]
        if leavers:
            if stayers or newcomers or self._is_time(leavers, wanted):
                self._ask_change()
        elif newcomers and room > 0:
            settled = now_s - min(membership.slots[worker].since_s for worker in newcomers) >= rules.settle_s
            if settled or len(newcomers) >= room:
                self._ask_change()

    def _let_follow(self, room: int, members: list[str]) -> None:
        """Newcomers take the state over while the world trains; nobody waits for that."""
        membership = self.membership
        generation = membership.world.generation
        for worker in membership.having("ready")[:room]:
            slot = membership.slots[worker]
            if slot.step < 0 and slot.follows != generation:
                near = [member for member in members if host_of(member) == host_of(worker)]
                self._set(worker, "ready", follows=generation)
                self.actions.append(happenings.Follow(worker, generation, (near or members)[-1]))

    def _can_join(self, worker: str) -> bool:
        """It need not be given the state while the others wait, or cannot be spared that."""
        slot, generation = self.membership.slots[worker], self.membership.world.generation
        late = slot.follows == generation and self._age(worker) > self.membership.rules.follow_s
        return slot.step >= 0 or slot.warm == generation or late

    def _is_time(self, leavers: list[str], wanted: set[str]) -> bool:
        """Nobody else holds the state. Leave now: no other worker can come, or the notice is nearly over?"""
        return not wanted or self._now_s >= min(self._deadline_s(worker) for worker in leavers)

    def _deadline_s(self, worker: str) -> float:
        """When a worker that is to leave has to be gone."""
        drains = self.membership.drains
        asked = [drains[what] for what in (worker, host_of(worker)) if what in drains]
        return min(asked) if asked else self.membership.world.since_s + self.membership.rules.removal_notice_s

    def _regroup(self) -> None:
        """There is no world; can there be one?"""
        membership = self.membership
        wanted = membership.wanted(self._now_s)
        ready = membership.having("ready")
        leavers = [worker for worker in ready if worker not in set(wanted)]
        able = self._without_cold([worker for worker in ready if worker not in leavers])
        holders = [worker for worker in leavers if membership.slots[worker].step >= 0]
        handing_on: list[str] = []
        if able and not any(membership.slots[worker].step >= 0 for worker in able):
            handing_on = sorted(holders, key=lambda worker: membership.slots[worker].step)[-1:]
        if len(able) + len(handing_on) >= self._needed and self._have_settled(able):
            for worker in leavers:
                if worker not in handing_on:
                    self._dismiss(worker)
            self._publish(able, handing_on)
            return
        if not wanted and not membership.having("starting"):
            self._send_home(holders, leavers)
        self._starve(able)

    def _without_cold(self, able: list[str]) -> list[str]:
        """Leave out whom the others would have to wait for, where they can do without; it follows their world then.

        A spare is not left out: it is there to take a lost worker's place at once.
        """
        membership = self.membership
        if not membership.world.generation or membership.rules.spares:
            return able
        regular = membership.world.phase == "changing"
        warm = [worker for worker in able if membership.slots[worker].step >= 0 or (regular and self._can_join(worker))]
        holds = any(membership.slots[worker].step >= 0 for worker in warm)
        return warm if holds and len(warm) >= self._needed else able

    @property
    def _needed(self) -> int:
        membership, rules = self.membership, self.membership.rules
        aside = any(membership.aside.get(entry.host, self._now_s) > self._now_s for entry in membership.hosts)
        # A host that nobody can reach does not keep all others from starting, once these are ready.
        enough = membership.world.generation or (aside and not membership.having("starting"))
        return rules.min_np if enough else rules.num_proc

    def _have_settled(self, able: list[str]) -> bool:
        """The very first world waits a moment for the others that started with it; no later one waits."""
        membership = self.membership
        if membership.world.generation or not membership.having("starting") or len(able) >= membership.rules.max_np:
            return True
        return self._now_s - max(membership.slots[worker].since_s for worker in able) >= membership.rules.settle_s

    def _send_home(self, holders: list[str], leavers: list[str]) -> None:
        """Nobody can come any more: the freshest saves, all go."""
        freshest = max(holders, key=lambda worker: self.membership.slots[worker].step, default=None)
        for worker in leavers:
            self._dismiss(worker, save=worker == freshest)
        if self.membership.drains and self.membership.hosts and not self.membership.having(*LIVE):
            self._end(SAVED, "every host is left; run it again to go on")

    def _starve(self, able: list[str]) -> None:
        membership, rules = self.membership, self.membership.rules
        starting = membership.having("starting")
        on_their_way = len(able) + len(starting) >= self._needed
        if membership.hungry_s is None or (on_their_way and not any(membership.slots[w].backoff_s for w in starting)):
            self._change(hungry_s=self._now_s)  # a first start has its own bound
        elif self._now_s - membership.hungry_s > rules.elastic_timeout_s and membership.end is None:
            self._end(
                1,
                f"fewer than {self._needed} workers were ready for {rules.elastic_timeout_s:.0f} s; see their output "
                "and what discovery reports; --elastic-timeout sets how long to wait",
            )

    def _publish(self, able: list[str], handing_on: list[str]) -> None:
        rules, world = self.membership.rules, self.membership.world
        if rules.reset_limit is not None and world.generation > rules.reset_limit:
            self._end(
                1, f"the world has changed more than {rules.reset_limit} times, the limit that --reset-limit sets"
            )
            return
        # Who was there before comes first; whole hosts stay together, because ranks of one host talk fastest.
        before = {worker: place for place, worker in enumerate(world.members)}
        chosen = sorted(able, key=lambda worker: before.get(worker, len(before)))[: rules.max_np]
        chosen = [*handing_on, *chosen]  # one more than allowed, for as long as it takes to hand the state on
        hosts: dict[str, list[str]] = {}
        for worker in chosen:
            hosts.setdefault(host_of(worker), []).append(worker)
        members = tuple(worker for host in hosts.values() for worker in host)
        generation = world.generation + 1
        for worker in members:
            self._set(worker, "member")
        self._change(world=World(generation, members, "forming", self._now_s), hungry_s=None)
        self.actions.append(happenings.Publish(generation, members))

    # --- small changes ---

    def _change(self, **changes: object) -> None:
        self.membership = replace(self.membership, **changes)  # type: ignore[arg-type]

    def _set(self, worker: str, state: str | None = None, **changes: object) -> None:
        slot = self.membership.slots.get(worker, Slot())
        if state is not None:
            changes.update(state=state, since_s=self._now_s)
        slots = {**self.membership.slots, worker: replace(slot, **changes)}  # type: ignore[arg-type]
        self._change(slots=slots)

    def _set_phase(self, phase: str) -> None:
        self._change(world=replace(self.membership.world, phase=phase, since_s=self._now_s))

    def _age(self, worker: str) -> float:
        return self._now_s - self.membership.slots[worker].since_s

    def _ask_change(self) -> None:
        self._set_phase("changing")
        self.actions.append(happenings.AskChange(self.membership.world.generation))

    def _dismiss(self, worker: str, save: bool = False) -> None:
        slot = self.membership.slots[worker]
        self._set(worker, "dismissed")
        self.actions.append(happenings.Dismiss(worker, slot.life, save))

    def _kill(self, worker: str, reason: str) -> None:
        slot = self.membership.slots[worker]
        self._set(worker, "dying")
        self.actions.append(happenings.Kill(worker, slot.life, reason))
        if slot.state == "member":
            self._leave_world(worker)

    def _end(self, code: int, reason: str = "") -> None:
        end = happenings.End(code, reason)
        self._change(end=end)
        self.actions.append(end)
