"""Weights out of another run's checkpoint, as a start for training: models only, and if asked for only what fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edl_hvd.checkpoint.reading.catalog import chosen_steps
from edl_hvd.checkpoint.reading.restoring import usable_manifest
from edl_hvd.checkpoint.reading.spans import empty_tensors, read_spans, spans_of
from edl_hvd.errors import StateError
from edl_hvd.storage import open_storage
from edl_hvd.worker.codec import decode
from edl_hvd.worker.commits.handlers import ModuleHandler
from edl_hvd.worker.commits.state_store import StateStore

_NAMED = 10  # weights of each kind in an error


@dataclass(frozen=True)
class LoadReport:
    """How the weights of a checkpoint fit the models of a ``State``; names as in ``state.<model>``'s ``state_dict``.

    Attributes:
        loaded: Weights that were loaded.
        missing: Weights that the models have and the checkpoint lacks.
        unexpected: Weights that the checkpoint has and the models lack.
        mismatched: Weights whose shapes differ: that in the checkpoint, and the model's.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]

    @property
    def complete(self) -> bool:
        """Whether all weights of the checkpoint and of the models fit each other."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        shapes = [f"{name} {list(theirs)} instead of {list(own)}" for name, (theirs, own) in self.mismatched.items()]
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": shapes}
        return "; ".join(f"{kind}: {_some(names)}" for kind, names in kinds.items() if names) or "everything fits"


def load_weights(store: StateStore, url: str | os.PathLike[str], step: int | None, partial: bool) -> LoadReport:
    """See :meth:`edl_hvd.State.load_weights`."""
    storage = open_storage(os.fspath(url))
    [chosen] = chosen_steps(storage, step)
    manifest = usable_manifest(storage, chosen).manifest
    models = {name: handler.value for name, handler in store.handlers.items() if isinstance(handler, ModuleHandler)}
    saved: dict[str, Any] = {name: manifest.plain["attributes"].get(name, {}) for name in models}
    shapes = {name: torch.empty(entry.shape, device="meta") for name, entry in manifest.tensors.items()}
    report = _compare({name: decode(value, shapes) for name, value in saved.items()}, models)
    if not report.complete and not partial:
        raise StateError(
            f"the checkpoint of step {chosen} in {storage.url} does not fit the models given to State: {report}; build "
            "the same models, or load what fits with partial=True"
        )
    wanted = {f"{model}/{key}" for model in models for key in saved[model]}
    tensors = empty_tensors(manifest, wanted)
    read_spans(storage, manifest, spans_of(manifest, wanted), tensors)
    loaded = set(report.loaded)
    for name, model in models.items():
        weights = decode(saved[name], tensors)
        model.load_state_dict({key: weights[key] for key in weights if f"{name}.{key}" in loaded}, strict=False)
    return report


def _compare(saved: dict[str, dict[str, torch.Tensor]], models: dict[str, torch.nn.Module]) -> LoadReport:
    theirs = {f"{name}.{key}": value for name, weights in saved.items() for key, value in weights.items()}
    own = {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}
    mismatched = {
        name: (tuple(theirs[name].shape), tuple(own[name].shape))
        for name in own
        if name in theirs and theirs[name].shape != own[name].shape
    }
    return LoadReport(
        loaded=tuple(name for name in own if name in theirs and name not in mismatched),
        missing=tuple(name for name in own if name not in theirs),
        unexpected=tuple(name for name in theirs if name not in own),
        mismatched=mismatched,
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
