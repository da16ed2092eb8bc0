"""LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2), which torch lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LAMB(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].lerp_(parameter.grad, 1 - beta1)
                state["square"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                mean = state["mean"] / (1 - beta1 ** state["step"])
                square = state["square"] / (1 - beta2 ** state["step"])
                update = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * parameter
                weight_norm, update_norm = parameter.norm(), update.norm()
                trust = weight_norm / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
                parameter.sub_(update * (group["lr"] * trust))
