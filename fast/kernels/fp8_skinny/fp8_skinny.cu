// y = x @ w.T + bias of at most TOKENS rows of x with a weight of e4m3, both with a scale a row, stored as it is, for Hopper. x is
// codes, or bfloat16 that is quantized on the way (`inputs.cuh`). `variants.py` says what is defined for a variant, `host.py` launches it.
//
// No word of the weight goes through shared memory. A warp has 16 rows (a slab) of SLABS of a program, and every PHASES-th turn of
// 128 columns, whose words are in registers, EACH turns ahead of what it multiplies. Columns are taken in an order in which a lane
// has sixteen neighbouring ones of its rows, of both operands: codes are converted to float16, which is exact, for
// `mma.m16n8k16`. Sums of a row are of PHASES parts, added in their order; then x's scale, the weight's and the bias.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct TensorMap;

struct Problem {
  const char* x;        // (count, k) e4m3, bfloat16 where KEPT
  const float* x_scale;  // (count); not read where KEPT
  const char* codes;    // (n, k)
  const float* scale;   // (n)
  const void* bias;     // (n); may be null
  void* y;              // (count, n) bfloat16
  int count, n, k;
  int bias_kind;        // FLOAT32, ...
};

constexpr int GROUPS = 1, CLUSTER = 1;
constexpr int TILES = TOKENS / 8, WARPS = SLABS * PHASES, ROWS = 16 * SLABS, LINE = ROWS + 4, TURN = 128;

#include "words.cuh"
#include "copies.cuh"
#include "inputs.cuh"

// The codes of a word as two pairs of float16.
__device__ __forceinline__ void halves_of(u32& low, u32& high, u32 word) {
  unsigned short first, second;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(first), "=h"(second) : "r"(word));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(first));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(second));
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 load_stream(const char* from) {
  uint4 w;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(__cvta_generic_to_global(from)));
  return w;
}

// A warp's turns, every PHASES-th, some of them under way: of a lane's row and of that + 8 sixteen columns of either half.
struct Stream {
  const char* from;
  i64 lower;  // bytes to the row + 8
  int turns;
  uint4 high[EACH][2], low[EACH][2];

  __device__ __forceinline__ Stream(const Problem& p, int slab, int phase, int lane)
      : from(p.codes + i64(slab * 16 + lane / 4) * p.k + phase * TURN + lane % 4 * 16), lower(i64(p.k) * 8),
        turns((p.k / TURN - phase + PHASES - 1) / PHASES) {}

  // A half of turn i in place j.
  __device__ __forceinline__ void load(int j, int i, int half) {
    if (i >= turns) return;
    const char* at = from + i * PHASES * TURN + half * 64;
    high[j][half] = load_stream(at), low[j][half] = load_stream(at + lower);
  }

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int j = 0; j < EACH; j++) load(j, j, 0), load(j, j, 1);
  }

  // Ask for the first turns, into the L2 cache.
  __device__ __forceinline__ void prefetch(int lane) const {
#pragma unroll
    for (int j = 0; j < EACH; j++)
      if (j < turns && lane % 4 < 2)
        asm volatile("prefetch.global.L2 [%0];"
            ::"l"(__cvta_generic_to_global(from + j * PHASES * TURN + (lane % 4 ? lower - 16 : 0))) : "memory");
  }
};

typedef float Sums[TILES][4];  // by tile of 8 tokens: (row, token), (row, token + 1), (row + 8, token), (row + 8, token + 1)

// First operands of 64 columns.
__device__ __forceinline__ void operands(u32 (&a)[4][4], const uint4& high, const uint4& low) {
  halves_of(a[0][0], a[0][2], high.x), halves_of(a[0][1], a[0][3], low.x);
  halves_of(a[1][0], a[1][2], high.y), halves_of(a[1][1], a[1][3], low.y);
  halves_of(a[2][0], a[2][2], high.z), halves_of(a[2][1], a[2][3], low.z);
  halves_of(a[3][0], a[3][2], high.w), halves_of(a[3][1], a[3][3], low.w);
}

