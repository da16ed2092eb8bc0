"""Files of Horovod and Gloo that several edits change, and an anchor that several of them have."""

from __future__ import annotations

OPERATIONS = "horovod/common/operations.cc"
STORE = "horovod/common/gloo/http_store"
CONTEXT = "horovod/common/gloo/gloo_context"
QUEUE = "horovod/common/tensor_queue"
NCCL = "horovod/common/ops/nccl_operations"
SETS = "horovod/common/process_set.cc"
TORCH = "horovod/torch/mpi_ops_v2.cc"
ADAPTER = "horovod/torch/adapter_v2"
TCP = "third_party/gloo/gloo/transport/tcp"
TCP_CONTEXT_CLASS = (
    "class Context : public ::gloo::transport::Context,\n"
    "                      public std::enable_shared_from_this<Context> {\n public:\n"
)
