// Each way in which an exchange fails or ends, with threads as ranks: every rank learns of it and can shut down, and
// what it then frees is not touched any more.
#include <sys/wait.h>

#include <chrono>
#include <random>
#include <utility>

#include "copy_plan.h"
#include "world.h"

namespace ulysses::stress {
namespace {

constexpr int kRandomEnds = 40;

void queue_group(ShmTransport& transport) {
  transport.begin(kReadyDigest);
  transport.end(kDoneDigest);
}

// A rank that exchanges two groups, the second one queued before the first has ended, and has to fail.
void require_failure(ShmTransport& transport, Failure::Kind expected) {
  queue_group(transport);
  transport.begin(kReadyDigest);
  wait(transport, transport.end(kDoneDigest));
  const auto failure = transport.failure();
  require(failure.has_value(), "a rank has not learned of a failure");
  // Who hears of it from another rank first has that one's word for it.
  require(failure->kind == expected || !failure->message.empty(),
          std::string("expected ") + kind_name(expected) + ", got " + kind_name(failure->kind));
  require(!describe(*failure, 0).empty(), "a failure without a word");
}

// The last rank does `odd`, the others exchange.
void fail(int world_size, double timeout_s, Failure::Kind expected, const std::function<void(ShmTransport&)>& odd) {
  World world(world_size, timeout_s);
  world.run([&](int rank) {
    if (rank == world_size - 1) {
      odd(world.transport(rank));
    } else {
      require_failure(world.transport(rank), expected);
    }
  });
  for (auto& transport : world.ranks) transport->shutdown(0.1);
}

// The last rank closes, or gives up, while its copy thread stands in READY, which the first rank gives only after that.
void end_while_waiting(int world_size, const std::function<void(ShmTransport&)>& end, const std::string& told) {
  constexpr double kTimeout = 20;
  World world(world_size, kTimeout);
  Barrier ended(2);
  world.run([&](int rank) {
    ShmTransport& transport = world.transport(rank);
    if (rank == world_size - 1) {
      queue_group(transport);
      const auto start = std::chrono::steady_clock::now();
      end(transport);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      require(took.count() < kTimeout / 2, "the end has waited for a peer");
      ended.meet();
    } else {
      if (rank == 0) ended.meet();
      require_failure(transport, Failure::Kind::kAbort);
      require(transport.failure()->message.find(told) != std::string::npos, "another reason");
    }
    transport.shutdown(0.1);
  });
}

// Ranks that close with a group under way, and time enough to complete it.
void close_in_peace(int world_size) {
  World world(world_size, 20);
  world.run([&](int rank) {
    ShmTransport& transport = world.transport(rank);
    queue_group(transport);
    queue_group(transport);
    transport.shutdown(20);
    transport.shutdown(0);
    require(!transport.failure(), "a group that had time to complete has failed");
  });
}

// The last rank is a process that ends while the others wait for it.
void lose_a_process(int world_size) {
  const auto segment = board_segment(world_size);
  int registered[2];
  int go[2];
  require(::pipe(registered) == 0 && ::pipe(go) == 0, "no pipes");
  char byte = 0;
  const pid_t child = ::fork();
  require(child >= 0, "no child");
  if (child == 0) {
    Board board(segment, world_size - 1, world_size);
    board.register_self();
    const bool told = ::write(registered[1], &byte, 1) == 1 && ::read(go[0], &byte, 1) == 1;
    std::_Exit(told ? 0 : 1);
  }
  require(::read(registered[0], &byte, 1) == 1, "the child has not registered itself");
  {
    World world(segment, world_size, world_size - 1, 20);
    for (auto& board : world.boards) require(!board->peer_gone(world_size - 1), "a peer that is there is gone");
    world.run([&](int rank) {
      if (rank == 0) require(::write(go[1], &byte, 1) == 1, "the child cannot be told");
      require_failure(world.transport(rank), Failure::Kind::kPeerGone);
      world.transport(rank).shutdown(0.1);
    });
  }
  int status = 0;
  require(::waitpid(child, &status, 0) == child && status == 0, "the child has not ended well");
  for (int end : {registered[0], registered[1], go[0], go[1]}) ::close(end);
}

// Each rank sends large inputs and, at a random moment, gives up, closes, or waits for what comes, while another thread
// looks at its state; then it frees its inputs and writes where it may have been writing.
void end_at_random(int world_size, std::mt19937& random) {
  constexpr int64_t kRows = 64;
  constexpr int64_t kHeadDim = 256;
  const Dims sizes{1, kRows, world_size, kHeadDim};
  const Dims strides{kRows * world_size * kHeadDim, world_size * kHeadDim, kHeadDim, 1};
  std::vector<HeadRange> heads;
  for (int64_t head = 0; head < world_size; ++head) heads.push_back({head, head + 1});
  const std::vector<int64_t> seq_lens(static_cast<size_t>(world_size), kRows);
  std::vector<std::vector<int32_t>> targets;
  std::vector<uintptr_t> addresses;
  for (int rank = 0; rank < world_size; ++rank) {
    auto& target = targets.emplace_back(static_cast<size_t>(world_size * kRows * kHeadDim));
    addresses.push_back(reinterpret_cast<uintptr_t>(target.data()));
  }
  std::vector<std::pair<unsigned, unsigned>> how;  // after so many microseconds, what
  for (int rank = 0; rank < world_size; ++rank) how.emplace_back(random() % 1500, random() % 3);

  World world(world_size, 0.1);
  world.run([&](int rank) {
    ShmTransport& transport = world.transport(rank);
    const Board& board = *world.boards[static_cast<size_t>(rank)];
    std::atomic<bool> over{false};
    std::thread onlooker([&] {
      while (!over) {
        const auto told = board.aborted();
        require(!told || !told->message.empty(), "a peer that gave up without a word");
        if (transport.idle()) board.signalled((rank + 1) % world_size);
        transport.failure();
        std::this_thread::yield();
      }
    });
    const CopyPlan plan =
        make_copy_plan(Direction::kScatterHeads, sizes, strides, sizeof(int32_t), heads, seq_lens, rank);
    uint64_t number = 0;
    {
      auto route = std::make_shared<const Route>(Route{plan, addresses});
      std::vector<int32_t> input(static_cast<size_t>(strides[0]), rank);
      for (int group = 0; group < 8; ++group) {
        transport.begin(kReadyDigest);
        for (int tag = 0; tag < 3; ++tag) transport.put(route, reinterpret_cast<uintptr_t>(input.data()));
        number = transport.end(kDoneDigest);
      }
      route.reset();
      const auto [after_us, what] = how[static_cast<size_t>(rank)];
      std::this_thread::sleep_for(std::chrono::microseconds(after_us));
      if (what == 0) {
        transport.abort(Failure::Kind::kAbort, "gave up");
      } else if (what == 1) {
        transport.shutdown(0);
      } else {
        wait(transport, number);
      }
    }
    for (const PitchedCopy& copy : plan.copies)
      targets[static_cast<size_t>(copy.peer)][static_cast<size_t>(copy.dst_offset_bytes) / sizeof(int32_t)] = -1;
    require(transport.wait_for(number, 0), "a group that was dropped counts as under way");
    transport.shutdown(0.01);
    over = true;
    onlooker.join();
  });
}

}  // namespace

void fail_in_every_way(int world_size, unsigned seed) {
  lose_a_process(world_size);  // first: a child that is forked beside other threads may do little
  fail(world_size, 20, Failure::Kind::kAbort, [](ShmTransport& rank) { rank.abort(Failure::Kind::kAbort, "gave up"); });
  fail(world_size, 0.2, Failure::Kind::kTimeout, [](ShmTransport&) {});
  fail(world_size, 20, Failure::Kind::kPeerGone, [](ShmTransport& closes) { closes.shutdown(0.1); });
  fail(world_size, 20, Failure::Kind::kMismatch, [](ShmTransport& rank) {
    rank.begin(0x300000001);
    rank.shutdown(5);
  });
  end_while_waiting(world_size, [](ShmTransport& rank) { rank.shutdown(0.05); }, "closed its communicator");
  end_while_waiting(world_size, [](ShmTransport& rank) { rank.abort(Failure::Kind::kAbort, "gave up"); }, "gave up");
  close_in_peace(world_size);
  std::mt19937 random(seed);
  for (int count = 0; count < kRandomEnds; ++count) end_at_random(world_size, random);
}

}  // namespace ulysses::stress
