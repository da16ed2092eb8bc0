import gc
import random
import re
import weakref

import pytest
import torch
from fake_world import alone
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import StateError, UsageError
from edl_hvd.events import read_events
from edl_hvd.rescale.policy import WorkerBatch
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous


def make(samples=20, **sampler_arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = edl_hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    batches = edl_hvd.ElasticBatchSampler(samples, **(sampler_arguments or {"global_batch": 8, "micro_batch": 4}))
    loader = DataLoader(TensorDataset(torch.arange(samples), torch.randn(samples, 4)), batch_sampler=batches)
    state = edl_hvd.State(model=model, optimizer=optimizer, scheduler=scheduler, batches=batches, notes=[], best=0.0)
    return state, loader


def run(state, loader, epochs=2, body=lambda indices: None, **arguments):
    @edl_hvd.elastic(**arguments)
    def train(state):
        for _ in state.epochs(epochs):
            for indices, inputs in state.batches(loader):
                state.optimizer.zero_grad()
                state.model(inputs).square().mean().backward()
                state.optimizer.step()
                state.scheduler.step()
                body(indices)
        return "returned"

    with alone():
        return train(state)


def test_the_function_runs_once_and_its_result_comes_back():
    state, loader = make()
    seen = []
    assert run(state, loader, body=lambda indices: seen.extend(indices.tolist())) == "returned"
    assert sorted(seen) == sorted([*range(20), *range(20)])
    assert (state.step, state.epoch, state.samples) == (6, 2, 40)


def test_elastic_is_used_bare_too():
    calls = []

    @edl_hvd.elastic
    def train(state, word, *, end):
        calls.append(word + end)

    with alone():
        train(edl_hvd.State(), "a", end="b")
    assert calls == ["ab"]


def test_a_scheduler_moves_once_per_optimizer_step_under_accumulation():
    state, loader = make(samples=24, global_batch=8, micro_batch=2)
    run(state, loader, epochs=1)
    assert state.scheduler.last_epoch == 3


def test_putting_back_undoes_everything_since_the_commit():
    state, loader = make()
    state.notes.append({"deep": [1]})
    state._runtime.store.save(7)
    state._runtime.commit_every = 100
    kept = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    with alone():
        edl_hvd.worker.process.current().joined = SoloRendezvous().join(-1, -1)
        for _, inputs in state.batches(loader):
            state.optimizer.zero_grad()
            state.model(inputs).square().mean().backward()
            state.optimizer.step()
            state.scheduler.step()
            if state.optimizer.at_boundary:
                state.notes[0]["deep"].append(2)
                state.best = 5.0
            if state.step == 1:
                break
    state._runtime.store.restore()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in state.model.state_dict().items())
    assert state.notes == [{"deep": [1]}]
    assert (state.best, state.step, state.samples, state.scheduler.last_epoch) == (0.0, 0, 0, 0)
    assert state.optimizer.state_dict()["state"] == {}


def test_putting_back_does_not_hand_out_the_snapshot_itself():
    state, _ = make()
    state.notes.append([1])
    state._runtime.store.save(0)
    state._runtime.store.restore()
    state.notes[0].append(2)
    state.model[0].weight.data.zero_()
    state._runtime.store.restore()
    assert state.notes == [[1]]
    assert state.model[0].weight.abs().sum() > 0


def test_a_commit_that_cannot_encode_an_attribute_leaves_the_last_one_whole():
    state, _ = make()
    state.best = 1.0
    state._runtime.store.save(3)
    state.best = {1, 2}
    with pytest.raises(StateError, match=r"state\.best was set to something that cannot be kept.*builtins\.set"):
        state._runtime.store.save(4)
    state._runtime.store.restore()
    assert (state.best, state._runtime.store.commit) == (1.0, 3)


