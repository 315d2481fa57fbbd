#include "shm_transport.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>

namespace ulysses {
namespace {

constexpr int kSpins = 200;               // about as long as a cache line takes to travel
constexpr int64_t kSliceMicros = 20'000;  // how often a sleeping wait looks for a failure

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Where a peer wants its data, from READY to DONE.
char* place_in(uintptr_t target, size_t place_bytes) {
  char* base = reinterpret_cast<char*>(target);
  if (place_bytes == 0) return base;
  const auto& number = *reinterpret_cast<const std::atomic<uint32_t>*>(base);
  // Whatever it says: within the target.
  return base + ShmTransport::places_offset() + (number.load(std::memory_order_relaxed) & 1U) * place_bytes;
}

void copy_rows(const PitchedCopy& copy, const char* source, char* target) {
  const char* from = source + copy.src_offset_bytes;
  char* to = target + copy.dst_offset_bytes;
  for (int64_t row = 0; row < copy.height; ++row) {
    std::memcpy(to, from, static_cast<size_t>(copy.width_bytes));
    from += copy.src_pitch_bytes;
    to += copy.dst_pitch_bytes;
  }
}

}  // namespace

size_t ShmTransport::places_offset() {
  static const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return page;
}

ShmTransport::ShmTransport(std::shared_ptr<Board> board, double timeout_s, bool skip_ready, bool skip_done)
    : board_(std::move(board)), timeout_s_(timeout_s), skip_ready_(skip_ready), skip_done_(skip_done), thread_([this] {
        run();
      }) {}

ShmTransport::~ShmTransport() { shutdown(0); }

void ShmTransport::begin(uint64_t ready) {
  if (!skip_ready_) enqueue({[this, ready] { handshake(Signal::kReady, ready); }, false});
}

void ShmTransport::put(std::shared_ptr<const Route> route, uintptr_t source) {
  const auto copy_all = [this, route = std::move(route), source] {
    for (const PitchedCopy& copy : route->plan.copies) {
      if (dropping_.load(std::memory_order_relaxed)) return;
      copy_rows(copy, reinterpret_cast<const char*>(source),
                place_in(route->targets[static_cast<size_t>(copy.peer)], route->place_bytes));
    }
  };
  enqueue({copy_all, false});
}

uint64_t ShmTransport::end(uint64_t done) {
  const auto shake_hands = [this, done] {
    if (!skip_done_) handshake(Signal::kDone, done);
  };
  enqueue({shake_hands, true});
  return ++groups_;
}

bool ShmTransport::wait_for(uint64_t number, double timeout_s) {
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                         [this, number] { return ended_groups_ >= number; });
}

std::optional<Failure> ShmTransport::failure() const {
  {
    std::lock_guard lock(mutex_);
    if (failure_) return failure_;
  }
  return board_->aborted();
}

void ShmTransport::abort(Failure::Kind kind, const std::string& message) {
  Failure failure;
  failure.kind = kind;
  failure.message = message;
  fail(std::move(failure));
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [this] { return commands_.empty() && !running_; });
}

bool ShmTransport::idle() const {
  std::lock_guard lock(mutex_);
  return commands_.empty() && !running_;
}

bool ShmTransport::shutdown(double grace_s) {
  {
    std::unique_lock lock(mutex_);
    ended_.wait_for(lock, std::chrono::duration<double>(grace_s), [this] { return commands_.empty() && !running_; });
    if (!commands_.empty() || running_) {
      lock.unlock();
      fail(closed());
      lock.lock();
    }
    stopping_ = true;
  }
  queued_.notify_one();
  if (thread_.joinable()) thread_.join();
  board_->leave();
  return true;
}

void ShmTransport::enqueue(Command command) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) {
      commands_.push_back(std::move(command));
    } else {  // nobody is there to run it, nor may anybody wait for it
      if (command.ends_group) ++ended_groups_;
      if (!failure_) failure_ = closed();
    }
  }
  queued_.notify_one();
}

void ShmTransport::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [this] { return stopping_ || !commands_.empty(); });
    if (commands_.empty()) return;
    const Command command = std::move(commands_.front());
    commands_.pop_front();
    if (!failure_) {
      running_ = true;
      lock.unlock();
      command.run();
      lock.lock();
      running_ = false;
    }
    if (command.ends_group) ++ended_groups_;
    if (command.ends_group || commands_.empty()) ended_.notify_all();
  }
}

void ShmTransport::handshake(Signal signal, uint64_t value) {
  const int rank = board_->rank();
  const int world_size = board_->world_size();
  for (int step = 1; step < world_size; ++step)
    signal_store(board_->slot((rank + step) % world_size, signal, rank), value);
  const auto start = Clock::now();
  for (int step = 1; step < world_size && !dropping_.load(); ++step)
    await_peer(signal, (rank + step) % world_size, value, start);
  if (dropping_.load()) return;
  // Behind all waits: a peer raises this signal again only after the other handshake, which stands behind these writes.
  for (int peer = 0; peer < world_size; ++peer) {
    if (peer != rank) board_->slot(rank, signal, peer).store(0, std::memory_order_relaxed);
  }
}

void ShmTransport::await_peer(Signal signal, int peer, uint64_t value, Clock::time_point start) {
  SignalWord& word = board_->slot(board_->rank(), signal, peer);
  for (int spin = 0; word.load(std::memory_order_acquire) != value; ++spin) {
    if (spin < kSpins) continue;
    if (dropping_.load()) return;
    if (auto failure = hopeless(signal, value, seconds_since(start))) return fail(std::move(*failure));
    signal_wait_change(word, 0, kSliceMicros);
  }
}

std::optional<Failure> ShmTransport::hopeless(Signal signal, uint64_t value, double waited_s) const {
  Failure failure;
  failure.signal = signal;
  failure.seconds = waited_s;
  std::vector<int> silent, ended;
  for (int peer = 0; peer < board_->world_size(); ++peer) {
    if (peer == board_->rank()) continue;
    const SignalWord& word = board_->slot(board_->rank(), signal, peer);
    const bool gone = board_->peer_gone(peer);  // looked for first: it may have signalled and then ended
    const uint64_t seen = word.load(std::memory_order_acquire);
    if (seen == value) continue;
    if (seen != 0) {
      failure.peers.push_back(peer);
    } else {
      (gone ? ended : silent).push_back(peer);
    }
  }
  if (!failure.peers.empty()) {
    failure.kind = Failure::Kind::kMismatch;
    return failure;
  }
  if (auto told = board_->aborted()) {
    told->signal = signal;
    return told;
  }
  if (!ended.empty()) {
    failure.kind = Failure::Kind::kPeerGone;
    failure.peers = ended;
    return failure;
  }
  if (waited_s > timeout_s_ && !silent.empty()) {
    failure.kind = Failure::Kind::kTimeout;
    failure.peers = silent;
    return failure;
  }
  return std::nullopt;
}

Failure ShmTransport::closed() const {
  Failure failure;
  failure.kind = Failure::Kind::kClosed;
  failure.message =
      "rank " + std::to_string(board_->rank()) + " closed its communicator before the exchange was complete";
  return failure;
}

void ShmTransport::fail(Failure failure) {
  const std::string text = describe(failure, board_->rank());
  const Failure::Kind kind = failure.kind;
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
  }
  dropping_.store(true);
  board_->abort_peers(kind, text);
}

}  // namespace ulysses
