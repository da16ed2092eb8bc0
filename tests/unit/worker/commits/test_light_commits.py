"""Commits that copy only what optimizer steps do not move, and what a worker does that breaks off after one."""

import pytest
import torch
from fake_world import alone
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import edl_hvd
from edl_hvd.errors import StateError
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.joining.solo_rendezvous import SoloRendezvous

WEIGHT = "model/0.weight"


@pytest.fixture(autouse=True)
def in_a_world():
    with alone():
        edl_hvd.worker.process.current().joined = SoloRendezvous().join(-1, -1)
        yield


def make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), model=None, **more):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = edl_hvd.DistributedOptimizer(optimizer(trained), names)
    return edl_hvd.State(model=model, optimizer=optimizer, notes=[], **more)


def move(state, seed=0):
    """What a script does for one batch."""
    torch.manual_seed(seed)
    state.optimizer.zero_grad()
    state.model(torch.randn(8, 4)).square().mean().backward()
    state.optimizer.step()


def finish(state):
    """What it does after the optimizer has moved, and the commit."""
    state.notes.append(state.step)
    state._runtime.store.step += 1
    state._runtime.commit_step(None)


def train(state, steps):
    for _ in range(steps):
        move(state, seed=state.step)
        finish(state)
    return state


def stands(state):
    """The last commit holds the parameters themselves, not a copy."""
    return state._runtime.store.export()[1][WEIGHT].data_ptr() == state.model[0].weight.data_ptr()


