#include "cuda_transport.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <utility>

#include "cuda_driver.h"

namespace ulysses {
namespace {

// Set in the values of DONE, clear in those of READY: what is awaited tells which of them it is.
constexpr uint64_t kDoneBit = uint64_t{1} << 63;

constexpr size_t kMaxInFlight = 64;  // well under the commands that a driver queue takes
constexpr auto kTick = std::chrono::milliseconds(20);
constexpr auto kReleaseTick = std::chrono::milliseconds(1);
constexpr double kSlowGroupSeconds = 0.05;  // a group in flight for less is not looked at
constexpr double kDrainSeconds = 10;

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

CUstream stream_of(uintptr_t stream) { return reinterpret_cast<CUstream>(stream); }

CUevent create_event() {
  CUevent event = nullptr;
  ULYSSES_CUDA(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
  return event;
}

CUstream create_stream(int priority) {
  CUstream stream = nullptr;
  ULYSSES_CUDA(cuStreamCreateWithPriority, &stream, CU_STREAM_NON_BLOCKING, priority);
  return stream;
}

void copy_slice(const PitchedCopy& copy, uintptr_t source, uintptr_t target, CUstream stream) {
  const uintptr_t from = source + static_cast<uintptr_t>(copy.src_offset_bytes);
  const uintptr_t to = target + static_cast<uintptr_t>(copy.dst_offset_bytes);
  if (copy.height == 1) {
    ULYSSES_CUDA(cuMemcpyAsync, to, from, static_cast<size_t>(copy.width_bytes), stream);
    return;
  }
  CUDA_MEMCPY2D description{};
  description.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
  description.srcDevice = from;
  description.srcPitch = static_cast<size_t>(copy.src_pitch_bytes);
  description.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  description.dstDevice = to;
  description.dstPitch = static_cast<size_t>(copy.dst_pitch_bytes);
  description.WidthInBytes = static_cast<size_t>(copy.width_bytes);
  description.Height = static_cast<size_t>(copy.height);
  ULYSSES_CUDA(cuMemcpy2DAsync, &description, stream);
}

CUstreamBatchMemOpParams write_operation(CUdeviceptr address, uint64_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  operation.writeValue.address = address;
  operation.writeValue.value64 = value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  return operation;
}

CUstreamBatchMemOpParams wait_operation(CUdeviceptr address, uint64_t value) {
  CUstreamBatchMemOpParams operation{};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  operation.waitValue.address = address;
  operation.waitValue.value64 = value;
  operation.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  return operation;
}

// Lets this thread query events and streams while another thread, or this one on another stream, captures.
class RelaxedCapture {
 public:
  RelaxedCapture() { CudaDriver::get().p_cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { CudaDriver::get().p_cuThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// The entry point has one parameter more from CUDA 13 on; all after the id are optional.
template <typename... Optional>
CUresult capture_info(CUresult (*entry)(CUstream, CUstreamCaptureStatus*, cuuint64_t*, Optional...), CUstream stream,
                      CUstreamCaptureStatus* status, cuuint64_t* id) {
  return entry(stream, status, id, Optional{}...);
}

CUdeviceptr word(CUdeviceptr pad, size_t index) { return pad + index * sizeof(uint64_t); }

}  // namespace

// A pad read back: slots[signal * world_size + writer], then what is or was awaited last.
struct CudaTransport::PadImage {
  std::vector<uint64_t> words;
  size_t world_size;
  size_t rank;
  uint64_t awaited() const { return words[2 * world_size]; }
  Signal signal() const { return (awaited() & kDoneBit) != 0 ? Signal::kDone : Signal::kReady; }
  size_t slot_index(size_t writer) const { return static_cast<size_t>(signal()) * world_size + writer; }
  uint64_t slot(size_t writer) const { return words[slot_index(writer)]; }
  bool arrived(size_t writer) const { return slot(writer) == awaited(); }
  bool waiting() const {
    if (awaited() == 0) return false;  // no group so far
    for (size_t writer = 0; writer < world_size; ++writer) {
      if (writer != rank && !arrived(writer)) return true;
    }
    return false;
  }
};

size_t CudaTransport::pad_bytes(int world_size) { return (2 * static_cast<size_t>(world_size) + 1) * sizeof(uint64_t); }

CudaTransport::CudaTransport(uintptr_t context, std::shared_ptr<Board> board, std::vector<uintptr_t> pads,
                             double timeout_s, bool skip_ready, bool skip_done, Tuning tuning)
    : context_(reinterpret_cast<CUcontext>(context)),
      board_(std::move(board)),
      pads_(pads.begin(), pads.end()),
      timeout_s_(timeout_s),
      skip_ready_(skip_ready),
      skip_done_(skip_done),
      tuning_(tuning) {
  if (pads_.size() != static_cast<size_t>(board_->world_size()))
    throw std::invalid_argument("one pad a rank is needed");
  CudaContextGuard guard(context_);
  int least = 0;
  int greatest = 0;
  ULYSSES_CUDA(cuCtxGetStreamPriorityRange, &least, &greatest);
  copy_stream_ = create_stream(tuning_.low_priority ? least : greatest);
  own_stream_ = create_stream(tuning_.low_priority ? least : greatest);
  watch_stream_ = create_stream(greatest);
  input_ready_ = create_event();
  captured_input_ready_ = create_event();
  for (Ends& ends : captured_ends_) ends = {create_event(), create_event()};
  ULYSSES_CUDA(cuMemAllocHost, reinterpret_cast<void**>(&host_pad_), pad_bytes(board_->world_size()));
  watcher_ = std::thread([this] { watch(); });
}

CudaTransport::~CudaTransport() {
  // Whatever is still queued, nobody is left to release it.
  if (!shutdown(0)) stop();
}

void CudaTransport::join(uintptr_t stream) {
  // In front of the event's next record: of another stream's input it tells no more.
  if (own_behind_ && *own_behind_ != stream) join_own_slices();
  ULYSSES_CUDA(cuEventRecord, input_ready(), stream_of(stream));
  ULYSSES_CUDA(cuStreamWaitEvent, copy_stream_, input_ready(), 0);
  own_behind_ = stream;
}

void CudaTransport::join_own_slices() {
  if (own_behind_) ULYSSES_CUDA(cuStreamWaitEvent, own_stream_, input_ready(), 0);
  own_behind_.reset();
}

uint64_t CudaTransport::capture_id(uintptr_t stream) const {
  CudaContextGuard guard(context_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  check_cuda(capture_info(CudaDriver::get().p_cuStreamGetCaptureInfo, stream_of(stream), &status, &id),
             "cuStreamGetCaptureInfo");
  return status == CU_STREAM_CAPTURE_STATUS_NONE ? 0 : id;
}

bool CudaTransport::begin(uint64_t ready, const std::set<uintptr_t>& readers, bool capturing, bool open_ended,
                          Put first) {
  if (failed()) return false;
  CudaContextGuard guard(context_);
  if (capturing) captured_.store(true);
  // The host may run ahead, but not without limit: every group in flight holds two events.
  while (!capturing && !failed_.load() && in_flight() >= kMaxInFlight) {
    retire_completed();
    if (in_flight() >= kMaxInFlight) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  capturing_ = capturing;
  held_back_.clear();  // of a group that was given up, as is this
  own_behind_.reset();
  own_slices_late_ = open_ended ? std::min<size_t>(tuning_.own_slices_late, 1) : tuning_.own_slices_late;
  for (uintptr_t reader : readers) join(reader);  // own slices overwrite the targets too
  join(first.stream);
  if (!skip_ready_) handshake(Signal::kReady, ready);
  send(first);
  held_back_.push_back(std::move(first));
  queue_own_slices(own_slices_late_);
  return true;
}

void CudaTransport::put(Put next) {
  CudaContextGuard guard(context_);
  join(next.stream);
  send(next);
  held_back_.push_back(std::move(next));
  queue_own_slices(own_slices_late_);
}

void CudaTransport::send(const Put& put) {
  const auto send_all = [&](const std::vector<PitchedCopy>& copies) {
    for (const PitchedCopy& copy : copies)
      copy_slice(copy, put.source, put.route->targets[static_cast<size_t>(copy.peer)], copy_stream_);
  };
  if (tuning_.rotated) {
    send_all(put.route->plan.copies);
  } else {
    std::vector<PitchedCopy> copies = put.route->plan.copies;
    std::stable_sort(copies.begin(), copies.end(), [](const auto& a, const auto& b) { return a.peer < b.peer; });
    send_all(copies);
  }
}

void CudaTransport::queue_own_slices(size_t but_for) {
  while (held_back_.size() > but_for) {
    const Put& own = held_back_.front();
    if (own.own_target != 0) {
      join_own_slices();
      for (const PitchedCopy& copy : own.route->plan.own) copy_slice(copy, own.source, own.own_target, own_stream_);
    }
    held_back_.pop_front();
  }
}

uint64_t CudaTransport::end(uint64_t done) {
  CudaContextGuard guard(context_);
  queue_own_slices(0);
  join_own_slices();  // also where there were none: what follows on that stream is part of the capture, too
  if (!skip_done_) handshake(Signal::kDone, done);
  const uint64_t number = ++groups_;
  const Ends ends = capturing_ ? captured_ends_[number % kMaxUnwaited] : Ends{take_event(), take_event()};
  ULYSSES_CUDA(cuEventRecord, ends.done, copy_stream_);
  ULYSSES_CUDA(cuEventRecord, ends.own_slices, own_stream_);
  if (capturing_) return number;
  std::lock_guard lock(mutex_);
  in_flight_.push_back({number, ends});
  return number;
}

bool CudaTransport::wait(uintptr_t stream, uint64_t number, bool capturing) {
  CudaContextGuard guard(context_);
  const auto wait_for = [stream](const Ends& ends) {
    ULYSSES_CUDA(cuStreamWaitEvent, stream_of(stream), ends.done, 0);
    ULYSSES_CUDA(cuStreamWaitEvent, stream_of(stream), ends.own_slices, 0);
  };
  if (capturing) {
    wait_for(captured_ends_[number % kMaxUnwaited]);
    return failed();
  }
  {
    // Under the lock, since a retired group's events are recorded again by others. One that is not found is complete.
    std::lock_guard lock(mutex_);
    const auto group = std::find_if(in_flight_.rbegin(), in_flight_.rend(),
                                    [number](const InFlight& each) { return each.number == number; });
    if (group != in_flight_.rend()) wait_for(group->ends);
  }
  return failed();
}

void CudaTransport::handshake(Signal signal, uint64_t value) {
  const auto rank = static_cast<size_t>(board_->rank());
  const auto world_size = static_cast<size_t>(board_->world_size());
  const bool ready = signal == Signal::kReady;
  const size_t row = ready ? 0 : world_size;
  const CUdeviceptr own = pads_[rank];
  value = ready ? value & ~kDoneBit : value | kDoneBit;
  operations_.clear();
  const auto each_peer = [&](const auto& operation) {
    for (size_t step = 1; step < world_size; ++step) operations_.push_back(operation((rank + step) % world_size));
  };
  const auto zero = [&](size_t slots) {
    each_peer([&](size_t peer) { return write_operation(word(own, slots + peer), 0); });
  };
  zero(world_size - row);
  each_peer([&](size_t peer) { return write_operation(word(pads_[peer], row + rank), value); });
  operations_.push_back(write_operation(word(own, 2 * world_size), value));  // while the peers' signals travel
  each_peer([&](size_t peer) { return wait_operation(word(own, row + peer), value); });
  if (skip_ready_ || skip_done_) zero(row);  // which the other handshake does not do then
  ULYSSES_CUDA(cuStreamBatchMemOp, copy_stream_, static_cast<unsigned>(operations_.size()), operations_.data(), 0);
}

CUevent CudaTransport::take_event() {
  {
    std::lock_guard lock(mutex_);
    if (!spare_events_.empty()) {
      CUevent event = spare_events_.back();
      spare_events_.pop_back();
      return event;
    }
  }
  return create_event();
}

size_t CudaTransport::in_flight() const {
  std::lock_guard lock(mutex_);
  return in_flight_.size();
}

void CudaTransport::retire_completed() {
  RelaxedCapture relaxed;
  std::lock_guard lock(mutex_);
  while (!in_flight_.empty()) {
    const Ends ends = in_flight_.front().ends;
    for (CUevent event : {ends.done, ends.own_slices}) {
      const CUresult result = CudaDriver::get().p_cuEventQuery(event);
      if (result == CUDA_ERROR_NOT_READY) return;
      check_cuda(result, "cuEventQuery");
    }
    in_flight_.pop_front();
    spare_events_.push_back(ends.done);
    spare_events_.push_back(ends.own_slices);
  }
}

bool CudaTransport::queues_empty() const {
  RelaxedCapture relaxed;
  return CudaDriver::get().p_cuStreamQuery(copy_stream_) != CUDA_ERROR_NOT_READY &&
         CudaDriver::get().p_cuStreamQuery(own_stream_) != CUDA_ERROR_NOT_READY;
}

bool CudaTransport::device_lost() const {
  RelaxedCapture relaxed;
  switch (CudaDriver::get().p_cuStreamQuery(copy_stream_)) {
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

bool CudaTransport::failed() const { return failed_.load(std::memory_order_acquire) || board_->is_aborted(); }

std::optional<Failure> CudaTransport::failure() const {
  if (failed_.load(std::memory_order_acquire)) {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  return board_->aborted();
}

void CudaTransport::watch() {
  try {
    ULYSSES_CUDA(cuCtxSetCurrent, context_);
    RelaxedCapture relaxed;
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      wake_.wait_for(lock, failed_.load() ? kReleaseTick : kTick);
      if (stopping_) return;
      lock.unlock();
      if (failed_.load()) {
        release_waits();
      } else {
        look();
      }
      lock.lock();
    }
  } catch (const std::exception& error) {
    // The device has failed: there is nothing left to release.
    Failure failure;
    failure.kind = Failure::Kind::kDriver;
    failure.message = std::string("rank ") + std::to_string(board_->rank()) + ": " + error.what();
    fail(std::move(failure));
  }
}

void CudaTransport::look() {
  retire_completed();
  uint64_t number = 0;
  {
    std::lock_guard lock(mutex_);
    if (!in_flight_.empty()) number = in_flight_.front().number;
  }
  const double now = now_seconds();
  if (number != watched_number_) {
    watched_number_ = number;
    watched_since_ = now;
    watched_pad_.clear();
  }
  if (number == 0 && !captured_.load()) return;
  if (now - watched_since_ < kSlowGroupSeconds) return;
  const PadImage pad = read_pad();
  Failure failure;
  failure.seconds = now - watched_since_;
  if (pad.waiting()) failure.signal = pad.signal();
  if (auto told = board_->aborted()) {
    told->signal = failure.signal;
    told->seconds = failure.seconds;
    return fail(std::move(*told));
  }
  // Only a pad that reads the same twice is judged: the handshakes' operations may run between two words of one
  // reading.
  if (!pad.waiting() || pad.words != watched_pad_) {
    watched_pad_ = pad.words;
    watched_since_ = now - kSlowGroupSeconds;
    return;
  }
  std::vector<int> silent;
  for (int peer = 0; peer < board_->world_size(); ++peer) {
    if (peer == board_->rank()) continue;
    const auto writer = static_cast<size_t>(peer);
    if (pad.slot(writer) == 0) {
      silent.push_back(peer);
    } else if (!pad.arrived(writer)) {
      failure.peers.push_back(peer);
    }
  }
  failure.kind = Failure::Kind::kMismatch;
  if (failure.peers.empty()) {
    failure.kind = Failure::Kind::kPeerGone;
    for (int peer : silent) {
      // Read again: it may have signalled and then ended.
      if (board_->peer_gone(peer) && read_pad().words == pad.words) failure.peers.push_back(peer);
    }
    // Behind that look: who gives up tells, and closes then.
    if (auto told = board_->aborted()) {
      told->signal = failure.signal;
      told->seconds = failure.seconds;
      return fail(std::move(*told));
    }
  }
  if (failure.peers.empty()) {
    failure.kind = Failure::Kind::kTimeout;
    if (failure.seconds >= timeout_s_) failure.peers = silent;
  }
  if (!failure.peers.empty()) fail(std::move(failure));
}

CudaTransport::PadImage CudaTransport::read_pad() {
  const size_t bytes = pad_bytes(board_->world_size());
  ULYSSES_CUDA(cuMemcpyDtoHAsync, host_pad_, pads_[static_cast<size_t>(board_->rank())], bytes, watch_stream_);
  ULYSSES_CUDA(cuStreamSynchronize, watch_stream_);
  return {std::vector<uint64_t>(host_pad_, host_pad_ + bytes / sizeof(uint64_t)),
          static_cast<size_t>(board_->world_size()), static_cast<size_t>(board_->rank())};
}

void CudaTransport::fail(Failure failure) {
  const Failure::Kind kind = failure.kind;
  const std::string text = describe(failure, board_->rank());
  {
    std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
  }
  // In this order: once the watcher releases it, the queue writes to the peers what no longer means anything.
  board_->abort_peers(kind, text);
  failed_.store(true, std::memory_order_release);
  wake_.notify_all();
}

void CudaTransport::release_waits() {
  const PadImage pad = read_pad();
  if (!pad.waiting()) return;
  const auto rank = static_cast<size_t>(board_->rank());
  for (size_t peer = 0; peer < pads_.size(); ++peer) {
    if (peer == rank || pad.arrived(peer)) continue;
    ULYSSES_CUDA(cuStreamWriteValue64, watch_stream_, word(pads_[rank], pad.slot_index(peer)), pad.awaited(),
                 CU_STREAM_WRITE_VALUE_DEFAULT);
  }
  ULYSSES_CUDA(cuStreamSynchronize, watch_stream_);
}

void CudaTransport::abort(Failure::Kind kind, const std::string& message) {
  Failure failure;
  failure.kind = kind;
  failure.message = message;
  fail(std::move(failure));
}

bool CudaTransport::shutdown(double grace_s) { return shut_down_ || (drain(grace_s) && stop()); }

bool CudaTransport::drain(double grace_s) {
  // At process exit the driver may have gone first, and with it everything that could be drained.
  if (CudaDriver::get().p_cuCtxPushCurrent(context_) != CUDA_SUCCESS) return true;
  const double start = now_seconds();
  while (!failed_.load() && !queues_empty()) {
    if (now_seconds() - start >= grace_s) {
      Failure failure;
      failure.kind = Failure::Kind::kClosed;
      failure.message =
          "rank " + std::to_string(board_->rank()) + " closed its communicator before the exchange was complete";
      fail(std::move(failure));
      break;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  const double drain_start = now_seconds();
  bool empty = queues_empty();
  while (!empty && now_seconds() - drain_start < kDrainSeconds) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    empty = queues_empty();
  }
  const bool drained = empty && !device_lost();
  CUcontext popped = nullptr;
  CudaDriver::get().p_cuCtxPopCurrent(&popped);
  return drained;
}

bool CudaTransport::stop() {
  shut_down_ = true;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  board_->leave();
  const CudaDriver& driver = CudaDriver::get();
  if (driver.p_cuCtxPushCurrent(context_) != CUDA_SUCCESS) return true;
  driver.p_cuMemFreeHost(host_pad_);
  std::vector<Ends> all(captured_ends_.begin(), captured_ends_.end());
  for (const InFlight& group : in_flight_) all.push_back(group.ends);
  for (const Ends& ends : all) {
    spare_events_.push_back(ends.done);
    spare_events_.push_back(ends.own_slices);
  }
  spare_events_.push_back(input_ready_);
  spare_events_.push_back(captured_input_ready_);
  for (CUevent event : spare_events_) driver.p_cuEventDestroy(event);
  for (CUstream stream : {copy_stream_, own_stream_, watch_stream_}) driver.p_cuStreamDestroy(stream);
  CUcontext popped = nullptr;
  driver.p_cuCtxPopCurrent(&popped);
  return true;
}

}  // namespace ulysses
