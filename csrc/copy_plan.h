// The index equation of a Ulysses exchange, turned into pitched copies. Pure arithmetic: no CUDA, no torch.
//
// n_p = heads[p].stop - heads[p].start, off_p = seq_lens[0] + ... + seq_lens[p-1], S = sum of seq_lens,
// slot_r = n_0 + ... + n_{r-1}, N = sum of n. Rank r holds x and writes, for every rank p, b and s:
//
//   kScatterHeads  x is (B, seq_lens[r], H, D), target_p is (B, S, n_p, D):
//                  target_p[b, off_r + s, 0 : n_p, :] = x[b, s, heads[p].start : heads[p].stop, :]    s < seq_lens[r]
//   kGatherHeads   x is (B, S, n_r, D), target_p is (B, seq_lens[p], N, D):
//                  target_p[b, s, slot_r : slot_r + n_r, :] = x[b, off_p + s, :, :]                   s < seq_lens[p]
//
// Targets are contiguous; x is read through its strides. If the ranges partition the heads in rank order, N = H and
// slot_r = heads[r].start; if they overlap (replicated heads), a gather places all copies side by side.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ulysses {

enum class Direction { kScatterHeads, kGatherHeads };

/// Heads [start, stop) of one rank.
struct HeadRange {
  int64_t start;
  int64_t stop;
};

/// Four sizes or strides, in the order (B, S, H, D).
using Dims = std::array<int64_t, 4>;

/// Largest pitch that a pitched copy is given: the limit of the CUDA driver.
inline constexpr int64_t kMaxPitchBytes = (int64_t{1} << 31) - 1;

/// `height` rows of `width_bytes`. With more than one row, width_bytes <= pitch <= kMaxPitchBytes on both sides; with
/// one row both pitches equal width_bytes (which may exceed kMaxPitchBytes: such a copy is a plain one).
struct PitchedCopy {
  int peer;                  ///< rank whose target is written
  int64_t src_offset_bytes;  ///< from the first element of the input
  int64_t src_pitch_bytes;
  int64_t dst_offset_bytes;  ///< from the base of the peer's target
  int64_t dst_pitch_bytes;
  int64_t width_bytes;
  int64_t height;
};

struct CopyPlan {
  std::vector<PitchedCopy> copies;  ///< to peers only, in the order rank + 1, rank + 2, ..., wrapping
  std::vector<PitchedCopy> own;     ///< the rank's own slice, into its own target
};

/// A plan, and where each rank's target lies in this process.
struct Route {
  CopyPlan plan;
  std::vector<uintptr_t> targets;
  std::size_t place_bytes = 0;  // where targets have places (shm_transport.h), the size of one
};

/// Whether pitched copies can read the tensor: each (H, D) row is dense, and rows that follow each other along S do
/// not overlap. `strides` are in elements. Sizes of 1 make a stride irrelevant; an empty tensor is dense.
bool rows_dense(const Dims& shape, const Dims& strides);

/// The copies that `rank` makes, as few and as wide as the layout allows: rows that are contiguous on both sides
/// become one wide row, batches that continue the row pitch on both sides one taller copy, empty slices none.
///
/// `shape` and `strides` (elements) are those of the rank's input, `itemsize` (bytes) is 1, 2, 4 or 8, `heads` and
/// `seq_lens` have one entry a rank. Throws std::invalid_argument if these contradict each other or if
/// !rows_dense(shape, strides).
CopyPlan make_copy_plan(Direction direction, const Dims& shape, const Dims& strides, int64_t itemsize,
                        const std::vector<HeadRange>& heads, const std::vector<int64_t>& seq_lens, int rank);

}  // namespace ulysses
