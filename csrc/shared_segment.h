// POSIX shared memory that several processes of one user map.
#pragma once

#include <cstddef>
#include <string>

namespace ulysses {

// One mapping of a named shared-memory object, unmapped on destruction.
//
// The name is a capability: callers make it unguessable, and remove it (unlink) as soon as every peer has mapped it.
// The object is created with mode 0600, and all its pages are reserved at once, so that a full /dev/shm is an error
// here and never a SIGBUS later.
class SharedSegment {
 public:
  // Creates the object; throws std::system_error when the name exists or the memory cannot be reserved.
  static SharedSegment create(const std::string& name, size_t size_bytes);
  // Maps an existing object; throws std::runtime_error unless this user owns it and its size is exactly size_bytes.
  static SharedSegment open(const std::string& name, size_t size_bytes);
  // Removes the name; mappings stay valid. A name that is gone already is not an error.
  static void unlink(const std::string& name) noexcept;

  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  SharedSegment(void* data, size_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  void* data_ = nullptr;
  size_t size_bytes_ = 0;
};

}  // namespace ulysses
