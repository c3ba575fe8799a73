// y = x @ w.T + bias of a weight of packed integers of 2 to 6 bits as it is stored, for Hopper. `variants.py` says what is defined for a
// variant, `host.py` launches it.
//
// A ring of stages in shared memory has codes, scales and rows of x of the same columns, copied by all threads STAGES - 1 stages ahead.
// A warp has HEIGHT times 16 rows of the weight (a slab of SLABS) and every PHASES-th unit of a stage's columns. It decodes a unit once,
// exactly, multiplies it by each tile of eight rows of x from zero, and adds the sums times the group's scale to its totals.
//
// Phases are added in their order, then the SPLITS programs along K, a cluster, through each other's shared memory in the order of K.
// So the same operands have the same bits every time.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct TensorMap;

#include "problem.cuh"
#include "words.cuh"
#include "copies.cuh"
#include "pairs.cuh"
#include "decode.cuh"
#include "load.cuh"

// A lane's sums of 16 rows and a tile of tokens: (row, token), (row, token + 1), (row + 8, token), (row + 8, token + 1).
typedef float Totals[HEIGHT][TILES][4];

// Where a lane finds its operands, behind the begin of a stage: its first row's codes and scales, its row of the first tile of x; zero
// points. Rows of x that do not exist are what memory had before: sums of them are not written, and are those of no other row.
struct Reads {
  Window window;
  u32 codes, scale, zero, x;
  __device__ __forceinline__ Reads(const Place& at, u32 zeros, int row, int t, int phase, int lane) : window(t) {
    codes = row * CODE_PITCH + phase * (UNIT * BITS / 8) + window.word * 4;
    scale = SCALE_AT + row * SCALE_PITCH, zero = zeros + row * at.zero_pitch;
    // Of one tile rows behind the last are the last: lanes that read the same words do so at once.
    const int token = TILES == 1 ? min(lane / 4, at.tokens - 1) : lane / 4;
    x = X_AT + token * X_PITCH + phase * (UNIT * 2) + t * 16;
  }
};

// First operands of a unit: rows and rows + 8 of each 16.
struct Operand {
  u32 low[HEIGHT][CHUNKS][4], high[HEIGHT][CHUNKS][4];
  float low_scale[HEIGHT], high_scale[HEIGHT];

  // stage: where the stage begins; u: of the warp's units; scale, zero: offsets of the unit's group.
  __device__ __forceinline__ void load(const Reads& from, const Place& at, u32 stage, int u, u32 scale, u32 zero) {
#pragma unroll
    for (int h = 0; h < HEIGHT; h++) {
      u32 less_low = 0, less_high = 0;
      if constexpr (ZERO) {
        less_low = load_less(from.zero + zero + 16 * h * at.zero_pitch);
        less_high = load_less(from.zero + zero + (16 * h + 8) * at.zero_pitch);
      }
#pragma unroll
      for (int c = 0; c < CHUNKS; c++) {
        const u32 codes = stage + from.codes + (u * PHASES * UNIT + 32 * c) * BITS / 8 + 16 * h * CODE_PITCH;
        decode(low[h][c], codes, from.window, less_low);
        decode(high[h][c], codes + 8 * CODE_PITCH, from.window, less_high);
      }
      low_scale[h] = __uint_as_float(load_word(stage + from.scale + scale + 16 * h * SCALE_PITCH));
      high_scale[h] = __uint_as_float(load_word(stage + from.scale + scale + (16 * h + 8) * SCALE_PITCH));
    }
  }
};

// A unit's products with all tiles of x. x: of the unit, behind a tile's first row.
__device__ __forceinline__ void multiply_tiles(Totals& totals, const Operand& w, const Reads& from, u32 x) {
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    float sums[HEIGHT][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      u32 b[4];
      load_inputs(b, from.x + x + tile * 8 * X_PITCH + c * 64);
#pragma unroll
      for (int h = 0; h < HEIGHT; h++) {
        multiply(sums[h], w.low[h][c], w.high[h][c], 0, b[0], b[1]);
        multiply(sums[h], w.low[h][c], w.high[h][c], 1, b[2], b[3]);
      }
    }
#pragma unroll
    for (int h = 0; h < HEIGHT; h++)
#pragma unroll
      for (int i = 0; i < 4; i++) totals[h][tile][i] = fmaf(sums[h][i], i < 2 ? w.low_scale[h] : w.high_scale[h], totals[h][tile][i]);
  }
}

