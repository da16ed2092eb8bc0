"""A connection that ends as soon as this process begins to end, long before the system has freed its memory."""

from __future__ import annotations

from edl_hvd.build.edits.release import Edit, Mend
from edl_hvd.build.edits.sources import OPERATIONS

DEATH_WATCH = Mend(
    "The connections of a killed process stay open until its memory has been freed: 0.1 s for a gigabyte, and "
    "several times as long where others want the processors. Until then nobody knows that it is gone.",
    "",
    "tests/elastic/test_death_watch.py",
    (
        Edit(
            OPERATIONS,
            "bool horovod_init(const int* ranks,",
            """#ifdef __linux__
namespace {
struct DeathWatch {
  std::thread thread;
  int wake;
};

std::vector<DeathWatch>& DeathWatches() {
  // Never destroyed: the process ends with its threads.
  static auto* all = new std::vector<DeathWatch>;
  return *all;
}

// Closes all descriptors of this thread's own table but these two, which the first call makes a copy of the process's.
int KeepOnly(unsigned low, unsigned high) {
  constexpr long close_range = 436; // SYS_close_range, from Linux 5.9 on
  constexpr unsigned unshare = 1U << 1;
  if (syscall(close_range, high + 1, ~0U, unshare) != 0 ||
      (low > 0 && syscall(close_range, 0U, low - 1, 0U) != 0) ||
      (high - low > 1 && syscall(close_range, low + 1, high - 1, 0U) != 0)) {
    return errno;
  }
  return 0;
}

void HoldUntilTheEnd(int connection, int wake, std::promise<int> held) {
  int failure = KeepOnly(std::min(connection, wake), std::max(connection, wake));
  held.set_value(failure);
  if (failure != 0) {
    return;
  }
  pollfd waits[2] = {{connection, POLLIN, 0}, {wake, POLLIN, 0}};
  while (poll(waits, 2, -1) < 0 && errno == EINTR) {
  }
  if (waits[1].revents != 0) {
    send(connection, "\\n", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  close(connection);
  close(wake);
}
} // namespace
#endif

// A thread with a table of descriptors of its own keeps the connection; the caller then closes its own descriptor of
// it. SIGKILL ends the thread, and with it the connection, at once, unless it is the last thread: hold two.
// Returns 0, or the error for which nothing is held.
int horovod_watch_death(int connection) {
#ifdef __linux__
  int wake = eventfd(0, EFD_CLOEXEC);
  if (wake < 0) {
    return errno;
  }
  std::promise<int> held;
  auto failure = held.get_future();
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(HoldUntilTheEnd, connection, wake, std::move(held));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    int result = failure.get();
    if (result == 0) {
      DeathWatches().push_back({std::move(thread), wake});
      return 0;
    }
    thread.join();
    close(wake);
    return result;
  } catch (const std::system_error& ex) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close(wake);
    return ex.code().value();
  }
#else
  return ENOSYS;
#endif
}

// The process ends in order: each connection says so, by one byte, before it ends.
void horovod_end_death_watch() {
#ifdef __linux__
  for (auto& watch : DeathWatches()) {
    uint64_t one = 1;
    if (write(watch.wake, &one, sizeof(one)) == sizeof(one)) {
      watch.thread.join();
      close(watch.wake);
    } else {
      watch.thread.detach();
    }
  }
  DeathWatches().clear();
#endif
}

""",
            "before",
        ),
        Edit(
            OPERATIONS,
            '#include "operations.h"\n',
            """#ifdef __linux__
#include <cerrno>
#include <csignal>
#include <future>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>
#endif

""",
            "before",
        ),
    ),
)
