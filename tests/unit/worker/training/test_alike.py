"""What workers compare of their weights: precise in any layout, and votes travel along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from edl_hvd.errors import UsageError
from edl_hvd.worker.engine.collectives import SoloCollectives
from edl_hvd.worker.training.alike import ComparedWorkers, check_alike
from edl_hvd.worker.training.round_message import Vote

MANY = 1_000_003


class Beside(SoloCollectives):
    """Of a worker beside another one, whose part is given; keeps its own."""

    def __init__(self, other: torch.Tensor | None = None) -> None:
        self.other, self.own, self.calls = other, torch.empty(0), 0

    def allreduce(self, tensor: torch.Tensor, op: str, name: str | None = None) -> torch.Tensor:
        assert op == "max"
        self.calls, self.own = self.calls + 1, tensor.clone()
        return tensor if self.other is None else torch.maximum(tensor, self.other)


def compared(one: list[torch.Tensor], other: list[torch.Tensor], **how: Any) -> ComparedWorkers:
    """What a worker finds that has ``one``, beside a worker that has ``other``."""
    beside = Beside()
    check(other, beside, attributes=how.get("their_attributes", {}), vote=how.get("their_vote", Vote()))
    here = Beside(beside.own)
    found = check(one, here, attributes=how.get("attributes", {}), vote=how.get("vote", Vote()))
    assert here.calls == 1
    return found


def check(
    tensors: list[torch.Tensor],
    collectives: Beside,
    attributes: Mapping[str, Any] | None = None,
    vote: Vote | None = None,
) -> ComparedWorkers:
    names = {torch.nn.Parameter(tensor): f"weight {i}" for i, tensor in enumerate(tensors)}
    return check_alike(names, attributes or {}, vote or Vote(), collectives, step=7)


def layouts() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "a number": torch.randn((), generator=made),
        "empty": torch.empty(0, 3),
        "small": torch.randn(7, 5, generator=made),
        "one row": torch.randn(1, MANY, generator=made),
        "all ones": torch.ones(MANY),
        "channels last": torch.randn(64, 64, 3, 3, generator=made).to(memory_format=torch.channels_last),
        "transposed": torch.randn(300, 400, generator=made).t(),
        "expanded": torch.randn(7000, generator=made).expand(3, 7000),
        "every second": torch.randn(300, 400, generator=made)[:, ::2],
        "bfloat16": torch.randn(300, 400, generator=made).bfloat16(),
        "float16": torch.randn(300, 400, generator=made).half(),
        "float64": torch.randn(300, 400, generator=made).double(),
        "complex": torch.randn(300, 400, generator=made, dtype=torch.complex64),
    }


@pytest.mark.parametrize("layout", layouts())
def test_sum_and_norm_are_those_of_double_precision(layout: str) -> None:
    tensor = layouts()[layout]
    beside = Beside()
    check([tensor], beside)
    values = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
    expected = torch.stack([values.sum(), torch.linalg.vector_norm(values)])
    # A hundredth of what two workers may be apart.
    assert ((beside.own[:2] - expected).abs() <= 1e-6 * expected[1]).all()


@pytest.mark.parametrize("layout", [layout for layout in layouts() if layout != "empty"])
def test_one_element_that_has_moved_is_seen(layout: str) -> None:
    tensor = layouts()[layout]
    moved = tensor.clone()
    moved[(-1,) * moved.dim()] += 0.1 * torch.linalg.vector_norm(torch.abs(tensor).double()).to(tensor.real.dtype)
    with pytest.raises(UsageError, match=r"different weights 'weight 1' \(and 0 more\) after step 7"):
        compared([torch.ones(3), tensor], [torch.ones(3), moved])


def test_weights_that_are_not_numbers_are_alike_where_all_have_them() -> None:
    spoilt = torch.tensor([1.0, float("nan"), float("inf")])
    assert compared([spoilt, -spoilt], [spoilt, -spoilt]).unlike == ()


def test_attributes_and_votes_travel_along() -> None:
    found = compared(
        [torch.ones(3)],
        [torch.ones(3)],
        attributes={"same": [1, 2.0], "other": 3, "_own": 4, "table": torch.ones(5)},
        their_attributes={"same": [1, 2.0], "other": 4, "_own": 5, "table": torch.zeros(5)},
        vote=Vote(writing=1.0),
        their_vote=Vote(resize=1.0),
    )
    assert found == ComparedWorkers(("other", "table"), Vote(resize=1.0, writing=1.0))


def test_a_state_without_weights_brings_votes() -> None:
    assert compared([], [], vote=Vote(stop=1.0)) == ComparedWorkers((), Vote(stop=1.0))
