"""What a script sets on a data set while it trains is said where a worker that joins lacks it or computes it anew."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from catalogue.kept import Tempered
from idioms import Job
from script_parts import momentum_sgd, prepare
from simulation import Fault, Simulation
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import edl_hvd
from edl_hvd.errors import EdlHvdWarning

JOINS = Fault(9, worker=1, joins=1, politely=True)
FAULTS = [
    None, JOINS, Fault(12, worker=1, leaves=(1,)), Fault(17, worker=0, leaves=(2,), joins=1),
    Fault(8, worker=1, joins=1, politely=True), Fault(26, worker=1, leaves=(1,), joins=1),
]  # fmt: skip


class Selected(Dataset):
    """Samples of which the training keeps some, as for small losses; a cache, and a count that reading moves."""

    def __init__(self, job: Job) -> None:
        self.inputs, self.labels, self.kept = job.inputs, job.target.clone(), torch.arange(job.samples)
        self.order, self.strength, self.epoch = numpy.arange(job.samples), 1.0, 0
        self.cache, self.reads = torch.zeros(job.samples), 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, place: int):
        self.reads += 1
        self._note(place)
        sample = self.kept[self.order[place] % len(self.kept)]
        return self.strength * self.inputs[sample], self.labels[sample]

    def _note(self, place: int) -> None:
        self.cache[place] = 1.0

    def select(self, losses: torch.Tensor) -> None:
        self.kept = losses.argsort()[:30]


@torch.no_grad()
def losses_of(model, dataset) -> torch.Tensor:
    return F.cross_entropy(model(dataset.inputs), dataset.labels, reduction="none")


@torch.no_grad()
def labels_of(model, dataset) -> torch.Tensor:
    return (model(dataset.inputs) + torch.rand(1) * 0).argmax(1)


def nothing(*_) -> None:
    pass


def script_of(top=nothing, behind=nothing, **kept):
    """A script with something at the top of each epoch, and behind its loop over batches."""

    def script(job: Job):
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered, **{k: v(job) for k, v in kept.items()})
        dataset = Selected(job)
        if "labels" in kept:
            dataset.labels = state.labels
        loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)

        @edl_hvd.elastic
        def train(state):
            for epoch in state.epochs(job.epochs):
                top(epoch, model, dataset, state)
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
                behind(epoch, model, dataset, state)

        train(state)

    return script


def small_losses(epoch, model, dataset, state) -> None:
    dataset.kept = losses_of(model, dataset).argsort()[:30]


def selected_by_a_method(epoch, model, dataset, state) -> None:
    dataset.select(losses_of(model, dataset))


def sorted_by_numpy(epoch, model, dataset, state) -> None:
    dataset.order = losses_of(model, dataset).argsort().numpy()


def written_in_place(epoch, model, dataset, state) -> None:
    dataset.order[:20] = losses_of(model, dataset).argsort().numpy()[:20]


def strength(epoch, model, dataset, state) -> None:
    dataset.strength *= 0.9


def kept_in_both(epoch, model, dataset, state) -> None:
    state.kept = dataset.kept = losses_of(model, dataset).argsort()[:30]


def pseudo_labels(epoch, model, dataset, state) -> None:
    dataset.labels = labels_of(model, dataset)


def pseudo_labels_once(epoch, model, dataset, state) -> None:
    if epoch == 1:
        dataset.labels = labels_of(model, dataset)


def labels_in_state(epoch, model, dataset, state) -> None:
    state.labels[:] = labels_of(model, dataset)


def kept_in_state(epoch, model, dataset, state) -> None:
    state.kept = losses_of(model, dataset).argsort()[:30]


def from_state(epoch, model, dataset, state) -> None:
    dataset.kept = state.kept


def of_the_epoch(epoch, model, dataset, state) -> None:
    dataset.epoch = epoch
    dataset.strength = 0.5 + 0.1 * epoch
    dataset.order = numpy.random.RandomState(epoch).permutation(len(dataset))


def larger_from_an_epoch_on(epoch, model, dataset, state) -> None:
    dataset.strength = 0.5 if epoch < 1 else 1.0


def weaker_in_validation(epoch, model, dataset, state) -> None:
    dataset.strength = 0.0


def said(script, fault: Fault | None) -> set[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", EdlHvdWarning)
        Simulation(3, fault).run(lambda: script(Job(epochs=4)))
    return {str(warning.message) for warning in caught if "of a data set that the loop reads" in str(warning.message)}


@pytest.mark.parametrize("fault", [None, JOINS], ids=["no change", "joins"])
@pytest.mark.parametrize(
    ("behind", "name"),
    [
        (small_losses, "kept"),
        (selected_by_a_method, "kept"),
        (sorted_by_numpy, "order"),
        (written_in_place, "order"),
        (strength, "strength"),
        (kept_in_both, "kept"),
        (pseudo_labels, "labels"),
    ],
)
def test_what_is_set_behind_the_loop_is_named(behind, name: str, fault: Fault | None) -> None:
    kept = {"kept": lambda job: torch.arange(job.samples)} if behind is kept_in_both else {}
    [message] = said(script_of(behind=behind, **kept), fault)
    assert message.startswith(f"dataset.{name}, of a data set that the loop reads, has been set anew behind the loop")
    assert f"keep it in State, as state.{name} (an array as a tensor), and set it from there at the top" in message


@pytest.mark.parametrize("fault", [None, JOINS], ids=["no change", "joins"])
def test_what_the_top_of_one_epoch_sets_is_named(fault: Fault | None) -> None:
    [message] = said(script_of(top=pseudo_labels_once), fault)
    assert message.startswith(
        "dataset.labels, of a data set that the loop reads, has been set at the top of an earlier"
    )


@pytest.mark.parametrize("fault", [JOINS, FAULTS[2]], ids=["joins", "dies"])
def test_what_a_top_computes_again_from_weights_in_mid_training_is_named(fault: Fault) -> None:
    [message] = said(script_of(top=pseudo_labels), fault)
    assert "of epoch" in message
    assert "which is continued, has set dataset.labels, of a data set that the loop reads, to something else" in message


@pytest.mark.parametrize("fault", FAULTS, ids=str)
@pytest.mark.parametrize(
    "script",
    [
        script_of(),
        script_of(top=of_the_epoch),
        script_of(top=of_the_epoch, behind=weaker_in_validation),
        script_of(top=from_state, behind=kept_in_state, kept=lambda job: torch.arange(job.samples)),
        script_of(top=labels_in_state, labels=lambda job: job.target.clone()),
        script_of(behind=labels_in_state, labels=lambda job: job.target.clone()),
    ],
)
def test_what_each_top_sets_alike_or_state_keeps_is_not_named(script, fault: Fault | None) -> None:
    assert said(script, fault) == set()


@pytest.mark.parametrize("collective", range(18, 34))
def test_a_number_that_is_another_while_the_script_validates_is_not_named(collective: int) -> None:
    """Also where the world changes before the next top has set it again."""
    script = script_of(top=of_the_epoch, behind=weaker_in_validation)
    assert said(script, Fault(collective, worker=1, leaves=(1,))) == set()


class Mosaic(Selected):
    """Samples with options that a script changes while it trains."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.mosaic, self.size, self.transform = True, 2, self.small
        self.rank = 0

    def __getitem__(self, place: int):
        inputs, label = super().__getitem__(place)
        return self.transform(inputs[: self.size].sum() * inputs if self.mosaic else inputs), label

    def small(self, inputs: torch.Tensor) -> torch.Tensor:
        return 0.5 * inputs

    def large(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def close_mosaic(self) -> None:
        self.mosaic = False


def set_in_one_epoch(job: Job, dataset: Mosaic, loader, model, optimizer, state) -> None:
    dataset.size = 3
    for epoch in state.epochs(job.epochs):
        if epoch == 1:
            dataset.size = 6
        elif epoch in (2, 3):
            print(epoch)
        for step in state.steps(loader):
            trained(step, model, optimizer)


def set_by_a_method(job: Job, dataset: Mosaic, loader, model, optimizer, state) -> None:
    for epoch in state.epochs(job.epochs):
        if epoch + 3 == job.epochs:
            dataset.close_mosaic()
        for step in state.steps(loader):
            trained(step, model, optimizer)


def another_transform(job: Job, dataset: Mosaic, loader, model, optimizer, state) -> None:
    for epoch in state.epochs(job.epochs):
        one_epoch(epoch, dataset, loader, model, optimizer, state)


def one_epoch(epoch, dataset: Mosaic, loader, model, optimizer, state) -> None:
    if epoch == 1:
        dataset.transform = dataset.large
    for step in state.steps(loader):
        trained(step, model, optimizer)


def set_in_all_later_epochs(job: Job, dataset: Mosaic, loader, model, optimizer, state) -> None:
    """Also what each worker has of its own, and what is set in each branch."""
    for epoch in state.epochs(job.epochs):
        if edl_hvd.rank() == 0:
            dataset.rank = 1
        if epoch >= 1:
            dataset.close_mosaic()
            dataset.transform = dataset.large
        if epoch == 1:
            dataset.size = 6
        else:
            dataset.size = 3
        for step in state.steps(loader):
            trained(step, model, optimizer)
        dataset.mosaic = True


def trained(step, model, optimizer) -> None:
    optimizer.zero_grad()
    for inputs, target in step:
        F.cross_entropy(model(inputs), target).backward()
    optimizer.step()


def with_options(body):
    def script(job: Job) -> None:
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
        dataset = Mosaic(job)
        loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)

        @edl_hvd.elastic
        def train(state):
            body(job, dataset, loader, model, optimizer, state)

        train(state)

    return script


