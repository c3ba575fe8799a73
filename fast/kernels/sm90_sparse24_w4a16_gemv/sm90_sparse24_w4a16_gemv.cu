// y = x @ w.T + bias of at most TOKENS * CHUNKS rows of x with a weight of 4-bit integers in 2:4 storage as `compress` and `pack` write
// it, for Hopper. `variants.py` says what is defined for a variant, `host.py` launches it.
//
// A program has TILES tiles of 16 rows and a part of K, each of its PHASES warps a stage of that, COLUMNS columns, whose x it keeps
// in registers. Whole rows are a stream of memory (`cp.async`, each warp its own stage). A warp waits for nobody but its copies, and
// has AHEAD tiles under way: were all asked for at once, those of one warp would come before the next one's, and the last would
// have all of its tiles to multiply when everything is there. Places of tiles are a ring, so that a program may have as many as
// make one wave; sums of all of them are kept.
//
// Products are `mma.sp.m16n8k32`. Instruction i of a stage has columns 32 i to 32 i + 31, whose eight groups of four it takes in
// the order 0, 1, 4, 5, 2, 3, 6, 7: lane t of four has the group of byte t % 2 of word t / 2 of the codes, then that of byte
// t % 2 + 2; x's tiles of eight columns are taken as 0, 2, 1, 3; metadata are bytes 0 and 2 of a word for the first half of K,
// 1 and 3 for the second.
//
// Warps' sums are added in the order of K, then those of a cluster's SPLITS programs, which send them to each other. So the
// same operands have the same bits every time.
//
// More than TOKENS rows of x are CHUNKS of so many, whose programs of the same tiles are neighbours: the second-level cache has what
// one of them read for the others.
//
// PRODUCTS: ONE weight, TWO of one x in one launch, or GATED: y is silu of the first product times the second. Of TWO the tiles
// of the second follow those of the first, of GATED they take turns, so that a program has both. Sums of a tile are those that
// it has alone.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct TensorMap;

enum { ONE = 0, TWO = 1, GATED = 2 };

struct Problem {
  const char* x;         // (count, k) of 16 bits
  const char* codes;     // (n, k / 4)
  const char* metadata;  // (n, k / 8)
  const char* scale;     // (n, k / GROUP) of SCALE_BYTES: float32 or bfloat16
  const void* bias;      // (n); may be null, of two products it is
  void* y;               // (count, n), of x's dtype
#if PRODUCTS
  const char *codes2, *metadata2, *scale2;  // the second weight, of n2 rows; of GATED n2 is n
  void* y2;                                 // (count, n2); null where GATED
#endif
#if ZEROS
  const char* zero;  // (n, k / GROUP) int8, of ONE weight alone
#endif
  int count, n, k;
  int bias_kind;  // FLOAT32, ...
#if PRODUCTS
  int n2;
#endif
};

// A tile of 16 rows of one of the weights: from row `row` of n on, of which those behind the last are none.
struct Tile {
  const char *codes, *metadata, *scale;
  void* y;
  int n, row;
};

// number: of all tiles of all weights.
__device__ __forceinline__ Tile tile_of(const Problem& p, int number) {
#if PRODUCTS
  const int first = (p.n + 15) / 16;
  const bool second = PRODUCTS == GATED ? number % 2 : number >= first;
  number = PRODUCTS == GATED ? number / 2 : second ? number - first : number;
  if (second) return {p.codes2, p.metadata2, p.scale2, p.y2, p.n2, number * 16};
#endif
  return {p.codes, p.metadata, p.scale, p.y, p.n, number * 16};
}

constexpr int GROUPS = 1, CLUSTER = SPLITS;
constexpr int STAGE = COLUMNS, INSTRUCTIONS = STAGE / 32;       // columns of a stage, and products of 16 rows by it
constexpr int CODES = STAGE / 4, METADATA = STAGE / 8, SCALES = STAGE / GROUP * SCALE_BYTES;  // bytes of a row of a stage
constexpr int PIECE = SCALES < 16 ? SCALES : 16;                // bytes of scales in a copy
// Zero points of a row of a stage, and the bytes that are copied to have them: four at least, from a multiple of that on.
constexpr int POINTS = STAGE / GROUP, ZERO_BYTES = !ZEROS ? 0 : POINTS < 4 ? 4 : POINTS;
constexpr int PART = (16 * (CODES + METADATA + SCALES + ZERO_BYTES) + 127) / 128 * 128, PLACE = PHASES * PART;  // bytes of a tile: of a warp, of all
// Places of tiles that are under way: the next one is asked for while one is multiplied, in the place of the one before.
constexpr int RING = TILES <= AHEAD ? TILES : AHEAD + 1;
constexpr int COLUMN_TILES = TOKENS / 8, THREADS = 32 * PHASES, ROWS = 16 * TILES;
constexpr int LINE = 20, LEFT = TOKENS * LINE * 4;              // words of a row of sums, bytes of a warp's of a tile

