// y = x @ w.T + bias of at most TOKENS rows of x with a weight of 4-bit integers in 2:4 storage as `compress` and `pack` write
// it, for Hopper. `variants.py` says what is defined for a variant, `host.py` launches it.
//
// A program has SLABS times HEIGHT tiles of 16 rows. PHASES warps share those of a slab: each takes every PHASES-th stage of COLUMNS
// columns. A round is a stage of every phase, copied by the threads that multiply (`cp.async`, each warp its own rows, all of them
// x) as far ahead as AHEAD says, which is all of the program's part of K where shared memory holds that.
//
// Products are `mma.sp.m16n8k32`. Instruction i of a stage has columns 32 i to 32 i + 31, whose eight groups of four it takes in
// the order 0, 1, 4, 5, 2, 3, 6, 7, so that x needs no other order than memory's: lane t of four has the group of byte t % 2 of
// word t / 2 of the codes, then that of byte t % 2 + 2; x's tiles of eight columns are taken as 0, 2, 1, 3; metadata are bytes 0
// and 2 of a word for the first half of K, 1 and 3 for the second.
//
// A cluster has SPLITS programs along K, which add their sums through each other's shared memory in the order of K; phases of a
// program are added before, in their order. So the same operands have the same bits every time.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct TensorMap;

struct Problem {
  const char* x;         // (count, k) of 16 bits
  const char* codes;     // (n, k / 4)
  const char* metadata;  // (n, k / 8)
  const char* scale;     // (n, k / GROUP) of SCALE_BYTES: float32 or bfloat16
  const void* bias;      // (n); may be null
  void* y;               // (count, n), of x's dtype
  int count, n, k;
  int bias_kind;  // FLOAT32, ...
};

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

constexpr int GROUPS = 1, CLUSTER = SPLITS;
constexpr int STAGE = COLUMNS, INSTRUCTIONS = STAGE / 32;       // columns of a stage, and products of 16 rows by it
constexpr int CODES = STAGE / 4, METADATA = STAGE / 8, SCALES = STAGE / GROUP * SCALE_BYTES;  // bytes of a row of a stage
constexpr int PIECE = SCALES < 16 ? SCALES : 16;                // bytes of scales in a copy
constexpr int TILE = (16 * (CODES + METADATA + SCALES) + 127) / 128 * 128;  // bytes of 16 rows of a stage
constexpr int PITCH = 2 * STAGE + 16;                           // puts eight rows of x into eight groups of banks
constexpr int COLUMN_TILES = TOKENS / 8, WARPS = SLABS * PHASES, THREADS = 32 * WARPS, HIGH = 16 * HEIGHT, ROWS = HIGH * SLABS;
constexpr int LINE = ROWS + 4;                                  // words of a row of sums

#include "copies.cuh"

// Operands

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 w;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
  return w;
}

__device__ __forceinline__ float load_scale(u32 address) {
  if constexpr (SCALE_BYTES == 4) return __uint_as_float(load_word(address));
  unsigned short half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return __uint_as_float(u32(half) << 16);
}

// Of 32 columns the second operand: rows of x are its columns.
__device__ __forceinline__ void load_inputs(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}

// The two codes of a byte as 16-bit floats. halves: selects it for the low half, and for the high one of the moved word. Codes
// are put into fractions of powers of two, exactly: low 128 + 8 + c (bfloat16) or 1024 + 8 + c, high, where its bits lie, 16 + 8 + c
// (a place lower, not to reach the exponent) or 64 + 8 + c; an addition takes off what is too much.
__device__ __forceinline__ u32 decode(u32 word, u32 moved, u32 halves) {
  const u32 v = bytes_of(word, moved, halves);
  u32 d;
  if constexpr (HALF) {
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(v), "r"(0x00F0000Fu), "r"(0x54806408u));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(d) : "r"(0xD480E408u));
  } else {
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(v), "r"(0x0078000Fu), "r"(0x41C04308u));
    asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(d) : "r"(0xC1C0C308u));
  }
  return d;
}

// indices: those of the quad's lanes 2 SELECTOR and the next.
template <int SELECTOR>
__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[4], u32 indices) {
#define MULTIPLY(KIND)                                                                                                           \
  asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." KIND "." KIND ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "   \
      "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"                                                                          \
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                                                   \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(indices), "n"(SELECTOR))
  if constexpr (HALF) MULTIPLY("f16");
  else MULTIPLY("bf16");