// A warp's part of a stage, which is stage `index` of K.
__device__ __forceinline__ void multiply_stage(Totals& totals, const Reads& from, const Place& at, u32 stage, int index, int phase) {
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int unit = u * PHASES + phase, own = GROUP >= COLUMNS ? 0 : unit * UNIT / GROUP;
    const int group = GROUP >= COLUMNS ? index / (GROUP / COLUMNS) : index * SCALES + own;
    Operand w;
    w.load(from, at, stage, u, own * 4, group);
    multiply_tiles(totals, w, from, stage + u * PHASES * UNIT * 2);
  }
}

// The sums of a program's stages.
__device__ __forceinline__ void consume(Totals& totals, const Copies& copies, const Place& at, const Reads& from, u32 ring, int phase) {
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (at.first + i < at.last) copies.load(ring + i * STAGE_BYTES, at.first + i);
    commit();
  }
#pragma unroll
  for (int h = 0; h < HEIGHT; h++)
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) totals[h][tile][i] = 0.f;
  int place = 0;
#pragma unroll 1
  for (int index = at.first; index < at.last; index++) {
    arrived();
    if constexpr (PAIRED) copies.of_x.pair(ring + place * STAGE_BYTES + X_AT);
    asm volatile("bar.sync 0;" ::: "memory");  // all copies of the stage are there, and the stage before has been read
    const int next = index + STAGES - 1, free = place == 0 ? STAGES - 1 : place - 1;
    if (next < at.last) copies.load(ring + free * STAGE_BYTES, next);
    commit();
    multiply_stage(totals, from, at, ring + place * STAGE_BYTES, index, phase);
    place = place == STAGES - 1 ? 0 : place + 1;
  }
}

// A warp's sums into shared memory, by phase, token and row.
__device__ __forceinline__ void leave(const Totals& totals, u32 sums, int phase, int row, int pair) {
  const u32 to = sums + 4 * ((phase * TOKENS + 2 * pair) * LINE + row);
#pragma unroll
  for (int h = 0; h < HEIGHT; h++)
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
#pragma unroll
      for (int i = 0; i < 4; i++) store_float(to + 4 * ((8 * tile + i % 2) * LINE + 16 * h + i / 2 * 8), totals[h][tile][i]);
}

__device__ __forceinline__ float load_sum(u32 address) {
  float v;
  if constexpr (SPLITS > 1) asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  else asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store(const Problem& p, float v, int token, int row) {
  if (p.bias != nullptr) v += bias_at(p.bias, p.bias_kind, row);
  unsigned short half;
  if constexpr (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  static_cast<unsigned short*>(p.y)[i64(token) * p.n + row] = half;
}

// Add phases, then programs, and write this program's share of the rows: every SPLITS-th part of them.
__device__ __forceinline__ void finish(const Problem& p, const Place& at, u32 sums, int split, int thread) {
  constexpr int SHARE = ROWS / SPLITS;
#pragma unroll 1
  for (int i = thread; i < at.tokens * SHARE; i += THREADS) {
    const int token = i / SHARE, row = split * SHARE + i % SHARE;
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
#pragma unroll
      for (int phase = 0; phase < PHASES; phase++) {
        const u32 address = sums + 4 * ((phase * TOKENS + token) * LINE + row);
        total += load_sum(SPLITS > 1 ? address_in(address, s) : address);
      }
    if (at.row + row < p.n) store(p, total, at.token + token, at.row + row);
  }
}

extern "C" __global__ __launch_bounds__(THREADS, AT_ONCE) __cluster_dims__(SPLITS, 1, 1) void sm90_intn_small_m(
    const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), lane = thread % 32;
  const int phase = warp / SLABS, row = warp % SLABS * (16 * HEIGHT) + lane / 4;
  u32 split = 0;
  if constexpr (SPLITS > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(split));
  const u32 ring = (shared_address(memory) + 127) & ~127u;
  const Place at(p, split);
  const Copies copies(p, at, thread);
  const Reads reads(at, ring + ZERO_AT, row, lane % 4, phase, lane);
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if constexpr (ZERO) load_zeros(p, at, ring + ZERO_AT, thread);
  Totals totals;
  consume(totals, copies, at, reads, ring, phase);
  asm volatile("bar.sync 0;" ::: "memory");  // the ring has been read
  leave(totals, ring, phase, row, lane % 4);
  sync_cluster();
  finish(p, at, ring, split, thread);
  if constexpr (SPLITS > 1) sync_cluster();  // nobody leaves before others have read its sums
}
