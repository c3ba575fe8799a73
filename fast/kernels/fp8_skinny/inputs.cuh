// Rows of x as codes of e4m3 under a scale each, in shared memory: as they come, or of bfloat16 by `quantize` of the scheme
// fp8_rowwise to the bit. Every program has all of them. Pieces of 256 columns are a warp's.
//
// Before: `words.cuh`; Problem; WARPS; KEPT: pieces of a warp, 0 where x is codes.

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

// A warp's pieces of all rows, every WARPS-th: kept, as reading them again would wait behind the weight.
struct Pieces {
  uint4 v[KEPT > 0 ? KEPT : 1];

  __device__ __forceinline__ Pieces(const Problem& p, int warp, int lane) {
#pragma unroll
    for (int j = 0; j < KEPT; j++)
      if (const int i = warp + j * WARPS; i < p.k / PIECE * p.count) v[j] = load_piece(p.x + i64(i) * PIECE * 2 + lane * 16);
  }

  // The largest magnitudes of all rows, words from `largest` on, which are 0.
  __device__ __forceinline__ void find_largest(const Problem& p, u32 largest, int warp, int lane) const {
    const int pieces = p.k / PIECE;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
      const int i = warp + j * WARPS;
      if (i >= pieces * p.count) break;
      const u32 pair = larger(larger(larger(larger(0, v[j].x), v[j].y), v[j].z), v[j].w);
      u32 one = max(pair >> 16, pair & 0xFFFFu);
      asm volatile("redux.sync.max.u32 %0, %1, 0xFFFFFFFF;" : "=r"(one) : "r"(one));
      if (lane == 0) asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(largest + 4 * (i / pieces)), "r"(one) : "memory");
    }
  }

  // Codes, rows of which are `pitch` bytes apart.
  __device__ __forceinline__ void leave_codes(const Problem& p, u32 to, u32 pitch, u32 largest, int warp, int lane) const {
    const int pieces = p.k / PIECE;
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
      const int i = warp + j * WARPS, token = i / pieces;
      if (i >= pieces * p.count) break;
      float m;
      asm("rcp.rn.f32 %0, %1;" : "=f"(m) : "f"(scale_of(load_word(largest + 4 * token))));
      const u32 first = codes_of(v[j].x, m) | codes_of(v[j].y, m) << 16, second = codes_of(v[j].z, m) | codes_of(v[j].w, m) << 16;
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};"
          ::"r"(to + token * pitch + (i - token * pieces) * PIECE + lane * 8), "r"(first), "r"(second) : "memory");
    }
  }
};

// Rows of x that are codes already.
__device__ __forceinline__ void copy_codes(const Problem& p, u32 to, u32 pitch, int thread) {
  const int each = p.k / 16;
#pragma unroll 1
  for (int i = thread; i < each * p.count; i += 32 * WARPS)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
        ::"r"(to + i / each * pitch + i % each * 16), "l"(__cvta_generic_to_global(p.x + i64(i) * 16)) : "memory");
}
