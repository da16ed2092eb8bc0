"""What is summed up from the top of an epoch is a sum of its rest where the epoch is continued, and it is said."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict, deque

import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import EdlHvdWarning


def trained(step, model, optimizer) -> float:
    loss = torch.zeros(())
    optimizer.zero_grad()
    for inputs, target in step:
        loss = F.cross_entropy(model(inputs), target)
        loss.backward()
    optimizer.step()
    return loss.item()


class AverageMeter:
    """As in PyTorch's example of ImageNet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.val = self.avg = self.sum = 0.0
        self.count = 0

    def update(self, value, n=1) -> None:
        self.val = value
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count


def of_the_tutorial(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            running_loss, right, is_first = 0.0, torch.zeros(1), True
            for i, step in enumerate(state.steps(loader)):
                loss = trained(step, model, optimizer)
                running_loss += loss
                right += 1
                if is_first and i == 0:
                    is_first = False
            print(running_loss / len(loader), right)

    train(state)


def in_a_function(job: Job) -> None:
    """As in PyTorch's example of ImageNet, with a dictionary besides."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    def train_epoch(state):
        batch_time, losses, counts = AverageMeter("Time"), AverageMeter("Loss"), {"right": 0}
        end = time.time()
        for inputs, target in state.batches(loader):
            loss = F.cross_entropy(model(inputs), target)
            losses.update(loss.item(), len(inputs))
            counts["right"] += 1
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch_time.update(time.time() - end)
            end = time.time()
        return losses.avg

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            train_epoch(state)

    train(state)


class SmoothedValue:
    """As in torchvision's references."""

    def __init__(self) -> None:
        self.recent: deque = deque(maxlen=20)
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.recent.append(value)
        self.total, self.count = self.total + value, self.count + 1


class MetricLogger:
    """As in torchvision's references."""

    def __init__(self) -> None:
        self.meters: dict = defaultdict(SmoothedValue)

    def update(self, **values: float) -> None:
        for name, value in values.items():
            self.meters[name].update(value)


def of_meters(job: Job) -> None:
    """Dictionaries and lists of meters, made at the top of each epoch."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            meters = {"loss": AverageMeter("Loss"), "top1": AverageMeter("Acc@1")}
            sums: dict = defaultdict(float)
            pair = [AverageMeter("first"), AverageMeter("second")]
            nested = {"train": {"loss": 0.0}, "steps": [0, 0]}
            recent: deque = deque(maxlen=20)
            logger = MetricLogger()
            logger.update(loss=0.0)
            constants = {"scale": {"loss": 2.0}, "names": ["loss"]}
            for step in state.steps(loader):
                loss = constants["scale"]["loss"] * trained(step, model, optimizer)
                meters["loss"].update(loss)
                sums["loss"] += loss
                pair[0].update(loss)
                nested["train"]["loss"] += loss
                recent.append(loss)
                logger.update(loss=loss)

    train(state)


def meters_in_state(job: Job) -> None:
    """A dictionary that State keeps."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, sums={"train": {"loss": 0.0}})

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            sums = state.sums
            for step in state.steps(loader):
                sums["train"]["loss"] += trained(step, model, optimizer)

    train(state)


def with_a_reset(job: Job) -> None:
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
    losses = AverageMeter("Loss")

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            losses.reset()
            for step in state.steps(loader):
                losses.update(trained(step, model, optimizer))

    train(state)


def in_state(job: Job) -> None:
    """What is read from State at the top, what State keeps, moments, and what the loop sets before it reads it."""
    model, optimizer, loader, state = prepare(
        job, momentum_sgd, Tempered, loss=edl_hvd.metrics.Mean(), seen=0, counts=torch.zeros(100), log=[]
    )

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            seen, counts, metric, log, began_s, is_first = (
                *(state.seen, state.counts, state.loss, state.log, time.monotonic()),
                True,
            )
            for step in state.steps(loader):
                samples = 0
                for inputs, target in step:
                    samples += len(inputs)
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    metric.update(loss, weight=len(inputs))
                optimizer.step()
                optimizer.zero_grad()
                seen += step.samples
                counts += 1
                log.append(step.number)
                state.seen = seen
                began_s = max(began_s, time.monotonic())
                is_first = is_first and not step.number
            state.loss.compute()

    train(state)


def counted_by_hand(job: Job) -> None:
    """Over a validation set, with a confusion matrix and a list, of which each worker has a part."""
    validation = edl_hvd.EvaluationSampler(job.samples, batch_size=4)
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, validation=validation)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for step in state.steps(loader):
                trained(step, model, optimizer)
            counts, found, losses, began_s = torch.zeros(3), [], AverageMeter("Loss"), time.perf_counter()
            with torch.no_grad():
                for inputs, target in state.evaluate(DataLoader(job.dataset(), batch_sampler=validation)):
                    output = model(inputs).argmax(1)
                    counts[0] += (output == target).sum()
                    found.append(output)
                    losses.update(F.cross_entropy(model(inputs), target))
                    began_s = max(began_s, time.perf_counter())
            counts = edl_hvd.allreduce(counts, op="sum")

    train(state)


