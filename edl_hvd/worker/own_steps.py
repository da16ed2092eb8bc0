"""Optimizer steps that the loops over batches do not make: in a loop of the script's own, or of a plain optimizer."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from edl_hvd.data.sampler import ElasticBatchSampler
from edl_hvd.errors import UsageError
from edl_hvd.worker.commits.state_store import StateStore
from edl_hvd.worker.position import position
from edl_hvd.worker.training.optimizer import plain_step_hook


class OwnSteps:
    """Counts the steps of distributed optimizers in loops of a script's own, and refuses those of other optimizers.

    Args:
        store: State of the job.
        optimizers: Distributed optimizers of the state.
        samplers: Samplers of the state that deal out batches.
        warn_once: Called with what a warning is about, and its text.

    Attributes:
        committed_step: ``state.step`` at the last commit; a script that counts by itself has set another one since.
    """

    def __init__(
        self, store: StateStore, optimizers: Sequence[Any], samplers: Sequence[ElasticBatchSampler],
        warn_once: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._store = store
        self._optimizers = optimizers
        self._samplers = samplers
        self._warn_once = warn_once
        self._before_plain = plain_step_hook(self._refuse_plain)
        self._hook: Any = None
        self._thread = threading.get_ident()
        self._has_counted = False
        self.committed_step = 0
        self._beside: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        for optimizer in optimizers:
            optimizer.stepping.after_own.add(self._after_own_step)

    def watch(self, is_running: bool) -> None:
        """An elastic function begins or ends in this thread.

        Args:
            is_running: Whether it begins.
        """
        if self._hook is not None:
            self._hook.remove()
        self._hook = register_optimizer_step_pre_hook(self._before_plain) if is_running else None
        self._thread = threading.get_ident()

    # --- distributed optimizers: counted ---

    @property
    def _uncounted(self) -> int:
        """Steps since the last commit."""
        return max((optimizer.stepping.own for optimizer in self._optimizers), default=0)

    def forget(self) -> None:
        """The state was restored, or a world was joined: steps since the last commit are not counted."""
        for optimizer in self._optimizers:
            optimizer.stepping.own = 0
        self.committed_step = self._store.step

    def count(self) -> int:
        """Count the steps since the last commit as steps of the run, unless the script has set ``state.step`` itself.

        Returns:
            The number of steps that were counted.
        """
        steps = self._uncounted
        for optimizer in self._optimizers:
            optimizer.stepping.own = 0
        if not steps:
            return 0
        self._has_counted = True
        if self._store.step != self.committed_step:
            return 0
        self._store.step += steps
        return steps

    def warn_at_end(self) -> bool:
        """The elastic function has returned; warn of steps that nothing has counted.

        Returns:
            Whether there are any.
        """
        steps = self._uncounted
        if not steps or self._has_counted:
            return False
        self._warn(steps)
        return True

    def _after_own_step(self) -> None:
        """A distributed optimizer has stepped outside the loops over batches. Warn where nothing counts its steps."""
        if self._hook is None:
            return
        for sampler in self._samplers:
            sampler.has_stepped = True
        if not self._has_counted and self._uncounted > 1 and any(sampler.is_bypassed for sampler in self._samplers):
            self._warn(self._uncounted)

    def _warn(self, steps: int) -> None:
        self._warn_once(
            "uncounted",
            f"optimizer.step() was called {steps} times outside of state.steps() and state.batches(), without "
            "state.commit(): no sample is counted, no checkpoint written, and a lost worker costs all of it; write "
            "`for step in state.steps(loader):` instead of a loop over the loader",
        )

    # --- other optimizers: refused ---

    def _refuse_plain(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is not distributed is about to step.

        Raises:
            UsageError: It moves a model with the gradient of this worker alone.
        """
        if not position.place.in_training:
            return
        if threading.get_ident() != self._thread:  # another thread trains something of its own
            return
        store = self._store
        summed = store.reduction.names if store.reduction is not None else {}
        kept = {parameter for model in store.of_kind(torch.nn.Module) for parameter in model.parameters()}
        own = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        if any(parameter in kept and parameter not in summed for parameter in own):
            raise UsageError(
                f"{type(optimizer).__name__}.step() moves parameters of a model in State by the gradient of this "
                "worker alone, because the optimizer is not a DistributedOptimizer; write optimizer = "
                "edl_hvd.DistributedOptimizer(optimizer) and give it to State(…)"
            )
        is_beside = any(isinstance(p, torch.nn.Parameter) and p.grad is not None and p not in summed for p in own)
        # One that is made for a single step may be meant for this worker alone.
        if is_beside and self._beside.setdefault(optimizer, store.step) != store.step:
            raise UsageError(
                f"{type(optimizer).__name__}.step() moves parameters of no model in State, by the gradient of this "
                "worker alone, and a worker that joins would not have them; give State(…) their model, and "
                "optimizer = edl_hvd.DistributedOptimizer(optimizer)"
            )
