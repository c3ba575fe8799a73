// y = x @ w.T * x_scale + bias of at most TOKENS rows of x with a preshuffled weight w, for Hopper. `variants.py` says what is
// defined for a variant, `host.py` launches it; the order of the weight's words is that of `linear_small/elements.py`.
//
// The weight is a stream: one warp asks the bulk copy engine for stages of STEPS times 128 columns as far ahead as the ring goes,
// each a contiguous piece of memory. Asking takes that warp some hundred cycles, so nothing small is copied this way: scales and
// zero points of the program's part of K, and x of it, are copied before by all others; where x is large a second warp copies it,
// stage by stage (STREAMED). Those have 16 rows of a block of 64 each, BLOCKS blocks; PHASES of them share a block and take its
// stages in turn. A lane's 16 bytes of words are operands of `mma.m16n8k16` where they are: decoded in registers, multiplied from
// zero, added to the total times the group's scale.
//
// A cluster has SPLITS programs along K, which add their sums through each other's shared memory in the order of K; phases of
// a program are added before, in their order. So the same operands have the same bits every time.
//
// WEIGHTS weights of one x, one K and one form may be one launch: programs of the second follow those of the first, and each makes
// what it makes in a launch of its own. GATED: of two weights of one shape, y is silu of the first product times the second, both
// rounded before; a cluster has a program of either weight for the same rows, and each writes half of them.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct TensorMap;

#include "problem.cuh"

constexpr int GROUPS = 1, CLUSTER = GATED ? 2 : SPLITS;
constexpr bool FACTORED = ELEMENT == E2M1 || ELEMENT == E4M3_MX, NIBBLES = ELEMENT == INT4 || ELEMENT == E2M1 || ELEMENT == NF4;
constexpr int ATOM = NIBBLES ? 2048 : 4096;                    // bytes of 64 rows by 64 columns
constexpr int STEP = 128, SUMMED = FACTORED ? STEP : GROUP;    // columns of a step, and of sums that are scaled (0: all)
constexpr int EACH = SUMMED == 0 || SUMMED >= STEP ? 1 : STEP / SUMMED;  // groups of a step
constexpr int TILES = TOKENS / 8, WARPS = 4 * BLOCKS * PHASES, ROWS = 64 * BLOCKS, PRODUCTS = ELEMENT == NF4 ? 2 : 1;
constexpr int PITCH = STEPS * 2 * STEP + 16;                   // bytes of a row of x in a stage
constexpr int BLOCK_BYTES = STEPS * 2 * ATOM, STAGE_BYTES = BLOCKS * BLOCK_BYTES + (STREAMED ? TOKENS * PITCH : 0);
constexpr int GROUPED = SUMMED > STEP ? SUMMED / STEP : 1;     // steps of a group
// A stage is always the same phase's: a barrier's parity says nothing to warps that have not waited for it every time before.
static_assert(STAGES % PHASES == 0, "stages are a multiple of phases");
static_assert(STEPS * STEP <= 256, "a warp copies a row of x of a stage in one go");
constexpr int LINE = ROWS + 4;                                 // words of a row of sums

#include "words.cuh"
#include "copies.cuh"
#include "pairs.cuh"
#include "decode.cuh"
#include "levels.cuh"
#include "factors.cuh"

constexpr int SCALE_BYTES = GROUP == 0 ? 0 : FACTORED ? ROWS / 2 * FACTOR_BYTES : ROWS * 4;  // of a group, or an atom

#include "sums.cuh"
#include "load.cuh"
#include "gated.cuh"

static_assert(!GATED || WEIGHTS == 2 && SPLITS == 1 && OUT == (HALF ? FLOAT16 : BFLOAT16), "two products as they are rounded");

#if WEIGHTS > 1
// The product of a program: that of the weight which its rows are of (GATED: which its place in the cluster says), and its rows there.
__device__ __forceinline__ Problem part_of(const Problem& all, int& row, u32 place) {
  Problem p = all;
#pragma unroll
  for (int i = 0; i < WEIGHTS - 1; i++) {
    const bool further = GATED ? place == 1 : row >= p.n;
    if (further) {
      if (!GATED) row -= p.n, p.n = all.rows[i], p.y = all.more[i].y;
      p.words = all.more[i].words, p.scale = all.more[i].scale, p.zero = all.more[i].zero;
    }
  }
  return p;
}
#endif

// Multiplying

// A lane's place: 16 rows of a block; its row of them (and that + 8), its pair of columns (and tokens).
struct Lane {
  int block, slab, row, pair, phase, lane;
  __device__ __forceinline__ Lane(int warp, int lane)
      : block(warp / 4 % BLOCKS), slab(warp % 4), row(lane / 4), pair(lane % 4), phase(warp / (4 * BLOCKS)), lane(lane) {}
  __device__ __forceinline__ int first() const { return block * 64 + slab * 16 + row; }
  __device__ __forceinline__ int couple() const { return block * 32 + slab * 8 + row; }  // rows n and n + 8
};