def everything(state):
    plain, tensors = state._runtime.store.live(0)
    return plain, {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        assert torch.equal(tensor, other[1][name]), name


def test_after_two_commits_parameters_and_momentum_are_no_longer_copied():
    state = make()
    assert [stands(train(state, 1)) for _ in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_what_came_before_the_next_step_is_undone(optimizer):
    state = train(make(lambda parameters: optimizer(parameters, lr=0.1)), 4)
    before = everything(state)
    state.model(torch.randn(8, 4))  # BatchNorm keeps its statistics
    state.notes.append("more")
    state.optimizer.param_groups[0]["lr"] = 5.0
    state._runtime.store.restore()
    assert_equal(everything(state), before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_made_after_the_commit_is_kept_and_not_made_again(optimizer):
    def built():
        return make(lambda parameters: optimizer(parameters, lr=0.1))

    whole = train(built(), 6)
    state = train(built(), 4)
    move(state, seed=4)
    state.notes.append("half of the batch's body")
    state._runtime.store.restore()
    assert (state.step, state.notes) == (4, [0, 1, 2, 3])
    train(state, 2)
    state.model.load_state_dict({**state.model.state_dict(), **dict(whole.model.named_buffers())})
    assert_equal(everything(state), everything(whole))


def test_breaking_off_twice_before_the_next_commit_changes_nothing():
    whole, state = train(make(), 6), train(make(), 4)
    for _ in range(2):
        move(state, seed=4)
        state._runtime.store.restore()
    train(state, 2)
    assert torch.equal(state.model[0].weight, whole.model[0].weight)
    assert state.notes == whole.notes


def test_several_steps_after_one_commit_are_none_of_them_made_again():
    whole, state = make(), make()
    for built in (whole, state):
        train(built, 4)
        for seed in range(3):
            move(built, seed)
    state._runtime.store.restore()
    for seed in range(3):
        move(state, seed)
    assert torch.equal(state.model[0].weight, whole.model[0].weight)
    move(state), move(whole)
    assert torch.equal(state.model[0].weight, whole.model[0].weight)


def test_of_two_optimizers_only_the_one_that_moved_is_held_back():
    def built():
        torch.manual_seed(1)
        critic = nn.Linear(4, 1)
        second = edl_hvd.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.1), critic.named_parameters())
        return make(critic=critic, second=second)

    def both(state, upto=2):
        move(state, seed=state.step)
        if upto == 2:
            state.second.zero_grad()
            state.critic(torch.ones(1, 4)).sum().backward()
            state.second.step()
            finish(state)

    whole, state = built(), built()
    for _ in range(4):
        both(whole), both(state)
    both(state, upto=1)
    state._runtime.store.restore()
    both(state), both(whole)
    assert torch.equal(state.critic.weight, whole.critic.weight)
    assert torch.equal(state.model[0].weight, whole.model[0].weight)


def test_another_worker_takes_over_a_state_that_is_ahead():
    whole, state, newcomer = train(make(), 6), train(make(), 4), make()
    move(state, seed=4)
    state._runtime.store.restore()
    plain, tensors = state._runtime.store.export()
    newcomer._runtime.store.load(plain, {name: tensor.clone() for name, tensor in tensors.items()})
    assert newcomer._runtime.store.freshness == state._runtime.store.freshness
    train(newcomer, 2)
    assert torch.equal(newcomer.model[0].weight, whole.model[0].weight)
    assert newcomer.notes == whole.notes


def test_the_best_state_is_the_latest_commit_and_of_one_commit_the_one_that_stands_at_it():
    found = [train(make(), 3)._runtime.store.freshness]
    for moved in (lambda state: state.model[0].weight.data.mul_(2), move, lambda state: None):
        state = train(make(), 4)
        moved(state)
        state._runtime.store.restore()
        found.append(state._runtime.store.freshness)
    found.append(train(make(), 5)._runtime.store.freshness)
    assert found == sorted(set(found)), "each one is better than the one before"
    assert [freshness.is_dirty for freshness in found] == [False, True, False, False, False]


def in_place(weight):
    with torch.no_grad():
        weight.mul_(0.5)


def through_data(weight):
    weight.data.mul_(0.5)


def by_another_tensor(weight):
    weight.data = weight.data.clone()


@pytest.mark.parametrize("write", [in_place, through_data, by_another_tensor])
@pytest.mark.parametrize("place", ["before the step", "after it"])
def test_a_script_that_moves_parameters_itself_gets_copies_until_it_has_not_for_a_while(write, place):
    state = train(make(), 4)
    for _ in range(2):
        if place == "before the step":
            write(state.model[0].weight)
        move(state)
        if place == "after it":
            write(state.model[0].weight)
        finish(state)
        assert not stands(state)
    copied = [stands(train(state, 1)) for _ in range(20)]
    assert copied.index(True) >= 4
    assert all(copied[copied.index(True) :])


@pytest.mark.parametrize("write", [in_place, through_data, by_another_tensor])
def test_what_the_script_moved_itself_is_not_forgotten_by_the_step_after_it(write):
    state = train(make(), 4)
    write(state.model[0].weight)
    move(state, seed=4)
    state._runtime.store.restore()
    assert state._runtime.store.freshness.is_dirty


def test_who_came_back_from_a_script_that_moved_parameters_has_a_copy_before_it_does_so_again():
    state = train(make(), 4)
    in_place(state.model[0].weight)
    state._runtime.store.restore()
    state._runtime.store.resave()
    kept = state.model[0].weight.clone()
    in_place(state.model[0].weight)
    state._runtime.store.restore()
    assert torch.equal(state.model[0].weight, kept)


def test_a_step_that_computes_gradients_while_it_moves_is_always_copied():
    state = make(lambda parameters: torch.optim.LBFGS(parameters, lr=0.01, max_iter=1))
    for _ in range(5):
        state.optimizer.zero_grad()

        def closure():
            with state.optimizer.no_sync():
                loss = state.model(torch.ones(8, 4)).square().mean()
                loss.backward()
            return loss

        state.optimizer.step(closure)
        finish(state)
    assert not stands(state)


def test_steps_that_cannot_be_made_again_are_copied_for_good_though_the_script_moves_parameters_once():
    state = train(make(), 4)
    stepped = state._runtime.store.tracker.stepped
    stepped.never_clean()
    in_place(state.model[0].weight)
    train(state, 1)
    for _ in range(2000):
        stepped.begin_commit()
    assert not stepped.is_clean


class KeepsMore(nn.Linear):
    def get_extra_state(self):
        return {"calls": 1}

    def set_extra_state(self, state):
        pass


def test_a_model_that_keeps_more_than_tensors_is_copied():
    state = train(make(model=nn.Sequential(KeepsMore(4, 4), nn.Linear(4, 1))), 5)
    assert not stands(state)


def with_frozen(**more):
    """A model whose first layer is not trained, and another model beside it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    return make(model=model, teacher=nn.Linear(4, 4).requires_grad_(False), **more)


def test_parameters_that_nothing_moves_are_not_copied_either():
    state = train(with_frozen(), 4)
    assert stands(state)
    assert state._runtime.store.export()[1]["teacher/weight"].data_ptr() == state.teacher.weight.data_ptr()
    assert not any("weight" in name for name in state._runtime.store._last.state.tensors if name != "model/1.weight")


@torch.no_grad()
def write_in_place(state):
    state.teacher.weight[1] += 1
    state.model[0].bias[2:] += 1


def write_past_the_counter(state):
    state.teacher.weight.data += 1
    state.model[0].bias.data += 1


@pytest.mark.parametrize("write", [write_in_place, write_past_the_counter])
def test_frozen_parameters_that_the_script_moves_are_copied_from_then_on(write):
    state = train(with_frozen(), 4)
    write(state)
    train(state, 1)
    committed = everything(state)
    assert stands(state), "the others are not copied for that"
    write(state)
    state._runtime.store.restore()
    assert_equal(everything(state), committed)
    train(state, 8)
    shared = state._runtime.store.export()[1]["teacher/weight"]
    assert shared.data_ptr() == state.teacher.weight.data_ptr(), "it rests again"


def test_frozen_parameters_moved_for_the_first_time_before_it_breaks_off_are_kept_and_another_worker_is_asked():
    state = train(with_frozen(), 4)
    write_in_place(state)
    moved = state.teacher.weight.clone()
    state._runtime.store.restore()
    assert torch.equal(state.teacher.weight, moved)
    assert state._runtime.store.freshness.is_dirty


def test_a_worker_that_took_a_state_over_need_not_copy_frozen_parameters():
    giver, taker = train(with_frozen(), 4), train(with_frozen(), 2)
    taker._runtime.store.load(*giver._runtime.store.export())
    assert_equal(everything(taker), everything(giver))
    train(taker, 3)
    assert taker._runtime.store.export()[1]["teacher/weight"].data_ptr() == taker.teacher.weight.data_ptr()


def test_a_commit_between_batches_needs_no_collective_of_its_own(monkeypatch):
    calls = []
    monkeypatch.setattr(SoloCollectives, "allreduce", lambda self, tensor, op, name: calls.append(op) or tensor.clone())
    batches = edl_hvd.ElasticBatchSampler(40, global_batch=8)
    state = make(batches=batches)
    loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_sampler=batches)

    @edl_hvd.elastic
    def run(state):
        for (inputs,) in state.batches(loader):
            assert calls == []
            state.optimizer.zero_grad()
            state.model(inputs).square().mean().backward()
            state.optimizer.step()
        calls.append("after the epoch")

    run(state)
    assert calls[0] != "after the epoch", "the commit at the epoch's end agrees by itself"


class Remembering(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 1))
        self.register_buffer("bank", torch.zeros(1, 4))
        self.later = nn.Parameter(torch.zeros(1, 4), requires_grad=False)


@pytest.mark.parametrize("length", [0, 2])
def test_a_buffer_of_another_length_gets_back_the_one_of_the_commit(length):
    state = train(make(model=Remembering()), 3)
    store = state._runtime.store
    assert store.is_light
    state.model.bank = torch.ones(length, 4)
    store.restore()
    assert torch.equal(state.model.bank, torch.zeros(1, 4))
    assert torch.equal(state.model.state_dict()["bank"], torch.zeros(1, 4))


def test_a_parameter_of_another_shape_is_refused_and_not_filled_by_repetition():
    state = train(make(model=Remembering()), 1)
    state.model.later.data = torch.ones(2, 4)
    with pytest.raises(StateError, match=r"later has the shape \(2, 4\) and cannot get back what the last commit has"):
        state._runtime.store.load_delta(state._runtime.store._last.state, [0])
