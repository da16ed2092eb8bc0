"""What two members say to each other before they take a connection for theirs."""

from __future__ import annotations

from edl_hvd.build.edits.release import Edit, Mend
from edl_hvd.build.edits.sources import CONTEXT, TCP, TCP_CONTEXT_CLASS

KEYED_HELLO = Mend(
    "The first process that connects to a listening pair is taken for the member that is expected there, whoever it "
    "is and whether it says anything; the world then never forms.",
    "",
    "tests/elastic/test_strangers.py",
    (
        Edit(
            f"{CONTEXT}.cc",
            "  timeout_ = GetTimeoutFromEnv();\n\n  auto host_env",
            """#ifdef __linux__
  auto key = std::getenv("HOROVOD_WORLD_KEY");
  gloo::transport::tcp::Context::setKey(key == nullptr ? "" : key);
#endif
""",
            "before",
        ),
        Edit(
            f"{TCP}/context.h",
            TCP_CONTEXT_CLASS,
            """  // What the members of the next world prove to know. While there is none.
  static void setKey(const std::string& key);

  // HMAC-SHA256 (RFC 2104) with this key: 32 bytes.
  static std::string mac(const std::string& message);

""",
        ),
        Edit(
            f"{TCP}/context.cc",
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
        Edit(f"{TCP}/context.cc", "#include <set>\n", "#include <algorithm>\n#include <cstdint>\n", "before"),
        Edit(
            f"{TCP}/pair.h",
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
        Edit(f"{TCP}/pair.h", "#include <deque>\n", "#include <string>\n"),
        Edit(
            f"{TCP}/pair.cc",
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
            f"{TCP}/pair.cc",
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
            f"{TCP}/pair.cc",
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
            f"{TCP}/pair.cc",
            "  // First destroy listening socket.\n",
            "  closeCandidates();\n",
            "before",
        ),
        Edit(
            f"{TCP}/pair.cc",
            "  if (nextState == CLOSED) {\n    switch (state_) {\n",
            "  if (nextState == CLOSED) {\n    closeCandidates();\n    switch (state_) {\n",
            "instead",
        ),
        Edit(
            f"{TCP}/pair.cc",
            "  // Keep copy of address\n  self_ = Address::fromSockName(fd);\n",
            "  setSocketBlocking(fd_, false);\n",
        ),
    ),
)