#include "words.cuh"
#include "copies.cuh"

// Operands

__device__ __forceinline__ float load_scale(u32 address) {
  if constexpr (SCALE_BYTES == 4) return __uint_as_float(load_word(address));
  unsigned short half;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address) : "memory");
  return __uint_as_float(u32(half) << 16);
}

__device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 selector) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selector));
  return d;
}

// The two codes of a byte as 16-bit floats. halves: selects it for the low half, and for the high one of the moved word. Codes
// are put into fractions of powers of two, exactly: low 128 + 8 + c (bfloat16) or 1024 + 8 + c, high, where its bits lie, 16 + 8 + c
// (a place lower, not to reach the exponent) or 64 + 8 + c; an addition of `less` takes off what is too much, and a zero point.
__device__ __forceinline__ u32 decode(u32 word, u32 moved, u32 halves, u32 less) {
  const u32 v = bytes_of(word, moved, halves);
  u32 d;
  if constexpr (HALF) {
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(v), "r"(0x00F0000Fu), "r"(0x54806408u));
    asm("add.rn.f16x2 %0, %0, %1;" : "+r"(d) : "r"(less));
  } else {
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(v), "r"(0x0078000Fu), "r"(0x41C04308u));
    asm("add.rn.bf16x2 %0, %0, %1;" : "+r"(d) : "r"(less));
  }
  return d;
}

// What `decode` takes off, less a zero point z from -8 to 7: one more is the next pattern of both halves, whose last bits stand
// for 1 in the low half and for 1/8 (bfloat16) or 1/16 in the high one. c - z is exact.
constexpr u32 LESS = HALF ? 0xD480E408u : 0xC1C0C308u, ONE_MORE = HALF ? 0x00100001u : 0x00080001u;