@pytest.mark.parametrize("fault", [None, JOINS], ids=["no change", "joins"])
@pytest.mark.parametrize(
    ("body", "name"), [(set_in_one_epoch, "size"), (set_by_a_method, "mosaic"), (another_transform, "transform")]
)
def test_an_option_that_is_set_in_one_epoch_is_named(body, name: str, fault: Fault | None) -> None:
    [message] = said(with_options(body), fault)
    assert message.startswith(
        f"dataset.{name}, of a data set that the loop reads, has been set at the top of epoch 1 only"
    )
    assert message.endswith("as in `if epoch >= 1:`")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_an_option_that_is_set_in_all_later_epochs_is_not_named(fault: Fault | None) -> None:
    assert said(with_options(set_in_all_later_epochs), fault) == set()
    assert said(script_of(top=larger_from_an_epoch_on), fault) == set()


class Dictionaries(Dataset):
    """Samples as dictionaries, as in many a tutorial of language models; the last ones stay in memory."""

    def __init__(self, job: Job) -> None:
        self.inputs, self.labels = job.inputs, job.target.tolist()
        self.cache = torch.zeros(job.samples)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int):
        item = {"inputs": self.inputs[place]}
        item["labels"] = torch.tensor(self.labels[place])
        self.cache[int(place)] = 1.0
        return item


