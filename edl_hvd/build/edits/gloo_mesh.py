"""How the members of a world find each other: the client of the key-value store, and Gloo's contexts."""

from __future__ import annotations

from edl_hvd.build.edits.release import Edit, Mend
from edl_hvd.build.edits.sources import CONTEXT, STORE

ONE_MESH = Mend(
    "A world connects all its members six times, although one time serves; each time every member asks the key-value "
    "store for every other, every 10 ms; and the connections of process sets ignore the interface that was given.",
    "horovod/horovod#2015, #2419",
    "benchmarks/world_start.py",
    (
        Edit(
            f"{STORE}.h",
            "  bool CheckKeys(const std::vector<std::string>& keys);\n",
            """
  // Give one's own value, and get those of all ranks as soon as they are there. Only edl_hvd's store serves this.
  std::vector<std::vector<char>> Exchange(const std::vector<char>& own, int size,
                                          const std::chrono::milliseconds& timeout);
""",
        ),
        Edit(
            f"{STORE}.h",
            "      : rank_(rank) {\n",
            "      : server_(server_ip), port_(port), scope_(scope), rank_(rank) {\n",
            "instead",
        ),
        Edit(
            f"{STORE}.h",
            "  std::string url_prefix_;\n",
            "  std::string server_;\n  int port_;\n  std::string scope_;\n",
            "before",
        ),
        Edit(
            f"{STORE}.cc",
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
            f"{STORE}.cc",
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
            f"{STORE}.cc",
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
            f"{CONTEXT}.cc",
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
            f"{CONTEXT}.cc",
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
            f"{CONTEXT}.cc",
            "  if (elastic && reset_) {\n",
            "  if (elastic && reset_ && !StoreExchanges()) {\n",
            "instead",
        ),
        Edit(
            f"{CONTEXT}.cc",
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
            f"{CONTEXT}.h",
            "  std::shared_ptr<gloo::Context> local_ctx = nullptr;\n",
            """
  // Global ranks of the processes in local_ctx and cross_ctx, where those are not connected; else empty.
  std::vector<int> local_ranks;
  std::vector<int> cross_ranks;
""",
        ),
        Edit(
            f"{CONTEXT}.cc",
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
                f"{CONTEXT}.cc",
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