// Where a lane finds its operands: words in a stage; x at the program's first step, or in a stage, rows behind the last are the last;
// scales, factors and zero points of the first group; its copies of the table. own: the scale of a weight with factors.
struct Places {
  u32 words, x[TILES], scale, zero, table;
  Levels levels;
  float own;
  __device__ __forceinline__ Places(const Problem& p, const Ring& ring, const Lane& at)
      : words(at.block * BLOCK_BYTES + at.slab * 512 + at.lane * 16),
        scale(ring.scale + (FACTORED ? at.couple() * FACTOR_BYTES : at.first() * 4)),
        zero(ring.zero + at.couple() * 4), table(ring.table + at.lane % COPIES * 8),
        own(FACTORED ? *reinterpret_cast<const float*>(p.scale) * LACKING : 1.f) {
    if (ELEMENT == NF4) levels.keep(u32(p.count >> 16 & at.lane));
#pragma unroll
    for (int t = 0; t < TILES; t++) x[t] = ring.x + min(8 * t + at.lane % 8, p.count - 1) * ring.pitch + at.lane / 8 * 16;
  }
};

// What decoding takes beside words.
struct Beside {
  Less less;
  Factors factors;
};

// First operands of two tiles, 32 columns: half an atom. w: of NIBBLES the atom's words, else the half's.
__device__ __forceinline__ void operands(u32 (&a)[PRODUCTS][2][4], const uint4& w, int half, const Places& places, const Beside& beside) {
  const u32 first[2] = {half ? w.z : w.x, half ? w.w : w.y};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if constexpr (ELEMENT == NF4) decode_levels(a[0][i], a[PRODUCTS - 1][i], first[i], places.levels, places.table);
    else if constexpr (FACTORED && NIBBLES) decode_factored(a[0][i], first[i], 0, 2 * half + i, beside.factors);
    else if constexpr (FACTORED) decode_factored(a[0][i], i ? w.z : w.x, i ? w.w : w.y, 2 * half + i, beside.factors);
    else if constexpr (NIBBLES) decode(a[0][i], first[i], beside.less);
    else decode(a[0][i], i ? w.z : w.x, i ? w.w : w.y, beside.less);
  }
}

// Products of two tiles.
__device__ __forceinline__ void multiply_tiles(Sums (&into)[PRODUCTS], const u32 (&a)[PRODUCTS][2][4], const Places& places, u32 x) {
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    u32 b[4];
    load_inputs(b, places.x[t] + x);
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
      multiply(into[i][t], a[i][0], b[0], b[1]);
      multiply(into[i][t], a[i][1], b[2], b[3]);
    }
  }
}

// A group's sums into the total. scale: of its row n.
__device__ __forceinline__ void add_group(Sums& total, Sums (&sums)[PRODUCTS], const Places& places, u32 scale) {
  if constexpr (PRODUCTS == 2) {  // of rows n and of n + 8, first terms and second ones
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        sums[0][t][i] = fmaf(sums[0][t][i + 2], SECOND, sums[0][t][i]);
        sums[0][t][i + 2] = fmaf(sums[1][t][i + 2], SECOND, sums[1][t][i]);
      }
  }
  if constexpr (FACTORED) add_scaled(total, sums[0], places.own, places.own);
  else add_scaled(total, sums[0], __uint_as_float(load_word(scale)), __uint_as_float(load_word(scale + 32)));
}

// The products of a step. words: of the step in its stage; x: of the step, behind `places.x`; first: its group, or atom, in the part.
__device__ __forceinline__ void multiply_step(Sums& total, u32 words, u32 x, const Places& places, int first) {
  const u32 scale = places.scale + first * SCALE_BYTES, zero = places.zero + first * ROWS * 2;
  Sums sums[PRODUCTS];
  Beside beside;
  uint4 w;
#pragma unroll
  for (int part = 0; part < 4; part++) {  // of 32 columns
    constexpr int PARTS = SUMMED == 0 ? 4 : 4 / EACH;  // of a group
    const int group = part / PARTS;
    if (part % PARTS == 0) {
#pragma unroll
      for (Sums& one : sums) clear(one);
      if (ZERO) beside.less = Less(load_word(zero + group * ROWS * 2));
    }
    if (FACTORED && part % 2 == 0) beside.factors = Factors(scale + part / 2 * SCALE_BYTES);
    if (!NIBBLES || part % 2 == 0) w = load_words(words + (NIBBLES ? part / 2 * ATOM : part * (ATOM / 2)));
    u32 a[PRODUCTS][2][4];
    operands(a, w, part % 2, places, beside);
    if constexpr (SUMMED == 0) {
      multiply_tiles(reinterpret_cast<Sums(&)[PRODUCTS]>(total), a, places, x + part * 64);
    } else {
      multiply_tiles(sums, a, places, x + part * 64);
      if (part % PARTS == PARTS - 1) add_group(total, sums, places, scale + group * SCALE_BYTES);
    }
  }
}

