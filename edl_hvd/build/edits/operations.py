"""What is mended in Horovod 0.28.1 and the Gloo that it brings along: every defect with its edits.

``horovod_mended_revision()`` of the built library tells ``REVISION``; it rises with every change of this file.
"""

from __future__ import annotations

from edl_hvd.build.edits import Edit, Mend

REVISION = 3

_OPERATIONS = "horovod/common/operations.cc"
_STORE = "horovod/common/gloo/http_store"
_CONTEXT = "horovod/common/gloo/gloo_context"
_QUEUE = "horovod/common/tensor_queue"
_SETS = "horovod/common/process_set.cc"
_TORCH = "horovod/torch/mpi_ops_v2.cc"
_ADAPTER = "horovod/torch/adapter_v2"
_TCP = "third_party/gloo/gloo/transport/tcp"
_TCP_CONTEXT_CLASS = (
    "class Context : public ::gloo::transport::Context,\n"
    "                      public std::enable_shared_from_this<Context> {\n public:\n"
)

_REVISION_AND_ABORT = Mend(
    "Nothing ends a wait from outside: init(), a collective and shutdown() wait for the Gloo timeout.",
    "horovod/horovod#2484, #3014",
    "tests/elastic/test_engine.py",
    (
        Edit(
            _OPERATIONS,
            "bool horovod_init(const int* ranks,",
            f"""int horovod_mended_revision() {{ return {REVISION}; }}

// Any thread, any time. While it is on, every wait of this world ends, with an error, and no other world forms.
void horovod_abort(bool on) {{
  horovod_global.aborted = on;
#if HAVE_GLOO
  GlooContext::Abort(on);
#endif
}}

""",
            "before",
        ),
        Edit(
            "horovod/common/global_state.h",
            "  std::atomic_bool initialization_failed{false};\n",
            """
  // This world was given up.
  std::atomic_bool aborted{false};
""",
        ),
        Edit(
            "horovod/common/ops/nccl_operations.cc",
            "void NCCLOpContext::AsyncErrorCheck() {\n",
            """  if (global_state_->aborted) {
    // Horovod's thread ends with its world, and calls ncclCommAbort.
    throw std::logic_error("The world was given up");
  }
""",
        ),
        Edit(f"{_CONTEXT}.h", "  void Finalize();\n", "\n  static void Abort(bool on);\n"),
        Edit(
            f"{_CONTEXT}.cc",
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
            f"{_CONTEXT}.cc",
            '#include "gloo/transport/tcp/device.h"\n',
            '#include "gloo/transport/tcp/context.h"\n',
            "before",
        ),
        Edit(f"{_STORE}.h", "  void Finalize() override;\n", "\n  static void Abort(bool on);\n"),
        Edit(
            f"{_STORE}.cc",
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
        Edit(f"{_STORE}.cc", "#include <cstring>", "#include <atomic>\n", "before"),
        Edit(f"{_STORE}.cc", "  while (!CheckKeys(keys)) {\n", "    ThrowIfAborted();\n"),
        Edit(f"{_STORE}.cc", "    // sleep for 500ms before another try.\n", "    ThrowIfAborted();\n", "before"),
        Edit(
            f"{_TCP}/context.h",
            _TCP_CONTEXT_CLASS,
            """  // While it is on, no connection lives, and none is made. Any thread.
  static void abortAll(bool on);

""",
        ),
        Edit(
            f"{_TCP}/context.cc",
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
            f"{_TCP}/context.cc",
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
            f"{_TCP}/context.cc",
            '#include "gloo/common/error.h"\n',
            "#include <atomic>\n#include <set>\n\n",
            "before",
        ),
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
            """void TensorQueue::FinalizeTensorQueue(const Status& status) {
  std::unique_lock<std::mutex> guard(mutex_);
  closed_ = true;
""",
            "instead",
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

_NO_PYTHON_LOCK = Mend(
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
            f"{_QUEUE}.cc",
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
            f"{_ADAPTER}.h",
            "::torch::ScalarType GetTorchDataType(DataType dtype);\n",
            """
// Keep a tensor, which Python knows, until the thread that waits for handles frees what is kept. When a reference from
// C++ goes and Python's is left, torch needs Python's lock.
void KeepForPython(::torch::Tensor&& tensor);
void FreeKept();
""",
        ),
        Edit(f"{_ADAPTER}.h", "  void AddOutput(int device, ::torch::Tensor output);\n", "  ~TorchOpContext();\n"),
        Edit(
            f"{_ADAPTER}.cc",
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
        Edit(f"{_ADAPTER}.cc", '#include "adapter_v2.h"\n', "\n#include <mutex>\n"),
        Edit(
            _TORCH,
            "      [handle, divisor, output, device](const Status& status) mutable {\n",
            "      [handle, divisor, output = output.detach(), device](const Status& status) mutable {\n",
            "instead",
        ),
        Edit(
            _TORCH,
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
        Edit(_TORCH, "  auto status = handle_manager.ReleaseHandle(handle);\n", "  FreeKept();\n"),
        Edit(
            "horovod/common/ops/gpu_operations.cc",
            "        for (auto& e : entries) {\n          timeline.End(e.tensor_name, e.output);\n",
            "        first_entry = TensorTableEntry();\n",
            "before",
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
  std::lock_guard<std::mutex> guard(livesMutex);
  lives().insert(life_);
}""",
            "instead",
        ),
        Edit(
            f"{_TCP}/context.cc",
            "Context::~Context() {\n",
            """  {
    std::lock_guard<std::mutex> guard(livesMutex);
    lives().erase(life_);
  }
  {
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

_ONE_MESH = Mend(
    "A world connects all its members six times, although one time serves; each time every member asks the key-value "
    "store for every other, every 10 ms; and the connections of process sets ignore the interface that was given.",
    "horovod/horovod#2015, #2419",
    "benchmarks/world_start.py",
    (
        Edit(
            f"{_STORE}.h",
            "  bool CheckKeys(const std::vector<std::string>& keys);\n",
            """
  // Give one's own value, and get those of all ranks as soon as they are there. Only edl_hvd's store serves this.
  std::vector<std::vector<char>> Exchange(const std::vector<char>& own, int size,
                                          const std::chrono::milliseconds& timeout);
""",
        ),
        Edit(
            f"{_STORE}.h",
            "      : rank_(rank) {\n",
            "      : server_(server_ip), port_(port), scope_(scope), rank_(rank) {\n",
            "instead",
        ),
        Edit(
            f"{_STORE}.h",
            "  std::string url_prefix_;\n",
            "  std::string server_;\n  int port_;\n  std::string scope_;\n",
            "before",
        ),
        Edit(
            f"{_STORE}.cc",
            "void HTTPStore::Finalize() {",
            """namespace {
// A connection to the store, closed with its scope. Every wait ends with the world.
class StoreConnection {
public:
  StoreConnection(const std::string& server, int port, const std::chrono::milliseconds& timeout)
      : deadline_(std::chrono::steady_clock::now() + timeout) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (getaddrinfo(server.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
      GLOO_THROW_IO_EXCEPTION("The key-value store has no address: " + server);
    }
    fd_ = socket(found->ai_family, SOCK_STREAM, 0);
    int error = 0;
    if (fd_ == -1 || fcntl(fd_, F_SETFL, O_NONBLOCK) == -1 || fcntl(fd_, F_SETFD, FD_CLOEXEC) == -1 ||
        (connect(fd_, found->ai_addr, found->ai_addrlen) == -1 && errno != EINPROGRESS)) {
      error = errno;
    }
    freeaddrinfo(found);
    if (error == 0) {
      try {
        Await(POLLOUT);
      } catch (...) {
        close(fd_);
        throw;
      }
      socklen_t length = sizeof(error);
      getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &length);
    }
    if (error != 0) {
      close(fd_);
      GLOO_THROW_IO_EXCEPTION("The key-value store cannot be reached: " + std::string(strerror(error)));
    }
  }

  ~StoreConnection() { close(fd_); }

  void Send(const std::string& text) {
    for (size_t at = 0; at < text.size();) {
      auto sent = send(fd_, text.data() + at, text.size() - at, MSG_NOSIGNAL);
      at += Count(sent);
      if (sent <= 0) {
        Await(POLLOUT);
      }
    }
  }

  std::string ReceiveAnswer() {
    std::string text;
    std::vector<char> part(1 << 16);
    for (;;) {
      // Not until the end of the connection, which a forked process may keep open.
      auto head = text.find("\\r\\n\\r\\n"), field = text.find("Content-Length: ");
      if (head != std::string::npos && field < head &&
          text.size() >= head + 4 + std::stoul(text.substr(field + 16))) {
        return text;
      }
      Await(POLLIN);
      auto received = recv(fd_, part.data(), part.size(), 0);
      if (received == 0) {
        return text;
      }
      text.append(part.data(), Count(received));
    }
  }

private:
  static size_t Count(ssize_t result) {
    if (result >= 0) {
      return result;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
      GLOO_THROW_IO_EXCEPTION("The key-value store is gone: " + std::string(strerror(errno)));
    }
    return 0;
  }

  void Await(short events) {
    pollfd waited{fd_, events, 0};
    do {
      ThrowIfAborted();
      if (std::chrono::steady_clock::now() > deadline_) {
        GLOO_THROW_IO_EXCEPTION("A member did not come to the key-value store in time");
      }
    } while (poll(&waited, 1, 10) <= 0);
  }

  std::chrono::steady_clock::time_point deadline_;
  int fd_;
};

std::string Authorization() {
  auto token = std::getenv("HOROVOD_GLOO_RENDEZVOUS_TOKEN");
  return token == nullptr ? "" : "Authorization: Bearer " + std::string(token);
}
} // namespace

std::vector<std::vector<char>> HTTPStore::Exchange(const std::vector<char>& own, int size,
                                                   const std::chrono::milliseconds& timeout) {
  StoreConnection connection(server_, port_, timeout);
  auto authorization = Authorization();
  connection.Send("PUT /" + scope_ + "/" + std::to_string(rank_) + "?of=" + std::to_string(size) +
                  " HTTP/1.1\\r\\n" + (authorization.empty() ? "" : authorization + "\\r\\n") +
                  "Content-Length: " + std::to_string(own.size()) + "\\r\\n\\r\\n" +
                  std::string(own.begin(), own.end()));
  auto answer = connection.ReceiveAnswer();
  auto head = answer.find("\\r\\n\\r\\n");
  if (head == std::string::npos || answer.compare(0, 12, "HTTP/1.1 200") != 0) {
    GLOO_THROW_IO_EXCEPTION("The key-value store answered: " + answer.substr(0, answer.find('\\r')));
  }
  std::vector<std::vector<char>> values;
  for (size_t at = head + 4; at + 4 <= answer.size();) {
    uint32_t length;
    memcpy(&length, answer.data() + at, 4);
    length = ntohl(length);
    at += 4;
    if (length > answer.size() - at) {
      break;
    }
    values.emplace_back(answer.begin() + at, answer.begin() + at + length);
    at += length;
  }
  if (values.size() != static_cast<size_t>(size)) {
    GLOO_THROW_IO_EXCEPTION("The key-value store closed in the middle of its answer");
  }
  return values;
}

""",
            "before",
        ),
        Edit(
            f"{_STORE}.cc",
            "      http::Response response = request.send(method, body);\n",
            """      std::vector<std::string> headers;
      if (!Authorization().empty()) {
        headers.push_back(Authorization());
      }
      http::Response response = request.send(method, body, headers);
""",
            "instead",
        ),
        Edit(
            f"{_STORE}.cc",
            "#include <cstring>",
            """#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
""",
            "before",
        ),
        Edit(
            f"{_CONTEXT}.cc",
            "std::shared_ptr<gloo::Context> Rendezvous(const std::string& prefix,",
            """// Connections between all processes of a context, whose addresses are exchanged in one request.
class Mesh : public gloo::rendezvous::Context {
public:
  Mesh(int rank, int size) : gloo::rendezvous::Context(rank, size) {}

  void Connect(HTTPStore& store, const std::shared_ptr<gloo::transport::Device>& dev) {
    auto transport = dev->createContext(rank, size);
    transport->setTimeout(getTimeout());
    std::vector<char> own;
    for (int i = 0; i < size; ++i) {
      if (i != rank) {
        auto& pair = transport->createPair(i);
        pair->setLocalRank(0);
        auto address = pair->address().bytes();
        own.insert(own.end(), address.begin(), address.end());
      }
    }
    if (size > 1) {
      auto all = store.Exchange(own, size, getTimeout());
      for (int i = 0; i < size; ++i) {
        if (i != rank) {
          transport->getPair(i)->connect(extractAddress(all[i], i));
        }
      }
    }
    device_ = dev;
    transportContext_ = std::move(transport);
  }
};

// Where edl_hvd serves the key-value store it names the world by a key.
bool StoreExchanges() { return std::getenv("HOROVOD_WORLD_KEY") != nullptr; }

""",
            "before",
        ),
        Edit(
            f"{_CONTEXT}.cc",
            """  std::unique_ptr<GlooStore> store;
  if (server_addr_env != nullptr) {
""",
            """  if (server_addr_env != nullptr && StoreExchanges()) {
    auto mesh = std::make_shared<Mesh>(rank, size);
    mesh->setTimeout(timeout);
    HTTPStore exchanging(server_addr_env, server_port, prefix, rank);
    mesh->Connect(exchanging, dev);
    return mesh;
  }
""",
            "before",
        ),
        Edit(
            f"{_CONTEXT}.cc",
            "  if (elastic && reset_) {\n",
            "  if (elastic && reset_ && !StoreExchanges()) {\n",
            "instead",
        ),
        Edit(
            f"{_CONTEXT}.cc",
            "  local_ctx = Rendezvous(HOROVOD_GLOO_LOCAL_PREFIX + hostname_,\n"
            "                         rendezvous_addr_env",
            """  bool hierarchical = false;
  for (auto name : {HOROVOD_HIERARCHICAL_ALLREDUCE, HOROVOD_HIERARCHICAL_ALLGATHER,
                    HOROVOD_TORUS_ALLREDUCE, HOROVOD_AUTOTUNE}) {
    hierarchical |= GetBoolEnvOrDefault(name, false);
  }
  if (!hierarchical) {
    // Nothing speaks in these contexts. Who is in them is told in the world's.
    std::vector<int64_t> all(3 * size);
    int64_t own[] = {static_cast<int64_t>(std::hash<std::string>{}(hostname_)), local_rank, cross_rank};
    gloo::AllgatherOptions opts(ctx);
    opts.setInput(own, 3);
    opts.setOutput(all.data(), 3 * size);
    gloo::allgather(opts);
    local_ranks.assign(local_size, rank);
    cross_ranks.assign(cross_size, rank);
    for (int other = 0; other < size; ++other) {
      auto theirs = &all[3 * other];
      if (theirs[0] == own[0] && theirs[1] >= 0 && theirs[1] < local_size) {
        local_ranks[theirs[1]] = other;
      }
      if (theirs[1] == own[1] && theirs[2] >= 0 && theirs[2] < cross_size) {
        cross_ranks[theirs[2]] = other;
      }
    }
    local_ctx = std::make_shared<gloo::rendezvous::Context>(local_rank, local_size);
    cross_ctx = std::make_shared<gloo::rendezvous::Context>(cross_rank, cross_size);
    return;
  }

""",
            "before",
        ),
        Edit(
            f"{_CONTEXT}.h",
            "  std::shared_ptr<gloo::Context> local_ctx = nullptr;\n",
            """
  // Global ranks of the processes in local_ctx and cross_ctx, where those are not connected; else empty.
  std::vector<int> local_ranks;
  std::vector<int> cross_ranks;
""",
        ),
        Edit(
            f"{_CONTEXT}.cc",
            "  attr device_attr;\n  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
            "  auto dev = CreateDevice(device_attr);\n\n  global_ctx",
            """  gloo_iface_ = global_context.gloo_iface_;
  if (registered_ranks.empty()) {
    // The set of all processes speaks through the connections of the world.
    timeout_ = global_context.timeout_;
    hostname_ = global_context.hostname_;
    global_ctx = ctx = global_context.ctx;
    local_ctx = global_context.local_ctx;
    cross_ctx = global_context.cross_ctx;
    local_ranks = global_context.local_ranks;
    cross_ranks = global_context.cross_ranks;
    return;
  }

""",
            "before",
        ),
        *(
            Edit(
                f"{_CONTEXT}.cc",
                f"      EnumerateSubRanks(global_context.ctx, global_context.{kind}_ctx);\n",
                f"""      global_context.{kind}_ranks.empty()
          ? EnumerateSubRanks(global_context.ctx, global_context.{kind}_ctx)
          : global_context.{kind}_ranks;
""",
                "instead",
            )
            for kind in ("local", "cross")
        ),
        Edit(
            "horovod/common/gloo/gloo_controller.cc",
            "    {\n      gloo::AllgatherOptions opts(gloo_context_.local_ctx);\n",
            """    if (!gloo_context_.local_ranks.empty()) {
      local_comm_ranks_ = gloo_context_.local_ranks;
    } else {
      gloo::AllgatherOptions opts(gloo_context_.local_ctx);
""",
            "instead",
        ),
    ),
)

_KEYED_HELLO = Mend(
    "The first process that connects to a listening pair is taken for the member that is expected there, whoever it "
    "is and whether it says anything; the world then never forms.",
    "",
    "tests/elastic/test_strangers.py",
    (
        Edit(
            f"{_CONTEXT}.cc",
            "  timeout_ = GetTimeoutFromEnv();\n\n  auto host_env",
            """#ifdef __linux__
  auto key = std::getenv("HOROVOD_WORLD_KEY");
  gloo::transport::tcp::Context::setKey(key == nullptr ? "" : key);
#endif
""",
            "before",
        ),
        Edit(
            f"{_TCP}/context.h",
            _TCP_CONTEXT_CLASS,
            """  // What the members of the next world prove to know. While there is none.
  static void setKey(const std::string& key);

  // HMAC-SHA256 (RFC 2104) with this key: 32 bytes.
  static std::string mac(const std::string& message);

""",
        ),
        Edit(
            f"{_TCP}/context.cc",
            "Context::Context(std::shared_ptr<Device> device, int rank, int size)",
            """namespace {
std::string worldKey;

// FIPS 180-4.
std::string sha256(std::string text) {
  static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1,
    0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3,
    0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786,
    0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13,
    0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a,
    0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t hash[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c,
    0x1f83d9ab, 0x5be0cd19};
  uint64_t bits = 8 * text.size();
  text += '\\x80';
  text.resize((text.size() + 8 + 63) / 64 * 64 - 8);
  for (int shift = 56; shift >= 0; shift -= 8) {
    text += static_cast<char>(bits >> shift);
  }
  auto turn = [](uint32_t x, int n) { return x >> n | x << (32 - n); };
  for (size_t at = 0; at < text.size(); at += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++) {
      w[i] = 0;
      for (int j = 0; j < 4; j++) {
        w[i] = w[i] << 8 | static_cast<uint8_t>(text[at + 4 * i + j]);
      }
    }
    for (int i = 16; i < 64; i++) {
      w[i] = w[i - 16] + w[i - 7] + (turn(w[i - 15], 7) ^ turn(w[i - 15], 18) ^ w[i - 15] >> 3) +
          (turn(w[i - 2], 17) ^ turn(w[i - 2], 19) ^ w[i - 2] >> 10);
    }
    uint32_t v[8];
    std::copy(hash, hash + 8, v);
    for (int i = 0; i < 64; i++) {
      auto first = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) +
          ((v[4] & v[5]) ^ (~v[4] & v[6])) + constants[i] + w[i];
      auto second = (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) +
          ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
      std::copy_backward(v, v + 7, v + 8);
      v[4] += first;
      v[0] = first + second;
    }
    for (int i = 0; i < 8; i++) {
      hash[i] += v[i];
    }
  }
  std::string result;
  for (auto word : hash) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      result += static_cast<char>(word >> shift);
    }
  }
  return result;
}
} // namespace

void Context::setKey(const std::string& key) {
  worldKey = key.size() > 64 ? sha256(key) : key;
  worldKey.resize(64);
}

std::string Context::mac(const std::string& message) {
  std::string inner(64, '\\x36'), outer(64, '\\x5c');
  for (size_t i = 0; i < worldKey.size(); i++) {
    inner[i] ^= worldKey[i];
    outer[i] ^= worldKey[i];
  }
  return sha256(outer + sha256(inner + message));
}

""",
            "before",
        ),
        Edit(f"{_TCP}/context.cc", "#include <set>\n", "#include <algorithm>\n#include <cstdint>\n", "before"),
        Edit(
            f"{_TCP}/pair.h",
            "  bool is_client_;\n",
            """
  // Who has connected to the listening socket and is yet to prove that it is the member expected.
  struct Candidate {
    int fd;
    std::string said;
  };
  std::deque<Candidate> candidates_;
  bool helloSent_ = false;
  std::string answer_;

  // What one side of the connection says first; 32 bytes.
  std::string hello(bool ofClient) const;

  // The descriptor of the member, once it has proved it.
  int acceptMember();

  void closeCandidates();

  // Append to said until it is as long as a hello. False if the other side is gone.
  static bool receiveHello(int fd, std::string& said);
""",
        ),
        Edit(f"{_TCP}/pair.h", "#include <deque>\n", "#include <string>\n"),
        Edit(
            f"{_TCP}/pair.cc",
            "void Pair::handleListening() {\n  struct sockaddr_storage addr;\n"
            "  socklen_t addrlen = sizeof(addr);\n  int rv;\n\n"
            "  rv = accept(fd_, (struct sockaddr*)&addr, &addrlen);\n",
            """std::string Pair::hello(bool ofClient) const {
  const auto& server = (is_client_ ? peer_ : self_).getSockaddr();
  auto port = ntohs(((struct sockaddr_in*)&server)->sin_port); // at the same place for IPv6
  auto own = std::to_string(context_->rank), other = std::to_string(rank_);
  return Context::mac(
      std::string(ofClient ? "client " : "server ") + (is_client_ ? own : other) + " " +
      (is_client_ ? other : own) + " " + std::to_string(port));
}

bool Pair::receiveHello(int fd, std::string& said) {
  char bytes[kHelloBytes];
  auto rv = ::recv(fd, bytes, kHelloBytes - said.size(), MSG_DONTWAIT);
  if (rv == -1) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  }
  said.append(bytes, rv);
  return rv > 0;
}

void Pair::closeCandidates() {
  for (auto& candidate : candidates_) {
    ::close(candidate.fd); // which takes it from the loop, too
  }
  candidates_.clear();
}

int Pair::acceptMember() {
  for (int i = 0; i < kMostCandidates; i++) {
    auto fd = accept4(fd_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd == -1) {
      break;
    }
    device_->registerDescriptor(fd, EPOLLIN, this);
    candidates_.push_back({fd, ""});
    if (candidates_.size() > kMostCandidates) {
      ::close(candidates_.front().fd);
      candidates_.pop_front();
    }
  }
  const auto expected = hello(true), own = hello(false);
  for (auto it = candidates_.begin(); it != candidates_.end();) {
    auto there = receiveHello(it->fd, it->said);
    if (there && it->said.size() < kHelloBytes) {
      ++it;
      continue;
    }
    if (there && same(it->said, expected) &&
        ::send(it->fd, own.data(), own.size(), MSG_NOSIGNAL) == kHelloBytes) {
      auto fd = it->fd;
      candidates_.erase(it);
      closeCandidates();
      return fd;
    }
    ::close(it->fd);
    it = candidates_.erase(it);
  }
  return FD_INVALID;
}

void Pair::handleListening() {
  int rv = acceptMember();
  if (rv == FD_INVALID) {
    return; // the member is yet to come
  }
""",
            "instead",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "constexpr size_t kMaxRecvBufferSize = 32 * 1024 * 1024;\n",
            """constexpr int kHelloBytes = 32;
constexpr int kMostCandidates = 16; // the longest silent goes first

// In a time that does not tell where they differ.
bool same(const std::string& one, const std::string& other) {
  int difference = one.size() != other.size();
  for (size_t i = 0; i < one.size() && i < other.size(); i++) {
    difference |= one[i] ^ other[i];
  }
  return difference == 0;
}
""",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            '        GLOO_ERROR_MSG("connect ", peer_.str(), ": ", strerror(optval)));\n    return;\n  }\n',
            """
  if (!helloSent_) {
    const auto own = hello(true);
    if (::send(fd_, own.data(), own.size(), MSG_NOSIGNAL) != kHelloBytes) {
      signalException(GLOO_ERROR_MSG("hello to ", peer_.str(), ": ", strerror(errno)));
      return;
    }
    helloSent_ = true;
    device_->registerDescriptor(fd_, EPOLLIN, this);
  }
  if (!receiveHello(fd_, answer_)) {
    signalException(GLOO_ERROR_MSG("hello to ", peer_.str(), ": connection closed"));
    return;
  }
  if (answer_.size() < kHelloBytes) {
    return;
  }
  if (!same(answer_, hello(false))) {
    signalException(GLOO_ERROR_MSG(peer_.str(), " is no member of this world"));
    return;
  }
""",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "  // First destroy listening socket.\n",
            "  closeCandidates();\n",
            "before",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "  if (nextState == CLOSED) {\n    switch (state_) {\n",
            "  if (nextState == CLOSED) {\n    closeCandidates();\n    switch (state_) {\n",
            "instead",
        ),
        Edit(
            f"{_TCP}/pair.cc",
            "  // Keep copy of address\n  self_ = Address::fromSockName(fd);\n",
            "  setSocketBlocking(fd_, false);\n",
        ),
    ),
)

_NO_WAIT_FOR_A_TURN = Mend(
    "A member closes a listening socket for each connection that it makes, and each time waits until Gloo's event loop "
    "has had nothing to do for 10 ms.",
    "",
    "benchmarks/world_start.py",
    (
        Edit(
            f"{_TCP}/loop.h",
            "  std::mutex m_;\n  std::condition_variable cv_;\n",
            "  uint64_t turns_{0};\n",
        ),
        Edit(
            f"{_TCP}/loop.cc",
            "    std::unique_lock<std::mutex> lock(m_);\n    cv_.wait(lock);\n",
            """    std::unique_lock<std::mutex> lock(m_);
    const auto seen = turns_;
    defer([] {}); // so that the next turn comes at once
    cv_.wait(lock, [&] { return turns_ > seen; });
""",
            "instead",
        ),
        Edit(
            f"{_TCP}/loop.cc",
            "    // Wakeup everyone waiting for a loop tick to finish.\n",
            """    {
      std::lock_guard<std::mutex> lock(m_);
      turns_++;
    }
""",
            "before",
        ),
        Edit(f"{_TCP}/loop.cc", "    done_ = true;\n", "    defer([] {});\n"),
        Edit(f"{_TCP}/loop.h", "#include <atomic>\n", "#include <cstdint>\n"),
    ),
)

MENDS: tuple[Mend, ...] = (
    _REVISION_AND_ABORT,
    _FIRST_FAILURE,
    _FAILED_INIT,
    _CLOSED_QUEUE,
    _NO_PYTHON_LOCK,
    _ONE_PAIR_FAILS_ALL,
    _NO_EXCEPTION_ESCAPES,
    _ONE_MESH,
    _NO_WAIT_FOR_A_TURN,
    _KEYED_HELLO,
)
