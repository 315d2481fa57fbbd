#include "shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace ulysses {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

[[noreturn]] void throw_errno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

void reserve_range(int fd, size_t offset, size_t size_bytes) {
  if (int error = ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(size_bytes))) {
    throw_errno(error, "reserving " + std::to_string(size_bytes) + " bytes of shared memory");
  }
}

void* map(int fd, size_t size_bytes, const std::string& name) {
  void* data = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_errno(errno, "mmap of shared memory " + name);
  return data;
}

}  // namespace

SharedSegment SharedSegment::create(const std::string& name, size_t size_bytes, size_t reserved_bytes) {
  FileDescriptor fd(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) throw_errno(errno, "shm_open of " + name);
  try {
    if (::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) throw_errno(errno, "ftruncate of " + name);
    reserve_range(fd.get(), 0, reserved_bytes);
    void* data = map(fd.get(), size_bytes, name);
    return SharedSegment(data, size_bytes, reserved_bytes < size_bytes ? fd.release() : -1);
  } catch (...) {
    unlink(name);
    throw;
  }
}

SharedSegment SharedSegment::open(const std::string& name, size_t size_bytes) {
  FileDescriptor fd(::shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0));
  if (fd.get() < 0) throw_errno(errno, "shm_open of " + name);
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) throw_errno(errno, "fstat of " + name);
  if (info.st_uid != ::geteuid()) throw std::runtime_error("shared memory " + name + " belongs to another user");
  if (static_cast<size_t>(info.st_size) != size_bytes) {
    throw std::runtime_error("shared memory " + name + " has " + std::to_string(info.st_size) + " bytes, expected " +
                             std::to_string(size_bytes));
  }
  return SharedSegment(map(fd.get(), size_bytes, name), size_bytes, -1);
}

void SharedSegment::reserve(size_t offset, size_t size_bytes) const {
  if (fd_ >= 0) reserve_range(fd_, offset, size_bytes);
}

void SharedSegment::unlink(const std::string& name) noexcept { ::shm_unlink(name.c_str()); }

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

SharedSegment::~SharedSegment() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

void make_private(void* address, size_t size_bytes) {
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  const size_t pages = (size_bytes + page - 1) / page * page;
  void* copy = ::mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) throw_errno(errno, "mmap of private memory");
  std::memcpy(copy, address, size_bytes);
  if (::mremap(copy, pages, pages, MREMAP_MAYMOVE | MREMAP_FIXED, address) == MAP_FAILED) {
    const int error = errno;
    ::munmap(copy, pages);
    throw_errno(error, "mremap of private memory");
  }
}

}  // namespace ulysses
