"""What is mended in Horovod 0.28.1 and the Gloo that it brings along: every defect with its edits.

``horovod_mended_revision()`` of the built library tells ``REVISION``; it rises with every change of this file.
"""

from __future__ import annotations

from edl_hvd.build.edits import Edit, Mend

REVISION = 1

_OPERATIONS = "horovod/common/operations.cc"
_STORE = "horovod/common/gloo/http_store.cc"
_QUEUE = "horovod/common/tensor_queue"
_SETS = "horovod/common/process_set.cc"
_TCP = "third_party/gloo/gloo/transport/tcp"

_REVISION_AND_ABORT = Mend(
    "A call of init() cannot be ended from outside: it waits for the Gloo timeout.",
    "horovod/horovod#2484",
    "tests/elastic/test_engine.py",
    (
        Edit(
            _OPERATIONS,
            "bool horovod_init(const int* ranks,",
            f"""int horovod_mended_revision() {{ return {REVISION}; }}

// Any thread, any time. While it is on, an init() that waits for the key-value store ends, with an error.
void horovod_abort(bool on) {{ HTTPStore::Abort(on); }}

""",
            "before",
        ),
        Edit(_OPERATIONS, '#include "gloo/gloo_controller.h"', '\n#include "gloo/http_store.h"'),
        Edit(
            "horovod/common/gloo/http_store.h",
            "  void Finalize() override;\n",
            """
  // Ends, while it is on, whatever waits for a store. Any thread.
  static void Abort(bool on);
""",
        ),
        Edit(
            _STORE,
            "void HTTPStore::Finalize() {",
            """namespace {
std::atomic_bool aborted{false};

void ThrowIfAborted() {
  if (aborted) {
    GLOO_THROW_IO_EXCEPTION("The world was given up while it formed");
  }
}
} // namespace

void HTTPStore::Abort(bool on) { aborted = on; }

""",
            "before",
        ),
        Edit(_STORE, "#include <cstring>", "#include <atomic>\n", "before"),
        Edit(_STORE, "  while (!CheckKeys(keys)) {\n", "    ThrowIfAborted();\n"),
        Edit(_STORE, "    // sleep for 500ms before another try.\n", "    ThrowIfAborted();\n", "before"),
    ),
)

_FIRST_FAILURE = Mend(
    "After a failed collective Horovod's thread sends its next message into a context whose peers still wait for the "
    "last one; they take it for the missing piece: wrong sums without an error, and aborts.",
    "",
    "benchmarks/broken_sums.py",
    (
        Edit(
            _OPERATIONS,
            '        << "ExecuteOperation Failed";\n    status = Status::UnknownError(ex.what());\n',
            "    failed = true;\n",
        ),
        Edit(_OPERATIONS, "  Status status;\n  try {\n", "  bool failed = false;\n", "before"),
        Edit(
            _OPERATIONS,
            "      timeline.End(e.tensor_name, status.ok() ? e.output : nullptr);\n"
            "      e.FinishWithCallback(status);\n    }\n  }\n",
            """
  if (failed) {
    // Nothing more is said in this world.
    throw std::runtime_error(status.reason());
  }
""",
        ),
        Edit(
            _OPERATIONS,
            """    LOG(ERROR, horovod_global.global_controller->GetRank())
        << "Horovod background loop uncaught exception: " << ex.what();
""",
            """    LOG(DEBUG, horovod_global.global_controller->GetRank())
        << "Horovod's thread ends with its world: " << ex.what();
""",
            "instead",
        ),
        Edit(
            _OPERATIONS,
            """    horovod_global.process_set_table.Finalize(global_gloo_context,
                                              SHUT_DOWN_ERROR);
""",
            """    try {
      horovod_global.process_set_table.Finalize(global_gloo_context,
                                                SHUT_DOWN_ERROR);
    } catch (const std::exception& ex) {
      // The members cannot agree any more on the end of further process sets.
      horovod_global.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
    }
""",
            "instead",
        ),
    ),
)