#undef MULTIPLY
}

// Copying

// Part of K of a program in stages, and its rounds.
struct Span {
  int first, last, rounds;
  __device__ __forceinline__ Span(const Problem& p, int split) {
    const int stages = p.k / STAGE;
    first = stages * split / SPLITS, last = stages * (split + 1) / SPLITS;
    rounds = (last - first + PHASES - 1) / PHASES;
  }
};

// Shared memory: slots of the ring, each x by phase, then the tiles of each warp. Sums take the ring's place in the end.
struct Ring {
  u32 base, weights, slot;
  __device__ __forceinline__ Ring(u32 base, const Problem& p)
      : base(base), weights((PHASES * p.count * PITCH + 127) & ~127), slot(weights + WARPS * HEIGHT * TILE) {}
  __device__ __forceinline__ u32 at(int round) const { return base + (SLOTS == AHEAD ? round : round % SLOTS) * slot; }
};

// A lane's place: its warp's rows of the program and its phase; its row of a tile (and that + 8), its pair of columns (and tokens).
struct Lane {
  int warp, first, phase, row, pair, lane;
  __device__ __forceinline__ Lane(int warp, int lane)
      : warp(warp), first(warp % SLABS * HIGH), phase(warp / SLABS), row(lane / 4), pair(lane % 4), lane(lane) {}
};

template <int BYTES>
__device__ __forceinline__ void copy(u32 to, const char* from) {
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "n"(BYTES) : "memory");
}

// Sixteen-byte pieces of rows of 32 to 128 bytes lie in another order, piece ^ this, so that eight rows, whose same piece lanes
// read at once, have it in eight groups of banks.
template <int BYTES>
__device__ __forceinline__ int order_of(int row) { return row * BYTES / 128 & (BYTES / 16 - 1); }

// Rows [row, row + 16) of an array of rows of `stride` bytes, BYTES of each from byte `at` on, by a warp. Rows behind the last are the last.
template <int BYTES, int SIZE, bool ORDERED>
__device__ __forceinline__ void copy_tile(u32 to, const char* from, i64 stride, i64 at, int row, int rows, int lane) {
  constexpr int EACH = BYTES / SIZE, ALL = 16 * EACH;
#pragma unroll
  for (int i = 0; i < ALL; i += 32) {
    const int one = i + lane, own = one / EACH, piece = one % EACH;
    if (ALL % 32 == 0 || one < ALL)
      copy<SIZE>(to + own * BYTES + (ORDERED ? piece ^ order_of<BYTES>(own) : piece) * SIZE, from + min(row + own, rows - 1) * stride + at + piece * SIZE);
  }
}

// x of a round, by all threads.
__device__ __forceinline__ void copy_inputs(const Problem& p, u32 to, const Span& span, int round, int thread) {
  constexpr int EACH = 2 * STAGE / 16;
  const char* from = p.x + i64(span.first + round * PHASES) * 2 * STAGE;
#pragma unroll 1
  for (int i = thread; i < p.count * PHASES * EACH; i += THREADS) {
    const int token = i / (PHASES * EACH), piece = i % (PHASES * EACH), phase = piece / EACH;
    if (span.first + round * PHASES + phase < span.last)
      copy<16>(to + (phase * p.count + token) * PITCH + piece % EACH * 16, from + i64(token) * p.k * 2 + piece * 16);
  }
}

