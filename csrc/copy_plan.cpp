#include "copy_plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace ulysses {
namespace {

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

template <typename Int>
std::string text(Int value) {
  return std::to_string(value);
}

std::string text(const Dims& dims) {
  return "(" + text(dims[0]) + ", " + text(dims[1]) + ", " + text(dims[2]) + ", " + text(dims[3]) + ")";
}

int64_t add(int64_t a, int64_t b) {
  int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) fail("sizes are too large: byte offsets exceed 64 bits");
  return sum;
}

int64_t mul(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) fail("sizes are too large: byte offsets exceed 64 bits");
  return product;
}

/// A loop around a row: `count` steps, each moving both sides on by so many bytes.
struct Loop {
  int64_t count;
  int64_t src_step;
  int64_t dst_step;
};

bool fits_pitch(const Loop& loop, int64_t width) {
  return std::min(loop.src_step, loop.dst_step) >= width && std::max(loop.src_step, loop.dst_step) <= kMaxPitchBytes;
}

/// Appends the copies for batch x seq rows of `width` bytes.
void append_copies(int peer, int64_t src, int64_t dst, int64_t width, Loop batch, Loop seq,
                   std::vector<PitchedCopy>& out) {
  if (width == 0 || batch.count == 0 || seq.count == 0) return;

  std::vector<Loop> loops;  // innermost first, without loops of one step
  for (const Loop& loop : {seq, batch}) {
    if (loop.count == 1) continue;
    if (loops.empty() && loop.src_step == width && loop.dst_step == width) {
      width *= loop.count;
    } else if (!loops.empty() && loop.src_step == loops[0].src_step * loops[0].count &&
               loop.dst_step == loops[0].dst_step * loops[0].count) {
      loops[0].count *= loop.count;
    } else {
      loops.push_back(loop);
    }
  }

  // The longest loop that can be a pitch becomes the height, the others are unrolled.
  Loop height{1, width, width};
  auto longest = loops.end();
  for (auto it = loops.begin(); it != loops.end(); ++it) {
    if (fits_pitch(*it, width) && (longest == loops.end() || it->count > longest->count)) longest = it;
  }
  if (longest != loops.end()) {
    height = *longest;
    loops.erase(longest);
  }
  loops.resize(2, Loop{1, 0, 0});
  for (int64_t i = 0; i < loops[1].count; ++i) {
    for (int64_t j = 0; j < loops[0].count; ++j) {
      out.push_back({peer, src + i * loops[1].src_step + j * loops[0].src_step, height.src_step,
                     dst + i * loops[1].dst_step + j * loops[0].dst_step, height.dst_step, width, height.count});
    }
  }
}

