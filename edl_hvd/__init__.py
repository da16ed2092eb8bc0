"""Elastic training for PyTorch on Horovod: hosts come and go, the job goes on and learns the same thing.

``import edl_hvd`` alone imports neither torch nor Horovod; names load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Public name -> module that defines it. The whole public surface of the package is this table.
_HOMES = {
    "init": "edl_hvd.worker.process",
    "shutdown": "edl_hvd.worker.process",
    "is_initialized": "edl_hvd.worker.process",
    "device": "edl_hvd.worker.process",
    "rank": "edl_hvd.worker.process",
    "size": "edl_hvd.worker.process",
    "local_rank": "edl_hvd.worker.process",
    "local_size": "edl_hvd.worker.process",
    "allreduce": "edl_hvd.worker.calls",
    "allgather": "edl_hvd.worker.calls",
    "broadcast": "edl_hvd.worker.calls",
    "barrier": "edl_hvd.worker.calls",
    "State": "edl_hvd.worker.state",
    "Step": "edl_hvd.worker.batch_loops.steps",
    "elastic": "edl_hvd.worker.elastic",
    "DistributedOptimizer": "edl_hvd.worker.training.optimizer",
    "GradScaler": "edl_hvd.worker.training.step_gates",
    "schedule": "edl_hvd.worker.training.scheduler",
    "ElasticBatchSampler": "edl_hvd.data.sampler",
    "EvaluationSampler": "edl_hvd.data.evaluation",
    "SeededDataset": "edl_hvd.data.seeded",
    "ElasticShards": "edl_hvd.data.shards",
    "TarSamples": "edl_hvd.tar_samples",
    "count_samples": "edl_hvd.data.shard_index",
    "Order": "edl_hvd.data.order",
    "WeightedOrder": "edl_hvd.data.order",
    "GroupedOrder": "edl_hvd.data.order",
    "GlobalBatch": "edl_hvd.rescale.policy",
    "WorkerBatch": "edl_hvd.rescale.policy",
    "distill": "edl_hvd.distill",
    "errors": "edl_hvd.errors",
    "metrics": "edl_hvd.metrics",
}

# What the table does at run time, for type checkers and editors; a test compares the two.
if TYPE_CHECKING:
    from edl_hvd import distill as distill
    from edl_hvd import errors as errors
    from edl_hvd import metrics as metrics
    from edl_hvd.data.evaluation import EvaluationSampler as EvaluationSampler
    from edl_hvd.data.order import GroupedOrder as GroupedOrder
    from edl_hvd.data.order import Order as Order
    from edl_hvd.data.order import WeightedOrder as WeightedOrder
    from edl_hvd.data.sampler import ElasticBatchSampler as ElasticBatchSampler
    from edl_hvd.data.seeded import SeededDataset as SeededDataset
    from edl_hvd.data.shard_index import count_samples as count_samples
    from edl_hvd.data.shards import ElasticShards as ElasticShards
    from edl_hvd.rescale.policy import GlobalBatch as GlobalBatch
    from edl_hvd.rescale.policy import WorkerBatch as WorkerBatch
    from edl_hvd.tar_samples import TarSamples as TarSamples
    from edl_hvd.worker.batch_loops.steps import Step as Step
    from edl_hvd.worker.calls import allgather as allgather
    from edl_hvd.worker.calls import allreduce as allreduce
    from edl_hvd.worker.calls import barrier as barrier
    from edl_hvd.worker.calls import broadcast as broadcast
    from edl_hvd.worker.elastic import elastic as elastic
    from edl_hvd.worker.process import device as device
    from edl_hvd.worker.process import init as init
    from edl_hvd.worker.process import is_initialized as is_initialized
    from edl_hvd.worker.process import local_rank as local_rank
    from edl_hvd.worker.process import local_size as local_size
    from edl_hvd.worker.process import rank as rank
    from edl_hvd.worker.process import shutdown as shutdown
    from edl_hvd.worker.process import size as size
    from edl_hvd.worker.state import State as State
    from edl_hvd.worker.training.optimizer import DistributedOptimizer as DistributedOptimizer
    from edl_hvd.worker.training.scheduler import schedule as schedule
    from edl_hvd.worker.training.step_gates import GradScaler as GradScaler

__all__ = ["__version__", *sorted(_HOMES)]


if not TYPE_CHECKING:  # to a type checker it would mean that every name exists

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            if name.startswith("_"):  # asked for by Python's own machinery, again and again
                raise AttributeError(f"module 'edl_hvd' has no attribute {name!r}")
            raise AttributeError(importlib.import_module("edl_hvd.horovod_names").explain(name))
        try:
            home = importlib.import_module(_HOMES[name])
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "numpy"):
                raise
            raise ImportError(
                f"edl_hvd.{name} needs {error.name}, which this Python does not have; install it with "
                "pip install 'edl-hvd[torch]', or by torch's own instructions for this machine",
                name=error.name,
            ) from None
        value = home if _HOMES[name] == f"edl_hvd.{name}" else getattr(home, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