// Ask for all of a round, where there is one.
__device__ __forceinline__ void load(const Problem& p, const Ring& ring, const Span& span, const Lane& at, int row, int round) {
  if (round < span.rounds) {
    const u32 slot = ring.at(round);
    const int stage = span.first + round * PHASES + at.phase;
    if (stage < span.last) {
#pragma unroll
      for (int h = 0; h < HEIGHT; h++) {
        const u32 to = slot + ring.weights + (at.warp * HEIGHT + h) * TILE;
        const int first = row + at.first + 16 * h;
        copy_tile<CODES, 16, true>(to, p.codes, p.k / 4, i64(stage) * CODES, first, p.n, at.lane);
        copy_tile<METADATA, 16, true>(to + 16 * CODES, p.metadata, p.k / 8, i64(stage) * METADATA, first, p.n, at.lane);
        copy_tile<SCALES, PIECE, false>(to + 16 * (CODES + METADATA), p.scale, i64(p.k / STAGE) * SCALES, i64(stage) * SCALES, first, p.n, at.lane);
      }
    }
    copy_inputs(p, slot, span, round, 32 * at.warp + at.lane);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void prefetch_bytes(const char* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}

// Ask for the weight before the kernel in front has ended: into the L2 cache, nothing is read of it. Whole rows of a slab are one
// piece of memory; of parts of K each row is one.
__device__ __forceinline__ void prefetch(const Problem& p, const Span& span, const Lane& at, int row) {
  const int first = row + at.first, rows = min(HIGH, p.n - first), stages = span.last - span.first;
  if (at.phase || rows <= 0 || stages == 0) return;
  constexpr int EACH = SPLITS == 1 ? HIGH : 1;
  for (int i = at.lane * EACH; i < rows; i += 32 * EACH) {
    const int many = min(EACH, rows - i);
    prefetch_bytes(p.codes + i64(first + i) * (p.k / 4) + span.first * CODES, many * stages * CODES);
    prefetch_bytes(p.metadata + i64(first + i) * (p.k / 8) + span.first * METADATA, many * stages * METADATA);
    if constexpr (SCALES % 16 == 0)
      prefetch_bytes(p.scale + (i64(first + i) * (p.k / STAGE) + span.first) * SCALES, many * stages * SCALES);
  }
}

// Multiplying

typedef float Sums[COLUMN_TILES][4];  // by tile of 8 tokens: (row, token), (row, token + 1), (row + 8, token), (row + 8, token + 1)

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int t = 0; t < COLUMN_TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) sums[t][i] = 0.f;
}

// total += sums times the scales of both rows.
__device__ __forceinline__ void add_scaled(Sums& total, const Sums& sums, float low, float high) {
#pragma unroll
  for (int t = 0; t < COLUMN_TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) total[t][i] = fmaf(sums[t][i], i < 2 ? low : high, total[t][i]);
}

// What a lane selects: of a word's bytes those of the first half of K and of the second, of metadata of both rows its own.
struct Chosen {
  u32 first, second, indices;
  __device__ __forceinline__ explicit Chosen(int pair)
      : first(pair % 2 ? 0x5511 : 0x4400), second(pair % 2 ? 0x7733 : 0x6622), indices(pair % 2 ? 0x7531 : 0x6420) {}
};

// The first operand of instruction `at` of a stage. codes: a lane's word of the first one, of a tile.
__device__ __forceinline__ void operand(u32 (&a)[4], u32 codes, int at, const Chosen& chosen) {
  const u32 place = (codes ^ (at / 2 * 16)) + at % 2 * 8;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 word = load_word(place + half * 8 * CODES), moved = HALF ? word : word >> 1;
    a[half] = decode(word, moved, chosen.first), a[half + 2] = decode(word, moved, chosen.second);
  }
}

// A lane's places in a slot, of the first tile: its words of codes and metadata, scales of its row, its row of x by tile of tokens.
struct Places {
  u32 codes, metadata, scale, x[COLUMN_TILES];
  __device__ __forceinline__ Places(const Problem& p, const Ring& ring, const Lane& at) {
    const u32 tile = ring.weights + at.warp * HEIGHT * TILE;
    codes = tile + at.row * CODES + order_of<CODES>(at.row) * 16 + at.pair / 2 * 4;
    metadata = tile + 16 * CODES + at.row * METADATA + order_of<METADATA>(at.row) * 16 + at.pair / 2 * 4;
    scale = tile + 16 * (CODES + METADATA) + at.row * SCALES;
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; t++)
      x[t] = (at.phase * p.count + min(8 * t + at.lane % 8, p.count - 1)) * PITCH + at.lane / 8 % 2 * 32 + at.lane / 16 * 16;
  }
};

// The products of instruction `at`. indices: of each tile.
template <int SELECTOR>
__device__ __forceinline__ void multiply_columns(Sums (&total)[HEIGHT], Sums (&sums)[HEIGHT], u32 slot, const Places& places, int at,
                                                 const u32 (&indices)[HEIGHT], const Chosen& chosen) {
  u32 b[COLUMN_TILES][4];
#pragma unroll
  for (int t = 0; t < COLUMN_TILES; t++) load_inputs(b[t], slot + places.x[t] + at * 64);
#pragma unroll
  for (int h = 0; h < HEIGHT; h++) {
    if (at * 32 % GROUP == 0) clear(sums[h]);
    u32 a[4];
    operand(a, slot + places.codes + h * TILE, at, chosen);
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; t++) multiply<SELECTOR>(sums[h][t], a, b[t], indices[h]);
    if ((at + 1) * 32 % GROUP == 0) {
      const u32 scale = slot + places.scale + h * TILE + at * 32 / GROUP * SCALE_BYTES;
      add_scaled(total[h], sums[h], load_scale(scale), load_scale(scale + 8 * SCALES));
    }
  }
}

