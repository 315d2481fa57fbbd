#include "board.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>

namespace ulysses {
namespace {

constexpr size_t kMessageBytes = 496;
// In place of a peer's file descriptor.
constexpr int kUnknown = -1;
constexpr int kEnded = -2;

uint32_t* futex_word(SignalWord& word) { return reinterpret_cast<uint32_t*>(&word); }

uint64_t pid_namespace() {
  struct stat info{};
  return ::stat("/proc/self/ns/pid", &info) == 0 ? static_cast<uint64_t>(info.st_ino) : 0;
}

}  // namespace

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low half of a signal word is its first four bytes");

const char* kind_name(Failure::Kind kind) {
  switch (kind) {
    case Failure::Kind::kTimeout:
      return "timeout";
    case Failure::Kind::kMismatch:
      return "mismatch";
    case Failure::Kind::kAbort:
      return "abort";
    case Failure::Kind::kPeerGone:
      return "peer_gone";
    case Failure::Kind::kClosed:
      return "closed";
    case Failure::Kind::kDriver:
      return "driver";
  }
  return "abort";
}

Failure::Kind kind_of(const std::string& name) {
  for (auto kind : {Failure::Kind::kTimeout, Failure::Kind::kMismatch, Failure::Kind::kPeerGone}) {
    if (name == kind_name(kind)) return kind;
  }
  return Failure::Kind::kAbort;
}

std::string describe(const Failure& failure, int rank) {
  if (!failure.message.empty()) return failure.message;
  std::string peers;
  for (int peer : failure.peers) peers += (peers.empty() ? "" : ", ") + std::to_string(peer);
  const std::string text = "rank " + std::to_string(rank) + " gave up: rank(s) " + peers;
  switch (failure.kind) {
    case Failure::Kind::kMismatch:
      return text + " submitted something else";
    case Failure::Kind::kPeerGone:
      return text + " ended, or closed the communicator";
    default:
      return text + " did not signal in time";
  }
}

void signal_store(SignalWord& word, uint64_t value) {
  word.store(value, std::memory_order_release);
  ::syscall(SYS_futex, futex_word(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void signal_wait_change(SignalWord& word, uint64_t seen, int64_t timeout_us) {
  struct timespec timeout{};
  timeout.tv_sec = timeout_us / 1000000;
  timeout.tv_nsec = (timeout_us % 1000000) * 1000;
  ::syscall(SYS_futex, futex_word(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &timeout, nullptr, 0);
}

struct Board::Entry {
  // 0: no abort; else the Failure::Kind, and while a peer is still writing the message, kWriting and that peer's rank.
  std::atomic<uint32_t> abort_state;
  std::atomic<uint32_t> left;
  uint32_t message_bytes;
  uint64_t pid;
  uint64_t pid_namespace;
  char message[kMessageBytes];
};

namespace {
constexpr uint32_t kKindBits = 8;
constexpr uint32_t kWriting = 1U << 31;
}  // namespace

size_t Board::size_bytes(int world_size) {
  const auto world = static_cast<size_t>(world_size);
  return world * sizeof(Entry) + 2 * world * world * sizeof(SignalWord);
}

Board::Board(std::shared_ptr<SharedSegment> segment, int rank, int world_size)
    : segment_(std::move(segment)),
      rank_(rank),
      world_size_(world_size),
      peer_fds_(static_cast<size_t>(world_size), kUnknown) {
  if (segment_->size_bytes() != size_bytes(world_size)) throw std::invalid_argument("board segment has the wrong size");
}

Board::~Board() {
  for (int fd : peer_fds_) {
    if (fd >= 0) ::close(fd);
  }
}

Board::Entry& Board::entry(int rank) const { return static_cast<Entry*>(segment_->data())[rank]; }

SignalWord& Board::slot(int owner, Signal signal, int writer) const {
  auto* words = reinterpret_cast<SignalWord*>(static_cast<char*>(segment_->data()) +
                                              static_cast<size_t>(world_size_) * sizeof(Entry));
  return words[(owner * 2 + static_cast<int>(signal)) * world_size_ + writer];
}

bool Board::signalled(int peer) const {
  return slot(rank_, Signal::kReady, peer).load(std::memory_order_acquire) != 0 ||
         slot(rank_, Signal::kDone, peer).load(std::memory_order_acquire) != 0;
}

void Board::register_self() {
  Entry& self = entry(rank_);
  self.pid_namespace = pid_namespace();
  self.pid = static_cast<uint64_t>(::getpid());
}

void Board::watch_peers() {
  for (int peer = 0; peer < world_size_; ++peer) {
    const Entry& other = entry(peer);
    if (peer == rank_ || other.pid == 0 || other.pid_namespace != pid_namespace()) continue;
    int& fd = peer_fds_[static_cast<size_t>(peer)];
    fd = static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(other.pid), 0));
    if (fd >= 0) continue;
    fd = errno == ESRCH ? kEnded : kUnknown;
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
      throw std::system_error(errno, std::generic_category(), "watching the process of rank " + std::to_string(peer));
    }
  }
}

void Board::leave() {
  Entry& self = entry(rank_);
  // A process that was forked from this rank's is not this rank.
  if (self.pid == static_cast<uint64_t>(::getpid())) self.left.store(1, std::memory_order_release);
}

bool Board::peer_gone(int peer) const {
  if (entry(peer).left.load(std::memory_order_acquire) != 0) return true;
  struct pollfd poll_fd{};
  poll_fd.fd = peer_fds_[static_cast<size_t>(peer)];
  if (poll_fd.fd == kEnded) return true;
  poll_fd.events = POLLIN;
  return poll_fd.fd >= 0 && ::poll(&poll_fd, 1, 0) == 1 && (poll_fd.revents & POLLIN) != 0;
}

void Board::abort_peers(Failure::Kind kind, const std::string& message) {
  if (kind == Failure::Kind::kDriver) kind = Failure::Kind::kAbort;  // it is this rank's device, not theirs
  for (int peer = 0; peer < world_size_; ++peer) {
    if (peer == rank_) continue;
    Entry& other = entry(peer);
    uint32_t none = 0;
    const uint32_t writing = kWriting | static_cast<uint32_t>(rank_) << kKindBits | static_cast<uint32_t>(kind);
    if (!other.abort_state.compare_exchange_strong(none, writing)) continue;
    const size_t count = std::min(message.size(), kMessageBytes);
    std::memcpy(other.message, message.data(), count);
    other.message_bytes = static_cast<uint32_t>(count);
    other.abort_state.store(static_cast<uint32_t>(kind), std::memory_order_release);
    // A peer asleep on one of its own slots looks at its abort word when it wakes.
    for (Signal signal : {Signal::kReady, Signal::kDone}) {
      ::syscall(SYS_futex, futex_word(slot(peer, signal, rank_)), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    }
  }
}

bool Board::is_aborted() const { return entry(rank_).abort_state.load(std::memory_order_acquire) != 0; }

std::optional<Failure> Board::aborted() const {
  const Entry& self = entry(rank_);
  const uint32_t state = self.abort_state.load(std::memory_order_acquire);
  if (state == 0) return std::nullopt;
  Failure failure;
  failure.kind = static_cast<Failure::Kind>(state & ((1U << kKindBits) - 1));
  if ((state & kWriting) != 0) {  // who it is may be lost before the message is there
    failure.message = "rank " + std::to_string((state & ~kWriting) >> kKindBits) + " gave up";
    return failure;
  }
  failure.message.assign(self.message, std::min<size_t>(self.message_bytes, kMessageBytes));
  return failure;
}

}  // namespace ulysses
