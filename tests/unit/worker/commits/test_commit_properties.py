"""Commits agree with a store that copies everything, whatever a script does and wherever its world breaks.

The table "What a commit copies" in docs/architecture.md, made executable. Three workers train side by side: one keeps
its state in a ``StateStore`` and loses its world now and then; one is plain torch, and copies everything at every
commit; the third is a member of the same world to which nothing happens.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from fake_world import alone
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st
from torch import nn

import edl_hvd
from edl_hvd.checkpoint.format.snapshot import Snapshot
from edl_hvd.errors import StateError
from edl_hvd.worker.codec import Encoded
from edl_hvd.worker.commits.commit import Freshness
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous

WARM_UP = 3  # commits after which parameters are no longer copied


@pytest.fixture(autouse=True, scope="module")
def in_a_world() -> Iterator[None]:
    with alone():
        edl_hvd.worker.process.current().joined = SoloRendezvous().join(-1, -1)
        yield


class Trainee:
    """Two models with an optimizer each, one that nothing trains, and attributes; all of it of plain torch.

    No buffer and no attribute depends on the parameters: what is computed again, with parameters that are ahead, would
    differ in them.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.critic = nn.Linear(4, 1)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.optimizers = self.made_optimizers()
        self.kept: Any = types.SimpleNamespace(notes=[], average=torch.zeros(4))
        self.step = 0
        self.has_stepped = True  # with the gradients that there are

    def made_optimizers(self) -> list[Any]:
        return [
            torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
        ]

    @property
    def models(self) -> dict[str, nn.Module]:
        return {"model": self.model, "critic": self.critic, "teacher": self.teacher}

    def compute(self) -> None:
        """Gradients of one batch, on top of those that no step has been made with."""
        torch.manual_seed(self.step)
        inputs = torch.randn(8, 4)
        if self.has_stepped:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        (self.model(inputs).square().mean() + self.critic(inputs).square().mean()).backward()
        self.has_stepped = False
        self.kept.average = 0.9 * self.kept.average + inputs.mean(0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.99

    def move(self, number: int) -> None:
        self.optimizers[number].step()
        self.has_stepped = True

    def finish(self) -> None:
        self.kept.notes.append(self.step)
        self.step += 1

    def stepped_values(self) -> dict[str, Any]:
        """What optimizer steps change."""
        values: dict[str, Any] = {}
        for number, (name, model) in enumerate([("model", self.model), ("critic", self.critic)]):
            values |= {f"{name}.{key}": parameter.detach().clone() for key, parameter in model.named_parameters()}
            for place, parameter in enumerate(self.optimizers[number].param_groups[0]["params"]):
                for key, value in self.optimizers[number].state.get(parameter, {}).items():
                    values[f"optimizer{number}.{place}.{key}"] = copy.deepcopy(value)
        return values

    def other_values(self) -> dict[str, Any]:
        values: dict[str, Any] = {"step": self.step, **copy.deepcopy(vars_of(self.kept))}
        for name, model in self.models.items():
            values |= {f"{name}.{key}": buffer.clone() for key, buffer in model.named_buffers()}
            values |= {f"{name}.{key}?": parameter.requires_grad for key, parameter in model.named_parameters()}
        values |= {f"teacher.{key}": parameter.clone() for key, parameter in self.teacher.named_parameters()}
        for number, optimizer in enumerate(self.optimizers):
            values |= {f"optimizer{number}.{key}": optimizer.param_groups[0][key] for key in ("lr", "weight_decay")}
        if not self.has_stepped:
            values |= {
                f"{name}.{key}.grad": parameter.grad.clone()
                for name, model in self.models.items()
                for key, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        return values

    def everything(self) -> dict[str, Any]:
        return {**self.stepped_values(), **self.other_values()}


def vars_of(kept: Any) -> dict[str, Any]:
    return {"notes": kept.notes, "average": kept.average}


class Naive(Trainee):
    """Copies everything at every commit."""

    def commit(self) -> None:
        models = {name: copy.deepcopy(model.state_dict()) for name, model in self.models.items()}
        optimizers = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        parameters = [parameter for model in self.models.values() for parameter in model.parameters()]
        gradients = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        required = [parameter.requires_grad for parameter in parameters]
        self.copied = models, optimizers, gradients, required, copy.deepcopy(vars_of(self.kept)), self.has_stepped
        self.committed_step = self.step
        self.committed = self.everything()
        self.committed_stepped_names = self.stepped_values().keys()

    def restore(self) -> None:
        models, optimizers, gradients, required, kept, self.has_stepped = copy.deepcopy(self.copied)
        for name, model in self.models.items():
            model.load_state_dict(models[name])
        for optimizer, saved in zip(self.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(saved)
        parameters = [parameter for model in self.models.values() for parameter in model.parameters()]
        for parameter, gradient, is_required in zip(parameters, gradients, required, strict=True):
            parameter.grad = gradient
            parameter.requires_grad_(is_required)
        self.kept.notes, self.kept.average = kept["notes"], kept["average"]
        self.step = self.committed_step


class Kept(Trainee):
    """Keeps everything in a ``StateStore``."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = edl_hvd.State(
            model=self.model, critic=self.critic, teacher=self.teacher, first=self.optimizers[0],
            second=self.optimizers[1], notes=[], average=torch.zeros(4),
        )  # fmt: skip
        self.store = self.kept._runtime.store

    def made_optimizers(self) -> list[Any]:
        models = (self.model, self.critic)
        return [
            edl_hvd.DistributedOptimizer(optimizer, [(f"{number}.{name}", p) for name, p in model.named_parameters()])
            for number, (optimizer, model) in enumerate(zip(super().made_optimizers(), models, strict=True))
        ]

    @property
    def step(self) -> int:
        return self.store.step if hasattr(self, "store") else 0

    @step.setter
    def step(self, step: int) -> None:
        if hasattr(self, "store"):
            self.store.step = step

    def compute(self) -> None:
        self.store.reduction.has_stepped = False  # as a loop of the package does when a batch begins
        super().compute()

    def commit(self, light: bool) -> None:
        self.store.save(self.store.commit + 1, light=light)

    def restore(self) -> None:
        """What the loop does when a world is broken."""
        before = self.store.commit
        self.kept._runtime.begin_attempt()
        self.store.restore()
        assert self.store.commit == before
        self.note_gradients()

    def load(self, state: Encoded) -> None:
        self.store.load(state.plain, {name: tensor.clone() for name, tensor in state.tensors.items()})
        self.note_gradients()

    def note_gradients(self) -> None:
        self.has_stepped = all(o.reduction.round_number == o.stepping.round_number for o in self.optimizers)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in found.items() if not is_same(value, expected[name])]
    assert different == []


def is_same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- what a script does besides ---


@torch.no_grad()
def write_trained(trainee: Trainee) -> None:
    trainee.model[1].weight.add_(1)


def write_trained_past_the_counter(trainee: Trainee) -> None:
    trainee.model[3].weight.data.add_(1)


def give_other_memory(trainee: Trainee) -> None:
    trainee.critic.weight.data = trainee.critic.weight.data + 1


@torch.no_grad()
def write_frozen(trainee: Trainee) -> None:
    trainee.teacher.weight.add_(1)


def write_frozen_past_the_counter(trainee: Trainee) -> None:
    trainee.teacher.bias.data.add_(1)


def write_buffer(trainee: Trainee) -> None:
    trainee.model[0].running_mean.mul_(2)


def set_attributes(trainee: Trainee) -> None:
    trainee.kept.notes.append("more")
    trainee.kept.average.add_(1)


def set_option(trainee: Trainee) -> None:
    trainee.optimizers[0].param_groups[0]["weight_decay"] += 0.01


def unfreeze(trainee: Trainee) -> None:
    trainee.teacher.weight.requires_grad_(not trainee.teacher.weight.requires_grad)


TOUCHES_PARAMETERS = [
    write_trained, write_trained_past_the_counter, give_other_memory, write_frozen, write_frozen_past_the_counter,
]  # fmt: skip
TOUCHES_NONE = [write_buffer, set_attributes, set_option, unfreeze]
BREAKS = ("before the gradients", "before a step", "between the steps", "before the commit")


@dataclass
class Batch:
    """One batch of a script, and what becomes of it.

    Attributes:
        light: Whether the commit may leave parameters out.
        accumulates: Whether it makes no optimizer step: the next one adds to its gradients.
        breaks: Where the world breaks first; ``None``: nowhere.
        before, after: What the script does besides before the steps, and after them.
        again: Whether it does so again, when the batch is computed again.
        is_pinned, is_deferred, is_handed_over, is_followed: What happens to the commit after the batch.
    """

    light: bool
    accumulates: bool
    breaks: str | None
    before: list[Any]
    after: list[Any]
    again: bool
    is_pinned: bool
    is_deferred: bool
    is_handed_over: bool
    is_followed: bool


CALM = Batch(
    light=True, accumulates=False, breaks=None, before=[], after=[], again=False,
    is_pinned=False, is_deferred=False, is_handed_over=False, is_followed=False,
)  # fmt: skip


def rarely() -> st.SearchStrategy[bool]:
    return st.sampled_from([False, False, False, True])


TOUCHES = st.one_of(
    st.just([]),
    st.just([]),
    st.lists(st.sampled_from(TOUCHES_NONE), max_size=2),
    st.lists(st.sampled_from(TOUCHES_PARAMETERS + TOUCHES_NONE), max_size=2),
)
BATCHES = st.lists(
    st.builds(
        Batch, light=rarely().map(lambda full: not full), accumulates=rarely(),
        breaks=st.sampled_from([None, None, *BREAKS]), before=TOUCHES, after=TOUCHES, again=st.booleans(),
        is_pinned=rarely(), is_deferred=st.booleans(), is_handed_over=rarely(), is_followed=rarely(),
    ),
    min_size=1,
    max_size=10,
)  # fmt: skip


@dataclass
class Job:
    """The three workers, and what was taken of commits on the way."""

    kept: Kept = field(default_factory=Kept)
    naive: Naive = field(default_factory=Naive)
    other: Kept = field(default_factory=Kept)
    pinned: list[tuple[Encoded, dict[str, torch.Tensor]]] = field(default_factory=list)
    before: Encoded = field(default_factory=lambda: Encoded(None, {}))  # state of the commit before
    deferred: Any = None
    expected: dict[str, torch.Tensor] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    is_touched: bool = False  # the script has changed parameters by itself since the last commit

    def touch(self, trainee: Trainee, touches: list[Any]) -> None:
        for touch in touches:
            touch(trainee)

    def compute(self, trainee: Trainee, batch: Batch, touches: bool, breaks: str | None = None) -> None:
        """Go through a batch on one worker, up to where its world breaks."""
        if breaks == BREAKS[0]:
            return
        trainee.compute()
        self.touch(trainee, batch.before if touches else [])
        if breaks == BREAKS[1] or batch.accumulates:
            return
        trainee.move(0)
        if breaks == BREAKS[2]:
            return
        trainee.move(1)
        self.touch(trainee, batch.after if touches else [])

    def break_off(self, batch: Batch) -> None:
        """The world breaks in a batch; then the worker is where a commit lets it go on from."""
        made = {BREAKS[2]: 1, BREAKS[3]: 2}.get(str(batch.breaks), 0) if not batch.accumulates else 0
        touched = {BREAKS[1]: batch.before, BREAKS[2]: batch.before, BREAKS[3]: [*batch.before, *batch.after]}
        touches = [] if batch.accumulates else touched.get(str(batch.breaks), [])
        if batch.accumulates and batch.breaks != BREAKS[0]:
            touches = batch.before
        self.is_touched = any(touch in TOUCHES_PARAMETERS for touch in touches)
        self.compute(self.kept, batch, True, batch.breaks)
        self.kept.restore()
        self.naive.restore()
        self.check_restored(made)
        self.kept.store.resave()
        restored = self.kept.everything()
        self.kept.restore()
        assert_equal(self.kept.everything(), restored)

    def check_restored(self, made: int) -> None:
        store, committed = self.kept.store, self.naive.committed
        freshness, at_commit = store.freshness, self.other.store.freshness
        if freshness.is_dirty:
            assert self.is_touched, "the script has changed nothing itself"
            assert freshness < at_commit
            self.seen.add("dirty")
            self.take_best()
            return
        found = self.kept.everything()
        if freshness == at_commit:
            assert_equal(found, committed)
        else:
            assert freshness == Freshness(store.commit, made)
            assert made
            self.seen.add("ahead")
            stepped = self.naive.committed_stepped_names | self.kept.stepped_values().keys()
            assert_equal(
                {name: value for name, value in found.items() if name not in stepped},
                {name: value for name, value in committed.items() if name not in stepped},
            )

    def take_best(self) -> None:
        """What a new world does: a member whose state is worse takes over that of another."""
        self.kept.load(self.other.store.export())
        assert_equal(self.kept.everything(), self.naive.committed)
        assert self.kept.store.freshness == self.other.store.freshness

    def run(self, batch: Batch) -> None:
        self.is_touched = False
        if batch.breaks is not None:
            self.break_off(batch)
        # A step that is made already was made with the option that the script had set: it sets the same one again.
        touches = batch.breaks is None or batch.again or set_option in batch.before
        for trainee in (self.kept, self.naive, self.other):
            self.compute(trainee, batch, touches)
            trainee.finish()
        self.check_deferred(batch, touches)
        self.kept.commit(batch.light)
        self.other.commit(batch.light)
        self.naive.commit()
        self.check_committed()
        self.use(batch)
        plain, tensors = self.other.store.export()
        self.before = Encoded(copy.deepcopy(plain), {name: tensor.clone() for name, tensor in tensors.items()})

    def check_committed(self) -> None:
        assert_equal(self.kept.everything(), self.naive.committed)
        assert_equal(self.other.everything(), self.naive.committed)
        assert self.kept.store.freshness == self.other.store.freshness
        one, other = self.kept.store.export(), self.kept.store.live(self.kept.store.commit)
        assert one.plain == other.plain
        assert_equal(one.tensors, other.tensors)

    def use(self, batch: Batch) -> None:
        """What others want of the commit."""
        store = self.kept.store
        if batch.is_pinned:
            state = store.pin()
            self.pinned.append((state, {name: tensor.clone() for name, tensor in state.tensors.items()}))
        if batch.is_deferred:
            self.expected = {name: tensor.clone() for name, tensor in store.export().tensors.items()}
            self.deferred = store.deferred_snapshot()
            self.seen.add("copied at once" if isinstance(self.deferred, Snapshot) else "deferred")
        if batch.is_handed_over:
            newcomer = Kept()
            newcomer.load(store.export())
            assert_equal(newcomer.everything(), self.naive.committed)
        if batch.is_followed:
            self.follow()

    def follow(self) -> None:
        """A newcomer holds the commit before, is given what differs from this one, and can come back to it."""
        newcomer = Kept()
        plain, tensors = self.other.store.live(self.other.store.commit)
        newcomer.load(self.before)
        set_attributes(newcomer)
        live = newcomer.store.live(newcomer.store.commit).tensors
        moved = {
            name: tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith("gradient/") or name not in live or not is_same(tensor, live[name])
        }
        newcomer.store.apply_delta(plain, moved)
        newcomer.note_gradients()
        for _ in range(2):
            assert_equal(newcomer.everything(), self.naive.committed)
            newcomer.compute()
            write_trained(newcomer)
            newcomer.restore()

    def check_deferred(self, batch: Batch, touches: bool) -> None:
        """The checkpoint begun at the last commit holds it, or fails where the script has changed parameters."""
        if self.deferred is None:
            return
        deferred, self.deferred = self.deferred, None
        touched = batch.before + batch.after if touches else []
        may_fail = self.is_touched or any(touch in TOUCHES_PARAMETERS for touch in touched)
        if not isinstance(deferred, Snapshot):
            try:
                deferred.materialise()
            except StateError:
                assert may_fail
                self.seen.add("torn")
                return
            deferred = deferred.value
        assert_equal(dict(deferred.tensors), self.expected)


@settings(max_examples=50, phases=[phase for phase in Phase if phase is not Phase.explain])
@given(batches=BATCHES)
def test_commits_agree_with_a_store_that_copies_everything(batches: list[Batch]) -> None:
    job = Job()
    for batch in [*[CALM] * WARM_UP, *batches, CALM]:
        job.run(batch)
    for what in job.seen:
        event(what)
    for state, expected in job.pinned:
        assert_equal(state.tensors, expected)


SCRIPTS = [
    CALM,
    *[replace(CALM, before=[touch], again=again) for touch in TOUCHES_PARAMETERS for again in (False, True)],
    *[replace(CALM, before=[touch]) for touch in TOUCHES_NONE],
    *[replace(CALM, after=[touch]) for touch in TOUCHES_PARAMETERS + TOUCHES_NONE],
]


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_after_a_commit_that_copies_no_parameters(breaks: str, script: Batch) -> None:
    """The cases of the table, one by one."""
    job = Job()
    for _ in range(WARM_UP):
        job.run(replace(CALM, is_deferred=True))
    job.run(replace(script, breaks=breaks))
    job.run(replace(CALM, is_handed_over=True, is_followed=True))


def test_the_calm_batches_reach_commits_that_copy_no_parameters() -> None:
    """Else the properties above would say nothing about them."""
    job = Job()
    for _ in range(WARM_UP):
        job.run(replace(CALM, is_deferred=True))
    job.run(replace(CALM, breaks="between the steps"))
    assert job.seen == {"copied at once", "deferred", "ahead"}
    job.run(replace(CALM, breaks="before the commit", before=[write_trained]))
    assert "dirty" in job.seen


def test_the_calm_batches_reach_commits_that_copy_no_frozen_parameters() -> None:
    job = Job()
    for _ in range(WARM_UP):
        job.run(CALM)
    exported = job.kept.store.export().tensors
    assert exported["model/1.weight"].data_ptr() == job.kept.model[1].weight.data_ptr()
    assert exported["teacher/weight"].data_ptr() == job.kept.teacher.weight.data_ptr()