// The sums of a warp's steps, every PHASES-th.
__device__ __forceinline__ void consume(Sums& total, const Ring& ring, const Span& span, const Lane& at, const Places& places) {
  clear(total);
#pragma unroll 1
  for (int i = at.phase; i < span.stages(); i += PHASES) {
    const int stage = i % STAGES;
    const u32 begin = ring.stages + stage * STAGE_BYTES;
    wait_for(ring.full + 8 * stage, i / STAGES & 1);
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const int index = i * STEPS + j, step = span.first + index;
      if (step < span.last)
        multiply_step(total, begin + places.words + j * 2 * ATOM, STREAMED ? begin + j * 2 * STEP : index * 2 * STEP, places,
                      GROUP == 0 ? 0 : Span::group_of(step) - span.group);
    }
    __syncwarp();
    if (at.lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ring.empty + 8 * stage) : "memory");
  }
}

// Output

__device__ __forceinline__ float load_float(u32 address) {
  float v;
  if constexpr (CLUSTER > 1) asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  else asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

// The sum of a token and a row of the programs FIRST to LAST - 1 of a cluster: phases of each, then programs.
template <int FIRST, int LAST>
__device__ __forceinline__ float total_of(const Ring& ring, int token, int at) {
  float total = 0.f;
#pragma unroll
  for (int s = FIRST; s < LAST; s++)
#pragma unroll
    for (int phase = 0; phase < PHASES; phase++) {
      const u32 address = ring.sums + 4 * ((phase * TOKENS + token) * LINE + at);
      total += load_float(CLUSTER > 1 ? address_in(address, s) : address);
    }
  return total;
}

// Write this program's share of the rows: every CLUSTER-th part of them.
__device__ __forceinline__ void finish(const Problem& p, const Ring& ring, int row, int place, int thread) {
  constexpr int SHARE = ROWS / CLUSTER;
#pragma unroll 1
  for (int i = thread; i < p.count * SHARE; i += 32 * WARPS) {
    const int token = i / SHARE, at = place * SHARE + i % SHARE;
    if constexpr (GATED) {
      const u32 gate = narrowed(total_of<0, 1>(ring, token, at)), up = narrowed(total_of<1, 2>(ring, token, at));
      static_cast<unsigned short*>(p.y)[i64(token) * p.n + row + at] = gated(gate, up);
    } else {
      store(p, total_of<0, SPLITS>(ring, token, at), token, row + at);
    }
  }
}

extern "C" __global__ __launch_bounds__(32 * (WARPS + 1 + STREAMED), AT_ONCE) __cluster_dims__(CLUSTER, 1, 1) void sm90_w4a16_gemv(
    const __grid_constant__ Problem all) {
  extern __shared__ char memory[];
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), lane = thread % 32;
  u32 place = 0;
  if constexpr (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(place));
  int row = blockIdx.x / CLUSTER * ROWS;
#if WEIGHTS > 1
  const Problem p = part_of(all, row, place);
#else
  const Problem& p = all;
#endif
  const Span span(p, GATED ? 0 : place);
  const Ring ring((shared_address(memory) + 127) & ~127u, span);
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) {
      init_barrier(ring.full + 8 * s, STREAMED ? 33 : 1);
      init_barrier(ring.empty + 8 * s, 4 * BLOCKS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (AHEAD && warp == WARPS) prefetch(p, span, row, lane);
  if (warp != WARPS) fill_table(ring.table, warp < WARPS ? thread : thread - 32, 32 * (WARPS + STREAMED));
  sync_cluster();
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (warp == WARPS) {
    if (lane == 0) produce(p, ring, span, row);
    __syncwarp();
  } else if (warp > WARPS) {
    produce_inputs(p, ring, span, lane);
    __syncwarp();
  } else {
    collect(p, ring, span, row, thread);
    settle();
    const Lane at(warp, lane);
    const RowScales scales(p, row + at.first());
    Sums total;
    consume(total, ring, span, at, Places(p, ring, at));
    if constexpr (GROUP == 0) {
      Sums sums;
      clear(sums);
      add_scaled(sums, total, scales.low, scales.high);
      leave(sums, ring.sums, at.phase, at.pair, at.first());
    } else {
      leave(total, ring.sums, at.phase, at.pair, at.first());
    }
  }
  sync_cluster();
  if (warp < WARPS) finish(p, ring, row, place, thread);
  if constexpr (CLUSTER > 1) sync_cluster();  // nobody leaves before others have read its sums
}
