"""Optimizers whose ``state_dict`` has a form of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_world import alone

import edl_hvd
from edl_hvd.errors import StateError


class Lookahead(torch.optim.SGD):
    """Saves what it keeps by the addresses of the parameters, as a package of that name does."""

    def state_dict(self) -> dict[str, Any]:
        return {"fast_state": {}, "slow_state": {id(p): kept for p, kept in self.state.items()}, "param_groups": []}


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, edl_hvd.DistributedOptimizer])
def test_it_is_refused_when_state_is_made(wrap) -> None:
    model = torch.nn.Linear(2, 1)
    with (
        alone(),
        pytest.raises(StateError, match=r"optimizer=…\): state_dict\(\) of Lookahead has fast_state, slow_state, par"),
    ):
        edl_hvd.State(model=model, optimizer=wrap(Lookahead(model.parameters(), lr=0.1)))