void check_arguments(Direction direction, const Dims& shape, const Dims& strides, int64_t itemsize,
                     const std::vector<HeadRange>& heads, const std::vector<int64_t>& seq_lens, int rank) {
  if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8) {
    fail("itemsize must be 1, 2, 4 or 8 bytes, got " + text(itemsize));
  }
  if (heads.empty()) fail("heads must have one range a rank, got none");
  if (seq_lens.size() != heads.size()) {
    fail("seq_lens must have one length a rank as heads does, got " + text(seq_lens.size()) + " lengths and " +
         text(heads.size()) + " ranges");
  }
  if (rank < 0 || static_cast<size_t>(rank) >= heads.size()) {
    fail("rank must be in [0, " + text(heads.size()) + "), got " + text(rank));
  }
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0) fail("shape[" + text(i) + "] must not be negative, got " + text(shape[i]));
    if (strides[i] < 0) fail("strides[" + text(i) + "] must not be negative, got " + text(strides[i]));
  }

  const bool scatter = direction == Direction::kScatterHeads;
  int64_t seq_global = 0;
  int64_t num_slots = 0;
  for (size_t p = 0; p < heads.size(); ++p) {
    const auto [start, stop] = heads[p];
    if (seq_lens[p] < 0) fail("seq_lens[" + text(p) + "] must not be negative, got " + text(seq_lens[p]));
    if (start < 0 || start > stop || (scatter && stop > shape[2])) {
      fail("heads[" + text(p) + "] must be a range (start <= stop) " +
           (scatter ? "within the " + text(shape[2]) + " heads of the input" : "that starts at 0 or later") +
           ", got (" + text(start) + ", " + text(stop) + ")");
    }
    seq_global = add(seq_global, seq_lens[p]);
    num_slots = add(num_slots, stop - start);
  }
  const auto self = static_cast<size_t>(rank);
  const int64_t seq = scatter ? seq_lens[self] : seq_global;
  const int64_t own_heads = heads[self].stop - heads[self].start;
  if (shape[1] != seq) {
    fail("shape[1] must be " + (scatter ? "seq_lens[" + text(rank) + "] = " : std::string("the sum of seq_lens, ")) +
         text(seq) + ", when heads are " + (scatter ? "scattered" : "gathered") + ", got " + text(shape[1]));
  }
  if (!scatter && shape[2] != own_heads) {
    fail("shape[2] must be the " + text(own_heads) + " heads of heads[" + text(rank) +
         "] when heads are gathered, got " + text(shape[2]));
  }
  if (!rows_dense(shape, strides)) {
    fail("each (H, D) row of the input must be dense in memory and rows along S must not overlap, got shape " +
         text(shape) + " with strides " + text(strides) + "; copy it with contiguous() first");
  }

  // Every offset and step below is bounded by one of these extents, so the arithmetic that follows cannot overflow.
  const Dims size{std::max(shape[0], int64_t{1}), std::max(shape[1], int64_t{1}), std::max(shape[2], int64_t{1}),
                  std::max(shape[3], int64_t{1})};
  const int64_t target =
      mul(mul(size[0], std::max(seq_global, int64_t{1})), mul(std::max(num_slots, size[2]), size[3]));
  const int64_t input = add(add(mul(size[0], strides[0]), mul(size[1], strides[1])), mul(size[2], size[3]));
  mul(std::max(target, input), itemsize);
}

}  // namespace

bool rows_dense(const Dims& shape, const Dims& strides) {
  const auto [batch, seq, heads, dim] = shape;
  if (batch == 0 || seq == 0 || heads == 0 || dim == 0) return true;
  return (dim == 1 || strides[3] == 1) && (heads == 1 || strides[2] == dim) && (seq == 1 || strides[1] / dim >= heads);
}

CopyPlan make_copy_plan(Direction direction, const Dims& shape, const Dims& strides, int64_t itemsize,
                        const std::vector<HeadRange>& heads, const std::vector<int64_t>& seq_lens, int rank) {
  check_arguments(direction, shape, strides, itemsize, heads, seq_lens, rank);

  const size_t world_size = heads.size();
  const auto self = static_cast<size_t>(rank);
  std::vector<int64_t> slot(world_size + 1, 0);
  std::vector<int64_t> offset(world_size + 1, 0);
  for (size_t p = 0; p < world_size; ++p) {
    slot[p + 1] = slot[p] + heads[p].stop - heads[p].start;
    offset[p + 1] = offset[p] + seq_lens[p];
  }
  const int64_t head_bytes = shape[3] * itemsize;
  const int64_t src_batch = strides[0] * itemsize;
  const int64_t src_row = strides[1] * itemsize;

  CopyPlan plan;
  for (size_t step = 1; step <= world_size; ++step) {
    const size_t p = (self + step) % world_size;
    auto& out = p == self ? plan.own : plan.copies;
    if (direction == Direction::kScatterHeads) {
      const int64_t width = (heads[p].stop - heads[p].start) * head_bytes;
      append_copies(static_cast<int>(p), heads[p].start * head_bytes, offset[self] * width, width,
                    Loop{shape[0], src_batch, offset[world_size] * width}, Loop{shape[1], src_row, width}, out);
    } else {
      const int64_t width = shape[2] * head_bytes;
      const int64_t dst_row = slot[world_size] * head_bytes;
      append_copies(static_cast<int>(p), offset[p] * src_row, slot[self] * head_bytes, width,
                    Loop{shape[0], src_batch, seq_lens[p] * dst_row}, Loop{seq_lens[p], src_row, dst_row}, out);
    }
  }
  return plan;
}

}  // namespace ulysses
