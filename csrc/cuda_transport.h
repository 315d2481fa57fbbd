// The exchange protocol between GPUs of one host: pitched copies by the copy engines, signals by stream memory
// operations, no kernel.
#pragma once

#include <cuda.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "board.h"
#include "copy_plan.h"

namespace ulysses {

// One rank's copy stream. All commands are enqueued and return at once, except where too many groups are in flight.
//
// begin(r): the copy stream waits for everything on the caller's stream so far, so also for the last readers of the
// targets, then READY, and the first put.
// put: it waits for the caller's stream again, since that makes the input, then one pitched copy a peer. The stream of
// the own slices waits for it in front of those that are queued next.
// end(d): DONE.
// wait(g): a stream waits for group g's end and for its own slices.
//
// READY and DONE each are one batch of stream memory operations: set the own slots of the other one to 0, publish the
// value in every peer's slot, wait until every own slot EQUALS it. A peer writes a slot again only after the handshake
// behind this one, and every write takes the queue most of a microsecond. The values are constants of the call site, so
// that captured groups can be replayed between eager ones.
//
// A watcher thread looks at groups that take long: it reads the pad (slots, and the value awaited last) over a stream
// of its own, and reports a peer that signalled something else, that has ended, that gave up, or that did not signal
// within timeout_s. After a failure, whoever found it tells the peers, and then the watcher sets the own slots itself,
// for queued groups and replayed ones alike, until shutdown: the GPU stays usable, and what is exchanged from then on
// is void.
class CudaTransport {
 public:
  // What is as measuring found it best; other values are there for measuring it again.
  struct Tuning {
    bool low_priority = false;  // streams that have the callers' priority
    // Own slices are copied by multiprocessors, each so many submissions late: beside later copies to the peers,
    // instead of between what the caller computes until then. At most one late in a group whose end is not foreseen.
    size_t own_slices_late = 3;
    bool rotated = true;  // each rank begins with the peer behind it, else all with the first
  };

  // Words of 8 bytes on a pad: 2 x world_size slots, then the value that was awaited last.
  static size_t pad_bytes(int world_size);

  // `context` is the one to work in (cuda_current_context()). `pads` holds every rank's pad as mapped here, all of them
  // zero before any rank constructs its transport. skip_ready and skip_done leave a handshake out: only for tests that
  // show what it protects.
  CudaTransport(uintptr_t context, std::shared_ptr<Board> board, std::vector<uintptr_t> pads, double timeout_s,
                bool skip_ready, bool skip_done, Tuning tuning);
  ~CudaTransport();
  CudaTransport(const CudaTransport&) = delete;
  CudaTransport& operator=(const CudaTransport&) = delete;

  uintptr_t copy_stream() const { return reinterpret_cast<uintptr_t>(copy_stream_); }
  // Where the rank's own slices are written: a stream beside the caller's and the copy stream.
  uintptr_t own_stream() const { return reinterpret_cast<uintptr_t>(own_stream_); }

  // Identifies the CUDA graph capture that the stream is in; 0 when it is in none.
  uint64_t capture_id(uintptr_t stream) const;

  // What is put, on which stream it is made, and where the rank's own slice goes, if that is not 0: on the own-slice
  // stream, at one of the next puts or the end. The source stays until then.
  struct Put {
    std::shared_ptr<const Route> route;
    uintptr_t source;
    uintptr_t own_target;
    uintptr_t stream;
  };

  // `readers` are further streams on which earlier results may still be read. `capturing` says that the put's stream is
  // being captured; a group begins and ends in one capture. `open_ended`: the end does not follow the last put, but
  // whatever the caller computes before it waits. False: the exchange has failed, and nothing was enqueued.
  bool begin(uint64_t ready, const std::set<uintptr_t>& readers, bool capturing, bool open_ended, Put first);
  void put(Put next);
  // The number of the group that ends. Later groups may begin before it is waited for, kMaxUnwaited at most.
  uint64_t end(uint64_t done);
  // Whether the exchange has failed; what was waited for then is void.
  bool wait(uintptr_t stream, uint64_t number, bool capturing);

  static constexpr size_t kMaxUnwaited = 8;

  std::optional<Failure> failure() const;
  // Gives up: the peers are told, this rank's waits are released.
  void abort(Failure::Kind kind, const std::string& message);
  // Waits at most grace_s for queued work, then gives up and waits at most 10 s more. True once everything is released;
  // false while commands are stuck behind a caller's stream: then the watcher goes on releasing them, and pads and
  // targets must stay mapped. False, too, where the device has failed: what is freed there raises, in torch's
  // destructors for one, and so must stay. Idempotent.
  bool shutdown(double grace_s);

 private:
  struct Ends {
    CUevent done;        // behind the group's DONE on the copy stream
    CUevent own_slices;  // behind its last own slice
  };
  struct InFlight {
    uint64_t number;
    Ends ends;
  };
  struct PadImage;

  CUevent input_ready() const { return capturing_ ? captured_input_ready_ : input_ready_; }
  // Makes the copy stream stand behind what is on `stream` now, and, from join_own_slices() on, the own slices' stream.
  void join(uintptr_t stream);
  void join_own_slices();
  void send(const Put& put);
  void queue_own_slices(size_t but_for);  // those that are held back, but for the last ones
  bool failed() const;
  void handshake(Signal signal, uint64_t value);
  size_t in_flight() const;
  void retire_completed();  // pops completed groups
  bool queues_empty() const;
  bool device_lost() const;  // an error that the context keeps: nothing runs there any more, nothing can be freed
  CUevent take_event();

  bool drain(double grace_s);  // true once the queues are empty
  bool stop();                 // ends the watcher, releases streams and events

  void watch();
  void look();  // one look at a slow group
  PadImage read_pad();
  void fail(Failure failure);
  void release_waits();

  CUcontext context_;
  std::shared_ptr<Board> board_;
  std::vector<CUdeviceptr> pads_;
  double timeout_s_;
  bool skip_ready_;
  bool skip_done_;
  Tuning tuning_;
  CUstream copy_stream_ = nullptr;
  CUstream own_stream_ = nullptr;
  CUstream watch_stream_ = nullptr;
  CUevent input_ready_ = nullptr;  // re-recorded by every join; a wait keeps what it saw
  // Of the group that is open.
  bool capturing_ = false;
  size_t own_slices_late_ = 0;
  std::deque<Put> held_back_;            // whose own slices are not queued yet
  std::optional<uintptr_t> own_behind_;  // joined, but for the own slices' stream
  // Captured events cannot be queried or waited for outside, so they are apart.
  CUevent captured_input_ready_ = nullptr;
  std::array<Ends, kMaxUnwaited> captured_ends_{};  // by group number; a wait keeps what it saw
  std::vector<CUstreamBatchMemOpParams> operations_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<InFlight> in_flight_;
  std::vector<CUevent> spare_events_;
  uint64_t groups_ = 0;
  std::optional<Failure> failure_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> captured_{false};  // some group was captured: replays are not in in_flight_
  bool stopping_ = false;
  bool shut_down_ = false;

  // The watcher's own state.
  uint64_t* host_pad_ = nullptr;
  uint64_t watched_number_ = 0;
  std::vector<uint64_t> watched_pad_;
  double watched_since_ = 0;
  std::thread watcher_;
};

}  // namespace ulysses
