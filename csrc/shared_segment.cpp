#include "shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
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

 private:
  int fd_;
};

[[noreturn]] void throw_errno(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

void* map(int fd, size_t size_bytes, const std::string& name) {
  void* data = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw_errno(errno, "mmap of shared memory " + name);
  return data;
}

}  // namespace

SharedSegment SharedSegment::create(const std::string& name, size_t size_bytes) {
  FileDescriptor fd(::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (fd.get() < 0) throw_errno(errno, "shm_open of " + name);
  try {
    if (::ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) throw_errno(errno, "ftruncate of " + name);
    if (int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(size_bytes))) {
      throw_errno(error, "reserving " + std::to_string(size_bytes) + " bytes of shared memory");
    }
    return SharedSegment(map(fd.get(), size_bytes, name), size_bytes);
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
  return SharedSegment(map(fd.get(), size_bytes, name), size_bytes);
}

void SharedSegment::unlink(const std::string& name) noexcept { ::shm_unlink(name.c_str()); }

SharedSegment::SharedSegment(SharedSegment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}

SharedSegment& SharedSegment::operator=(SharedSegment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

SharedSegment::~SharedSegment() {
  if (data_ != nullptr) ::munmap(data_, size_bytes_);
}

}  // namespace ulysses
