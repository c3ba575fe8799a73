// y = x @ w.T * x_scale + bias of at most TOKENS rows of x with a preshuffled weight w, for Hopper. `variants.py` says what is
// defined for a variant, `host.py` launches it; the order of the weight's words is that of `linear_small/elements.py`.
//
// The weight is a stream: one warp asks the bulk copy engine for stages of STEPS times 128 columns as far ahead as the ring goes,
// each a contiguous piece of memory. Asking takes that warp some hundred cycles, so nothing small is copied this way: x, scales
// and zero points of the program's part of K are copied before by all others. Those have 16 rows of a block of 64 each, BLOCKS
// blocks; PHASES of them share a block and take its stages in turn. A lane's 16 bytes of words are operands of `mma.m16n8k16`
// where they are: decoded in registers, multiplied from zero, added to the total times the group's scale.
//
// A cluster has SPLITS programs along K, which add their sums through each other's shared memory in the order of K; phases of
// a program are added before, in their order. So the same operands have the same bits every time.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct TensorMap;

struct Problem {
  const char* x;          // (count, k) of 16 bits
  const char* words;      // (n / 64, k / 64, ATOM bytes)
  const char* scale;      // float32 (blocks, n)
  const char* zero;       // int32 (blocks, n / 2): pairs of rows n and n + 8; not read without ZERO
  const float* x_scale;   // (count); may be null
  const void* bias;       // (n); may be null
  void* y;                // (count, n)
  int count, n, k;
  int bias_kind;          // FLOAT32, ...; that of y is OUT
};

enum { INT4 = 0, INT8 = 1, E4M3 = 2 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

constexpr int GROUPS = 1, CLUSTER = SPLITS;
constexpr int ATOM = ELEMENT == INT4 ? 2048 : 4096;            // bytes of 64 rows by 64 columns
constexpr int STEP = 128, EACH = GROUP == 0 || GROUP >= STEP ? 1 : STEP / GROUP;  // columns of a step, and its groups
constexpr int TILES = TOKENS / 8, WARPS = 4 * BLOCKS * PHASES, ROWS = 64 * BLOCKS;
constexpr int BLOCK_BYTES = STEPS * 2 * ATOM, STAGE_BYTES = BLOCKS * BLOCK_BYTES;
constexpr int GROUPED = GROUP > STEP ? GROUP / STEP : 1;       // steps of a group
// A stage is always the same phase's: a barrier's parity says nothing to warps that have not waited for it every time before.
static_assert(STAGES % PHASES == 0, "stages are a multiple of phases");
constexpr int LINE = ROWS + 4;                                 // words of a row of sums

#include "copies.cuh"

// Operands

__device__ __forceinline__ uint4 load_words(u32 address) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(address) : "memory");
  return w;
}

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 w;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
  return w;
}

// Of two tiles of 16 columns the second operand: rows of x are its columns.
__device__ __forceinline__ void load_inputs(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

template <int TABLE>
__device__ __forceinline__ u32 logic(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return d;
}

__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Two float32 as a pair of 16-bit floats, exactly where they are that.
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 d;
  if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// What is added to codes of rows n and n + 8: minus the zero point, and the offset that decoding leaves.
struct Less {
  u32 low, high;

  __device__ __forceinline__ Less() {
    constexpr u32 none = ELEMENT != INT4 ? 0u : HALF ? 0xE408E408u : 0xC308C308u;
    low = high = none;
  }

  __device__ __forceinline__ explicit Less(u32 zeros) {
    constexpr float offset = ELEMENT != INT4 ? 0.f : HALF ? 1032.f : 136.f;
    const float a = -offset - float(int(zeros << 16) >> 16), b = -offset - float(int(zeros) >> 16);
    low = pair_of(a, a), high = pair_of(b, b);
  }
};

// The first operand of a tile of 16 columns: elements of rows n, n + 8, n, n + 8 at columns k, k, k + 8, k + 8, two each.
// Four bits: one word. Its nibbles, lowest first: k0, k3, n3.
__device__ __forceinline__ void decode(u32 (&a)[4], u32 word, const Less& less) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    a[i] = add_pairs(logic<0x6A>(word >> (4 * i), 0x000F000Fu, HALF ? 0x64086408u : 0x43084308u), i % 2 ? less.high : less.low);
}