_FAILED_INIT = Mend(
    "An error while the world forms is caught by nobody, and ends the process with SIGABRT.",
    "horovod/horovod#2484, #2746, #2955",
    "tests/elastic/test_engine.py",
    (
        Edit(
            _OPERATIONS,
            """#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context if mpi context is available
""",
            "  try {\n",
            "before",
        ),
        Edit(
            _OPERATIONS,
            """    global_gloo_context.Initialize(ParseGlooIface());
  }
  if (state.control_operation == LibType::GLOO) {
    // Initializes global controller
    state.process_set_table.Initialize(global_gloo_context);
  }
""",
            """  } catch (const std::exception& ex) {
    LOG(WARNING) << "Horovod could not be initialized: " << ex.what();
    state.process_set_table.Get(0).Finalize(SHUT_DOWN_ERROR);
    global_gloo_context.Finalize();
#if HAVE_MPI
    global_mpi_context.Finalize(mpi_ctx_manager);
#endif
    state.initialization_failed = true;
    return;
  }
""",
        ),
        Edit(
            _OPERATIONS,
            """    horovod_global.shut_down = false;
    horovod_global.initialization_done = false;
""",
            "    horovod_global.initialization_failed = false;\n",
        ),
    ),
)

_CLOSED_QUEUE = Mend(
    "A tensor that is queued while Horovod's thread ends is never answered, and its name is refused in later worlds.",
    "",
    "tests/elastic/test_lost_worker.py",
    (
        Edit(f"{_QUEUE}.h", "  void FinalizeTensorQueue(const Status& status);", "\n\n  void Open();"),
        Edit(
            f"{_QUEUE}.h",
            "  // Tensors waiting to be allreduced or allgathered.\n",
            "  // No thread of Horovod's serves the queue any more.\n  bool closed_ = false;\n\n",
            "before",
        ),
        Edit(
            f"{_QUEUE}.cc",
            "Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {\n"
            "  std::lock_guard<std::mutex> guard(mutex_);\n",
            "  if (closed_) {\n    return SHUT_DOWN_ERROR;\n  }\n",
        ),
        Edit(
            f"{_QUEUE}.cc",
            "  for (std::size_t i = 0; i < entries.size(); ++i) {\n    if (tensor_table_.find(",
            "  if (closed_) {\n    return SHUT_DOWN_ERROR;\n  }\n",
            "before",
        ),
        Edit(
            f"{_QUEUE}.cc",
            "void TensorQueue::FinalizeTensorQueue(const Status& status) {\n"
            "  std::lock_guard<std::mutex> guard(mutex_);\n",
            "  closed_ = true;\n",
        ),
        Edit(
            f"{_QUEUE}.cc",
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
                _SETS,
                f"bool ProcessSet::Initialize(const {kind}Context& global_{kind.lower()}_context) {{\n"
                "  if (initialization_done) {\n    return false;\n  }\n",
                "  tensor_queue.Open();\n",
            )
            for kind in ("MPI", "Gloo")
        ),
    ),
)