def test_objects_stay_the_ones_the_script_made():
    state, _ = make()
    model, optimizer, scheduler = state.model, state.optimizer, state.scheduler
    state._runtime.store.save(0)
    state._runtime.store.restore()
    assert (state.model, state.optimizer, state.scheduler) == (model, optimizer, scheduler)
    assert scheduler.optimizer is optimizer


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path):
    whole, loader = make()
    run(whole, loader, epochs=4)
    for epochs in (2, 4):
        state, loader = make()
        run(state, loader, epochs=epochs, checkpoint=tmp_path / "checkpoints", events=tmp_path / "events")
    assert (state.step, state.epoch, state.samples) == (12, 4, 80)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, state.model.state_dict()[name])
    kinds = [event["event"] for event in read_events(tmp_path / "events")]
    assert kinds.count("restore") == 1
    assert kinds.count("checkpoint") == 2


def test_a_full_disk_under_the_event_log_does_not_end_training(caplog):
    state, loader = make()
    assert run(state, loader, events="/dev/full") == "returned"
    assert state.step == 6
    assert [record.name for record in caplog.records].count("edl_hvd.events") == 1


@pytest.mark.parametrize(("every", "least"), [("1 step", 3), ("16 samples", 3), ("1 epoch", 2), ("1ms", 3)])
def test_checkpoints_are_written_as_often_as_asked(tmp_path, every, least):
    state, loader = make()

    def wait_for_writer(indices):
        while state._runtime.coordinator._checkpoints.busy:
            pass

    run(state, loader, body=wait_for_writer, checkpoint=tmp_path / "c", checkpoint_every=every, events=tmp_path / "e")
    assert [event["event"] for event in read_events(tmp_path / "e")].count("checkpoint") >= least


def test_a_fixed_world_keeps_commits_for_checkpoints_only_and_those_are_of_their_step(tmp_path):
    state, loader = make(samples=48)
    held, weights = [], {}

    def look(indices):
        session = state._runtime.coordinator
        while session._checkpoints.busy:
            pass
        held.append(state._runtime.store.held_step)
        if state.optimizer.at_boundary:
            weights[state.step + 1] = state.model[0].weight.detach().clone()

    run(state, loader, epochs=1, body=look, checkpoint=tmp_path / "c", checkpoint_every="2 steps", keep_newest=9)
    assert held == [0, 0, -1, -1, 2, 2, -1, -1, 4, 4, -1, -1]
    for step in (2, 4, 6):
        other, _ = make(samples=48)
        other.load_weights(tmp_path / "c", step)
        assert torch.equal(other.model[0].weight, weights[step])


def test_randomness_in_a_micro_batch_depends_on_its_place_alone():
    def drawn(epochs_before):
        state, loader = make()
        numbers = []
        run(state, loader, body=lambda indices: numbers.append((torch.rand(1).item(), random.random())))
        return numbers

    torch.manual_seed(99)
    first = drawn(0)
    torch.manual_seed(1)
    assert drawn(0) == first
    assert len(set(first)) == len(first)


def test_the_learning_rate_follows_a_worker_batch_policy():
    state, loader = make(samples=20, policy=WorkerBatch(4, base_size=2, warmup_samples=8))
    factors = []
    run(state, loader, epochs=1, body=lambda indices: factors.append(state.learning_rate_factor))
    assert factors == [1.0, 0.75, 0.5, 0.5, 0.5]


@pytest.mark.filterwarnings("ignore:the loop of state.batches")
def test_leaving_the_loop_early_counts_what_was_stepped_through():
    state, loader = make(samples=40)

    @edl_hvd.elastic
    def train(state):
        for i, (_, inputs) in enumerate(state.batches(loader)):
            state.optimizer.zero_grad()
            state.model(inputs).square().mean().backward()
            state.optimizer.step()
            if i == 3:
                break

    with alone():
        train(state)
    assert (state.step, state.samples) == (2, 16)


