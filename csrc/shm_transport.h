// The exchange protocol between processes of one host whose targets lie in shared memory. A copy thread stands in for
// the copy engine.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "board.h"
#include "copy_plan.h"

namespace ulysses {

// Commands return at once and run in order on the copy thread:
//   begin(r)  READY: tell every peer that this rank's targets may be written, await the same from all
//   put       write this rank's slices into the peers' targets. A target with places begins with the number, 0 or 1, of
//             that one of the two which its owner, before READY, has chosen; the first is places_offset() bytes further
//   end(d)    DONE: tell every peer that its data is complete, await the same from all
// wait_for(g) tells when group g has ended. Once a command fails, or after shutdown(), later ones are dropped unrun, so
// nothing is written after a failure.
class ShmTransport {
 public:
  // A page.
  static size_t places_offset();

  // skip_ready and skip_done leave a handshake out: only for tests that show what it protects.
  ShmTransport(std::shared_ptr<Board> board, double timeout_s, bool skip_ready, bool skip_done);
  ~ShmTransport();
  ShmTransport(const ShmTransport&) = delete;
  ShmTransport& operator=(const ShmTransport&) = delete;

  void begin(uint64_t ready);
  // The source must stay valid until wait_for() returns true for the group.
  void put(std::shared_ptr<const Route> route, uintptr_t source);
  // The number of the group that ends. Later groups may begin before it is waited for.
  uint64_t end(uint64_t done);
  // True once the group of that number, and all before it, have ended; false after timeout_s.
  bool wait_for(uint64_t number, double timeout_s);
  // This rank's own failure, or a peer's that it has been told of.
  std::optional<Failure> failure() const;
  // Gives up: the peers are told, what is queued is dropped; returns when the copy thread touches no memory of the
  // caller any more.
  void abort(Failure::Kind kind, const std::string& message);
  // Whether nothing is queued or running: what peers signal then was not asked for.
  bool idle() const;
  // Lets queued commands run for at most grace_s, then gives up. Idempotent. True: nothing of the caller's is in use.
  bool shutdown(double grace_s);

 private:
  // A command that ends a group counts when it is through, or dropped.
  struct Command {
    std::function<void()> run;
    bool ends_group;
  };
  void enqueue(Command command);
  void run();
  void handshake(Signal signal, uint64_t value);
  void await_peer(Signal signal, int peer, uint64_t value, std::chrono::steady_clock::time_point start);
  // Why a handshake cannot complete any more, if it cannot: all peers are looked at, for one may have ended while
  // another is late.
  std::optional<Failure> hopeless(Signal signal, uint64_t value, double waited_s) const;
  void fail(Failure failure);
  Failure closed() const;

  std::shared_ptr<Board> board_;
  double timeout_s_;
  bool skip_ready_;
  bool skip_done_;

  mutable std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable ended_;  // a group, or all that was queued
  std::deque<Command> commands_;
  uint64_t groups_ = 0;        // that end() was called for
  uint64_t ended_groups_ = 0;  // that are through
  bool running_ = false;
  bool stopping_ = false;
  std::optional<Failure> failure_;
  std::atomic<bool> dropping_{false};
  std::thread thread_;
};

}  // namespace ulysses