// The products of a half of turn i in place j; that of the next turn there is asked for as soon as it is decoded. x: of the half.
__device__ __forceinline__ void multiply_half(Sums& total, Stream& from, int j, int i, int half, const u32 (&x)[TILES], u32 at) {
  u32 a[4][4];
  operands(a, from.high[j][half], from.low[j][half]);
  from.load(j, i + EACH, half);
#pragma unroll
  for (int t = 0; t < TILES; t++) {
    const uint4 v = load_words(x[t] + at);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 b0, b1;
      halves_of(b0, b1, words[i]);
      multiply(total[t], a[i], b0, b1);
    }
  }
}

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ void consume(Sums& total, Stream& from, const u32 (&x)[TILES]) {
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) total[t][i] = 0.f;
#pragma unroll 1
  for (int i = 0; i < from.turns; i += EACH) {
    if (LATE && i + EACH >= from.turns) launch_dependents();
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (i + j >= from.turns) break;
#pragma unroll
      for (int half = 0; half < 2; half++) multiply_half(total, from, j, i + j, half, x, (i + j) * PHASES * TURN + half * 64);
    }
  }
}

// A warp's sums, by phase, token and row.
__device__ __forceinline__ void leave(const Sums& total, u32 to, int phase, int pair, int first) {
  const u32 place = to + 4 * ((phase * TOKENS + 2 * pair) * LINE + first);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) store_float(place + 4 * ((8 * t + i % 2) * LINE + i / 2 * 8), total[t][i]);
}

// Add phases, and write the program's rows.
__device__ __forceinline__ void finish(const Problem& p, u32 sums, u32 largest, int thread) {
#pragma unroll 1
  for (int i = thread; i < p.count * ROWS; i += 32 * WARPS) {
    const int token = i / ROWS, at = i % ROWS, row = blockIdx.x * ROWS + at;
    float v = 0.f;
#pragma unroll
    for (int phase = 0; phase < PHASES; phase++) v += __uint_as_float(load_word(sums + 4 * ((phase * TOKENS + token) * LINE + at)));
    const float own = KEPT ? scale_of(load_word(largest + 4 * token)) : p.x_scale[token];
    v = __fmul_rn(__fmul_rn(v, own), p.scale[row]);
    if (p.bias != nullptr) v = __fadd_rn(v, bias_at(p.bias, p.bias_kind, row));
    unsigned short half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
    static_cast<unsigned short*>(p.y)[i64(token) * p.n + row] = half;
  }
}

__device__ __forceinline__ void meet_all() { asm volatile("bar.sync 0;" ::: "memory"); }

// Shared memory: codes of x, rows of a pitch that puts two of them into all banks; sums; the largest magnitude of each row.
extern "C" __global__ __launch_bounds__(32 * WARPS, 1) void fp8_skinny(const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), lane = thread % 32;
  const int own = warp % SLABS, slab = blockIdx.x * SLABS + own, phase = warp / SLABS;
  const u32 base = (shared_address(memory) + 127) & ~127u, pitch = p.k + 64, sums = base + p.count * pitch;
  const u32 largest = sums + PHASES * TOKENS * LINE * 4;
  if (KEPT && thread < TOKENS) store_float(largest + 4 * thread, 0.f);
  if (KEPT) meet_all();
  Stream from(p, slab, phase, lane);
  if (AHEAD) from.prefetch(lane);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!LATE) launch_dependents();
  // x first: it would come behind all of the weight.
  if constexpr (KEPT > 0) {
    const Pieces pieces(p, warp, lane);
    from.begin();
    pieces.find_largest(p, largest, warp, lane);
    meet_all();
    pieces.leave_codes(p, base, pitch, largest, warp, lane);
  } else {
    copy_codes(p, base, pitch, thread);
    from.begin();
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  meet_all();
  u32 x[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) x[t] = base + min(8 * t + lane / 4, p.count - 1) * pitch + lane % 4 * 16 + phase * TURN;
  Sums total;
  consume(total, from, x);
  leave(total, sums, phase, lane % 4, own * 16 + lane / 4);
  meet_all();
  finish(p, sums, largest, thread);
}
