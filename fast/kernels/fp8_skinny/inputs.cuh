// Rows of x as codes of e4m3 under a scale each, in shared memory: `quantize` of the scheme fp8_rowwise to the bit.
//
// Every program has all of them: reading x costs less than a kernel in front would. Pieces of 256 columns are a warp's.
//
// Before: `words.cuh`; Problem; WARPS, TOKENS.

constexpr int PIECE = 256;
constexpr u32 INFINITY_BITS = 0x7F80;  // of bfloat16

__device__ __forceinline__ uint4 load_piece(const char* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(from)));
  return v;
}

// Magnitudes of pairs of bfloat16, as integers.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
  u32 d;
  asm("max.u16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b & 0x7FFF7FFFu));
  return d;
}

// The scale of a row, of its largest magnitude: NaN where that is not finite, no less than the smallest normal number.
__device__ __forceinline__ float scale_of(u32 largest) {
  if (largest >= INFINITY_BITS) return __uint_as_float(0x7FFFFFFFu);
  float s;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(s) : "f"(__uint_as_float(largest << 16)), "f"(448.f));
  return fmaxf(s, 1.17549435e-38f);
}

// Codes of a pair of bfloat16, whose high half is the later column.
__device__ __forceinline__ u32 codes_of(u32 pair, float reciprocal) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(d) : "f"(__uint_as_float(pair & 0xFFFF0000u) * reciprocal), "f"(__uint_as_float(pair << 16) * reciprocal));
  return d;
}

// The largest magnitudes of all rows, words from `largest` on, which are 0.
__device__ __forceinline__ void find_largest(const Problem& p, u32 largest, int warp, int lane) {
  const int pieces = p.k / PIECE;
#pragma unroll 1
  for (int i = warp; i < pieces * p.count; i += WARPS) {
    const uint4 v = load_piece(p.x + i64(i) * PIECE * 2 + lane * 16);
    const u32 pair = larger(larger(larger(larger(0, v.x), v.y), v.z), v.w);
    u32 one = max(pair >> 16, pair & 0xFFFFu);
    asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(one) : "r"(one));
    if (lane == 0) asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(largest + 4 * (i / pieces)), "r"(one) : "memory");
  }
}

// Codes of all rows, `pitch` bytes apart.
__device__ __forceinline__ void leave_codes(const Problem& p, u32 to, u32 pitch, u32 largest, int warp, int lane) {
  const int pieces = p.k / PIECE;
#pragma unroll 1
  for (int i = warp; i < pieces * p.count; i += WARPS) {
    const uint4 v = load_piece(p.x + i64(i) * PIECE * 2 + lane * 16);
    const int token = i / pieces;
    float m;
    asm("rcp.rn.f32 %0, %1;" : "=f"(m) : "f"(scale_of(load_word(largest + 4 * token))));
    const u32 first = codes_of(v.x, m) | codes_of(v.y, m) << 16, second = codes_of(v.z, m) | codes_of(v.w, m) << 16;
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
        ::"r"(to + token * pitch + (i - token * pieces) * PIECE + lane * 8), "r"(first), "r"(second) : "memory");
  }
}
