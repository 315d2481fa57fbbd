// Threads as the ranks of one world, over one mapping, so that the sanitizers see who writes what.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "board.h"
#include "shared_segment.h"
#include "shm_transport.h"

namespace ulysses::stress {

constexpr uint64_t kReadyDigest = 0x100000001;
constexpr uint64_t kDoneDigest = 0x200000001;

inline void require(bool held, const std::string& what) {
  if (held) return;
  std::fprintf(stderr, "stress: %s\n", what.c_str());
  std::_Exit(1);
}

inline std::shared_ptr<SharedSegment> board_segment(int world_size) {
  static std::atomic<int> count{0};
  const std::string name = "/ulysses_op_stress_" + std::to_string(::getpid()) + "_" + std::to_string(++count);
  auto segment = std::make_shared<SharedSegment>(SharedSegment::create(name, Board::size_bytes(world_size)));
  SharedSegment::unlink(name);
  return segment;
}

struct World {
  World(int world_size, double timeout_s, const std::string& skip = "")
      : World(board_segment(world_size), world_size, world_size, timeout_s, skip) {}

  // Of the ranks on that segment, only the first `here`; the others have registered themselves.
  World(const std::shared_ptr<SharedSegment>& segment, int world_size, int here, double timeout_s,
        const std::string& skip = "")
      : size(here) {
    for (int rank = 0; rank < size; ++rank) boards.push_back(std::make_shared<Board>(segment, rank, world_size));
    for (auto& board : boards) board->register_self();
    for (auto& board : boards) board->watch_peers();
    for (auto& board : boards)
      ranks.push_back(std::make_unique<ShmTransport>(board, timeout_s, skip == "ready", skip == "done"));
  }

  void run(const std::function<void(int)>& rank_main) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank) threads.emplace_back(rank_main, rank);
    for (std::thread& thread : threads) thread.join();
  }

  ShmTransport& transport(int rank) { return *ranks[static_cast<size_t>(rank)]; }

  int size;
  std::vector<std::shared_ptr<Board>> boards;
  std::vector<std::unique_ptr<ShmTransport>> ranks;
};

// Where all ranks meet on the host.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void meet() {
    std::unique_lock lock(mutex_);
    const int round = round_;
    if (++arrived_ == count_) {
      arrived_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round_ != round; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  int count_;
  int arrived_ = 0;
  int round_ = 0;
};

inline void wait(ShmTransport& transport, uint64_t number) {
  while (!transport.wait_for(number, 1.0)) {
  }
}

// Every way to fail, and to end.
void fail_in_every_way(int world_size, unsigned seed);

}  // namespace ulysses::stress