__device__ __forceinline__ u32 less_of(u32 address) {
  int z;
  asm volatile("ld.shared.s8 %0, [%1];" : "=r"(z) : "r"(address) : "memory");
  return LESS + u32(z) * ONE_MORE;
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

// Part of K of a program in stages, of which each warp has one or none.
struct Span {
  int first, last;
  __device__ __forceinline__ Span(const Problem& p, int split) {
    const int stages = p.k / STAGE;
    first = stages * split / SPLITS, last = stages * (split + 1) / SPLITS;
  }
};

// A lane's place: its warp; its row of a tile (and that + 8), its pair of columns (and tokens).
struct Lane {
  int warp, row, pair, lane;
  __device__ __forceinline__ Lane(int warp, int lane) : warp(warp), row(lane / 4), pair(lane % 4), lane(lane) {}
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

// Ask for a warp's stage of a tile, if it has one.
__device__ __forceinline__ void load(const Problem& p, u32 part, int stage, bool has, int first, int tile, int lane) {
  if (has) {
    const u32 to = part + tile % RING * PLACE;
    const Tile t = tile_of(p, first + tile);
    copy_tile<CODES, 16, true>(to, t.codes, p.k / 4, i64(stage) * CODES, t.row, t.n, lane);
    copy_tile<METADATA, 16, true>(to + 16 * CODES, t.metadata, p.k / 8, i64(stage) * METADATA, t.row, t.n, lane);
    copy_tile<SCALES, PIECE, false>(to + 16 * (CODES + METADATA), t.scale, i64(p.k / STAGE) * SCALES, i64(stage) * SCALES, t.row, t.n, lane);
#if ZEROS
    copy_tile<ZERO_BYTES, ZERO_BYTES < 16 ? ZERO_BYTES : 16, false>(to + 16 * (CODES + METADATA + SCALES), p.zero, p.k / GROUP,
                                                                    i64(stage) * POINTS / 4 * 4, t.row, t.n, lane);
#endif
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void prefetch_bytes(const char* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
}

// Ask for the first tiles before the kernel in front has ended: into the L2 cache, nothing is read of them. Whole rows of a tile are
// one piece of memory; of parts of K each row is one. Asking takes a thread long, so each warp has a few of all pieces, and of all
// tiles it takes longer than it saves.
__device__ __forceinline__ void prefetch(const Problem& p, const Span& span, const Lane& at, int tile) {
  constexpr int EACH = SPLITS == 1 ? 16 : 1, PIECES = 16 * AHEAD / EACH;
  const int stages = span.last - span.first;
#pragma unroll 1
  for (int i = at.lane * PHASES + at.warp; i < 2 * PIECES; i += THREADS) {
    const Tile t = tile_of(p, tile + i / 2 * EACH / 16);
    const int first = t.row + i / 2 * EACH % 16, many = min(EACH, t.n - first) * stages;
    if (many <= 0) continue;
    if (i % 2 == 0) prefetch_bytes(t.codes + i64(first) * (p.k / 4) + span.first * CODES, many * CODES);
    else prefetch_bytes(t.metadata + i64(first) * (p.k / 8) + span.first * METADATA, many * METADATA);
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

// The first operand of instruction `at` of a stage. codes: a lane's word of the first one, of a tile. less: of both rows.
__device__ __forceinline__ void operand(u32 (&a)[4], u32 codes, int at, const Chosen& chosen, const u32 (&less)[2]) {
  const u32 place = (codes ^ (at / 2 * 16)) + at % 2 * 8;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 word = load_word(place + half * 8 * CODES), moved = HALF ? word : word >> 1;
    a[half] = decode(word, moved, chosen.first, less[half]), a[half + 2] = decode(word, moved, chosen.second, less[half]);
  }
}

// A lane's second operands of all instructions: pairs of columns of x, whose rows are columns; rows behind the last are zeros.
typedef u32 Inputs[INSTRUCTIONS][COLUMN_TILES][4];

__device__ __forceinline__ void exchange(u32& one, u32& other, bool swapped, int from) {
  const u32 given = __shfl_sync(0xFFFFFFFF, swapped ? one : other, from);
  (swapped ? one : other) = given;
}

// Word j of lane i of four becomes word i of lane j.
__device__ __forceinline__ void transpose(u32 (&v)[4], const Lane& at) {
  const bool odd = at.pair & 1, late = at.pair & 2;
  exchange(v[0], v[1], odd, at.lane ^ 1), exchange(v[2], v[3], odd, at.lane ^ 1);
  exchange(v[0], v[2], late, at.lane ^ 2), exchange(v[1], v[3], late, at.lane ^ 2);
}

// A lane reads eight columns of those of an instruction, of x's rows; `spread` gives the other three their pairs.
__device__ __forceinline__ void load_inputs(Inputs& b, const Problem& p, int stage, const Lane& at) {
#pragma unroll
  for (int t = 0; t < COLUMN_TILES; t++) {
    const int token = 8 * t + at.row;
    const uint4* from = reinterpret_cast<const uint4*>(p.x + (i64(token) * p.k + stage * STAGE) * 2 + 16 * at.pair);
#pragma unroll
    for (int i = 0; i < INSTRUCTIONS; i++) {
      const uint4 v = token < p.count ? from[4 * i] : make_uint4(0, 0, 0, 0);
      b[i][t][0] = v.x, b[i][t][1] = v.y, b[i][t][2] = v.z, b[i][t][3] = v.w;
    }
  }
}

__device__ __forceinline__ void spread(Inputs& b, const Lane& at) {
#pragma unroll
  for (int i = 0; i < INSTRUCTIONS; i++)
#pragma unroll
    for (int t = 0; t < COLUMN_TILES; t++) {
      transpose(b[i][t], at);
      const u32 second = b[i][t][1];
      b[i][t][1] = b[i][t][2], b[i][t][2] = second;
    }
}

// A lane's places in a warp's stage of a tile: its words of codes and metadata, the scales and zero points of its row.
struct Places {
  u32 codes, metadata, scale, zero;
  __device__ __forceinline__ Places(u32 part, int stage, const Lane& at)
      : codes(part + at.row * CODES + order_of<CODES>(at.row) * 16 + at.pair / 2 * 4),
        metadata(part + 16 * CODES + at.row * METADATA + order_of<METADATA>(at.row) * 16 + at.pair / 2 * 4),
        scale(part + 16 * (CODES + METADATA) + at.row * SCALES),
        zero(part + 16 * (CODES + METADATA + SCALES) + at.row * ZERO_BYTES + stage * POINTS % 4) {}
};

// The products of instruction `at`. less: of its group.
template <int SELECTOR>
__device__ __forceinline__ void multiply_columns(Sums& total, Sums& sums, u32 (&less)[2], const Places& places, int at,
                                                 const u32 (&b)[COLUMN_TILES][4], u32 indices, const Chosen& chosen) {
  if (at * 32 % GROUP == 0) {
    clear(sums);
    const u32 zero = places.zero + at * 32 / GROUP;
    if constexpr (ZEROS) less[0] = less_of(zero), less[1] = less_of(zero + 8 * ZERO_BYTES);
  }
  u32 a[4];
  operand(a, places.codes, at, chosen, less);
#pragma unroll
  for (int t = 0; t < COLUMN_TILES; t++) multiply<SELECTOR>(sums[t], a, b[t], indices);
  if ((at + 1) * 32 % GROUP == 0) {
    const u32 scale = places.scale + at * 32 / GROUP * SCALE_BYTES;
    add_scaled(total, sums, load_scale(scale), load_scale(scale + 8 * SCALES));
  }
}

// The products of a stage. Metadata of two instructions are an operand: lanes 0 and 1 of four have those of the first.
__device__ __forceinline__ void multiply_stage(Sums& total, const Places& places, const Inputs& b, const Chosen& chosen) {
  Sums sums;
  u32 less[2] = {LESS, LESS};
#pragma unroll
  for (int at = 0; at < INSTRUCTIONS; at += 2) {
    const u32 place = (places.metadata ^ (at / 4 * 16)) + at % 4 * 4;
    const u32 indices = bytes_of(load_word(place), load_word(place + 8 * METADATA), chosen.indices);
    multiply_columns<0>(total, sums, less, places, at, b[at], indices, chosen);
    multiply_columns<1>(total, sums, less, places, at + 1, b[at + 1], indices, chosen);
  }
}

// A warp's sums of a tile, by token and row.
__device__ __forceinline__ void leave(const Sums& total, u32 to, const Lane& at) {
  const u32 place = to + 4 * (2 * at.pair * LINE + at.row);
#pragma unroll
  for (int t = 0; t < COLUMN_TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) store_float(place + 4 * ((8 * t + i % 2) * LINE + i / 2 * 8), total[t][i]);
}

// Multiply a warp's stage of all tiles as they come, and ask for those AHEAD of them. Without a stage its sums are zeros.
__device__ __forceinline__ void consume(const Problem& p, Inputs& b, u32 begin, u32 left, int stage, bool has, int first, const Lane& at) {
  const Chosen chosen(at.pair);
  if (has) spread(b, at);
#pragma unroll 1
  for (int tile = 0; tile < TILES; tile++) {
    Sums total;
    clear(total);
    asm volatile("cp.async.wait_group %0;" ::"n"(AHEAD - 1) : "memory");
    __syncwarp();
    load(p, begin, stage, has && tile + AHEAD < TILES, first, tile + AHEAD, at.lane);
    if (has) multiply_stage(total, Places(begin + tile % RING * PLACE, stage, at), b, chosen);
    leave(total, left + tile * PHASES * LEFT, at);
  }
}

#include "gated.cuh"
#include "output.cuh"

extern "C" __global__ __launch_bounds__(THREADS, AT_ONCE) __cluster_dims__(SPLITS, 1, 1) void sm90_sparse24_w4a16_gemv(
    const __grid_constant__ Problem given) {
#if CHUNKS > 1
  const int begun = blockIdx.x / SPLITS % CHUNKS * TOKENS;
  Problem p = given;
  p.x += i64(begun) * p.k * 2, p.y = static_cast<char*>(p.y) + i64(begun) * p.n * 2, p.count = min(TOKENS, p.count - begun);
#else
  const Problem& p = given;
#endif
  extern __shared__ char memory[];
  const int thread = threadIdx.x;
  const Lane at(__shfl_sync(0xFFFFFFFF, thread / 32, 0), thread % 32);
  u32 split = 0;
  if constexpr (SPLITS > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(split));
  if constexpr (SPLITS > 1) arrive_cluster();
  const int first = blockIdx.x / SPLITS / CHUNKS * TILES;
  const Span span(p, split);
  const u32 base = (shared_address(memory) + 127) & ~127u, part = base + at.warp * PART, left = base + RING * PLACE;
  const int stage = span.first + at.warp;
  const bool has = stage < span.last;
  if constexpr (EARLY) prefetch(p, span, at, first);
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  Inputs b;
  // x first: it would come behind all of the weight, and nothing could be multiplied before.
  if (has) load_inputs(b, p, stage, at);
#pragma unroll 1
  for (int tile = 0; tile < AHEAD; tile++) load(p, part, stage, has, first, tile, at.lane);
  consume(p, b, part, left + at.warp * LEFT, stage, has, first, at);
  __syncthreads();
  finish(p, left, first, split, thread);
}