def test_sums_of_an_evaluation_that_goes_on_in_another_world_are_named() -> None:
    found = set()
    for collective in range(28, 37):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EdlHvdWarning)
            Simulation(2, Fault(collective, worker=1, leaves=(1,))).run(lambda: counted_by_hand(Job()))
        found |= {str(warning.message) for warning in caught if "in an evaluation," in str(warning.message)}
    [message] = found
    assert (
        "and counts, found, losses, set before it, begins anew, so what it counts is a part of the validation set"
        in message
    )


def said_of(script, fault: Fault) -> set[str]:
    simulation = Simulation(3, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        simulation.run(lambda: script(Job()))
    assert len(simulation.worlds) == 2, "the fault did not come"
    return {str(warning.message) for warning in caught if "which goes on where it was" in str(warning.message)}


@pytest.mark.parametrize(
    "fault",
    [Fault(12, worker=1, leaves=(1,)), Fault(17, worker=0, leaves=(2,), joins=1), Fault(8, 1, joins=1, politely=True)],
    ids=["dies", "dies late", "joins"],
)
@pytest.mark.parametrize(
    ("script", "names"),
    [
        (of_the_tutorial, "right, running_loss"),
        (in_a_function, "batch_time, counts, losses"),
        (with_a_reset, "losses"),
        (of_meters, "logger, meters, nested, pair, recent, sums"),
        (in_state, ""),
        (meters_in_state, ""),
    ],
)
def test_sums_of_an_epoch_that_is_continued_are_named(script, names: str, fault: Fault) -> None:
    said = said_of(script, fault)
    if not names:
        assert said == set()
        return
    [message] = said
    assert f"has changed in an epoch, which goes on where it was, and {names}, set at its top, begins anew" in message


def test_an_epoch_that_begins_anew_has_its_whole_sum() -> None:
    """The worker dies before the first commit of its first epoch."""
    assert said_of(of_the_tutorial, Fault(2, worker=1, leaves=(1,))) == set()


def judged_by_the_sum(job: Job) -> list[float]:
    """The plateau schedule of a tutorial, which takes the sum of an epoch's rest for progress."""
    model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, rates=[])
    # An epoch of a tenth less loss than the best one is no plateau.
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=loader.batch_sampler, scheduler=scheduler, rates=[])

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            running_loss = 0.0
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                running_loss += step.mean("loss")
            scheduler.step(running_loss / len(loader))
            state.rates.append((running_loss, optimizer.param_groups[0]["lr"]))

    train(state)
    return state.rates


def test_a_schedule_that_a_partial_sum_misleads_comes_with_the_warning() -> None:
    """The recipe for it is the idiom ``plateau_summed``, which learns what plain PyTorch does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        [expected, *_] = Simulation(3).run(lambda: judged_by_the_sum(Job(epochs=5)))
        assert not [warning for warning in caught if "which goes on where it was" in str(warning.message)]
        [found, *_] = Simulation(3, Fault(12, worker=1, leaves=(1,))).run(lambda: judged_by_the_sum(Job(epochs=5)))
    assert found[-1][1] < expected[-1][1], "the schedule was not misled"
    [message] = {str(w.message) for w in caught if "which goes on where it was" in str(w.message)}
    assert "running_loss, set at its top, begins anew" in message
    assert "count with a metric of edl_hvd.metrics in State" in message
