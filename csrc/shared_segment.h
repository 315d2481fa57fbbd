// POSIX shared memory that several processes of one user map.
#pragma once

#include <cstddef>
#include <string>

namespace ulysses {

// One mapping of a named shared-memory object, unmapped on destruction.
//
// The name is a capability: callers make it unguessable, and remove it (unlink) as soon as every peer has mapped it.
// The object is created with mode 0600, and its pages are reserved before anybody touches them, so that a full /dev/shm
// is an error here and never a SIGBUS later.
class SharedSegment {
 public:
  // Creates the object, with its first reserved_bytes reserved; throws std::system_error when the name exists or the
  // memory cannot be reserved.
  static SharedSegment create(const std::string& name, size_t size_bytes, size_t reserved_bytes);
  // All of it reserved.
  static SharedSegment create(const std::string& name, size_t size_bytes) {
    return create(name, size_bytes, size_bytes);
  }
  // Maps an existing object; throws std::runtime_error unless this user owns it and its size is exactly size_bytes.
  static SharedSegment open(const std::string& name, size_t size_bytes);
  // Removes the name; mappings stay valid. A name that is gone already is not an error.
  static void unlink(const std::string& name) noexcept;

  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  // The creator reserves more; throws std::system_error when that is not there.
  void reserve(size_t offset, size_t size_bytes) const;

  void* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }

 private:
  SharedSegment(void* data, size_t size_bytes, int fd) : data_(data), size_bytes_(size_bytes), fd_(fd) {}

  void* data_ = nullptr;
  size_t size_bytes_ = 0;
  int fd_ = -1;  // the creator's, as long as something is not reserved
};

// Gives this process pages of its own, with the same contents, in place of the shared ones at `address`, the beginning
// of a page. Throws std::system_error when there is no memory.
void make_private(void* address, size_t size_bytes);

}  // namespace ulysses
