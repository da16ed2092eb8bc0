"""The collectives that a script calls, in worlds of one and of several."""

from __future__ import annotations

import weakref

import pytest
import torch
from fake_world import Turns, alone, rank_of

import edl_hvd
from edl_hvd.errors import UsageError

EVERY_TYPE = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16,
              torch.int32, torch.int64, torch.complex64, torch.bool]  # fmt: skip

ONES = torch.ones(2)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [6, 9]), ("mean", [2, 3]), ("average", [2, 3]), ("max", [3, 4]), ("min", [1, 2])],
)
def test_allreduce_combines_by_the_operation(op, expected):
    given = [torch.tensor([rank + 1.0, rank + 2.0]) for rank in range(3)]
    results = Turns(3).run(lambda rank: edl_hvd.allreduce(given[rank], op=op))
    assert [result.tolist() for result in results] == [expected] * 3
    assert [tensor.tolist() for tensor in given] == [[1, 2], [2, 3], [3, 4]], "arguments stay as they are"


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_allreduce_keeps_the_type_and_the_shape(kind):
    op = "max" if kind is torch.bool else "sum"
    results = Turns(2).run(lambda rank: edl_hvd.allreduce(torch.full((2, 1), rank + 1).to(kind), op=op))  # type: ignore[arg-type]
    expected = torch.full((2, 1), 3).to(kind)
    assert all(result.dtype is kind and result.equal(expected) for result in results)


def test_a_mean_of_half_precision_does_not_overflow():
    results = Turns(4).run(lambda rank: edl_hvd.allreduce(torch.tensor(60000.0, dtype=torch.float16), op="mean"))
    assert [result.item() for result in results] == [60000.0] * 4


CALLS = {
    "allreduce": lambda tensor: edl_hvd.allreduce(tensor, op="mean"),
    "allgather": edl_hvd.allgather,
    "broadcast": edl_hvd.broadcast,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_loss_through_a_collective_is_refused_and_its_value_may_be_used(call):
    """Without a gradient, the part of the loss that is behind it would silently count nothing."""
    features = torch.ones(2, requires_grad=True)
    with rank_of(0, 1):
        result = CALLS[call](features)
        assert result.tolist() == [1, 1]
        assert CALLS[call](features.detach()).requires_grad is False
        with torch.no_grad():
            assert CALLS[call](features).requires_grad is False
        (features * CALLS[call](features).detach()).sum().backward()
        with pytest.raises(UsageError, match=rf"came to what edl_hvd\.{call} has returned, and no gradient flows"):
            (features * result).sum().backward()


def test_what_a_collective_returns_does_not_keep_the_graph_of_what_it_was_given():
    features = torch.ones(2, requires_grad=True)
    squared = features * 2
    kept_by_graph = weakref.ref(squared)
    loss = squared.square().sum()
    with rank_of(0, 1):
        result = edl_hvd.allreduce(loss, op="mean")
    del squared, loss
    assert kept_by_graph() is None
    assert result.item() == 8


@pytest.mark.parametrize("kind", [torch.int64, torch.uint8, torch.bool])
def test_a_mean_of_whole_numbers_is_refused(kind):
    with rank_of(0, 1), pytest.raises(UsageError, match=r"convert it to float first, e\.g\. allreduce\(tensor\.f"):
        edl_hvd.allreduce(torch.ones(2).to(kind), op="mean")


def test_allreduce_without_an_operation_names_that_of_horovod():
    with rank_of(0, 1), pytest.raises(UsageError, match=r'write op="mean" \(Horovod\'s default\), op="sum"'):
        edl_hvd.allreduce(torch.ones(2))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: edl_hvd.allreduce(torch.ones(2), op="product"), "'product' is not known; expected one of sum, mean"),  # type: ignore[arg-type]
        (lambda: edl_hvd.allreduce(torch.ones(2) > 0, op="sum"), r"allreduce\(tensor\.int\(\), op=\"sum\"\) to count"),
        (lambda: edl_hvd.allreduce(torch.ones(2) * 1j, op="max"), "complex numbers have no order"),
        (lambda: edl_hvd.allreduce(3.0, op="sum"), r"got float instead of a tensor; write allreduce\(torch\.tensor"),  # type: ignore[arg-type]
        (lambda: edl_hvd.allgather(torch.eye(2).to_sparse()), "expected a dense one"),
        (lambda: edl_hvd.broadcast(torch.ones(2), root_rank=1), "root_rank=1 in a world of 1"),
        (lambda: edl_hvd.broadcast(torch.ones(2), root_rank=-1), "root_rank=-1 in a world of 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, said):
    with rank_of(0, 1), pytest.raises(UsageError, match=said):
        call()


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_allgather_lays_parts_of_different_lengths_in_rank_order(kind):
    parts = [torch.arange(rank * 3).reshape(rank, 3).to(kind) for rank in range(3)]
    results = Turns(3).run(lambda rank: edl_hvd.allgather(parts[rank]))
    assert all(result.dtype is kind and result.equal(torch.cat(parts)) for result in results)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(7.0), [7.0, 7.0]),
        (torch.zeros(0, 3), []),
        (torch.zeros(1, 0), [[], []]),
        (torch.arange(6.0).reshape(2, 3).t(), [[0, 3], [1, 4], [2, 5]] * 2),
    ],
    ids=["a scalar", "nothing at all", "rows of nothing", "transposed"],
)
def test_allgather_takes_any_shape(tensor, expected):
    results = Turns(2).run(lambda rank: edl_hvd.allgather(tensor))
    assert [result.tolist() for result in results] == [expected] * 2


