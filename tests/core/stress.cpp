// The shared-memory exchange with threads as ranks, for the sanitizers: every rank checks every element that its peers
// wrote, group after group, while ranks are late at random, groups overlap and targets are replaced by larger ones;
// then each way to fail. Exit status 0: all held.
//
//   stress RANKS GROUPS SEED [ready|done]     with the handshake that is named left out, which has to be found
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "copy_plan.h"
#include "world.h"

namespace {

using namespace ulysses;
using namespace ulysses::stress;

constexpr int kTags = 3;
constexpr int kReplaceEvery = 61;  // groups after which targets are replaced
constexpr size_t kMostInFlight = 3;

// What rank `rank` sends as `tag` of `group`, at row s (of its part of the sequence), head h and element d.
int32_t element(int64_t rank, int64_t group, int64_t tag, int64_t s, int64_t h, int64_t d) {
  return static_cast<int32_t>((((rank * 131 + group) * 7 + tag) * 1009 + s) * 257 + h * 17 + d);
}

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

// A rank's targets, (S, H_local, D) each as peers write them; as many sets as groups may be in flight.
using Targets = std::array<std::array<std::vector<int32_t>, kTags>, kMostInFlight>;

// A group that is not waited for yet. Its inputs are freed right behind the wait.
struct InFlight {
  int group;
  uint64_t number;
  std::array<std::vector<int32_t>, kTags> inputs;
};

class Rank {
 public:
  Rank(int rank, ShmTransport& transport, const Shape& shape, std::vector<Targets>& targets, Barrier& barrier,
       size_t most_in_flight, unsigned seed)
      : rank_(rank),
        transport_(transport),
        shape_(shape),
        targets_(targets),
        barrier_(barrier),
        most_in_flight_(most_in_flight),
        random_(seed + static_cast<unsigned>(rank)) {}

  void run(int groups) {
    for (int group = 0; group < groups; ++group) {
      if (group % kReplaceEvery == 0) replace_targets(3 + group / kReplaceEvery % 4);
      submit(group);
      if (in_flight_.size() == most_in_flight_) receive();
    }
    while (!in_flight_.empty()) receive();
  }

 private:
  int64_t rows() const { return shape_.seq_lens[static_cast<size_t>(rank_)]; }
  int64_t row() const { return (shape_.num_heads + 2) * head_dim_; }  // rows are apart, as in a fused projection
  HeadRange heads() const { return shape_.ranges[static_cast<size_t>(rank_)]; }
  size_t set_of(int group) const { return static_cast<size_t>(group) % most_in_flight_; }

  void late() {
    if (random_() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
  }

  // Once nothing is in flight here, no peer writes to these targets any more: they are freed before ranks meet.
  void replace_targets(int64_t head_dim) {
    while (!in_flight_.empty()) receive();
    head_dim_ = head_dim;
    const int64_t numel = shape_.seq_start(static_cast<int>(targets_.size())) * (heads().stop - heads().start);
    for (auto& set : targets_[static_cast<size_t>(rank_)])
      for (auto& target : set) target = std::vector<int32_t>(static_cast<size_t>(numel * head_dim + 1));
    barrier_.meet();
    const Dims sizes{1, rows(), shape_.num_heads, head_dim};
    const Dims strides{rows() * row(), row(), head_dim, 1};
    const CopyPlan plan = make_copy_plan(Direction::kScatterHeads, sizes, strides, sizeof(int32_t), shape_.ranges,
                                         shape_.seq_lens, rank_);
    for (size_t set = 0; set < kMostInFlight; ++set) {
      for (size_t tag = 0; tag < kTags; ++tag) {
        std::vector<uintptr_t> addresses;
        for (Targets& of_rank : targets_) addresses.push_back(reinterpret_cast<uintptr_t>(of_rank[set][tag].data()));
        routes_[set][tag] = std::make_shared<Route>(Route{plan, addresses});
      }
    }
  }

  void submit(int group) {
    InFlight& one = in_flight_.emplace_back();
    one.group = group;
    transport_.begin(kReadyDigest);
    for (size_t tag = 0; tag < kTags; ++tag) {
      auto& input = one.inputs[tag];
      input.resize(static_cast<size_t>(rows() * row()));
      for (int64_t s = 0; s < rows(); ++s)
        for (int64_t h = 0; h < shape_.num_heads; ++h)
          for (int64_t d = 0; d < head_dim_; ++d)
            input[static_cast<size_t>(s * row() + h * head_dim_ + d)] =
                element(rank_, group, static_cast<int64_t>(tag), s, h, d);
      late();
      transport_.put(routes_[set_of(group)][tag], reinterpret_cast<uintptr_t>(input.data()));
    }
    one.number = transport_.end(kDoneDigest);
  }

  void receive() {
    const InFlight& one = in_flight_.front();
    wait(transport_, one.number);
    require(!transport_.failure(), "a group failed");
    const int64_t own_heads = heads().stop - heads().start;
    for (size_t tag = 0; tag < kTags; ++tag) {
      const auto& found = targets_[static_cast<size_t>(rank_)][set_of(one.group)][tag];
      for (int peer = 0; peer < static_cast<int>(targets_.size()); ++peer) {
        for (int64_t s = 0; peer != rank_ && s < shape_.seq_lens[static_cast<size_t>(peer)]; ++s)
          for (int64_t h = 0; h < own_heads; ++h)
            for (int64_t d = 0; d < head_dim_; ++d) {
              const int64_t at = ((shape_.seq_start(peer) + s) * own_heads + h) * head_dim_ + d;
              require(found[static_cast<size_t>(at)] ==
                          element(peer, one.group, static_cast<int64_t>(tag), s, heads().start + h, d),
                      "a wrong element");
            }
      }
    }
    in_flight_.pop_front();
    late();
  }

  int rank_;
  ShmTransport& transport_;
  const Shape& shape_;
  std::vector<Targets>& targets_;
  Barrier& barrier_;
  size_t most_in_flight_;
  std::mt19937 random_;
  int64_t head_dim_ = 0;
  std::array<std::array<std::shared_ptr<const Route>, kTags>, kMostInFlight> routes_;
  std::deque<InFlight> in_flight_;
};

void exchange(int world_size, int groups, size_t most_in_flight, unsigned seed, const std::string& skip) {
  World world(world_size, 30, skip);
  const Shape shape(world_size);
  std::vector<Targets> targets(static_cast<size_t>(world_size));
  Barrier barrier(world_size);
  world.run(
      [&](int rank) { Rank(rank, world.transport(rank), shape, targets, barrier, most_in_flight, seed).run(groups); });
}

}  // namespace

int main(int argc, char** argv) {
  require(argc == 4 || argc == 5, "usage: stress RANKS GROUPS SEED [ready|done]");
  const int world_size = std::atoi(argv[1]);
  const int groups = std::atoi(argv[2]);
  const auto seed = static_cast<unsigned>(std::atoi(argv[3]));
  const std::string skip = argc == 5 ? argv[4] : "";
  fail_in_every_way(world_size, seed);
  exchange(world_size, groups / 2, 1, seed, skip);
  exchange(world_size, groups - groups / 2, kMostInFlight, seed + 100, skip);
  std::puts("held");
}
