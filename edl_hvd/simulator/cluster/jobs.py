"""One job of a workload in virtual time: its progress, its batch, and what it knows of itself.

After the simulator of Pollux's artifact: a job trains by the measured profiles, and knows only what it has measured in
the configurations that it has had. Each new one refines its model of its steps, by which it chooses its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from edl_hvd.errors import InternalError
from edl_hvd.planning.values import Curve
from edl_hvd.simulator.cluster.profiles import GradientStatistics, StepTime
from edl_hvd.simulator.cluster.throughput_fit import (
    BatchBounds,
    BestBatch,
    MeasuredStep,
    StepModel,
    best_batches,
    fit,
)
from edl_hvd.simulator.cluster.workload import SubmittedJob
from edl_hvd.timings import SHARED_TIMINGS, varied

_ALMOST = 1e-8
_MOST_GPUS = 64
# More were not measured.
_MOST_UNMEASURED = 2
# The planner's own rule for a job without a curve (``planning.ranks.reach``).

Models = dict[tuple[tuple[MeasuredStep, StepTime], ...], StepModel]
"""Models of steps, by the steps that they were fitted to."""


@dataclass(frozen=True)
class ResizeCost:
    """What changes of a job's GPUs cost it.

    Attributes:
        change_s: Seconds without progress after a change.
        start_s: Seconds without progress after the first slots, or after slots that follow none.
        join_s: Seconds for which newcomers hold their slots while the others train on without them.
    """

    change_s: float = 30.0
    start_s: float = 30.0
    join_s: float = 0.0


class FamilySteps:
    """What the jobs of one family have measured, from the oldest to the newest; see ``edl_hvd.planning.family``."""

    def __init__(self) -> None:
        self._measured: dict[MeasuredStep, StepTime] = {}
        self.noise: GradientStatistics | None = None

    def add(self, step: MeasuredStep, time: StepTime, noise: GradientStatistics) -> None:
        """Take in what a job has measured."""
        self._measured.pop(step, None)
        self._measured[step] = time
        self.noise = self.noise or noise

    def shared(self) -> dict[MeasuredStep, StepTime]:
        """What a new job is given."""
        kept = varied(tuple(self._measured), lambda step: (step.hosts, step.gpus), SHARED_TIMINGS)
        return {step: self._measured[step] for step in kept}


class SimulatedJob:
    """A job that trains.

    Args:
        submitted: Its row of the workload.
        gpus: GPUs of its user, if the policy gives these alone.
        batch: Global batch of its user; ``None``: it chooses its own by its model.
        cost: What changes cost it.
        models: Models by what they were fitted to, shared among jobs that are played.
        family: What jobs measure that are like it; ``None``: it is like no other.
    """

    def __init__(
        self, submitted: SubmittedJob, gpus: int | None, batch: int | None, cost: ResizeCost,
        models: Models | None = None, family: FamilySteps | None = None,
    ) -> None:  # fmt: skip
        self._models: Models = {} if models is None else models
        self.submitted, self.application = submitted, submitted.application
        self.gpus, self.batch, self.cost = gpus, batch, cost
        self.ended_s: float | None = None
        self.first_slots_s: float | None = None
        self.now_s = 0.0
        self.delay_s = 0.0
        self.joining_s = 0.0
        self.hosts: dict[int, int] = {}
        self.placement: tuple[int, ...] = ()
        self.joining: tuple[int, ...] = ()
        self.local_batch = 0
        self.passes = 1
        self.progress = 0.0
        self.epoch = 0
        self.served_gpu_s = 0.0
        self.changes = 0
        self.changed_s = -math.inf
        self.measured: dict[MeasuredStep, StepTime] = {}
        self._family = family
        self._given: dict[MeasuredStep, StepTime] = {}
        self._noise: GradientStatistics | None = None
        self._model: StepModel | None = None
        self._is_model_new = True
        self._curve: tuple[object, Curve] | None = None
        self._best: tuple[object, BestBatch] | None = None

    @property
    def name(self) -> str:
        return self.submitted.name

    @property
    def largest_seen(self) -> int:
        """Most GPUs that it has trained with."""
        return max((step.gpus for step in self.measured), default=0)

    @property
    def least(self) -> int:
        """Fewest GPUs that it runs with."""
        return 1

    @property
    def explored(self) -> int:
        """Most GPUs that it may have now: two before its steps are known; then its curve says what they bring."""
        return _MOST_GPUS if self._known else _MOST_UNMEASURED

    @property
    def left(self) -> float:
        """Rest of its work, in samples of the script's own batch."""
        return max(0.0, self.application.total_progress - self.progress) * self.application.base_batch

    @property
    def _known(self) -> dict[MeasuredStep, StepTime]:
        """What it has measured, and before that what its family had when it began; until then what that has now."""
        if self.first_slots_s is None and self._family is not None:
            return self._family.shared()
        return {**self._given, **self.measured}

    @property
    def noise(self) -> GradientStatistics | None:
        """The noise of its gradients; before its first step that of the first steps of its family."""
        return self._family.noise if self._noise is None and self._family is not None else self._noise

    @property
    def model(self) -> StepModel | None:
        """What it makes of its steps; ``None`` before any are known."""
        known = self._known if self._is_model_new or self.first_slots_s is None else {}
        if known:
            # Jobs of one application often measure the same at first; to fit is most of what playing takes.
            key = tuple(known.items())
            found = self._models.get(key)
            self._model = self._models[key] = fit(known) if found is None else found
            self._is_model_new = False
        return self._model

    @property
    def bounds(self) -> BatchBounds:
        """What limits its batch."""
        app = self.application
        return BatchBounds(app.base_batch, app.largest_batch, app.smallest_local_batch, app.largest_local_batch)

    def curve(self, sizes: Sequence[int], host_slots: int) -> Curve | None:
        """Its goodput over GPUs, by what is known of its steps; ``None`` before any are."""
        model, noise = self.model, self.noise
        if model is None or noise is None:
            return None
        key = (model, noise, tuple(sizes))
        if self._curve is None or self._curve[0] != key:
            pairs = [(-(-size // host_slots), size) for size in sizes]
            if self.batch is None:
                goodput = [best.goodput for best in best_batches(model, noise, self.bounds, pairs)]
            else:
                goodput = [self._goodput_of_batch(model, self.batch, *pair) for pair in pairs]
            usable = [(size, value) for size, value in zip(sizes, goodput, strict=True) if value > 0]
            self._curve = (key, Curve(tuple(size for size, _ in usable), tuple(value for _, value in usable)))
        return self._curve[1]

    def _goodput_of_batch(self, model: StepModel, batch: int, hosts: int, gpus: int) -> float:
        local_batch, passes = self._divide(batch, gpus)
        step_s = float(model.step_s(numpy.array(hosts), numpy.array(gpus), local_batch, passes))
        return self.application.base_batch / step_s

    def _divide(self, batch: int, gpus: int) -> tuple[int, int]:
        """Samples per GPU and pass, and passes, of a global batch."""
        app = self.application
        local = math.ceil(batch / gpus - _ALMOST)
        passes = math.ceil(local / app.largest_local_batch - _ALMOST)
        if gpus == 1 and batch > app.base_batch:
            passes = max(2, passes)
        return math.ceil(local / passes - _ALMOST), passes

    def _choose_batch(self) -> None:
        gpus = sum(self.placement)
        batch = self.batch
        if batch is None and self.model is None:
            batch = max(self.application.base_batch, self.application.smallest_local_batch * gpus)
        if batch is None:
            model, noise = self.model, self.noise
            if model is None or noise is None:
                raise InternalError(f"job {self.name} chooses a batch before its first step")
            key = (model, noise, len(self.placement), gpus)
            if self._best is None or self._best[0] != key:
                self._best = key, best_batches(model, noise, self.bounds, [(len(self.placement), gpus)])[0]
            best = self._best[1]
            self.local_batch, self.passes = best.local_batch, best.passes
        else:
            self.local_batch, self.passes = self._divide(batch, gpus)
        self.local_batch = min(self.local_batch, int(self.application.largest_batch / (gpus * self.passes)))

    def give(self, hosts: dict[int, int], now_s: float) -> None:
        """Give the job other GPUs, by host; none takes all from it."""
        before, self.hosts = self.hosts, dict(hosts)
        self.changed_s = now_s
        self.joining, self.joining_s = (), 0.0
        if not hosts:
            self.placement, self.local_batch = (), 0
            return
        self.changes += 1
        if self.first_slots_s is None:
            self._given, self._is_model_new = self._known, True
            self.first_slots_s, self.changes = now_s, 0
        placement = tuple(hosts.values())
        kept = {host: min(slots, hosts[host]) for host, slots in before.items() if host in hosts}
        if self.cost.join_s and kept:
            # Those that stay train on at once; newcomers hold their slots until they have started.
            if kept != before:
                self.delay_s = self.cost.change_s
                self._train_on(tuple(kept.values()))
            if kept != hosts:
                self.joining, self.joining_s = placement, self.cost.join_s
            return
        self.delay_s = self.cost.change_s if kept else self.cost.start_s
        self._train_on(placement)

    def _train_on(self, placement: tuple[int, ...]) -> None:
        self.placement = placement
        self._choose_batch()

    def advance(self, seconds: float) -> None:
        """Let time go on."""
        if self.joining and seconds > self.joining_s:
            first_s = self.joining_s
            placement, self.joining, self.joining_s = self.joining, (), 0.0
            self._advance(first_s)
            if self.ended_s is None:
                self.delay_s += self.cost.change_s
                self._train_on(placement)
            self._advance(seconds - first_s)
            return
        if self.joining:
            self.joining_s -= seconds
        self._advance(seconds)

    def _advance(self, seconds: float) -> None:
        if not self.placement:
            self.now_s += seconds
            return
        delay_s = min(self.delay_s, seconds)
        self.delay_s -= delay_s
        self._pass(delay_s)
        seconds -= delay_s
        while seconds > 0 and self.ended_s is None:
            goodput = self._train_one_configuration()
            target = self.application.progress_at[self.epoch + 1]
            if self.progress + goodput * seconds < target:
                self.progress += goodput * seconds
                self._pass(seconds)
                seconds = 0
            else:
                self.epoch += 1
                # Whole seconds, as in the artifact; with costs that are none, there may be less than that left.
                spent_s = min(round((target - self.progress) / goodput), seconds)
                self.progress = target
                self._pass(spent_s)
                seconds -= spent_s
                if self.epoch >= self.application.epochs:
                    self.ended_s = self.now_s
            if self.ended_s is None:
                self._choose_batch()
        self.now_s += seconds

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        self.served_gpu_s += seconds * sum(self.placement)

    def _train_one_configuration(self) -> float:
        """What a second of the present configuration is worth, in steps of the script's own batch; it is measured."""
        app, gpus = self.application, sum(self.placement)
        batch = gpus * self.local_batch * self.passes
        scale = batch / app.base_batch
        time = app.step(self.placement, self.local_batch)
        noise = app.gradients(batch, self.epoch)
        gain = (noise.variance + noise.square) / (noise.variance / scale + noise.square)
        self._noise = noise
        key = MeasuredStep(len(self.placement), gpus, self.local_batch)
        if key not in self.measured:
            self.measured[key] = time
            self._is_model_new = True
            if self._family is not None:
                self._family.add(key, time, noise)
        return gain / (time.step_s + time.compute_s * (self.passes - 1))
