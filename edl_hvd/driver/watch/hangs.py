"""Who does not move although others wait for it, told from what the workers say of themselves.

A worker *waits* when it is in phase "collective": it has come to a call that ends only when every member has. All make
the same such calls in the same order and count them, so one that works while another waits, with no more calls behind
it, is the one that is waited for. How long it keeps the others waiting is its **lag**: the shorter of its own time in
the present phase and the longest wait of another. A worker that nobody waits for has none, however long it takes.

A worker is *hung* when its lag exceeds a bound, which depends on what it is doing:

- A phase that repeats itself from batch to batch (compute, input, commit) has been measured. Its bound is

      max(floor · 2^k, 10 · s, 2 · l)     s  longest recent phase of that kind, of any member
                                          l  longest lag that has ended by itself, in this job
                                          k  workers that were ended for this in the last 24 hours

- Nobody knows how long anything else may take: starting, compiling, validating, writing, the script's own code outside
  ``state.batches``, the first batches of a process. Its bound is an hour; long before that, there is a warning.
- A worker in phase "teachers" waits for an answer of a distillation. It has no bound as long as beats come, because it
  ends by itself after ``Teachers(patience=…)``.
- When more than half of a world is late at the same time, it is rather something that they share, such as a disk: they
  have that hour, too.

When all of a world wait at once, nobody is hung: that is a **standstill**, and what it is depends on what they wait
for, see ``standstill.py``. Its bound is a setting.

The time of a phase is counted in beats heard, so that nobody is blamed for a time in which its host, or the driver,
was paused. A worker without beats whose process runs all the same holds Python's lock in native code, as large reads
and hung drivers do; it is judged by its silence, and by the longest one that has ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from edl_hvd.driver.watch.standstill import Standstill, WaitPlace
from edl_hvd.protocol import Beat, WorkerPhase

_FLOORS_S: Mapping[WorkerPhase, float] = {"compute": 30.0, "silence": 60.0, "input": 120.0, "commit": 120.0}
# Compute: what a script does now and then on one worker, such as drawing or uploading a picture, takes seconds.
# Silence: reading a file of gigabytes, or collecting as much garbage, may hold the lock for half a minute.
# Input, commit: a network disk that stalls, or memory that is swapped out, comes back within a minute or two.
_TIMES_SLOWEST = 10.0
# A worker may become 4 times as slow and wait for a busy disk on top of it.
_TIMES_LAG = 2.0
# What went well once may take twice as long the next time.
_TIMES_SILENCE = 4.0
# The same; but silences are rare, and so the longest yet says less.
_UNMEASURED_S = 3600.0
# Longer than anybody lets all other workers stand idle on purpose; without a bound, a job could hang for ever.
_TIMES_UNMEASURED = 3.0
_FIRST_STEPS = 3
# CUDA's modules are loaded, kernels chosen and graphs compiled in the first; shapes may differ in the second.
_WARN_S = 60.0
# Horovod's own patience, for its own warning.
_FRESH_S = 1.0
# Four beats. An older one does not say what its worker is doing now.
_OWN_PAUSE_S = 1.0
# A driver that slept for this long has heard no worker.
_REMEMBER_KILLS_S = 24 * 3600.0
# A bound that was wrong should not be wrong again every epoch, and the odd real hang should not lame it for ever.
_MOST_DOUBLINGS = 6
# Half a minute becomes half an hour.
_ONE_INCIDENT_S = 60.0
# Workers that hang together are found within moments of each other.


@dataclass(frozen=True)
class Hung:
    """A worker that is to be given up. ``reason`` is for people, and lacks only where it stands."""

    worker: str
    incarnation: int
    reason: str


@dataclass(frozen=True)
class HangReport:
    """What is to be done now, and to be said; a warning is said once, anything else as long as it lasts."""

    hung: tuple[Hung, ...] = ()
    warnings: tuple[str, ...] = ()
    standstill: Standstill | None = None


@dataclass
class _Seen:
    """A worker's last beat.

    Attributes:
        heard_s: When it came.
        stuck_s: For how long the worker is known to have been in its phase.
        still_s: The same, of the collective that it waits for: several may make up one wait.
        lag_s: Of the look before.
        measured: Whether that was in a phase that has been measured.
    """

    incarnation: int
    beat: Beat
    heard_s: float
    stuck_s: float
    still_s: float = 0.0
    lag_s: float = 0.0
    measured: bool = False


class _Waits:
    """How long workers have waited, by the number of calls that they have completed."""

    def __init__(self, waiting: Iterable[_Seen]) -> None:
        self._longest_s: dict[int, float] = {}
        self._step = 0
        for seen in waiting:
            calls = seen.beat.waits
            self._longest_s[calls] = max(seen.stuck_s, self._longest_s.get(calls, 0.0))
            self._step = max(self._step, seen.beat.step)

    def longest_s(self, calls: int) -> float:
        """How long they have waited for a worker that has completed ``calls`` calls."""
        return max((seconds for own, seconds in self._longest_s.items() if own >= calls), default=0.0)

    def estimated(self, beat: Beat) -> Beat:
        """What a silent worker would say now, as far as they show it."""
        ahead = any(calls > beat.waits for calls in self._longest_s)
        steps = max(self._step - beat.step, 0)
        phase: WorkerPhase = "silence" if ahead or beat.phase == "collective" else beat.phase
        return replace(beat, phase=phase, step=beat.step + steps, steps=beat.steps + steps)


class HangDetector:
    """Over all workers of a job. Pure: time is an argument, in seconds, and never goes back.

    Args:
        now_s: Now.
        collective_timeout_s: How long all may wait for each other.
    """

    def __init__(self, now_s: float, collective_timeout_s: float = 60.0) -> None:
        self._collective_timeout_s = collective_timeout_s
        self._seen: dict[str, _Seen] = {}
        self._looked_s = now_s
        self._woke_s = now_s
        self._kills: deque[float] = deque(maxlen=_MOST_DOUBLINGS)
        self._longest_lag_s = 0.0
        self._longest_unmeasured_s = 0.0
        self._longest_silence_s = 0.0
        self._warned: set[tuple[object, ...]] = set()

    def heard(self, worker: str, incarnation: int, beat: Beat, now_s: float) -> None:
        """A worker has said what it is doing."""
        self._note_pause(now_s)
        before = self._seen.get(worker)
        if before is None or before.incarnation != incarnation:
            self._seen[worker] = _Seen(incarnation, beat, now_s, 0.0)
            return
        gap_s = now_s - before.heard_s
        if before.heard_s >= self._woke_s:
            self._longest_silence_s = max(self._longest_silence_s, gap_s)
        stays = _place(beat) == _place(before.beat)
        known_s = before.stuck_s if stays else 0.0
        still_s = before.still_s if stays and beat.collective == before.beat.collective else 0.0
        stuck_s = min(beat.phase_s, known_s + min(gap_s, _FRESH_S))
        still_s = min(stuck_s, still_s + min(gap_s, _FRESH_S))
        self._seen[worker] = _Seen(incarnation, beat, now_s, stuck_s, still_s, before.lag_s, before.measured)

    def ends(self, worker: str) -> None:
        """Its process has ended."""
        self._seen.pop(worker, None)

    def gave_up(self, now_s: float) -> None:
        """A worker was ended for being hung."""
        if not self._kills or now_s - self._kills[-1] > _ONE_INCIDENT_S:
            self._kills.append(now_s)

    def look(self, generation: int, members: Iterable[str], silent: Mapping[str, float], now_s: float) -> HangReport:
        """Judge the members of the present world.

        Args:
            generation: Of the world.
            members: Its members.
            silent: For how many seconds those have said nothing whose process is known to run.
            now_s: Now.
        """
        self._note_pause(now_s)
        self._looked_s = now_s
        names = tuple(members)
        present = {
            worker: seen
            for worker in names
            if (seen := self._seen.get(worker)) is not None and seen.beat.generation == generation
        }
        fresh = {worker for worker, seen in present.items() if now_s - seen.heard_s < _FRESH_S}
        waiting = {worker for worker in fresh if present[worker].beat.phase == "collective"}
        waits = _Waits([present[worker] for worker in waiting])
        slowest_s = max((seen.beat.slowest_s for seen in present.values()), default=0.0)
        late: list[tuple[float, Hung]] = []
        warnings: list[str] = []
        for worker, seen in present.items():
            if worker in waiting:
                self._note_lag(seen, 0.0, measured=True)
            elif worker in fresh or worker in silent:
                is_silent = worker not in fresh
                beat = waits.estimated(seen.beat) if is_silent else seen.beat
                lag_s = min(silent[worker] if is_silent else seen.stuck_s, waits.longest_s(seen.beat.waits))
                self._note_lag(seen, lag_s, _is_measured(beat))
                if lag_s > self._bound_s(beat, slowest_s, is_silent, now_s):
                    late.append((lag_s, Hung(worker, seen.incarnation, _reason(beat, lag_s, slowest_s, is_silent))))
                if lag_s > self._patience_s(beat):
                    doing = "it says nothing, although its process runs" if is_silent else _doing(beat)
                    text = f"the others have waited {lag_s:.0f} s for {worker}: {doing}"
                    warnings += self._once(text, (worker, seen.incarnation, *_place(seen.beat)))
        standstill = self._standstill(generation, present) if waiting == set(names) and len(names) > 1 else None
        least_s = _UNMEASURED_S if 2 * len(late) > len(names) else 0.0
        return HangReport(tuple(hung for lag_s, hung in late if lag_s > least_s), tuple(warnings), standstill)

    def _note_pause(self, now_s: float) -> None:
        """Looks come every moment, unless the driver itself did not run."""
        if now_s - self._looked_s > _OWN_PAUSE_S:
            self._woke_s = self._looked_s = now_s

    def _bound_s(self, beat: Beat, slowest_s: float, silent: bool, now_s: float) -> float:
        if beat.phase == "teachers" and not silent:
            return math.inf
        if not _is_measured(beat):
            return max(_UNMEASURED_S, _TIMES_UNMEASURED * self._longest_unmeasured_s)
        kills = sum(now_s - at_s < _REMEMBER_KILLS_S for at_s in self._kills)
        floor_s = max(_FLOORS_S[beat.phase], _FLOORS_S["silence"]) if silent else _FLOORS_S[beat.phase]
        bound_s = max(floor_s * (1 << kills), _TIMES_SLOWEST * slowest_s, _TIMES_LAG * self._longest_lag_s)
        return max(bound_s, _TIMES_SILENCE * self._longest_silence_s) if silent else bound_s

    def _patience_s(self, beat: Beat) -> float:
        """How long others may wait for it before that is worth a word."""
        longest_s = self._longest_lag_s if _is_measured(beat) else self._longest_unmeasured_s
        return max(_WARN_S, _TIMES_LAG * longest_s)

    def _note_lag(self, seen: _Seen, lag_s: float, measured: bool) -> None:
        """A lag that has become smaller has ended by itself."""
        if lag_s < seen.lag_s and seen.measured:
            self._longest_lag_s = max(self._longest_lag_s, seen.lag_s)
        elif lag_s < seen.lag_s:
            self._longest_unmeasured_s = max(self._longest_unmeasured_s, seen.lag_s)
        seen.lag_s, seen.measured = lag_s, measured

    def _standstill(self, generation: int, present: Mapping[str, _Seen]) -> Standstill | None:
        together_s = min(seen.still_s for seen in present.values())
        if together_s <= self._collective_timeout_s:
            return None
        step = max(seen.beat.step for seen in present.values())
        places = {worker: WaitPlace(seen.beat.waits, seen.beat.collective) for worker, seen in present.items()}
        incarnations = {worker: seen.incarnation for worker, seen in present.items()}
        return Standstill(generation, step, places, incarnations, together_s)

    def _once(self, text: str, about: tuple[object, ...]) -> list[str]:
        if about in self._warned:
            return []
        self._warned.add(about)
        return [text]


def _place(beat: Beat) -> tuple[object, ...]:
    """Where in its work a worker is; equal ones follow each other unless it has moved."""
    return beat.generation, beat.waits, beat.phase


def _is_measured(beat: Beat) -> bool:
    return beat.phase in _FLOORS_S and beat.steps >= _FIRST_STEPS


def _doing(beat: Beat) -> str:
    return f'phase "{beat.phase}" at step {beat.step}'


def _reason(beat: Beat, lag_s: float, slowest_s: float, silent: bool) -> str:
    if silent:
        return (
            f"it has said nothing for {lag_s:.0f} s while the others wait for it at step {beat.step}, although its "
            "process runs: native code holds Python's lock"
        )
    usual = f", which takes up to {slowest_s:.2g} s" if _is_measured(beat) else ""
    return f"it does not move, and the others wait for it: {lag_s:.0f} s in {beat.phase}{usual}, at step {beat.step}"