def refusals(size, call):
    """The error that ``call(rank)`` raises on each rank."""

    def refused(rank):
        with pytest.raises(UsageError) as raised:
            call(rank)
        return raised.value

    return Turns(size).run(refused)


@pytest.mark.parametrize("other", [torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.float64), torch.zeros(3)])
def test_allgather_of_what_does_not_fit_together_is_refused_on_every_rank(other):
    errors = refusals(3, lambda rank: edl_hvd.allgather(other if rank == 1 else torch.zeros(2, 3)))
    assert len({str(error) for error in errors}) == 1, "the driver takes equal errors for the script's"
    assert "one after the other: rank 0: float32 [2, 3], rank 1: float" in str(errors[0])


def test_a_broadcast_of_different_roots_is_refused_on_every_rank():
    errors = refusals(2, lambda rank: edl_hvd.broadcast(ONES, root_rank=rank))
    assert "rank 0: float32 [2] from 0, rank 1: float32 [2] from 1" in str(errors[0])
    assert str(errors[0]) == str(errors[1])


def test_different_collectives_are_refused_on_every_rank():
    errors = refusals(2, lambda rank: edl_hvd.barrier() if rank == 1 else edl_hvd.allgather(ONES))
    assert "different collectives: rank 0 allgather, rank 1 barrier; every worker must make" in str(errors[0])
    assert str(errors[0]) == str(errors[1])


@pytest.mark.parametrize("kind", EVERY_TYPE)
def test_broadcast_gives_everyone_the_tensor_of_the_root_and_leaves_the_argument(kind):
    given = [torch.full((2, 2), rank).to(kind) for rank in range(3)]
    before = [tensor.clone() for tensor in given]
    results = Turns(3).run(lambda rank: edl_hvd.broadcast(given[rank], root_rank=2))
    assert all(result.dtype is kind and result.equal(before[2]) for result in results)
    assert all(tensor.equal(was) for tensor, was in zip(given, before, strict=True))


def test_nobody_leaves_a_barrier_before_all_have_come():
    come = []

    def meet(rank):
        come.append(rank)
        edl_hvd.barrier()
        return len(come)

    assert Turns(3).run(meet) == [3, 3, 3]


def test_a_result_is_another_tensor_and_inference_mode_is_no_obstacle():
    weight = torch.ones(2, requires_grad=True)
    with rank_of(0, 1):
        for result in (edl_hvd.allreduce(weight, op="mean"), edl_hvd.allgather(weight), edl_hvd.broadcast(weight)):
            assert result.data_ptr() != weight.data_ptr()
        with torch.inference_mode():
            given = torch.ones(2) * 2
            results = [edl_hvd.allreduce(given, op="sum"), edl_hvd.allgather(given), edl_hvd.broadcast(given)]
        assert all((result + 1).tolist() == [3, 3] and not result.is_inference() for result in results)


@pytest.mark.parametrize("name", ["allreduce", "allgather", "broadcast", "barrier"])
def test_outside_a_world_a_collective_says_where_it_works(name):
    arguments = {"allreduce": (torch.ones(1), "sum"), "barrier": ()}.get(name, (torch.ones(1),))
    with alone(), pytest.raises(UsageError, match=f"{name} was called outside a world; collectives work inside"):
        getattr(edl_hvd, name)(*arguments)
