"""Tensors between Python's threads and Horovod's: the queue, and the binding to torch."""

from __future__ import annotations

from edl_hvd.build.edits.release import Edit, Mend
from edl_hvd.build.edits.sources import ADAPTER, QUEUE, SETS, TORCH

CLOSED_QUEUE = Mend(
    "A tensor that is queued while Horovod's thread ends is never answered, and its name is refused in later worlds.",
    "",
    "tests/elastic/test_lost_worker.py",
    (
        Edit(f"{QUEUE}.h", "  void FinalizeTensorQueue(const Status& status);", "\n\n  void Open();"),
        Edit(
            f"{QUEUE}.h",
            "  // Tensors waiting to be allreduced or allgathered.\n",
            "  // No thread of Horovod's serves the queue any more.\n  bool closed_ = false;\n\n",
            "before",
        ),
        Edit(
            f"{QUEUE}.cc",
            "Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {\n"
            "  std::lock_guard<std::mutex> guard(mutex_);\n",
            "  if (closed_) {\n    return SHUT_DOWN_ERROR;\n  }\n",
        ),
        Edit(
            f"{QUEUE}.cc",
            "  for (std::size_t i = 0; i < entries.size(); ++i) {\n    if (tensor_table_.find(",
            "  if (closed_) {\n    return SHUT_DOWN_ERROR;\n  }\n",
            "before",
        ),
        Edit(
            f"{QUEUE}.cc",
            "void TensorQueue::FinalizeTensorQueue(const Status& status) {\n"
            "  std::lock_guard<std::mutex> guard(mutex_);\n",
            """void TensorQueue::FinalizeTensorQueue(const Status& status) {
  std::unique_lock<std::mutex> guard(mutex_);
  closed_ = true;
""",
            "instead",
        ),
        Edit(
            f"{QUEUE}.cc",
            "// Execute callback for each tensor and clear tensor queue\n",
            """// Take tensors again, for a new world.
void TensorQueue::Open() {
  std::lock_guard<std::mutex> guard(mutex_);
  closed_ = false;
}

""",
            "before",
        ),
        *(
            Edit(
                SETS,
                f"bool ProcessSet::Initialize(const {kind}Context& global_{kind.lower()}_context) {{\n"
                "  if (initialization_done) {\n    return false;\n  }\n",
                "  tensor_queue.Open();\n",
            )
            for kind in ("MPI", "Gloo")
        ),
    ),
)

NO_PYTHON_LOCK = Mend(
    "Horovod's thread lets go of tensors a little after it has said that they are done, and needs Python's lock for "
    "that. A thread that queues a tensor has that lock and waits for the queue's, which Horovod's thread holds as it "
    "gives up; and a process that is forked meanwhile waits for ever.",
    "python/cpython#112275",
    "tests/elastic/test_horovods_thread.py",
    (
        Edit(
            "horovod/common/common.cc",
            "void TensorTableEntry::FinishWithCallback(const Status& status) {\n",
            """  // Who waits for the callback holds them, too.
  context.reset();
  tensor.reset();
  output.reset();
  received_splits.reset();
""",
        ),
        Edit(
            f"{QUEUE}.cc",
            """  for (auto& e : tensor_table_) {
    e.second.FinishWithCallback(status);
  }
  tensor_table_.clear();
  while (!message_queue_.empty()) {
    message_queue_.pop();
  }
""",
            """  TensorTable unfinished;
  unfinished.swap(tensor_table_);
  while (!message_queue_.empty()) {
    message_queue_.pop();
  }
  guard.unlock(); // callbacks may wait for who queues
  for (auto& e : unfinished) {
    e.second.FinishWithCallback(status);
  }
""",
            "instead",
        ),
        Edit(
            f"{ADAPTER}.h",
            "::torch::ScalarType GetTorchDataType(DataType dtype);\n",
            """
// Keep a tensor, which Python knows, until the thread that waits for handles frees what is kept. When a reference from
// C++ goes and Python's is left, torch needs Python's lock.
void KeepForPython(::torch::Tensor&& tensor);
void FreeKept();
""",
        ),
        Edit(f"{ADAPTER}.h", "  void AddOutput(int device, ::torch::Tensor output);\n", "  ~TorchOpContext();\n"),
        Edit(
            f"{ADAPTER}.cc",
            "TorchTensor::TorchTensor(::torch::Tensor tensor) : tensor_(tensor) {}\n",
            """// Python does not know this one of the same memory.
TorchTensor::TorchTensor(::torch::Tensor tensor) : tensor_(tensor.detach()) {}

namespace {
std::mutex kept_mutex;

std::vector<::torch::Tensor>& Kept() {
  static auto* all = new std::vector<::torch::Tensor>;
  return *all;
}
} // namespace

void KeepForPython(::torch::Tensor&& tensor) {
  std::lock_guard<std::mutex> guard(kept_mutex);
  Kept().push_back(std::move(tensor));
}

void FreeKept() {
  std::vector<::torch::Tensor> all;
  {
    std::lock_guard<std::mutex> guard(kept_mutex);
    all.swap(Kept());
  }
}

TorchOpContext::~TorchOpContext() {
  for (auto& output : outputs_) {
    KeepForPython(std::move(output));
  }
}
""",
            "instead",
        ),
        Edit(f"{ADAPTER}.cc", '#include "adapter_v2.h"\n', "\n#include <mutex>\n"),
        Edit(
            TORCH,
            "      [handle, divisor, output, device](const Status& status) mutable {\n",
            "      [handle, divisor, output = output.detach(), device](const Status& status) mutable {\n",
            "instead",
        ),
        Edit(
            TORCH,
            """        handle_manager.MarkDone(handle, status);
      }, process_set_id);
  ThrowIfError(enqueue_result);

  return handle;
}

int DoAlltoallCudaOnCPU(""",
            """        KeepForPython(std::move(cpu_received_splits));
        KeepForPython(std::move(output_received_splits));
""",
            "before",
        ),
        Edit(TORCH, "  auto status = handle_manager.ReleaseHandle(handle);\n", "  FreeKept();\n"),
        Edit(
            "horovod/common/ops/gpu_operations.cc",
            "        for (auto& e : entries) {\n          timeline.End(e.tensor_name, e.output);\n",
            "        first_entry = TensorTableEntry();\n",
            "before",
        ),
    ),
)