@pytest.mark.parametrize(
    ("make_state", "said"),
    [
        (lambda: edl_hvd.State(commit=1), "names of its own"),
        (lambda: edl_hvd.State(things={1, 2}), r"State\(…, things=…\)"),
        (lambda: setattr(edl_hvd.State(), "later", 1), "is not kept"),
        (lambda: setattr(edl_hvd.State(model=nn.Linear(1, 1)), "model", nn.Linear(1, 1)), "cannot be replaced"),
    ],
)
def test_a_state_that_cannot_be_kept_is_refused(make_state, said):
    with pytest.raises(StateError, match=said):
        make_state()


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, edl_hvd.DistributedOptimizer], ids=["plain", "wrapped"])
def test_a_state_of_another_optimizer_is_refused(wrap):
    """``load_state_dict`` of torch would take it, with Adam's options in the groups of SGD."""

    def with_optimizer(kind):
        model = nn.Linear(2, 1)
        return edl_hvd.State(model=model, optimizer=wrap(kind(model.parameters(), lr=0.1)))._runtime.store

    saved = with_optimizer(torch.optim.Adam).live(1)
    with_optimizer(torch.optim.Adam).load_live(saved)
    message = "the saved optimizer is one of class Adam, and State(…) was given one of class AdamW"
    with pytest.raises(StateError, match=re.escape(message)):
        with_optimizer(torch.optim.AdamW).load_live(saved)
    del saved.plain["counters"]["optimizers"]
    with_optimizer(torch.optim.AdamW).load_live(saved)  # an older version has not kept it


def test_a_loader_that_the_sampler_does_not_drive_is_refused():
    state, loader = make()
    with alone(), pytest.raises(UsageError, match="cannot tell how batches are dealt"):
        next(state.batches(DataLoader(loader.dataset, batch_size=4)))


def test_a_script_that_forgot_init_is_told_so():
    with pytest.raises(UsageError, match=r"call edl_hvd\.init\(\)"):
        edl_hvd.rank()


def test_a_grad_scaler_acts_at_the_bounds_of_a_global_batch(tmp_path):
    ends = []
    for scaled in (False, True):
        state, loader = make(samples=24, global_batch=8, micro_batch=2)
        scaler = edl_hvd.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scaled)

        @edl_hvd.elastic
        def train(state, loader=loader, scaler=scaler):
            for _ in state.epochs(1):
                for _, inputs in state.batches(loader):
                    state.optimizer.zero_grad()
                    scaler.scale(state.model(inputs).square().mean()).backward()
                    scaler.unscale_(state.optimizer)
                    scaler.step(state.optimizer)
                    scaler.update()
                    state.scheduler.step()

        with alone():
            train(state)
        ends.append(state.model.state_dict())
        if scaled:
            assert scaler.get_scale() == 2048.0  # 3 optimizer steps with growth every 2: grown once
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor)


def test_an_overflow_skips_the_step_and_not_the_scheduler_as_in_pytorch():
    state, loader = make(samples=16, global_batch=8, micro_batch=8)
    scaler = edl_hvd.GradScaler("cpu", init_scale=1024.0)
    losses = iter([1.0, float("inf")])

    @edl_hvd.elastic
    def train(state):
        for _ in state.epochs(1):
            for _, inputs in state.batches(loader):
                state.optimizer.zero_grad()
                scaler.scale(state.model(inputs).square().mean() * next(losses)).backward()
                scaler.step(state.optimizer)
                scaler.update()
                state.scheduler.step()

    with alone():
        train(state)
    assert (state.step, state.scheduler.last_epoch, scaler.get_scale()) == (2, 2, 512.0)


def make_again(state):
    """Another state of the same objects."""
    return edl_hvd.State(model=state.model, optimizer=state.optimizer, scheduler=state.scheduler)


@pytest.mark.parametrize("is_run", [False, True], ids=["made", "run"])
def test_a_state_that_nobody_holds_is_freed_while_its_optimizer_lives(is_run):
    """It may hold a copy of all weights, and the optimizer goes on in the next state."""
    state, loader = make()
    if is_run:
        run(state, loader)
    optimizer, others = state.optimizer, [make_again(state) for _ in range(3)]
    freed = [weakref.ref(one._runtime) for one in (state, *others)]
    del state, others
    gc.collect()
    assert [runtime() for runtime in freed] == [None] * 4
    with alone():
        optimizer.step()


def test_two_states_of_one_optimizer_both_see_its_steps():
    with alone():
        state, _ = make()
        other = make_again(state)
        for _ in range(2):
            state.optimizer.zero_grad()
            state.model(torch.ones(2, 4)).square().mean().backward()
            state.optimizer.step()
        for one in (state, other):
            stepped = one._runtime.store.tracker.stepped
            assert (stepped.steps, stepped.is_dirty()) == ([2], False)
