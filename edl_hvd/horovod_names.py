"""Names of ``horovod.torch`` that this package does not have, and what a script writes instead.

Imported only when such a name is used.
"""

from __future__ import annotations

_REMOVE = "remove it; entering the function decorated with @edl_hvd.elastic brings all workers to one state"
_BLOCKING = (
    "edl_hvd's collectives return when they are done (gradients are summed beside backward() all the same); write "
)
_GROUPED = "call {} for one tensor after the other, or for torch.cat of them"
_IN_PLACE = "write tensor.copy_({})"
_BUILD = "run the command `edl-hvd doctor`, which says what Horovod was built with and what works here"
_WORLD = (
    "remove it; collectives are those of the whole world, and for groups of ranks use torch.distributed beside edl_hvd"
)
_OBJECT = (
    "nothing is pickled here; give the value to edl_hvd.State, which brings it to all workers, or make it a tensor and "
    "write {}"
)
_CONSTANT = 'write op="{0}", e.g. edl_hvd.allreduce(tensor, op="{0}")'
_INSIDE = "it is Horovod's own module; import it from horovod if you need it"

INSTEAD = {
    # starting weights
    "broadcast_parameters": _REMOVE,
    "broadcast_optimizer_state": _REMOVE,
    "broadcast_object": _OBJECT.format("edl_hvd.broadcast(tensor, root_rank)"),
    "allgather_object": _OBJECT.format("edl_hvd.allgather(tensor)"),
    # operations
    "Average": _CONSTANT.format("mean"),
    "Sum": _CONSTANT.format("sum"),
    "Max": _CONSTANT.format("max"),
    "Min": _CONSTANT.format("min"),
    "Adasum": "gradients are averaged over samples; docs/batch_and_rate.md has AdaScale, which follows the batch, too",
    "Product": "there is no product over ranks; gather the factors with edl_hvd.allgather(tensor) and use torch.prod",
    # collectives
    "allreduce_": _IN_PLACE.format("edl_hvd.allreduce(tensor, op=…)"),
    "allreduce_async": _BLOCKING + "edl_hvd.allreduce(tensor, op=…)",
    "allreduce_async_": _BLOCKING + "tensor.copy_(edl_hvd.allreduce(tensor, op=…))",
    "sparse_allreduce_async": _BLOCKING + "edl_hvd.allreduce(tensor.to_dense(), op=…)",
    "grouped_allreduce": _GROUPED.format("edl_hvd.allreduce(tensor, op=…)"),
    "grouped_allreduce_": _GROUPED.format("tensor.copy_(edl_hvd.allreduce(tensor, op=…))"),
    "grouped_allreduce_async": _GROUPED.format("edl_hvd.allreduce(tensor, op=…)"),
    "grouped_allreduce_async_": _GROUPED.format("tensor.copy_(edl_hvd.allreduce(tensor, op=…))"),
    "allgather_async": _BLOCKING + "edl_hvd.allgather(tensor)",
    "grouped_allgather": _GROUPED.format("edl_hvd.allgather(tensor)"),
    "grouped_allgather_async": _GROUPED.format("edl_hvd.allgather(tensor)"),
    "broadcast_": _IN_PLACE.format("edl_hvd.broadcast(tensor, root_rank)"),
    "broadcast_async": _BLOCKING + "edl_hvd.broadcast(tensor, root_rank)",
    "broadcast_async_": _BLOCKING + "tensor.copy_(edl_hvd.broadcast(tensor, root_rank))",
    "alltoall": "gather with edl_hvd.allgather(tensor) and take this rank's parts",
    "alltoall_async": "gather with edl_hvd.allgather(tensor) and take this rank's parts",
    "reducescatter": "write edl_hvd.allreduce(tensor, op=…) and take this rank's rows",
    "reducescatter_async": "write edl_hvd.allreduce(tensor, op=…) and take this rank's rows",
    "grouped_reducescatter": "write edl_hvd.allreduce(tensor, op=…) and take this rank's rows",
    "grouped_reducescatter_async": "write edl_hvd.allreduce(tensor, op=…) and take this rank's rows",
    "poll": "remove it; edl_hvd's collectives return when they are done",
    "synchronize": "remove it; edl_hvd's collectives return when they are done",
    "join": "remove it; ElasticBatchSampler gives all workers the same number of steps, however many samples there are",
    # the optimizer
    "Compression": "remove the argument; gradients travel in their own type, that of the parameters",
    "SyncBatchNorm": (
        "write torch.nn.BatchNorm1d, 2d or 3d; its running statistics are averaged over the workers at the end of "
        "an epoch, and micro_batch=… fixes the samples that each batch's statistics are of"
    ),
    # where this worker is
    "cross_rank": "remove it; edl_hvd.rank() and edl_hvd.local_rank() tell one worker from the others",
    "cross_size": "remove it; edl_hvd.size() and edl_hvd.local_size() count workers",
    "ProcessSet": _WORLD,
    "add_process_set": _WORLD,
    "remove_process_set": _WORLD,
    "global_process_set": _WORLD,
    # what Horovod is made of
    "mpi_threads_supported": _BUILD,
    "mpi_enabled": _BUILD,
    "mpi_built": _BUILD,
    "gloo_enabled": _BUILD,
    "gloo_built": _BUILD,
    "nccl_built": _BUILD,
    "ddl_built": _BUILD,
    "ccl_built": _BUILD,
    "cuda_built": _BUILD,
    "rocm_built": _BUILD,
    "check_extension": _BUILD,
    "start_timeline": "set HOROVOD_TIMELINE, or the launcher's flag --timeline-filename",
    "stop_timeline": "set HOROVOD_TIMELINE, or the launcher's flag --timeline-filename",
    "HorovodInternalError": (
        "remove the except; the elastic function is run again by itself when a worker is gone, and the error is "
        "edl_hvd.errors.WorldBrokenError"
    ),
    "compression": _INSIDE,
    "functions": _INSIDE,
    "mpi_lib_v2": _INSIDE,
    "mpi_ops": _INSIDE,
    "optimizer": _INSIDE,
    "sync_batch_norm": _INSIDE,
}

