// What a group on shm pays for looking whether a peer gave up or has ended while its copy thread waits. Two ranks,
// processes that exchange groups without data, so that all there is to them is the two handshakes.
//
//   c++ -std=c++17 -O3 -DNDEBUG -pthread -Icsrc benchmarks/watchdog.cpp csrc/board.cpp csrc/shm_transport.cpp
//       csrc/shared_segment.cpp csrc/copy_plan.cpp -lrt -Wl,--wrap=_ZNK7ulysses5Board9peer_goneEi
//       -Wl,--wrap=_ZNK7ulysses5Board7abortedEv -o watchdog
//   ./watchdog [BLOCKS] [GROUPS_A_BLOCK]
//
// The transport is the library's own. Its calls of Board::aborted() and Board::peer_gone() go through functions below,
// which in every other block of groups answer at once, "no". Both ranks count the groups and so change over together.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "board.h"
#include "shared_segment.h"
#include "shm_transport.h"

using namespace ulysses;
using Clock = std::chrono::steady_clock;

namespace {

std::atomic<bool> looks{true};
std::atomic<uint64_t> look_count{0};

double nanos_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

double quantile(std::vector<double> values, double at) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(at * static_cast<double>(values.size() - 1))];
}

}  // namespace

extern "C" {
// NOLINTBEGIN: the names are the linker's
bool __real__ZNK7ulysses5Board9peer_goneEi(const Board* board, int peer);
bool __wrap__ZNK7ulysses5Board9peer_goneEi(const Board* board, int peer) {
  look_count.fetch_add(1, std::memory_order_relaxed);
  return looks.load(std::memory_order_relaxed) && __real__ZNK7ulysses5Board9peer_goneEi(board, peer);
}
std::optional<Failure> __real__ZNK7ulysses5Board7abortedEv(const Board* board);
std::optional<Failure> __wrap__ZNK7ulysses5Board7abortedEv(const Board* board) {
  return looks.load(std::memory_order_relaxed) ? __real__ZNK7ulysses5Board7abortedEv(board) : std::nullopt;
}
// NOLINTEND
}

namespace {

// Nanoseconds of one look at a peer that is there: what the wait does between two sleeps.
double one_look(const Board& board, int peer) {
  constexpr int kCount = 200'000;
  const auto start = Clock::now();
  bool found = false;
  for (int i = 0; i < kCount; ++i) {
    Failure failure;
    failure.seconds = nanos_since(start);
    failure.peers = {peer};
    found = found || board.aborted() || board.peer_gone(peer) || failure.seconds < 0;
  }
  if (found) std::puts("a peer is gone");
  return nanos_since(start) / kCount;
}

void run(const std::shared_ptr<SharedSegment>& segment, int rank, int registered_by_peer, int registered, int blocks,
         int groups) {
  auto board = std::make_shared<Board>(segment, rank, 2);
  board->register_self();
  char byte = 0;
  if (::write(registered, &byte, 1) != 1 || ::read(registered_by_peer, &byte, 1) != 1) std::_Exit(1);
  board->watch_peers();
  if (rank == 0) std::printf("one look: %.0f ns\n", one_look(*board, 1));
  ShmTransport transport(board, 30, false, false);
  std::vector<double> per_group[2];
  uint64_t looked = 0;
  for (int block = 0; block < blocks; ++block) {
    const bool on = block % 2 == 0;
    looks = on;
    const uint64_t before = look_count;
    const auto start = Clock::now();
    for (int group = 0; group < groups; ++group) {
      transport.begin(0x100000001);
      const uint64_t number = transport.end(0x200000001);
      while (!transport.wait_for(number, 1.0)) {
      }
    }
    per_group[on].push_back(nanos_since(start) / groups);
    if (on) looked += look_count - before;
  }
  if (transport.failure()) std::_Exit(1);
  transport.shutdown(10);
  if (rank != 0) return;
  std::vector<double> difference;
  for (size_t i = 0; i < per_group[0].size(); ++i) difference.push_back(per_group[1][i] - per_group[0][i]);
  for (bool on : {true, false}) {
    std::printf("a group, looks %s: %.0f ns in the median of %zu blocks of %d groups, quartiles %.0f and %.0f\n",
                on ? "on " : "off", quantile(per_group[on], 0.5), per_group[on].size(), groups,
                quantile(per_group[on], 0.25), quantile(per_group[on], 0.75));
  }
  const auto count = static_cast<double>(difference.size());
  // Of the median of what is spread like a normal distribution between its quartiles; beyond them are other programs.
  const double error = 1.2533 * (quantile(difference, 0.75) - quantile(difference, 0.25)) / 1.349 / std::sqrt(count);
  std::printf("looks a group: %.2f\n", static_cast<double>(looked) / (count * groups));
  std::printf("difference of neighbouring blocks: %.0f ns in the median, standard error %.0f\n",
              quantile(difference, 0.5), error);
}

}  // namespace

int main(int argc, char** argv) {
  const int blocks = argc > 1 ? std::atoi(argv[1]) : 400;
  const int groups = argc > 2 ? std::atoi(argv[2]) : 1000;
  const std::string name = "/ulysses_op_watchdog_" + std::to_string(::getpid());
  auto segment = std::make_shared<SharedSegment>(SharedSegment::create(name, Board::size_bytes(2)));
  SharedSegment::unlink(name);
  int pipes[2][2];
  if (::pipe(pipes[0]) != 0 || ::pipe(pipes[1]) != 0) return 1;
  const pid_t child = ::fork();
  const int rank = child == 0 ? 1 : 0;
  run(segment, rank, pipes[1 - rank][0], pipes[rank][1], blocks, groups);
  if (child == 0) return 0;
  int status = 0;
  return ::waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}
