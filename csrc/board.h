// What the ranks of one communicator tell each other through host memory: who they are, that they gave up, and, for CPU
// tensors, the READY and DONE signals themselves.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shared_segment.h"

namespace ulysses {

enum class Signal : int { kReady = 0, kDone = 1 };

// Why a communicator is unusable. `peers` are the ranks that did not signal, or signalled something else.
struct Failure {
  enum class Kind : uint32_t { kTimeout = 1, kMismatch = 2, kAbort = 3, kPeerGone = 4, kClosed = 5, kDriver = 6 };
  Kind kind = Kind::kAbort;
  std::optional<Signal> signal;  // the handshake this rank stood in, where it stood in one
  std::vector<int> peers;
  double seconds = 0;   // how long this rank had waited
  std::string message;  // set where another rank or the driver gave the reason
};

const char* kind_name(Failure::Kind kind);
// The kind of that name; kAbort for any other.
Failure::Kind kind_of(const std::string& name);
// One sentence for the other ranks: who gave up, and over whom.
std::string describe(const Failure& failure, int rank);

// A word that one rank writes and another awaits. The low half is never zero in a signal (the digests see to that), so
// it can serve as a futex.
using SignalWord = std::atomic<uint64_t>;
static_assert(SignalWord::is_always_lock_free && sizeof(SignalWord) == 8, "signal words live in shared memory");

void signal_store(SignalWord& word, uint64_t value);
// Returns once the word differs from `seen`, or after about timeout_us.
void signal_wait_change(SignalWord& word, uint64_t seen, int64_t timeout_us);

class Board {
 public:
  static size_t size_bytes(int world_size);
  // The segment is zero when its creator hands it over; all ranks map the same one.
  Board(std::shared_ptr<SharedSegment> segment, int rank, int world_size);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // Publishes this process's identity. Before watch_peers() every rank must have done so.
  void register_self();
  // Throws std::system_error where there is no file descriptor left to watch a process with.
  void watch_peers();
  // This rank takes part in nothing any more: it has signalled all that it ever will.
  void leave();
  // True once that rank has left, or its process has ended, also as a zombie. False where that cannot be known (another
  // PID namespace).
  bool peer_gone(int peer) const;

  // Tells every peer that this rank gives up. Only the first message that a peer gets counts. It must precede any
  // release of this rank's own queued work: from then on what this rank writes to its peers means nothing.
  void abort_peers(Failure::Kind kind, const std::string& message);
  // What a peer has told this rank, if one gave up.
  std::optional<Failure> aborted() const;
  // Whether one did: one load.
  bool is_aborted() const;

  // Whether a signal of that peer stands on this rank's pad.
  bool signalled(int peer) const;

  // The word on `owner`'s pad that `writer` sets.
  SignalWord& slot(int owner, Signal signal, int writer) const;

 private:
  struct Entry;
  Entry& entry(int rank) const;

  std::shared_ptr<SharedSegment> segment_;
  int rank_;
  int world_size_;
  std::vector<int> peer_fds_;
};

}  // namespace ulysses
