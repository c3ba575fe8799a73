// y = x @ dequantize(w).T + bias, the product times a scale of each row of x where SCALED, with a preshuffled weight w of 4 or 8
// bits, for Hopper (sm_90a). `variants.py` says what is defined for a variant and `host.py` launches it; `multiply` is generated
// by `hopper/wgmma.py`.
//
// The first operand of wgmma comes from registers: features (rows of w) are its M, 64 a warpgroup, tokens (rows of x) its N. One
// thread of each of three warps loads by the copy engine into a ring of STAGES; GROUPS warpgroups, or K_SLICES times as many that take
// stages in turn (`sliced_k.cuh`), decode what they have of w (`decode.cuh`) and multiply. A stage has 64 columns: 128 bytes of a row
// of x, one atom of w for each of GROUPS, and the scales and zero points, or factors, of PARTS blocks.
//
// A cluster has PAIR programs along the features, each of which loads a part of the tokens for all, times SPLITS programs along K,
// which add their sums at last through each other's shared memory in the order of K. Without SPLITS programs are persistent, and
// tiles have TOKENS or SMALL tokens, see `schedule.cuh`; where GROUPED, rows are sorted by expert and have weights of their own, see
// `experts.cuh`.
//
// Included are the generated header, those of this folder and those of `fast/kernels/hopper`.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap { char bytes[128]; };

struct Maps { TensorMap x, part, y; };  // of x: a program's share of a tile, and BOX rows of it

struct Problem {
  const unsigned char* words;   // (features / 64, steps, ATOM)
  const float* scales;          // (blocks, features), levels behind them, or the weight's own one and factors, see `factors.cuh`
  const int* zeros;             // (blocks, features / 2), or null
  const void* bias;             // or null
  void* y;
  int tokens, features, steps;  // steps: of 64 columns; even
  int each;                     // steps of a block of scales, where PARTS is 1
  int bias_kind;                // FLOAT32, ...; that of y is OUT
  int group;                    // tiles of tokens that share features in the L2 cache
  int cut, whole[2], shares;    // see `schedule.cuh`
  u32 nibble;                   // 15
  // What `output.cuh` and `scaled.cuh` multiply sums by.
#if SCALED
  const float* x_scale;         // (tokens)
#else
  const float* none;
  static constexpr const float* x_scale = nullptr;
#endif
#if GROUPED
  const int* ends;              // (experts), the row after the last one of each
  i64 words_each, scales_each, zeros_each;  // of an expert's weight: bytes, words, words
  int experts;
#endif
  static constexpr const float* scale = nullptr;
  static constexpr int x_scale_step = SCALED, scale_step = 0;
};

constexpr bool INTEGER = false;
constexpr int CONSUMERS = GROUPS * K_SLICES;              // warpgroups that multiply
constexpr int FEATURES = 64 * GROUPS, CLUSTER = PAIR * SPLITS, SUMS = TOKENS / 2;
static_assert(K_SLICES == 1 || (PAIR == 1 && SPLITS == 1 && SKEW == 0));
static_assert(!GROUPED || (CLUSTER == 1 && !SCALED));
static_assert(SMALL <= TOKENS && (SPLITS == 1 || SMALL == TOKENS) && (SMALL == TOKENS || SMALL / PAIR % BOX == 0));
constexpr int PANEL = 128;                             // bytes of a row of x
constexpr int ATOM = ELEMENT == 0 || ELEMENT == 3 || ELEMENT == 5 ? 2048 : 4096;  // bytes of an atom of w
constexpr bool FACTORS = ELEMENT == 3 || ELEMENT == 4;  // whether scales are factors of elements
constexpr int X_BYTES = TOKENS * PANEL, WORD_BYTES = GROUPS * ATOM;
constexpr int SCALE_BYTES = FEATURES * (!FACTORS ? 4 : PARTS == 4 ? 2 : 1), ZERO_BYTES = ZERO ? FEATURES * 2 : 0;  // of a block
constexpr int SIDE = TOKENS + 128, SIDE_BYTES = SPLITS > 1 || SCALED ? GROUPS * SIDE * 4 : 0;  // words of a warpgroup's scales and biases
constexpr int PITCH = 68;                              // words of a token in the outgoing tile: 64 features, 16-byte rows, no conflicts

#include "products.h"  // Sum: float; void multiply(Sum (&)[COUNT / 2], const u32 (&a)[4], u64 b), finish<PENDING>: COUNT of either tile