def test_labels_of_samples_that_are_dictionaries_are_named() -> None:
    def script(job: Job):
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
        dataset = Dictionaries(job)
        loader = DataLoader(dataset, batch_sampler=loader.batch_sampler)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for batch in step:
                        F.cross_entropy(model(batch["inputs"]), batch["labels"]).backward()
                    optimizer.step()
                dataset.labels = model(job.inputs).argmax(1).tolist()

        train(state)

    [message] = said(script, None)
    assert message.startswith("dataset.labels, of a data set that the loop reads, has been set anew behind the loop")


def test_items_of_data_sets_inside_others_are_named() -> None:
    def script(job: Job):
        model, optimizer, loader, state = prepare(job, momentum_sgd, Tempered)
        whole = TensorDataset(job.inputs, job.target)
        subset = Subset(whole, list(range(job.samples)))
        loader = DataLoader(subset, batch_sampler=loader.batch_sampler)

        @edl_hvd.elastic
        def train(state):
            for _ in state.epochs(job.epochs):
                for step in state.steps(loader):
                    optimizer.zero_grad()
                    for inputs, target in step:
                        F.cross_entropy(model(inputs), target).backward()
                    optimizer.step()
                whole.tensors = (whole.tensors[0], model(job.inputs).argmax(1))

        train(state)

    [message] = said(script, None)
    assert message.startswith("loader.dataset.dataset.tensors[1], of a data set")
