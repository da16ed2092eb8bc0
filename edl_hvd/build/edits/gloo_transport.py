"""Gloo's connections over TCP: what happens when one fails, and the event loop."""

from __future__ import annotations

from edl_hvd.build.edits.release import Edit, Mend
from edl_hvd.build.edits.sources import TCP

ONE_PAIR_FAILS_ALL = Mend(
    "A member that sees a connection fail keeps its other ones open, and its neighbours wait on them for the Gloo "
    "timeout; a send or receive under way when its connection fails is forgotten, and waited for as long.",
    "",
    "benchmarks/recovery.py",
    (
        Edit(
            f"{TCP}/context.h",
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
            f"{TCP}/context.h",
            "  std::shared_ptr<Device> device_;\n",
            """
  std::shared_ptr<ContextLife> life_;

  // Let every pair fail whose lock is free; whether all have. From the loop's thread, which must wait for none.
  bool trySignalException(const std::string& msg);
""",
        ),
        Edit(
            f"{TCP}/context.cc",
            "device_(std::move(device)) {}",
            """device_(std::move(device)), life_(std::make_shared<ContextLife>()) {
  life_->context = this;
  std::lock_guard<std::mutex> guard(livesMutex);
  lives().insert(life_);
}""",
            "instead",
        ),
        Edit(
            f"{TCP}/context.cc",
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
            f"{TCP}/context.cc",
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
        Edit(f"{TCP}/pair.h", "\nclass Buffer;\n", "struct ContextLife;\n"),
        Edit(
            f"{TCP}/pair.h",
            "  std::exception_ptr signalExceptionExternal(const std::string& msg);\n",
            """
  // Fail, unless another thread has the lock; whether this has failed.
  bool trySignalException(const std::string& msg);

  // Let all pairs of a context fail, from the loop's thread, as soon as their locks are free.
  static void failContext(Device* device, std::shared_ptr<ContextLife> life);
""",
        ),
        Edit(
            f"{TCP}/pair.cc",
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
            f"{TCP}/pair.cc",
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
            f"{TCP}/pair.cc",
            "      op.buf->signalException(ex);\n    }\n",
            """    NonOwningPtr<UnboundBuffer> underWay(op.ubuf);
    if (underWay) {
      underWay->signalException(ex);
    }
""",
        ),
        Edit(
            f"{TCP}/pair.cc",
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

NO_EXCEPTION_ESCAPES = Mend(
    "An exception in the thread of Gloo's event loop ends the process with SIGABRT, such as "
    "`op.preamble.length <= op.nbytes`.",
    "",
    "benchmarks/broken_sums.py",
    (
        Edit(f"{TCP}/pair.cc", "  if (state_ == CONNECTED) {\n    handleReadWrite(events);\n", "  try {\n", "before"),
        Edit(
            f"{TCP}/pair.cc",
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
            f"{TCP}/pair.cc",
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

NO_WAIT_FOR_A_TURN = Mend(
    "A member closes a listening socket for each connection that it makes, and each time waits until Gloo's event loop "
    "has had nothing to do for 10 ms.",
    "",
    "benchmarks/world_start.py",
    (
        Edit(
            f"{TCP}/loop.h",
            "  std::mutex m_;\n  std::condition_variable cv_;\n",
            "  uint64_t turns_{0};\n",
        ),
        Edit(
            f"{TCP}/loop.cc",
            "    std::unique_lock<std::mutex> lock(m_);\n    cv_.wait(lock);\n",
            """    std::unique_lock<std::mutex> lock(m_);
    const auto seen = turns_;
    defer([] {}); // so that the next turn comes at once
    cv_.wait(lock, [&] { return turns_ > seen; });
""",
            "instead",
        ),
        Edit(
            f"{TCP}/loop.cc",
            "    // Wakeup everyone waiting for a loop tick to finish.\n",
            """    {
      std::lock_guard<std::mutex> lock(m_);
      turns_++;
    }
""",
            "before",
        ),
        Edit(f"{TCP}/loop.cc", "    done_ = true;\n", "    defer([] {});\n"),
        Edit(f"{TCP}/loop.h", "#include <atomic>\n", "#include <cstdint>\n"),
    ),
)
