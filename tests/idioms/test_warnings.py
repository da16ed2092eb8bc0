"""What is no error, since it may be meant, is said once."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from catalogue.losses import focal_losses, hard_samples_ours, ignored_labels_ours, rarely_positive
from idioms import Job
from script_parts import make_model
from simulation import Fault, Simulation
from torch.utils.data import DataLoader

import edl_hvd
from edl_hvd.errors import EdlHvdWarning, UsageError


def counted_by_hand(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        global_step = 0
        for _ in state.epochs(job.epochs):
            for inputs, target in state.batches(loader):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                global_step += 1

    train(state)


def counted_by_enumerate(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)
    printed = []

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for i, (inputs, target) in enumerate(state.batches(loader)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()
                if i % 2 == 0:
                    printed.append(i)

    train(state)


def said_about_counters(script, job: Job, size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(lambda: script(job))
    return [str(warning.message) for warning in caught if "rises by one" in str(warning.message)]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("script", "name"), [(counted_by_hand, "global_step"), (counted_by_enumerate, "i")])
def test_a_counter_of_bodies_is_said_once_on_each_worker(script, name, size):
    said = said_about_counters(script, Job(3), size)
    assert len(said) == size
    assert all(message.startswith(f"{name} rises by one in each body of state.batches()") for message in said)
    assert all("state.step" in message for message in said)


def test_where_a_step_is_one_micro_batch_a_counter_counts_steps():
    assert not said_about_counters(counted_by_hand, Job(12), 1)


def trained(job: Job, *, flat=False, prepare=lambda model: None, wrap=iter, behind=lambda state, loss: None):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    batches = job.batches()
    loader = DataLoader(job.dataset(), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches, best=100.0, losses=[])
    prepare(model)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            if flat:
                for inputs, target in wrap(state.batches(loader)):
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
                continue
            for step in state.steps(loader):
                optimizer.zero_grad()
                for inputs, target in step:
                    loss = F.cross_entropy(model(inputs), target)
                    loss.backward()
                    step.record(loss=loss)
                optimizer.step()
                state.losses.append(step.mean("loss"))
                behind(state, loss.item())

    train(state)


def said(about: str, size: int, job: Job, **script) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(lambda: trained(job, **script))
    return [str(warning.message) for warning in caught if about in str(warning.message)]


def hook_on_gradient(model):
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def hook_behind_gradient(model):
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("hook", [hook_on_gradient, hook_behind_gradient])
def test_a_hook_on_a_gradient_is_said_once_where_there_are_micro_batches(hook, flat):
    for size, micro_batch in ((1, 3), (2, 6), (2, None)):
        found = said("the hook of the script", size, Job(micro_batch), prepare=hook, flat=flat)
        assert len(found) == size
        assert all("'model.0.weight'" in message and "behind the loop" in message for message in found)
    assert not said("the hook of the script", 1, Job(None), prepare=hook, flat=flat)
    assert not said("the hook of the script", 2, Job(3), flat=flat)


def keep_best(state, loss):
    state.best = min(state.best, loss)


def test_an_attribute_that_differs_between_workers_is_said_once():
    found = said("is not the same on all workers", 2, Job(3), behind=keep_best)
    assert [message.split(" ")[0] for message in found] == ["state.best"] * 2
    assert not said("is not the same on all workers", 1, Job(3), behind=keep_best)
    assert not said("is not the same on all workers", 3, Job(3))


def test_an_epoch_of_bodies_without_backward_is_said():
    [message] = said("no backward() was called", 1, Job(3), flat=True, wrap=list)
    assert "list(…) goes through all batches before" in message
    assert not said("no backward() was called", 3, Job(6), flat=True)


def test_a_flat_loop_that_is_left_by_a_count_of_its_own_is_said():
    def first_bodies(loop):
        return (batch for _, batch in zip(range(4), loop, strict=False))

    found = said("was left before the end of the epoch", 1, Job(3), flat=True, wrap=first_bodies)
    assert len(found) == 1
    assert "4 times per optimizer step" in found[0]
    assert not said("was left before the end of the epoch", 1, Job(None), flat=True, wrap=first_bodies)


def test_a_flat_loop_that_is_left_by_the_number_of_the_step_is_in_order():
    def script():
        edl_hvd.init()
        model = make_model()
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        batches = Job(3).batches()
        loader = DataLoader(Job(3).dataset(), batch_sampler=batches)
        state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(2):
                for inputs, target in state.batches(loader):
                    if state.step % 2 == 1:
                        break
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()

        train(state)

    with warnings.catch_warnings():
        warnings.simplefilter("error", EdlHvdWarning)
        Simulation(2).run(script)


def test_a_break_between_the_micro_batches_of_a_step_is_refused():
    with pytest.raises(UsageError, match=r"left, by break, .* between the micro-batches of a step"):
        Simulation(2).run(lambda: trained(Job(3), flat=True, wrap=lambda loop: itertools.islice(loop, 1)))


@pytest.mark.parametrize("flat", [False, True])
def test_a_variable_that_only_the_loop_assigns_is_explained_where_a_worker_is_idle(flat):
    def script():
        edl_hvd.init()
        model = make_model()
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        batches = Job(6).batches()
        loader = DataLoader(Job(6).dataset(), batch_sampler=batches)
        state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                for step in [state.batches(loader)] if flat else state.steps(loader):
                    for inputs, target in step:
                        optimizer.zero_grad()
                        loss = F.cross_entropy(model(inputs), target)
                        loss.backward()
                        if flat:
                            optimizer.step()
                    if not flat:
                        optimizer.step()
                loss.item()

        train(state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)
        Simulation(2).run(script)
        with pytest.raises(UsageError, match=r"'loss'.*: this worker was dealt no micro-batch so far.*step\.record"):
            Simulation(3).run(script)


def test_a_variable_of_the_last_step_is_explained_where_the_function_runs_again_behind_it():
    job = Job(4)
    model = [make_model() for _ in range(4)]

    def script():
        edl_hvd.init()
        net = model.pop()
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5))
        batches, validation = job.batches(), edl_hvd.EvaluationSampler(len(job.dataset()), batch_size=2)
        loader = DataLoader(job.dataset(), batch_sampler=batches)
        state = edl_hvd.State(
            model=net, optimizer=optimizer, batches=batches, validation=validation, loss=edl_hvd.metrics.Mean()
        )

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(1):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        loss = F.cross_entropy(net(inputs), target)
                        loss.backward()
                        step.record(loss=loss)
                    optimizer.step()
                    last = step.mean("loss")
                begun_to_evaluate.append(simulation.collectives[0])
                for inputs, target in state.evaluate(DataLoader(job.dataset(), batch_sampler=validation)):
                    with torch.no_grad():
                        state.loss.update(F.cross_entropy(net(inputs), target), weight=len(inputs))
                evaluated.append(simulation.collectives[0])
                print(last, end="")

        train(state)

    begun_to_evaluate, evaluated = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EdlHvdWarning)
        simulation = Simulation(2)
        simulation.run(script)
        simulation = Simulation(2, Fault(begun_to_evaluate[0] + 1, leaves=(0,)))
        with pytest.raises(UsageError, match=r"'last'.*: the function runs again behind the steps .* as state\.last$"):
            simulation.run(script)


def passes(size: int, job: Job, *, after=lambda loader: None, inside=lambda loader: None, before=lambda loader: None):
    """What is said on all workers of passes over the elastic loader before, inside and after training."""

    def script():
        edl_hvd.init()
        model = make_model()
        optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        batches = job.batches()
        loader = DataLoader(job.dataset(), batch_sampler=batches)
        before(loader)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(2):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
                inside(loader)

        train(edl_hvd.State(model=model, optimizer=optimizer, batches=batches))
        after(loader)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(script)
    return [str(warning.message) for warning in caught if "a pass over the loader" in str(warning.message)]


def samples(loader) -> int:
    return sum(len(inputs) for inputs, _ in loader)


@pytest.mark.parametrize("size", [1, 2])
def test_a_pass_over_the_loader_behind_the_loop_sees_nothing_and_says_so_once(size):
    job = Job(3)
    said = passes(size, job, inside=samples)
    assert len(said) == size
    assert all(f"saw 0 of {len(job.dataset())} samples" in message for message in said)
    assert all("DataLoader(dataset, batch_size=…)" in message for message in said)


def test_a_pass_over_the_loader_after_training_sees_a_share_and_says_so_once():
    job = Job(3)
    seen = []
    said = passes(2, job, after=lambda loader: seen.extend([samples(loader), samples(loader)]))
    assert len(said) == 2
    whole = len(job.dataset())
    assert all(0 < count < whole for count in seen)
    shares = sorted(seen)[::2]
    assert sum(shares) == whole
    assert sorted(said) == sorted(
        next(message for message in said if f"saw {count} of {whole} samples" in message) for count in shares
    )


def update_bn(loader) -> None:
    features = next(iter(loader))[0].flatten(1).shape[1]
    norm = torch.nn.BatchNorm1d(1)  # of micro-batches of a single sample, too
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Unflatten(1, (1, features)), norm)
    torch.optim.swa_utils.update_bn(loader, model)


def test_update_bn_with_the_loader_is_said_to_see_a_share():
    assert len(passes(2, Job(3), after=update_bn)) == 2


@pytest.mark.parametrize("size", [1, 2])
def test_a_look_at_the_first_batch_and_a_whole_pass_are_no_reason_to_say_anything(size):
    def look(loader):
        next(iter(loader))

    assert not passes(size, Job(3), before=samples, after=look)
    assert not passes(1, Job(3), after=samples)


def divided_by_positives_of_micro_batches(job: Job):
    edl_hvd.init()
    model = make_model()
    optimizer = edl_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), exact=job.exact)
    batches = job.batches()
    loader = DataLoader(job.dataset(job.inputs, rarely_positive()), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, batches=batches)

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(job.epochs):
            for inputs, positive in state.batches(loader):
                optimizer.zero_grad()
                count = positive.sum()
                state.weigh(count)
                losses = focal_losses(model(inputs)[:, 0], positive)
                (losses.sum() / count.clamp(min=1)).backward()
                optimizer.step()

    train(state)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_gradient_of_weight_0_is_said_once_on_each_worker(size, exact):
    said = said_about_weights(divided_by_positives_of_micro_batches, Job(3, exact), size)
    assert len(said) == size
    assert all("divided by the number of some" in message for message in said)


@pytest.mark.parametrize("script", [ignored_labels_ours, hard_samples_ours])
def test_a_mean_over_nothing_is_not_said(script):
    assert not said_about_weights(script, Job(3), 2)


def said_about_weights(script, job: Job, size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(size).run(lambda: script(job))
    return [str(warning.message) for warning in caught if "counts for nothing" in str(warning.message)]