#include "words.cuh"
#include "copies.cuh"
#include "output.cuh"
#include "tiles.cuh"
#include "decode.cuh"
#include "factors.cuh"
#include "levels.cuh"
#include "store.cuh"
#include "scaled.cuh"
#include "sliced_k.cuh"
#if GROUPED
#include "experts.cuh"
#else
#include "schedule.cuh"
#endif

struct Ring {
  u32 x, tiles, words, scales, zeros, side, sums, table, full, empty;
  __device__ __forceinline__ Ring(u32 base)
      : x(base), tiles(SPLITS > 1 ? base : base + STAGES * X_BYTES),
        words(base + STAGES * X_BYTES + (SPLITS > 1 ? 0 : GROUPS * 2 * BUFFER)), scales(words + STAGES * WORD_BYTES),
        zeros(scales + STAGES * PARTS * SCALE_BYTES), side(zeros + STAGES * PARTS * ZERO_BYTES),
        sums(side + SIDE_BYTES), table(sums + SUMS_BYTES), full(table + TABLE_BYTES), empty(full + 8 * STAGES) {}
};

// One warpgroup begins SKEW stages behind the other, so that one multiplies while the other writes its tile. The ring has more, and
// three at least: a stage is handed back after the next but one was read.
static_assert(SKEW < STAGES && STAGES > 2);

// The steps of a program: a part of K, whole pairs.
struct Steps {
  int first, last;
  __device__ __forceinline__ Steps(const Problem& p, int split)
      : first(2 * (i64(p.steps / 2) * split / SPLITS)), last(2 * (i64(p.steps / 2) * (split + 1) / SPLITS)) {}
};

#include "load.cuh"

// Where in the first stage a thread finds what it has of one. Known to no compiler: it would find out again for each stage.
struct Sources {
  u32 words, rows, pairs;
  __device__ __forceinline__ Sources(const Ring& ring, int group, int thread)
      : words(ring.words + group * ATOM + 16 * thread), rows(ring.scales + 4 * (64 * group + thread / 32 * 16 + thread % 32 / 4)),
        pairs((FACTORS ? ring.scales : ring.zeros) + (PARTS == 4 ? 16 : 4) * (32 * group + thread / 32 * 8 + thread % 32 / 4)) {
    asm volatile("" : "+r"(words), "+r"(rows), "+r"(pairs));
  }
};

// What a thread has of a stage: its words, and the scales and zero points of its rows, or its factors.
struct Loaded {
  uint4 words[ATOM / 2048];
  Rows rows[PARTS];
  Factored factored;

  __device__ __forceinline__ Loaded() {
#pragma unroll
    for (uint4& w : words) w = make_uint4(0, 0, 0, 0);
  }

  __device__ __forceinline__ void load(const Sources& from, int stage) {
#pragma unroll
    for (int i = 0; i < ATOM / 2048; i++) words[i] = load_words(from.words + stage * WORD_BYTES + 2048 * i);
    if constexpr (FACTORS) {
      factored.load(from.pairs + stage * PARTS * SCALE_BYTES);
    } else {
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        const int at = stage * PARTS + i;
        rows[i] = Rows(from.rows + at * SCALE_BYTES, from.pairs + at * ZERO_BYTES);
      }
    }
  }

  // 16 columns, number i of the stage's four. own: the weight's scale beside factors.
  __device__ __forceinline__ void decode(int i, Fragment& a, const Masks& masks, float own, u32 table) const {
    const uint4& w = words[ATOM / 2048 > 1 ? i / 2 : 0];
    const u32 nibbles = i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w;
    if constexpr (ELEMENT == E2M1) factored.decode_nibbles(i, a, nibbles, own);
    else if constexpr (ELEMENT == E4M3_MX) factored.decode_bytes(i, a, i % 2 ? w.z : w.x, i % 2 ? w.w : w.y, own);
    else if constexpr (ELEMENT == NF4) decode_levels(a, nibbles, rows[0], table);
    else if constexpr (ELEMENT == INT4) decode_nibbles(a, nibbles, rows[PARTS > 1 ? i / 2 : 0], masks);
    else decode_bytes(a, i % 2 ? w.z : w.x, i % 2 ? w.w : w.y, rows[PARTS > 1 ? i / 2 : 0]);
  }
};