_STATE = "write edl_hvd.State(model=model, optimizer=optimizer, epoch=0, …), which keeps all of it"
_SAMPLER = (
    "write edl_hvd.ElasticBatchSampler(len(dataset), …) as the loader's batch_sampler, and give it to edl_hvd.State"
)
INSTEAD_OF_ELASTIC = {
    "run": "write @edl_hvd.elastic",
    "run_fn": "write edl_hvd.elastic(function)",
    "State": _STATE,
    "ObjectState": _STATE,
    "TorchState": _STATE,
    "ElasticSampler": _SAMPLER,
    "init": "write edl_hvd.init()",
    "shutdown": "write edl_hvd.shutdown()",
    "sampler": _INSIDE,
    "state": _INSIDE,
}


def explain(name: str) -> str:
    """What to say when a script uses ``edl_hvd.name``, which does not exist."""
    return _sentence("edl_hvd", name, INSTEAD, f"module 'edl_hvd' has no attribute {name!r}")


def explain_elastic(name: str) -> str:
    """The same for ``edl_hvd.elastic.name``: here ``elastic`` is the decorator itself."""
    return _sentence(
        "edl_hvd.elastic", name, INSTEAD_OF_ELASTIC,
        f"edl_hvd.elastic has no attribute {name!r}; it is a decorator, written @edl_hvd.elastic",
    )  # fmt: skip


def _sentence(owner: str, name: str, table: dict[str, str], unknown: str) -> str:
    if name not in table:
        return unknown
    page = "from_horovod.md" if table is INSTEAD_OF_ELASTIC else "from_static_horovod.md"
    return f"{owner} has no {name!r}, which Horovod has; {table[name]} (docs/{page})"
