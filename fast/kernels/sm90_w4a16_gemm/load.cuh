// What the ring is filled with: tokens, words, and scales with zero points or factors.
//
// Loading is so much work for one thread that three share it, in warps of their own: each waits for a stage, says how many bytes it
// brings, and brings them, of this program's part of K of every tile.
//
// Before: Problem, Ring, Steps, `copies.cuh`, `schedule.cuh` or `experts.cuh`, and what `sm90_w4a16_gemm.cu` says of sizes.

constexpr int LOADERS = 3;

__device__ __forceinline__ u32 begin_stage(const Ring& ring, const Place& at, u32 bytes) {
  const u32 bar = ring.full + 8 * at.stage;
  wait_for(ring.empty + 8 * at.stage, at.parity ^ 1);
  expect_bytes(bar, bytes);
  return bar;
}

// A neighbour that has no features left multiplies others in vain.
__device__ __forceinline__ int loaded_feature(const Problem& p, const Schedule& tiles) { return min(tiles.feature, p.features - FEATURES); }

// Rows that are copied of a program's share of a tile, of which x has `left`: a whole tile's in one box, or boxes of BOX rows. Boxes
// that x has nothing of are left out: the copy engine takes longer to fill them with zeros than to copy others.
__device__ __forceinline__ int copied(int left, bool small) {
  const int share = (small ? SMALL : TOKENS) / PAIR;
  if (left > share / BOX * BOX) return share;
  return (max(left, 0) + BOX - 1) / BOX * BOX;
}

__device__ __forceinline__ void load_tokens(const Maps& maps, const Problem& p, const Ring& ring, int neighbour, int split) {
  Schedule tiles(p);
  Place at;
  const Steps steps(p, split);
  const unsigned short all = PAIR > 1 ? ((1 << PAIR) - 1) << (PAIR * split) : 0;
  while (tiles.take(neighbour)) {
    const bool small = SMALL < TOKENS && tiles.small;
    const int share = (small ? SMALL : TOKENS) / PAIR, first = share * neighbour, left = tiles.limit() - tiles.token;
    const int own = copied(left - first, small), all_rows = PAIR > 1 ? copied(left, small) + copied(left - share, small) : own;
    const bool whole = own == TOKENS / PAIR;
#pragma unroll 1
    for (int step = steps.first; step < steps.last; step++, at.advance()) {
      const u32 bar = begin_stage(ring, at, all_rows * PANEL), to = ring.x + at.stage * X_BYTES + first * PANEL;
      if (whole) {
        copy_box(maps.x, to, bar, step * PANEL, tiles.token + first, all);
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < own; i += BOX) copy_box(maps.part, to + i * PANEL, bar, step * PANEL, tiles.token + first + i, all);
    }
  }
}

__device__ __forceinline__ void load_weight(const Problem& p, const Ring& ring, int neighbour, int split) {
  Schedule tiles(p);
  Place at;
  const Steps steps(p, split);
  while (tiles.take(neighbour)) {
    const unsigned char* from = tiles.words() + (i64(loaded_feature(p, tiles) / 64) * p.steps + steps.first) * ATOM;
    const i64 row = i64(p.steps) * ATOM;
#pragma unroll 1
    for (int step = steps.first; step < steps.last; step++, from += ATOM, at.advance()) {
      const u32 bar = begin_stage(ring, at, WORD_BYTES);
#pragma unroll
      for (int group = 0; group < GROUPS; group++)
        copy_bytes(from + group * row, ring.words + at.stage * WORD_BYTES + group * ATOM, bar, ATOM);
    }
  }
}

__device__ __forceinline__ void load_scales(const Problem& p, const Ring& ring, int neighbour, int split) {
  Schedule tiles(p);
  Place at;
  const Steps steps(p, split);
  while (tiles.take(neighbour)) {
    const i64 first = PARTS > 1 ? PARTS * steps.first : steps.first / p.each;
    const float* scales = tiles.scales() + first * p.features + loaded_feature(p, tiles);
    const int* zeros = tiles.zeros() + (first * p.features + loaded_feature(p, tiles)) / 2;
    int left = PARTS > 1 ? 1 : p.each - steps.first % p.each;
#pragma unroll 1
    for (int step = steps.first; step < steps.last; step++, at.advance()) {
      const u32 bar = begin_stage(ring, at, PARTS * (SCALE_BYTES + ZERO_BYTES));
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        copy_bytes(scales + part * p.features, ring.scales + (at.stage * PARTS + part) * SCALE_BYTES, bar, SCALE_BYTES);
        if constexpr (ZERO)
          copy_bytes(zeros + part * p.features / 2, ring.zeros + (at.stage * PARTS + part) * ZERO_BYTES, bar, ZERO_BYTES);
      }
      if (--left == 0) {
        left = PARTS > 1 ? 1 : p.each;
        scales += PARTS * p.features;
        zeros += PARTS * p.features / 2;
      }
    }
  }
}

// In place of scales: behind the weight's own one, a row of words, those of a step lie side by side.
__device__ __forceinline__ void load_factors(const Problem& p, const Ring& ring, int neighbour, int split) {
  Schedule tiles(p);
  Place at;
  const Steps steps(p, split);
  constexpr int BYTES = PARTS * SCALE_BYTES, EACH = BYTES / (4 * FEATURES / 2);  // words of a pair of rows
  while (tiles.take(neighbour)) {
    const i64 row = p.features / 2 * EACH;
    const float* factors = tiles.scales() + p.features / 2 + steps.first * row + loaded_feature(p, tiles) / 2 * EACH;
#pragma unroll 1
    for (int step = steps.first; step < steps.last; step++, factors += row, at.advance())
      copy_bytes(factors, ring.scales + at.stage * BYTES, begin_stage(ring, at, BYTES), BYTES);
  }
}