// Multiplies what arrives, 64 features by the tokens of a tile, and writes the tiles.
struct Consumer {
  const Maps& maps;
  const Problem& p;
  const Ring& ring;
  const int group, thread, split, slice;
  const Steps steps;
  const Masks masks;
  float own_scale;
  const u32 tile, side, table;
  const Sources from;
  Own at;
  u32 buffer = 0;
  bool opening = true;

  __device__ __forceinline__ Consumer(const Maps& maps, const Problem& p, const Ring& ring, int group, int thread, int split, int slice)
      : maps(maps), p(p), ring(ring), group(group), thread(thread), split(split), slice(slice), steps(p, split), masks(p.nibble),
        own_scale(FACTORS ? p.scales[0] : 1.f), tile(ring.tiles + group * (SPLITS > 1 ? CHUNK * PITCH * 4 : 2 * BUFFER)),
        side(ring.side + group * SIDE * 4), table(filled_table(ring.table, p, 128 * (GROUPS * slice + group) + thread)),
        from(ring, group, thread), at(slice) {}

  __device__ __forceinline__ void release(int stage) const {
    if (thread % 32 < PAIR) arrive_at(ring.empty + 8 * stage, PAIR * split + thread % 32);
  }

  // COUNT: tokens of the tile; limit: the row that it must not write any more.
  template <int COUNT>
  __device__ __forceinline__ void multiply_tile(int token, int limit, int feature) {
    Sum sum[COUNT / 2];
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) sum[i] = 0;
    if constexpr (K_SLICES > 1) multiply_slice(sum);
    else multiply_ahead(sum);
    if (!gathered(sum, ring.sums + group * GATHERED * 256 + 16 * thread, group, slice, opening)) return;
    finish_tile<COUNT>(sum, token, limit, feature);
  }

  // Stages in turn: others multiply while a warpgroup decodes.
  template <int HELD>
  __device__ __forceinline__ void multiply_slice(Sum (&sum)[HELD]) {
    Fragment a[4];
#pragma unroll
    for (int i = 0; i < 16; i++) a[i / 4][i % 4] = 0;
    Loaded own;
    int before = 0;
#pragma unroll 1
    for (int step = steps.first; step < steps.last; step += K_SLICES) {
      wait_for(ring.full + 8 * at.stage, at.parity);
      own.load(from, at.stage);
      finish<0>(sum);
#pragma unroll
      for (int i = 0; i < 4; i++) hold(a[i], side, p.steps);
      if (step > steps.first) release(before);
      before = at.stage;
      const u64 x = descriptor(ring.x + at.stage * X_BYTES, PANEL);
      at.advance();
#pragma unroll
      for (int i = 0; i < 4; i++) own.decode(i, a[i], masks, own_scale, table);
      fence();
#pragma unroll
      for (int i = 0; i < 4; i++) multiply(sum, a[i], x + 2 * i);
      commit();
    }
    finish<0>(sum);
#pragma unroll
    for (int i = 0; i < 4; i++) hold(a[i], side, p.steps);
    if (steps.last > steps.first) release(before);
  }

  // All stages, each decoded while the one before is multiplied.
  template <int HELD>
  __device__ __forceinline__ void multiply_ahead(Sum (&sum)[HELD]) {
    // The tensor core reads fragments from registers until its products are waited for, which is when all of the next stage was
    // given to it: two stages have registers of their own.
    Fragment even[4], odd[4];
#pragma unroll
    for (int i = 0; i < 16; i++) even[i / 4][i % 4] = odd[i / 4][i % 4] = 0;
    int before = 0;
    Loaded next;
    // Multiply a stage, 16 columns after the other, and decode those of the next one meanwhile.
    auto multiply_stage = [&](Fragment (&a)[4], Fragment (&b)[4], bool begins, bool more) {
      const u64 x = descriptor(ring.x + at.stage * X_BYTES, PANEL);
      const int own = at.stage;
      at.advance();
#pragma unroll
      for (int i = 0; i < 4; i += BATCH) {
        fence();
#pragma unroll
        for (int j = i; j < i + BATCH; j++) multiply(sum, a[j], x + 2 * j);
        commit();
        if (i == 0 && more) {
          wait_for(ring.full + 8 * at.stage, at.parity);
          next.load(from, at.stage);
        }
        finish<4 / BATCH>(sum);  // all but this stage's, and those of the one before that came after the ones that read b[i]
#pragma unroll
        for (int j = i; j < i + BATCH; j++) hold(b[j], side, p.steps);
#pragma unroll
        for (int j = i; j < i + BATCH; j++) next.decode(j, b[j], masks, own_scale, table);
      }
      if (!begins) release(before);
      before = own;
    };
    if (SKEW > 0 && group == 1 && opening) skew_wait();
    if (steps.last > steps.first) {
      wait_for(ring.full + 8 * at.stage, at.parity);
      next.load(from, at.stage);
      next.decode(0, even[0], masks, own_scale, table);
      next.decode(1, even[1], masks, own_scale, table);
      next.decode(2, even[2], masks, own_scale, table);
      next.decode(3, even[3], masks, own_scale, table);
    }
#pragma unroll 1
    for (int step = steps.first; step < steps.last; step += 2) {
      if (SKEW > 0 && group == 0 && opening && step == steps.first + SKEW) skew_arrive();
      multiply_stage(even, odd, step == steps.first, true);
      multiply_stage(odd, even, false, step + 2 < steps.last);
    }
    if (SKEW > 0 && group == 0 && opening && steps.last <= steps.first + SKEW) skew_arrive();
    opening = false;
    finish<0>(sum);
#pragma unroll
    for (int i = 0; i < 4; i++) hold(odd[i], side, p.steps), hold(even[i], side, p.steps);
    if (steps.last > steps.first) release(before);
  }

  template <int COUNT>
  __device__ __forceinline__ void finish_tile(Sum (&sum)[COUNT / 2], int token, int limit, int feature) {
    const int first = feature + 64 * group;
    if constexpr (SPLITS == 1 && SCALED) {
      const Scaled scaled(p, side, thread, token, first);
      scaled.leave(thread);
      write_tile(maps, p, scaled, sum, tile, buffer, group, thread, token, first);
    } else if constexpr (SPLITS == 1) {
#if GROUPED
      if (limit - token < COUNT) return write_rows(p, Biases(p, thread, first), sum, thread, token, limit, first);
#endif
      write_tile(maps, p, Biases(p, thread, first), sum, tile, buffer, group, thread, token, first);
    } else {
      Factors(p, thread, token, first).leave(side, thread);
      sync_groups();  // the ring becomes the outgoing tile
      put<0>(sum, tile, thread);
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      const Epilogue e(side, thread);
      take<0>(p, e, tile, thread, token, first + thread % 8 * 8, split);
    }
  }

  __device__ __forceinline__ void consume(int neighbour) {
    Schedule tiles(p);
    while (tiles.take(neighbour)) {
      if constexpr (GROUPED && FACTORS) own_scale = tiles.scales()[0];
      if (SMALL == TOKENS || !tiles.small) multiply_tile<TOKENS>(tiles.token, tiles.limit(), tiles.feature);
      else multiply_tile<SMALL>(tiles.token, tiles.limit(), tiles.feature);
    }
    if (SPLITS == 1 && thread == 0 && slice == 0) wait_written<0>();
  }
};