// The products of a stage. Metadata of two instructions are an operand: lanes 0 and 1 of four have those of the first.
__device__ __forceinline__ void multiply_stage(Sums (&total)[HEIGHT], u32 slot, const Places& places, const Chosen& chosen) {
  Sums sums[HEIGHT];
#pragma unroll
  for (int at = 0; at < INSTRUCTIONS; at += 2) {
    u32 indices[HEIGHT];
#pragma unroll
    for (int h = 0; h < HEIGHT; h++) {
      const u32 place = ((slot + places.metadata + h * TILE) ^ (at / 4 * 16)) + at % 4 * 4;
      indices[h] = bytes_of(load_word(place), load_word(place + 8 * METADATA), chosen.indices);
    }
    multiply_columns<0>(total, sums, slot, places, at, indices, chosen);
    multiply_columns<1>(total, sums, slot, places, at + 1, indices, chosen);
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
  if (p.bias != nullptr) v += bias_at(p, row);
  unsigned short half;
  if constexpr (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  static_cast<unsigned short*>(p.y)[i64(token) * p.n + row] = half;
}

// A warp's sums into shared memory, by phase, token and row.
__device__ __forceinline__ void leave(const Sums (&total)[HEIGHT], u32 sums, const Lane& at) {
#pragma unroll
  for (int h = 0; h < HEIGHT; h++) {
    const u32 place = sums + 4 * ((at.phase * TOKENS + 2 * at.pair) * LINE + at.first + 16 * h + at.row);
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) store_float(place + 4 * ((8 * t + i % 2) * LINE + i / 2 * 8), total[h][t][i]);
  }
}

// Add phases, then programs, and write this program's share of the rows: every SPLITS-th part of them.
__device__ __forceinline__ void finish(const Problem& p, u32 sums, int row, int split, int thread) {
  constexpr int SHARE = ROWS / SPLITS;
#pragma unroll 1
  for (int i = thread; i < p.count * SHARE; i += THREADS) {
    const int token = i / SHARE, at = split * SHARE + i % SHARE;
    if (row + at >= p.n) continue;
    float total = 0.f;
#pragma unroll
    for (int s = 0; s < SPLITS; s++)
#pragma unroll
      for (int phase = 0; phase < PHASES; phase++) {
        const u32 address = sums + 4 * ((phase * TOKENS + token) * LINE + at);
        total += load_float(SPLITS > 1 ? address_in(address, s) : address);
      }
    store(p, total, token, row + at);
  }
}

extern "C" __global__ __launch_bounds__(THREADS, AT_ONCE) __cluster_dims__(SPLITS, 1, 1) void sparse_skinny(
    const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const int thread = threadIdx.x;
  const Lane at(__shfl_sync(0xFFFFFFFF, thread / 32, 0), thread % 32);
  u32 split = 0;
  if constexpr (SPLITS > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(split));
  const int row = blockIdx.x / SPLITS * ROWS;
  const Span span(p, split);
  const Ring ring((shared_address(memory) + 127) & ~127u, p);
  prefetch(p, span, at, row);
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#pragma unroll 1
  for (int round = 0; round < AHEAD; round++) load(p, ring, span, at, row, round);
  const Places places(p, ring, at);
  const Chosen chosen(at.pair);
  Sums total[HEIGHT];
#pragma unroll
  for (int h = 0; h < HEIGHT; h++) clear(total[h]);
#pragma unroll 1
  for (int round = 0; round < span.rounds; round++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
    __syncthreads();  // a round is there for all, and nobody reads the slot of the one before
    load(p, ring, span, at, row, AHEAD < SLOTS ? round + AHEAD : span.rounds);
    if (span.first + round * PHASES + at.phase < span.last) multiply_stage(total, ring.at(round), places, chosen);
  }
  __syncthreads();
  leave(total, ring.base, at);
  sync_cluster();
  finish(p, ring.base, row, split, thread);
  if constexpr (SPLITS > 1) sync_cluster();  // nobody leaves before others have read its sums
}