// Eight bits, bytes 0 and 2 or (odd) 1 and 3.
__device__ __forceinline__ u32 decode_bytes(u32 word, bool odd, u32 less) {
  if constexpr (ELEMENT == E4M3) {
    const u32 v = odd ? word : word << 8;
    const u32 u = (v >> (HALF ? 1 : 4)) & (HALF ? 0x3F803F80u : 0x07F007F0u);
    return multiply_pairs(logic<0xEA>(v, 0x80008000u, u), HALF ? 0x5C005C00u : 0x7B807B80u);
  }
  const u32 v = odd ? word >> 8 : word;
  u32 d;
  if constexpr (HALF) {
    d = add_pairs(logic<0x6A>(v, 0x00FF00FFu, 0x64806480u), 0xE480E480u);
  } else {
    const u32 sign = logic<0xEA>(v, 0x00800080u, 0x43004300u), rest = logic<0xEA>(v, 0x007F007Fu, 0x43004300u);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(sign), "r"(0xBF80BF80u), "r"(rest));
  }
  return ZERO ? add_pairs(d, less) : d;
}

// Eight bits: two words, of columns k and k + 8. Their bytes, lowest first: k0, n3.
__device__ __forceinline__ void decode(u32 (&a)[4], u32 first, u32 second, const Less& less) {
  a[0] = decode_bytes(first, false, less.low), a[1] = decode_bytes(first, true, less.high);
  a[2] = decode_bytes(second, false, less.low), a[3] = decode_bytes(second, true, less.high);
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (HALF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loading

// Part of K of a program: its first step and the one behind its last; the first group and the one behind the last.
struct Span {
  int first, last, group, groups;
  __device__ __forceinline__ Span(const Problem& p, int split) {
    const int steps = p.k / STEP;
    first = steps * split / SPLITS, last = steps * (split + 1) / SPLITS;
    group = GROUP == 0 ? 0 : first / GROUPED * EACH;
    groups = GROUP == 0 ? 1 : ((last - 1) / GROUPED + 1) * EACH - group;
  }
  __device__ __forceinline__ int stages() const { return (last - first + STEPS - 1) / STEPS; }
};

// Shared memory: the ring, the sums, barriers; then what the host counted for a part of K: scales, zero points, rows of x, whose
// pitch puts eight rows into eight groups of banks.
struct Ring {
  u32 stages, sums, full, empty, scale, zero, x, pitch;
  __device__ __forceinline__ Ring(u32 base, const Span& span)
      : stages(base), sums(base + STAGES * STAGE_BYTES), full(sums + PHASES * TOKENS * LINE * 4), empty(full + 8 * STAGES),
        scale((empty + 8 * STAGES + 15) & ~15u), zero(scale + (GROUP > 0 ? span.groups * ROWS * 4 : 0)),
        x(zero + (ZERO ? span.groups * ROWS * 2 : 0)), pitch((span.last - span.first) * 2 * STEP + 16) {}
};

// Ask for the weight of the first stages before the kernel in front has ended: into the L2 cache, nothing is read of it.
__device__ __forceinline__ void prefetch(const Problem& p, const Span& span, int row, int lane) {
  const int bytes = min(STAGES * STEPS, span.last - span.first) * 2 * ATOM;
  if (lane < BLOCKS) {
    const char* from = p.words + (i64(row / 64 + lane) * (p.k / 64) + 2 * span.first) * ATOM;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
  }
}

// One thread: copy the weight of a program's rows and part of K, stage by stage.
__device__ __forceinline__ void produce(const Problem& p, const Ring& ring, const Span& span, int row) {
  const char* from = p.words + (i64(row / 64) * (p.k / 64) + 2 * span.first) * ATOM;
  const i64 block = i64(p.k / 64) * ATOM;
#pragma unroll 1
  for (int i = 0; i < span.stages(); i++) {
    const int stage = i % STAGES;
    const u32 bar = ring.full + 8 * stage, to = ring.stages + stage * STAGE_BYTES;
    const u32 bytes = min(STEPS, span.last - span.first - i * STEPS) * 2 * ATOM;
    wait_for(ring.empty + 8 * stage, (i / STAGES & 1) ^ 1);
    expect_bytes(bar, BLOCKS * bytes);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) copy_bytes(from + b * block + i64(i) * BLOCK_BYTES, to + b * BLOCK_BYTES, bar, bytes);
  }
}

__device__ __forceinline__ void copy_16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// Rows of memory, `bytes` (a multiple of 16) of each, by all threads that multiply.
__device__ __forceinline__ void copy_rows(u32 to, u32 pitch, const char* from, i64 step, int rows, int bytes, int thread) {
  const int each = bytes / 16;
#pragma unroll 1
  for (int i = thread; i < rows * each; i += 32 * WARPS) copy_16(to + i / each * pitch + i % each * 16, from + i / each * step + i % each * 16);
}

// What is small, of the part of K; it is there after `settle`.
__device__ __forceinline__ void collect(const Problem& p, const Ring& ring, const Span& span, int row, int thread) {
  copy_rows(ring.x, ring.pitch, p.x + i64(span.first) * 2 * STEP, i64(p.k) * 2, p.count, (span.last - span.first) * 2 * STEP, thread);
  if (GROUP > 0) copy_rows(ring.scale, ROWS * 4, p.scale + (i64(span.group) * p.n + row) * 4, i64(p.n) * 4, span.groups, ROWS * 4, thread);
  if (ZERO) copy_rows(ring.zero, ROWS * 2, p.zero + (i64(span.group) * p.n + row) * 2, i64(p.n) * 2, span.groups, ROWS * 2, thread);
}

__device__ __forceinline__ void settle() {
  asm volatile("cp.async.wait_all;\nbar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

// Multiplying

typedef float Sums[TILES][4];  // by tile of 8 tokens: (row, token), (row, token + 1), (row + 8, token), (row + 8, token + 1)

// A lane's place: 16 rows of a block; its row of them (and that + 8), its pair of columns (and tokens).
struct Lane {
  int block, slab, row, pair, phase, lane;
  __device__ __forceinline__ Lane(int warp, int lane)
      : block(warp / 4 % BLOCKS), slab(warp % 4), row(lane / 4), pair(lane % 4), phase(warp / (4 * BLOCKS)), lane(lane) {}
  __device__ __forceinline__ int first() const { return block * 64 + slab * 16 + row; }
};

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[t][i] = 0.f;
}

// total += sums times the scales of both rows.
__device__ __forceinline__ void add_scaled(Sums& total, const Sums& sums, float low, float high) {
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) total[t][i] = fmaf(sums[t][i], i < 2 ? low : high, total[t][i]);
}

// The words of two tiles (32 columns) as first operands.
__device__ __forceinline__ void operands(u32 (&a)[2][4], u32 words, int half, const Less& less) {
  if constexpr (ELEMENT == INT4) {
    const uint4 w = load_words(words);
    decode(a[0], half ? w.z : w.x, less);
    decode(a[1], half ? w.w : w.y, less);
  } else {
    const uint4 w = load_words(words + half * (ATOM / 2));
    decode(a[0], w.x, w.y, less);
    decode(a[1], w.z, w.w, less);
  }
}

// Where a lane finds its operands: words in a stage; x at the program's first step, rows behind the last are the last; scales and
// zero points of the first group.
struct Places {
  u32 words, x[TILES], scale, zero;
  __device__ __forceinline__ Places(const Problem& p, const Ring& ring, const Lane& at)
      : words(at.block * BLOCK_BYTES + at.slab * 512 + at.lane * 16), scale(ring.scale + at.first() * 4),
        zero(ring.zero + (at.block * 32 + at.slab * 8 + at.row) * 4) {
#pragma unroll
    for (int t = 0; t < TILES; t++) x[t] = ring.x + min(8 * t + at.lane % 8, p.count - 1) * ring.pitch + at.lane / 8 * 16;
  }
};

// The products of a step. words: of the step in its stage; index: of the step in the program's part; first: its group there.
__device__ __forceinline__ void multiply_step(Sums& total, u32 words, const Places& places, int index, int first) {
  const u32 scale = places.scale + first * ROWS * 4, zero = places.zero + first * ROWS * 2;
  Sums sums;
  Less less;
#pragma unroll
  for (int part = 0; part < 4; part++) {  // of 32 columns
    constexpr int PARTS = GROUP == 0 ? 4 : 4 / EACH;  // of a group
    const int group = part / PARTS;
    if (part % PARTS == 0) {
      if (GROUP > 0) clear(sums);
      if (ZERO) less = Less(load_word(zero + group * ROWS * 2));
    }
    u32 a[2][4];
    operands(a, words + part / 2 * ATOM, part % 2, less);
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      u32 b[4];
      load_inputs(b, places.x[t] + index * 2 * STEP + part * 64);
      Sums& into = GROUP == 0 ? total : sums;
      multiply(into[t], a[0], b[0], b[1]);
      multiply(into[t], a[1], b[2], b[3]);
    }
    if (GROUP > 0 && part % PARTS == PARTS - 1)
      add_scaled(total, sums, __uint_as_float(load_word(scale + group * ROWS * 4)),
                 __uint_as_float(load_word(scale + group * ROWS * 4 + 32)));
  }
}