extern "C" __global__ __launch_bounds__(128 * (CONSUMERS + 1), 1) __cluster_dims__(CLUSTER, 1, 1) void sm90_w4a16_gemm(
    const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const Ring ring((shared_address(memory) + 1023) & ~1023u);
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), role = warp / 4;
  const u32 rank = cluster_rank();
  const int neighbour = rank % PAIR, split = rank / PAIR;
  if (thread == 0) init_ring(ring.full, ring.empty, STAGES, LOADERS, PAIR * GROUPS * 4);
  sync_cluster();
  if (role == CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(K_SLICES > 1 ? 32 : 40));
    if (thread % 32 == 0) {
      if (warp == CONSUMERS * 4) load_tokens(maps, p, ring, neighbour, split);
      if (warp == CONSUMERS * 4 + 1) load_weight(p, ring, neighbour, split);
      if (warp == CONSUMERS * 4 + 2) {
        if constexpr (FACTORS) load_factors(p, ring, neighbour, split);
        else load_scales(p, ring, neighbour, split);
      }
    }
    __syncwarp();
    // Those that multiply meet here once between putting their sums and taking them.
    if constexpr (SPLITS > 1)
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(K_SLICES > 1 ? 112 : 232));
    Consumer(maps, p, ring, role % GROUPS, thread % 128, split, role / GROUPS).consume(neighbour);
  }
  sync_cluster();
}
