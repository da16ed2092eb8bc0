"""How a world begins, ends and fails: Horovod's thread, and what stops all that it waits for."""

from __future__ import annotations

from edl_hvd.build.edits.release import REVISION, Edit, Mend
from edl_hvd.build.edits.sources import CONTEXT, OPERATIONS, STORE, TCP, TCP_CONTEXT_CLASS

REVISION_AND_ABORT = Mend(
    "Nothing ends a wait from outside: init(), a collective and shutdown() wait for the Gloo timeout.",
    "horovod/horovod#2484, #3014",
    "tests/elastic/test_engine.py",
    (
        Edit(
            OPERATIONS,
            "bool horovod_init(const int* ranks,",
            f"""int horovod_mended_revision() {{ return {REVISION}; }}

// Any thread, any time. While it is on, every wait of this world ends, with an error, and no other world forms.
void horovod_abort(bool on) {{
#if HAVE_GLOO
  GlooContext::Abort(on);
#endif
}}

""",
            "before",
        ),
        Edit(f"{CONTEXT}.h", "  void Finalize();\n", "\n  static void Abort(bool on);\n"),
        Edit(
            f"{CONTEXT}.cc",
            "void GlooContext::Initialize(const std::string& gloo_iface) {",
            """void GlooContext::Abort(bool on) {
  HTTPStore::Abort(on);
#ifdef __linux__
  gloo::transport::tcp::Context::abortAll(on);
#endif
}

""",
            "before",
        ),
        Edit(
            f"{CONTEXT}.cc",
            '#include "gloo/transport/tcp/device.h"\n',
            '#include "gloo/transport/tcp/context.h"\n',
            "before",
        ),
        Edit(f"{STORE}.h", "  void Finalize() override;\n", "\n  static void Abort(bool on);\n"),
        Edit(
            f"{STORE}.cc",
            "void HTTPStore::Finalize() {",
            """namespace {
std::atomic_bool aborted{false};

void ThrowIfAborted() {
  if (aborted) {
    GLOO_THROW_IO_EXCEPTION("The world was given up");
  }
}
} // namespace

void HTTPStore::Abort(bool on) { aborted = on; }

""",
            "before",
        ),
        Edit(f"{STORE}.cc", "#include <cstring>", "#include <atomic>\n", "before"),
        Edit(f"{STORE}.cc", "  while (!CheckKeys(keys)) {\n", "    ThrowIfAborted();\n"),
        Edit(f"{STORE}.cc", "    // sleep for 500ms before another try.\n", "    ThrowIfAborted();\n", "before"),
        Edit(
            f"{TCP}/context.h",
            TCP_CONTEXT_CLASS,
            """  // While it is on, no connection lives, and none is made. Any thread.
  static void abortAll(bool on);

""",
        ),
        Edit(
            f"{TCP}/context.cc",
            "Context::Context(std::shared_ptr<Device> device, int rank, int size)",
            """namespace {
std::atomic_bool aborted{false};
std::mutex livesMutex;

std::set<std::shared_ptr<ContextLife>>& lives() {
  // Never destroyed: Horovod's thread may outlive what is.
  static auto* all = new std::set<std::shared_ptr<ContextLife>>;
  return *all;
}
} // namespace

void Context::abortAll(bool on) {
  aborted = on;
  if (!on) {
    return;
  }
  std::set<std::shared_ptr<ContextLife>> all;
  {
    std::lock_guard<std::mutex> guard(livesMutex);
    all = lives();
  }
  for (auto& life : all) {
    std::shared_ptr<Device> device;
    {
      std::lock_guard<std::mutex> guard(life->mutex);
      if (life->context != nullptr) {
        device = life->context->device_;
      }
    }
    if (device) {
      Pair::failContext(device.get(), life);
    }
  }
}

""",
            "before",
        ),
        Edit(
            f"{TCP}/context.cc",
            """  pairs_[rank] = std::unique_ptr<transport::Pair>(
      new tcp::Pair(this, device_.get(), rank, getTimeout()));
""",
            """  std::unique_ptr<transport::Pair> pair(
      new tcp::Pair(this, device_.get(), rank, getTimeout()));
  {
    // Who aborts looks at all pairs.
    std::lock_guard<std::mutex> guard(life_->mutex);
    pairs_[rank] = std::move(pair);
  }
  if (aborted) {
    GLOO_THROW_IO_EXCEPTION("The world was given up");
  }
""",
            "instead",
        ),
        Edit(
            f"{TCP}/context.cc",
            '#include "gloo/common/error.h"\n',
            "#include <atomic>\n#include <set>\n\n",
            "before",
        ),
    ),
)

FIRST_FAILURE = Mend(
    "After a failed collective Horovod's thread sends its next message into a context whose peers still wait for the "
    "last one; they take it for the missing piece: wrong sums without an error, and aborts.",
    "",
    "benchmarks/broken_sums.py",
    (
        Edit(
            OPERATIONS,
            '        << "ExecuteOperation Failed";\n    status = Status::UnknownError(ex.what());\n',
            "    failed = true;\n",
        ),
        Edit(OPERATIONS, "  Status status;\n  try {\n", "  bool failed = false;\n", "before"),
        Edit(
            OPERATIONS,
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
            OPERATIONS,
            """    LOG(ERROR, horovod_global.global_controller->GetRank())
        << "Horovod background loop uncaught exception: " << ex.what();
""",
            """    LOG(DEBUG, horovod_global.global_controller->GetRank())
        << "Horovod's thread ends with its world: " << ex.what();
""",
            "instead",
        ),
        Edit(
            OPERATIONS,
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

FAILED_INIT = Mend(
    "An error while the world forms is caught by nobody, and ends the process with SIGABRT.",
    "horovod/horovod#2484, #2746, #2955",
    "tests/elastic/test_engine.py",
    (
        Edit(
            OPERATIONS,
            """#if HAVE_MPI
  if (global_mpi_context.IsEnabled()) {
    // Initialize gloo context if mpi context is available
""",
            "  try {\n",
            "before",
        ),
        Edit(
            OPERATIONS,
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
            OPERATIONS,
            """    horovod_global.shut_down = false;
    horovod_global.initialization_done = false;
""",
            "    horovod_global.initialization_failed = false;\n",
        ),
    ),
)