_ONE_PAIR_FAILS_ALL = Mend(
    "A member that sees a connection fail keeps its other ones open, and its neighbours wait on them for the Gloo "
    "timeout; a send or receive under way when its connection fails is forgotten, and waited for as long.",
    "",
    "benchmarks/recovery.py",
    (
        Edit(
            f"{_TCP}/context.h",
            "class Context : public",
            """// Held by what is deferred to the loop's thread, which may outlive the context.
struct ContextLife {
  std::mutex mutex;
  Context* context;
};

""",
            "before",
        ),
        Edit(
            f"{_TCP}/context.h",
            "  std::shared_ptr<Device> device_;\n",
            """
  std::shared_ptr<ContextLife> life_;

  // Let every pair fail whose lock is free; whether all have. From the loop's thread, which must wait for none.
  bool trySignalException(const std::string& msg);
""",
        ),
        Edit(
            f"{_TCP}/context.cc",
            "device_(std::move(device)) {}",
            """device_(std::move(device)), life_(std::make_shared<ContextLife>()) {
  life_->context = this;
}""",
            "instead",
        ),
        Edit(
            f"{_TCP}/context.cc",
            "Context::~Context() {\n",
            """  {
    std::lock_guard<std::mutex> guard(life_->mutex);
    life_->context = nullptr;
  }
""",
        ),
        Edit(
            f"{_TCP}/context.cc",
            "void Context::signalException(const std::string& msg) {",
            """bool Context::trySignalException(const std::string& msg) {
  bool all = true;
  for (auto& pair : pairs_) {
    if (pair) {
      all &= reinterpret_cast<tcp::Pair*>(pair.get())->trySignalException(msg);
    }
  }
  return all;
}

""",
            "before",
        ),
        Edit(f"{_TCP}/pair.h", "\nclass Buffer;\n", "struct ContextLife;\n"),
        Edit(
            f"{_TCP}/pair.h",
            "  std::exception_ptr signalExceptionExternal(const std::string& msg);\n",
            """
  // Fail, unless another thread has the lock; whether this has failed.
  bool trySignalException(const std::string& msg);

  // Let all pairs of a context fail, from the loop's thread, as soon as their locks are free.
  static void failContext(Device* device, std::shared_ptr<ContextLife> life);
""",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "void Pair::signalException(const std::string& msg) {\n",
            """bool Pair::trySignalException(const std::string& msg) {
  std::unique_lock<std::mutex> lock(m_, std::try_to_lock);
  if (!lock) {
    return false;
  }
  if (ex_ == nullptr && state_ != CLOSED) {
    signalException(msg);
  }
  return true;
}

void Pair::failContext(Device* device, std::shared_ptr<ContextLife> life) {
  device->loop_->defer([device, life] {
    std::lock_guard<std::mutex> guard(life->mutex);
    if (life->context != nullptr &&
        !life->context->trySignalException("Another connection of this world failed")) {
      // Who has a lock may wait for the loop's next turn.
      failContext(device, life);
    }
  });
}

""",
            "before",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "void Pair::signalException(std::exception_ptr ex) {\n  GLOO_ENFORCE(ex_ == nullptr);\n",
            """void Pair::signalException(std::exception_ptr ex) {
  if (ex_ != nullptr) {
    return;
  }
  failContext(device_, context_->life_);
""",
            "instead",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "      op.buf->signalException(ex);\n    }\n",
            """    NonOwningPtr<UnboundBuffer> underWay(op.ubuf);
    if (underWay) {
      underWay->signalException(ex);
    }
""",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "  // Store exception_ptr and signal any threads in the async path.\n",
            """  // The receive under way.
  {
    NonOwningPtr<UnboundBuffer> underWay(rx_.ubuf);
    if (underWay) {
      underWay->signalException(ex);
    }
  }

""",
            "before",
        ),
    ),
)

_NO_EXCEPTION_ESCAPES = Mend(
    "An exception in the thread of Gloo's event loop ends the process with SIGABRT, such as "
    "`op.preamble.length <= op.nbytes`.",
    "",
    "benchmarks/broken_sums.py",
    (
        Edit(f"{_TCP}/pair.cc", "  if (state_ == CONNECTED) {\n    handleReadWrite(events);\n", "  try {\n", "before"),
        Edit(
            f"{_TCP}/pair.cc",
            "    handleConnecting();\n    return;\n  }\n",
            """  } catch (const std::exception& ex) {
    signalException(ex.what());
    return;
  }
  if (state_ == CLOSED) {
    return;
  }
""",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            """  // State must be <= CONNECTED.
  // If state is CLOSED; this function will NOT be called. Refer to
""",
            """  // It failed while this event was on its way.
  if (state_ == CLOSED || ex_ != nullptr) {
    return;
  }

""",
            "before",
        ),
    ),
)

MENDS: tuple[Mend, ...] = (
    _REVISION_AND_ABORT,
    _FIRST_FAILURE,
    _FAILED_INIT,
    _CLOSED_QUEUE,
    _ONE_PAIR_FAILS_ALL,
    _NO_EXCEPTION_ESCAPES,
)
