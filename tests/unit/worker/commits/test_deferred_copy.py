"""A copy that several threads make together: each byte once, whoever comes when and whatever becomes of one."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import soon

from edl_hvd.worker.commits import checkpoint_copy
from edl_hvd.worker.commits.checkpoint_copy import Blocks, DeferredCopy

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 700)),
    st.tuples(st.integers(0, 700), st.integers(0, 9)),
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 90)),
)


def never() -> bool:
    return False


def together(copy: DeferredCopy, threads: int) -> list[bool]:
    found: list[bool] = []
    others = [threading.Thread(target=lambda: found.append(copy.complete())) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    found.append(copy.complete())
    for thread in others:
        soon(thread)
    return found


@given(shapes=st.lists(SHAPES, max_size=12), threads=st.integers(1, 3), gap=st.booleans())
def test_all_is_copied_each_byte_once(shapes, threads, gap):
    tensors = {str(number): torch.rand(shape, requires_grad=True) for number, shape in enumerate(shapes)}
    if gap:  # every other column
        tensors = {name: tensor[..., ::2] if tensor.dim() else tensor for name, tensor in tensors.items()}
    into = {name: torch.full(tensor.shape, -1.0) for name, tensor in tensors.items()}
    copied: list[tuple[int, int]] = []
    looks: list[int] = []
    real = checkpoint_copy._copy_chunk

    def counted(chunk: checkpoint_copy.Chunk) -> None:
        copied.extend((tensor.data_ptr(), tensor.nbytes) for tensor in chunk[1] if tensor.nbytes)
        real(chunk)

    def is_dirty() -> bool:
        assert all(torch.equal(tensors[name], tensor) for name, tensor in into.items()), "it came before the copy's end"
        looks.append(1)
        return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_copy, "_LEAST_CHUNK_BYTES", 64)
        patch.setattr(checkpoint_copy, "_LARGE_BYTES", 128)
        patch.setattr(checkpoint_copy, "_copy_chunk", counted)
        assert together(DeferredCopy(tensors.values(), Blocks(into.values()), is_dirty), threads) == [True] * threads
    assert len(looks) == 1
    places = sorted(copied)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(places))
    assert sum(size for _, size in places) == sum(tensor.nbytes for tensor in into.values())


def test_who_comes_later_shares_what_is_left_of_one_large_tensor(monkeypatch):
    began, rest_is_done, go_on = threading.Event(), threading.Event(), threading.Event()
    real = checkpoint_copy._copy_chunk
    rows: dict[str, int] = {}

    def slow(chunk: checkpoint_copy.Chunk) -> None:
        name = threading.current_thread().name
        if name == "first" and not rows:
            rows[name] = 0
            began.set()
            assert go_on.wait(60)
        rows[name] = rows.get(name, 0) + sum(len(tensor) for tensor in chunk[1])
        real(chunk)
        if rows.get("second") == 2048:  # all that the first has not taken
            rest_is_done.set()

    monkeypatch.setattr(checkpoint_copy, "_copy_chunk", slow)
    tensors, into = {"embedding": torch.rand(4096, 4096)}, {"embedding": torch.empty(4096, 4096)}
    copy = DeferredCopy(tensors.values(), Blocks(into.values()), never)
    first = threading.Thread(target=copy.complete, name="first")
    first.start()
    assert began.wait(60)
    second = threading.Thread(target=copy.complete, name="second")
    second.start()
    assert rest_is_done.wait(60)
    assert second.is_alive(), "it waits for the other's part"
    go_on.set()
    soon(first)
    soon(second)
    assert rows == {"first": 2048, "second": 2048}
    assert torch.equal(into["embedding"], tensors["embedding"])


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_copy_that_breaks_off_in_one_thread_is_of_no_use_to_the_other_which_does_not_wait_for_it(monkeypatch, error):
    real = checkpoint_copy._copy_chunk
    began = threading.Event()

    def breaking(chunk: checkpoint_copy.Chunk) -> None:
        if threading.current_thread().name == "breaking":
            began.set()
            raise error
        real(chunk)

    monkeypatch.setattr(checkpoint_copy, "_copy_chunk", breaking)
    tensors = {str(number): torch.rand(300_000) for number in range(8)}
    copy = DeferredCopy(tensors.values(), Blocks([torch.empty_like(tensor) for tensor in tensors.values()]), never)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            copy.complete()
        except error as found:
            raised.append(found)

    thread = threading.Thread(target=run, name="breaking")
    thread.start()
    assert began.wait(60)
    assert not copy.complete()
    soon(thread)
    assert len(raised) == 1


def test_what_was_disturbed_is_of_no_use_to_anybody():
    assert together(DeferredCopy([torch.rand(8)], Blocks([torch.empty(8)]), lambda: True), 3) == [False] * 3


@pytest.mark.parametrize("is_whole", [True, False])
def test_who_has_looked_itself_spares_the_copy_the_look(is_whole):
    def looks() -> bool:
        raise AssertionError("somebody has looked already")

    tensor, into = torch.rand(8), torch.empty(8)
    copy = DeferredCopy([tensor], Blocks([into]), looks)
    assert copy.complete(is_whole) == is_whole
    assert copy.complete() == is_whole
    assert torch.equal(tensor, into)


def test_a_copy_that_was_made_before_somebody_moved_the_tensors_is_whole():
    copy = DeferredCopy([torch.rand(8)], Blocks([torch.empty(8)]), never)
    assert copy.complete()
    assert copy.complete(is_whole=False)
