// The driver API, found in libcuda at run time: loading this library needs no driver, and using it without one is an
// exception.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

namespace ulysses {

// Entry points by their exported names: the header's macros choose the version that the header's prototypes describe.
// clang-format off
#define ULYSSES_CUDA_ENTRY_POINTS(X) \
  X(cuInit) X(cuGetErrorName) X(cuDriverGetVersion) X(cuDeviceGet) X(cuDeviceGetAttribute) \
  X(cuDeviceGetByPCIBusId) X(cuDeviceCanAccessPeer) X(cuCtxGetCurrent) X(cuCtxPushCurrent) X(cuCtxPopCurrent) \
  X(cuCtxSetCurrent) X(cuCtxGetStreamPriorityRange) X(cuStreamCreateWithPriority) X(cuStreamDestroy) \
  X(cuStreamQuery) X(cuStreamSynchronize) X(cuStreamGetCaptureInfo) X(cuStreamWaitEvent) \
  X(cuStreamBatchMemOp) X(cuStreamWriteValue64) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord) \
  X(cuEventQuery) X(cuMemcpy2DAsync) X(cuMemcpyAsync) X(cuMemcpyDtoHAsync) X(cuMemsetD8) X(cuMemAlloc) \
  X(cuMemFree) X(cuMemAllocHost) X(cuMemFreeHost) X(cuMemGetAddressRange) X(cuIpcGetMemHandle) \
  X(cuIpcOpenMemHandle) X(cuIpcCloseMemHandle) X(cuThreadExchangeStreamCaptureMode)
// clang-format on

struct CudaDriver {
#define ULYSSES_DECLARE(name) decltype(&::name) p_##name = nullptr;
  ULYSSES_CUDA_ENTRY_POINTS(ULYSSES_DECLARE)
#undef ULYSSES_DECLARE

  // Opens libcuda once a process; throws std::runtime_error that says what is missing.
  static const CudaDriver& get();
};

// Throws std::runtime_error "<call>: <error name>" unless the result is CUDA_SUCCESS.
void check_cuda(CUresult result, const char* call);

#define ULYSSES_CUDA(name, ...) ::ulysses::check_cuda(::ulysses::CudaDriver::get().p_##name(__VA_ARGS__), #name)

// Makes a context current for a scope; nothing is called when it already is.
class CudaContextGuard {
 public:
  explicit CudaContextGuard(CUcontext context);
  ~CudaContextGuard();
  CudaContextGuard(const CudaContextGuard&) = delete;
  CudaContextGuard& operator=(const CudaContextGuard&) = delete;

 private:
  bool pushed_ = false;
};

// The context that is current on this thread, as an integer for Python to keep; throws when there is none.
uintptr_t cuda_current_context();

// What a device can do for this library, by its PCI bus id ("0000:1B:00.0").
struct CudaDeviceFacts {
  int driver_version = 0;
  bool stream_memory_operations = false;  // 64-bit write and wait
  int copy_engines = 0;
};
CudaDeviceFacts cuda_device_facts(const std::string& bus_id);
// Whether `bus_id` can address memory of `peer_bus_id`; throws where the peer's device is not visible to this process.
bool cuda_can_access_peer(const std::string& bus_id, const std::string& peer_bus_id);

// Device memory of this process that other processes can map: cuMemAlloc'ed, so the caching allocator's settings
// (expandable segments) do not concern it. Zeroed. Freed on destruction.
class CudaIpcBuffer {
 public:
  CudaIpcBuffer(uintptr_t context, size_t size_bytes);
  ~CudaIpcBuffer();
  CudaIpcBuffer(const CudaIpcBuffer&) = delete;
  CudaIpcBuffer& operator=(const CudaIpcBuffer&) = delete;

  uintptr_t address() const { return static_cast<uintptr_t>(address_); }
  size_t size_bytes() const { return size_bytes_; }
  // The 64-byte handle of the allocation that holds the buffer, then the buffer's offset in it and its size, 8 bytes
  // each, little-endian.
  std::string handle() const;

  static constexpr size_t kHandleBytes = CU_IPC_HANDLE_SIZE + 16;

 private:
  CUcontext context_;
  CUdeviceptr address_ = 0;
  size_t size_bytes_;
};

// A peer's CudaIpcBuffer, mapped here; unmapped on destruction.
class CudaIpcMapping {
 public:
  // Throws std::runtime_error unless the handle has kHandleBytes and describes size_bytes.
  CudaIpcMapping(uintptr_t context, const std::string& handle, size_t size_bytes);
  ~CudaIpcMapping();
  CudaIpcMapping(const CudaIpcMapping&) = delete;
  CudaIpcMapping& operator=(const CudaIpcMapping&) = delete;

  uintptr_t address() const { return static_cast<uintptr_t>(base_) + offset_; }

 private:
  CUcontext context_;
  CUdeviceptr base_ = 0;
  size_t offset_ = 0;
};

}  // namespace ulysses