// The sums of a warp's steps, every PHASES-th.
__device__ __forceinline__ void consume(Sums& total, const Ring& ring, const Span& span, const Lane& at, const Places& places) {
  clear(total);
#pragma unroll 1
  for (int i = at.phase; i < span.stages(); i += PHASES) {
    const int stage = i % STAGES;
    wait_for(ring.full + 8 * stage, i / STAGES & 1);
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const int index = i * STEPS + j, step = span.first + index;
      if (step < span.last)
        multiply_step(total, ring.stages + stage * STAGE_BYTES + places.words + j * 2 * ATOM, places, index,
                      GROUP == 0 ? 0 : step / GROUPED * EACH - span.group);
    }
    __syncwarp();
    if (at.lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(ring.empty + 8 * stage) : "memory");
  }
}

// Output

__device__ __forceinline__ void store_float(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ float load_float(u32 address) {
  float v;
  if constexpr (SPLITS > 1) asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  else asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float bias_at(const Problem& p, int row) {
  if (p.bias_kind == FLOAT32) return static_cast<const float*>(p.bias)[row];
  const unsigned short half = static_cast<const unsigned short*>(p.bias)[row];
  if (p.bias_kind == BFLOAT16) return __uint_as_float(u32(half) << 16);
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
  return v;
}

__device__ __forceinline__ void store(const Problem& p, float v, int token, int row) {
  if (p.x_scale != nullptr) v *= p.x_scale[token];
  if (p.bias != nullptr) v += bias_at(p, row);
  const i64 place = i64(token) * p.n + row;
  if constexpr (OUT == FLOAT32) {
    static_cast<float*>(p.y)[place] = v;
  } else {
    unsigned short half;
    if constexpr (OUT == BFLOAT16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
    static_cast<unsigned short*>(p.y)[place] = half;
  }
}

// A warp's sums into shared memory, by phase, token and row.
__device__ __forceinline__ void leave(const Sums& total, const Ring& ring, const Lane& at) {
  const u32 place = ring.sums + 4 * ((at.phase * TOKENS + 2 * at.pair) * LINE + at.first());
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) store_float(place + 4 * ((8 * t + i % 2) * LINE + i / 2 * 8), total[t][i]);
}

// Add phases, then programs, and write this program's share of the rows: every SPLITS-th part of them.
__device__ __forceinline__ void finish(const Problem& p, const Ring& ring, int row, int split, int thread) {
  constexpr int SHARE = ROWS / SPLITS;
#pragma unroll 1
  for (int i = thread; i < p.count * SHARE; i += 32 * WARPS) {
    const int token = i / SHARE, at = split * SHARE + i % SHARE;
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
#pragma unroll
      for (int phase = 0; phase < PHASES; phase++) {
        const u32 address = ring.sums + 4 * ((phase * TOKENS + token) * LINE + at);
        total += load_float(SPLITS > 1 ? address_in(address, s) : address);
      }
    store(p, total, token, row + at);
  }
}

extern "C" __global__ __launch_bounds__(32 * (WARPS + 1), AT_ONCE) __cluster_dims__(SPLITS, 1, 1) void linear_skinny(
    const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), lane = thread % 32;
  u32 split = 0;
  if constexpr (SPLITS > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(split));
  const int row = blockIdx.x / SPLITS * ROWS;
  const Span span(p, split);
  const Ring ring((shared_address(memory) + 127) & ~127u, span);
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) {
      init_barrier(ring.full + 8 * s, 1);
      init_barrier(ring.empty + 8 * s, 4 * BLOCKS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (warp == WARPS) prefetch(p, span, row, lane);
  sync_cluster();
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  if (warp == WARPS) {
    if (lane == 0) produce(p, ring, span, row);
    __syncwarp();
  } else {
    collect(p, ring, span, row, thread);
    settle();
    const Lane at(warp, lane);
    Sums total;
    consume(total, ring, span, at, Places(p, ring, at));
    if constexpr (GROUP == 0) {
      const float* scale = reinterpret_cast<const float*>(p.scale) + row + at.first();
      Sums sums;
      clear(sums);
      add_scaled(sums, total, scale[0], scale[8]);
      leave(sums, ring, at);
    } else {
      leave(total, ring, at);
    }
  }
  sync_cluster();
  if (warp < WARPS) finish(p, ring, row, split, thread);
  if constexpr (SPLITS > 1) sync_cluster();  // nobody leaves before others have read its sums
}
