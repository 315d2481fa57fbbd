// The shared-memory exchange with threads as ranks, for the sanitizers: every rank checks every element that its peers
// wrote, group after group, while ranks are late at random; then each way to fail. Exit status 0: all held.
//
//   stress RANKS GROUPS SEED [ready|done]     with the handshake that is named left out, which has to be found
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "board.h"
#include "copy_plan.h"
#include "shared_segment.h"
#include "shm_transport.h"

namespace {

using namespace ulysses;

constexpr int kTags = 3;
constexpr int64_t kHeadDim = 3;

void require(bool held, const std::string& what) {
  if (held) return;
  std::fprintf(stderr, "stress: %s\n", what.c_str());
  std::_Exit(1);
}

// What rank `rank` sends as `tag` of `group`, at row s (of its part of the sequence), head h and element d.
int32_t element(int64_t rank, int64_t group, int64_t tag, int64_t s, int64_t h, int64_t d) {
  return static_cast<int32_t>((((rank * 131 + group) * 7 + tag) * 1009 + s) * 257 + h * 17 + d);
}

// Ranks of one process: a board each over one mapping, so that the sanitizers see who writes what.
struct World {
  World(int world_size, double timeout_s, const std::string& skip = "") : size(world_size) {
    const std::string name = "/ulysses_op_stress_" + std::to_string(::rand());
    segment = std::make_shared<SharedSegment>(SharedSegment::create(name, Board::size_bytes(size)));
    SharedSegment::unlink(name);
    for (int rank = 0; rank < size; ++rank) boards.push_back(std::make_shared<Board>(segment, rank, size));
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

  int size;
  std::shared_ptr<SharedSegment> segment;
  std::vector<std::shared_ptr<Board>> boards;
  std::vector<std::unique_ptr<ShmTransport>> ranks;
};

// Uneven lengths and heads, one rank without a head where there are three or more.
struct Shape {
  explicit Shape(int world_size) {
    int64_t heads = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      seq_lens.push_back(2 + rank);
      const int64_t count = rank == 2 ? 0 : 1 + rank % 2;
      ranges.push_back({heads, heads + count});
      heads += count;
    }
    num_heads = heads;
  }
  int64_t seq_start(int rank) const {
    int64_t start = 0;
    for (int peer = 0; peer < rank; ++peer) start += seq_lens[static_cast<size_t>(peer)];
    return start;
  }
  std::vector<int64_t> seq_lens;
  std::vector<HeadRange> ranges;
  int64_t num_heads = 0;
};

void exchange(int world_size, int groups, unsigned seed, const std::string& skip) {
  World world(world_size, 30, skip);
  const Shape shape(world_size);
  const int64_t seq = shape.seq_start(world_size);
  // targets[tag][rank]: (S, H_local, D), as peers write it.
  std::vector<std::vector<std::vector<int32_t>>> targets(kTags);
  for (auto& of_tag : targets) {
    for (const HeadRange& heads : shape.ranges)
      of_tag.emplace_back(static_cast<size_t>(seq * (heads.stop - heads.start) * kHeadDim + 1));
  }
  world.run([&](int rank) {
    std::mt19937 random(seed + static_cast<unsigned>(rank));
    ShmTransport& transport = *world.ranks[static_cast<size_t>(rank)];
    const int64_t rows = shape.seq_lens[static_cast<size_t>(rank)];
    const Dims sizes{1, rows, shape.num_heads, kHeadDim};
    const int64_t row = (shape.num_heads + 2) * kHeadDim;  // rows are apart, as those of a fused projection are
    const Dims strides{rows * row, row, kHeadDim, 1};
    std::vector<std::shared_ptr<const Route>> routes;
    for (auto& of_tag : targets) {
      std::vector<uintptr_t> addresses;
      for (auto& target : of_tag) addresses.push_back(reinterpret_cast<uintptr_t>(target.data()));
      const CopyPlan plan =
          make_copy_plan(Direction::kScatterHeads, sizes, strides, sizeof(int32_t), shape.ranges, shape.seq_lens, rank);
      routes.push_back(std::make_shared<Route>(Route{plan, addresses}));
    }
    const auto late = [&] {
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    };
    for (int group = 0; group < groups; ++group) {
      std::vector<std::vector<int32_t>> inputs(kTags);
      transport.begin(0x100000001);
      for (int tag = 0; tag < kTags; ++tag) {
        auto& input = inputs[static_cast<size_t>(tag)];
        input.resize(static_cast<size_t>(rows * row));
        for (int64_t s = 0; s < rows; ++s)
          for (int64_t h = 0; h < shape.num_heads; ++h)
            for (int64_t d = 0; d < kHeadDim; ++d)
              input[static_cast<size_t>(s * row + h * kHeadDim + d)] = element(rank, group, tag, s, h, d);
        late();
        transport.put(routes[static_cast<size_t>(tag)], reinterpret_cast<uintptr_t>(input.data()));
      }
      const uint64_t number = transport.end(0x200000001);
      while (!transport.wait_for(number, 1.0)) {
      }
      require(!transport.failure(), "a group failed");
      const HeadRange heads = shape.ranges[static_cast<size_t>(rank)];
      for (int tag = 0; tag < kTags; ++tag) {
        const int32_t* found = targets[static_cast<size_t>(tag)][static_cast<size_t>(rank)].data();
        for (int peer = 0; peer < world_size; ++peer) {
          for (int64_t s = 0; peer != rank && s < shape.seq_lens[static_cast<size_t>(peer)]; ++s)
            for (int64_t h = heads.start; h < heads.stop; ++h)
              for (int64_t d = 0; d < kHeadDim; ++d) {
                const int64_t at = (shape.seq_start(peer) + s) * (heads.stop - heads.start) + h - heads.start;
                require(found[at * kHeadDim + d] == element(peer, group, tag, s, h, d), "a wrong element");
              }
        }
      }
      late();
    }
  });
}

// One rank does `odd`, the others a group; every one of these has to learn of it, and all can shut down.
void fail(int world_size, double timeout_s, const std::function<void(ShmTransport&)>& odd, Failure::Kind expected) {
  World world(world_size, timeout_s);
  world.run([&](int rank) {
    ShmTransport& transport = *world.ranks[static_cast<size_t>(rank)];
    if (rank == world_size - 1) {
      odd(transport);
    } else {
      transport.begin(0x100000001);
      const uint64_t number = transport.end(0x200000001);
      while (!transport.wait_for(number, 1.0)) {
      }
      const auto failure = transport.failure();
      require(failure.has_value(), "a rank has not learned of a failure");
      // Who hears of it from another rank first has that one's word for it.
      require(failure->kind == expected || !failure->message.empty(),
              std::string("expected ") + kind_name(expected) + ", got " + kind_name(failure->kind));
    }
    transport.shutdown(0.1);
  });
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 4 || argc == 5, "usage: stress RANKS GROUPS SEED [ready|done]");
  const int world_size = std::atoi(argv[1]);
  exchange(world_size, std::atoi(argv[2]), static_cast<unsigned>(std::atoi(argv[3])), argc == 5 ? argv[4] : "");
  fail(world_size, 20, [](ShmTransport& rank) { rank.abort(Failure::Kind::kAbort, "gave up"); }, Failure::Kind::kAbort);
  fail(world_size, 0.2, [](ShmTransport&) {}, Failure::Kind::kTimeout);
  fail(
      world_size, 20,
      [](ShmTransport& rank) {
        rank.begin(0x300000001);
        rank.shutdown(5);
      },
      Failure::Kind::kMismatch);
  std::puts("held");
}
