#include "cuda_driver.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace ulysses {
namespace {

CudaDriver open_driver() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error("no NVIDIA driver: libcuda.so.1 cannot be opened");
  CudaDriver driver;
#define ULYSSES_STRING(name) #name
#define ULYSSES_EXPANDED_STRING(name) ULYSSES_STRING(name)
#define ULYSSES_FIND(name)                                                                                        \
  driver.p_##name = reinterpret_cast<decltype(driver.p_##name)>(::dlsym(library, ULYSSES_EXPANDED_STRING(name))); \
  if (driver.p_##name == nullptr) throw std::runtime_error("this NVIDIA driver has no " ULYSSES_EXPANDED_STRING(name));
  ULYSSES_CUDA_ENTRY_POINTS(ULYSSES_FIND)
#undef ULYSSES_FIND
#undef ULYSSES_EXPANDED_STRING
#undef ULYSSES_STRING
  check_cuda(driver.p_cuInit(0), "cuInit");
  return driver;
}

int attribute(CUdevice_attribute name, CUdevice device) {
  int value = 0;
  ULYSSES_CUDA(cuDeviceGetAttribute, &value, name, device);
  return value;
}

CUdevice device_of(const std::string& bus_id) {
  CUdevice device = 0;
  ULYSSES_CUDA(cuDeviceGetByPCIBusId, &device, bus_id.c_str());
  return device;
}

}  // namespace

const CudaDriver& CudaDriver::get() {
  static const CudaDriver driver = open_driver();
  return driver;
}

void check_cuda(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  // Error codes are the same in every driver; names need a loaded one, and the call that failed may be the loading.
  std::string text = std::string(call) + " failed with CUresult " + std::to_string(static_cast<int>(result));
  if (std::strcmp(call, "cuInit") != 0) {
    const char* name = nullptr;
    if (CudaDriver::get().p_cuGetErrorName(result, &name) == CUDA_SUCCESS && name != nullptr)
      text += std::string(" (") + name + ")";
  }
  throw std::runtime_error(text);
}

CudaContextGuard::CudaContextGuard(CUcontext context) {
  CUcontext current = nullptr;
  ULYSSES_CUDA(cuCtxGetCurrent, &current);
  if (current == context) return;
  ULYSSES_CUDA(cuCtxPushCurrent, context);
  pushed_ = true;
}

CudaContextGuard::~CudaContextGuard() {
  CUcontext popped = nullptr;
  if (pushed_) CudaDriver::get().p_cuCtxPopCurrent(&popped);
}

uintptr_t cuda_current_context() {
  CUcontext context = nullptr;
  ULYSSES_CUDA(cuCtxGetCurrent, &context);
  if (context == nullptr) throw std::runtime_error("no CUDA context is current");
  return reinterpret_cast<uintptr_t>(context);
}

CudaDeviceFacts cuda_device_facts(const std::string& bus_id) {
  const CUdevice device = device_of(bus_id);
  CudaDeviceFacts facts;
  ULYSSES_CUDA(cuDriverGetVersion, &facts.driver_version);
  facts.stream_memory_operations = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) != 0;
  facts.copy_engines = attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, device);
  return facts;
}

bool cuda_can_access_peer(const std::string& bus_id, const std::string& peer_bus_id) {
  int can_access = 0;
  ULYSSES_CUDA(cuDeviceCanAccessPeer, &can_access, device_of(bus_id), device_of(peer_bus_id));
  return can_access != 0;
}

CudaIpcBuffer::CudaIpcBuffer(uintptr_t context, size_t size_bytes)
    : context_(reinterpret_cast<CUcontext>(context)), size_bytes_(size_bytes) {
  CudaContextGuard guard(context_);
  ULYSSES_CUDA(cuMemAlloc, &address_, size_bytes);
  try {
    ULYSSES_CUDA(cuMemsetD8, address_, 0, size_bytes);
    ULYSSES_CUDA(cuStreamSynchronize, nullptr);
  } catch (...) {
    CudaDriver::get().p_cuMemFree(address_);
    throw;
  }
}

CudaIpcBuffer::~CudaIpcBuffer() {
  // At process exit the context may be gone already, and its memory with it.
  if (CudaDriver::get().p_cuCtxPushCurrent(context_) != CUDA_SUCCESS) return;
  CudaDriver::get().p_cuMemFree(address_);
  CUcontext popped = nullptr;
  CudaDriver::get().p_cuCtxPopCurrent(&popped);
}

std::string CudaIpcBuffer::handle() const {
  CudaContextGuard guard(context_);
  CUipcMemHandle ipc{};
  ULYSSES_CUDA(cuIpcGetMemHandle, &ipc, address_);
  CUdeviceptr base = 0;
  ULYSSES_CUDA(cuMemGetAddressRange, &base, nullptr, address_);
  const uint64_t numbers[2] = {static_cast<uint64_t>(address_ - base), size_bytes_};
  std::string text(kHandleBytes, '\0');
  std::memcpy(text.data(), &ipc, CU_IPC_HANDLE_SIZE);
  std::memcpy(text.data() + CU_IPC_HANDLE_SIZE, numbers, sizeof(numbers));
  return text;
}

CudaIpcMapping::CudaIpcMapping(uintptr_t context, const std::string& handle, size_t size_bytes)
    : context_(reinterpret_cast<CUcontext>(context)) {
  CudaContextGuard guard(context_);
  if (handle.size() != CudaIpcBuffer::kHandleBytes) throw std::runtime_error("CUDA IPC handle has the wrong length");
  CUipcMemHandle ipc{};
  uint64_t numbers[2];
  std::memcpy(&ipc, handle.data(), CU_IPC_HANDLE_SIZE);
  std::memcpy(numbers, handle.data() + CU_IPC_HANDLE_SIZE, sizeof(numbers));
  ULYSSES_CUDA(cuIpcOpenMemHandle, &base_, ipc, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  size_t mapped_bytes = 0;
  CUdeviceptr base = 0;
  const bool sized = CudaDriver::get().p_cuMemGetAddressRange(&base, &mapped_bytes, base_) == CUDA_SUCCESS;
  offset_ = numbers[0];
  if (numbers[1] != size_bytes || (sized && (offset_ > mapped_bytes || size_bytes > mapped_bytes - offset_))) {
    CudaDriver::get().p_cuIpcCloseMemHandle(base_);
    throw std::runtime_error("a peer's CUDA IPC buffer has another size than this rank's");
  }
}

CudaIpcMapping::~CudaIpcMapping() {
  if (CudaDriver::get().p_cuCtxPushCurrent(context_) != CUDA_SUCCESS) return;
  CudaDriver::get().p_cuIpcCloseMemHandle(base_);
  CUcontext popped = nullptr;
  CudaDriver::get().p_cuCtxPopCurrent(&popped);
}

}  // namespace ulysses
