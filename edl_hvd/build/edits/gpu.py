"""What waits for a GPU or for NCCL ends with its world, and nothing that was cut short counts as a sum."""

from __future__ import annotations

from edl_hvd.build.edits.release import Edit, Mend
from edl_hvd.build.edits.sources import NCCL, OPERATIONS

NCCL_WAITS_END = Mend(
    "A communicator of NCCL that forms, or connects at its first collective, waits for a member that has died, for "
    "ever: neither init() nor shutdown() comes back.",
    "",
    "tests/devices/test_cuda.py",
    (
        Edit(
            f"{NCCL}.h",
            "  void ShutDown();\n",
            """
  // While it is on, what waits for NCCL or the GPU ends with an error. Any thread.
  static void Abort(bool on);

  // Of whoever calls NCCL: any call may change a communicator that does not block.
  static std::recursive_mutex calls;
""",
        ),
        Edit(f"{NCCL}.h", "#include <functional>\n", "#include <mutex>\n"),
        Edit(
            f"{NCCL}.cc",
            "void commDestroyOrAbort(ncclComm_t& nccl_comm, bool elastic) {\n",
            """  if (nccl_comm == nullptr) {
    return;
  }
""",
        ),
        Edit(
            f"{NCCL}.cc",
            "ncclDataType_t GetNCCLDataType(const std::shared_ptr<Tensor> tensor) {",
            """namespace {
std::atomic_bool aborted{false};
} // namespace

std::recursive_mutex NCCLContext::calls;

void NCCLContext::Abort(bool on) { aborted = on; }

""",
            "before",
        ),
        Edit(
            f"{NCCL}.cc",
            '#include "nccl_operations.h"\n',
            "\n#include <atomic>\n#include <chrono>\n#include <thread>\n",
        ),
        Edit(
            f"{NCCL}.cc",
            "if (nccl_async_err == ncclSuccess && !elastic) {",
            "if (nccl_async_err == ncclSuccess && !elastic && !aborted) {",
            "instead",
        ),
        Edit(
            f"{NCCL}.cc",
            "                             ncclComm_t& nccl_comm) {\n  if (nccl_result != ncclSuccess) {\n"
            "    ncclCommAbort(nccl_comm);\n",
            """                             ncclComm_t& nccl_comm) {
#ifdef NCCL_NEED_NOT_BLOCK
  while (nccl_result == ncclInProgress && !aborted) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    auto asked = ncclCommGetAsyncError(nccl_comm, &nccl_result);
    nccl_result = asked == ncclSuccess ? nccl_result : asked;
  }
#endif
  if (nccl_result != ncclSuccess) {
    // ShutDown() aborts the communicator, after whoever waits for its sums.
""",
            "instead",
        ),
        Edit(
            f"{NCCL}.h",
            "ncclDataType_t GetNCCLDataType(",
            """#if HAVE_CUDA && NCCL_VERSION_CODE >= 21400
#define NCCL_NEED_NOT_BLOCK
#endif

""",
            "before",
        ),
        Edit(
            f"{NCCL}.cc",
            """    ncclComm_t new_nccl_comm;
    auto nccl_result =
        ncclCommInitRank(&new_nccl_comm, nccl_size, nccl_id, nccl_rank);
    nccl_context_->ErrorCheck("ncclCommInitRank", nccl_result, nccl_comm);
    nccl_comm = new_nccl_comm;
""",
            """#ifdef NCCL_NEED_NOT_BLOCK
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    auto nccl_result = ncclCommInitRankConfig(&nccl_comm, nccl_size, nccl_id,
                                              nccl_rank, &config);
#else
    auto nccl_result =
        ncclCommInitRank(&nccl_comm, nccl_size, nccl_id, nccl_rank);
#endif
    nccl_context_->ErrorCheck("ncclCommInitRank", nccl_result, nccl_comm);
""",
            "instead",
        ),
        Edit(
            f"{NCCL}.cc",
            "void NCCLOpContext::AsyncErrorCheck() {\n",
            """  if (aborted) {
    throw std::logic_error("The world was given up");
  }
  std::unique_lock<std::recursive_mutex> guard(NCCLContext::calls,
                                               std::try_to_lock);
  if (!guard.owns_lock()) {
    // Horovod's thread is calling NCCL.
    return;
  }
""",
        ),
        Edit(
            f"{NCCL}.cc",
            """  if (nccl_async_err != ncclSuccess) {
    // do not""",
            """#ifdef NCCL_NEED_NOT_BLOCK
  if (nccl_async_err == ncclInProgress) {
    return;
  }
#endif
""",
            "before",
        ),
        Edit(
            OPERATIONS,
            "    status = op_manager->ExecuteOperation(entries, response, process_set);\n",
            """#if HAVE_NCCL
    std::lock_guard<std::recursive_mutex> guard(NCCLContext::calls);
#endif
""",
            "before",
        ),
        Edit(
            OPERATIONS,
            "void horovod_abort(bool on) {\n",
            """#if HAVE_NCCL
  NCCLContext::Abort(on);
#endif
""",
        ),
    ),
)

SUMS_BEFORE_ABORTS = Mend(
    "ncclCommAbort ends the kernels of sums that others still wait for, and these count as done: wrong sums without an "
    "error. Sums that wait for a thread of the pool are forgotten when it ends, and their callers wait for ever.",
    "",
    "tests/devices/test_cuda.py",
    (
        Edit(
            OPERATIONS,
            '        << "Horovod\'s thread ends with its world: " << ex.what();\n',
            """#if HAVE_NCCL
    NCCLContext::Abort(true);
#endif
""",
        ),
        Edit(
            OPERATIONS,
            "    // Reset the initialization flag to allow restarting with horovod_init(...)\n",
            """#if HAVE_NCCL
    NCCLContext::Abort(false);
#endif
""",
        ),
        Edit(
            OPERATIONS,
            "shutdown:\n  // Finalize all contexts\n",
            """#if HAVE_GPU
  // First those that wait for the GPU: they use the communicators.
  gpu_context.Finalize();
#endif
""",
        ),
        Edit("horovod/common/thread_pool.cc", "  while (running_) {\n", "  while (true) {\n", "instead"),
        Edit(
            "horovod/common/thread_pool.cc",
            "    if (!running_) break;\n",
            "    if (work_queue_.empty()) break;\n",
            "instead",
        ),
        Edit(
            "horovod/common/ops/gpu_operations.cc",
            "  bool elastic = global_state_->elastic_enabled;\n",
            "  // Only then an abort ends the wait for the GPU.\n  bool elastic = true;\n",
            "instead",
        ),
    ),
)
