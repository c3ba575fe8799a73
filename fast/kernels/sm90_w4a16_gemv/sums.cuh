// A warp's sums of 16 rows of the weight, and where they go.
//
// Before: `words.cuh`, `problem.cuh`; TILES, TOKENS; GROUP, OUT; LINE: words of a row of sums in shared memory.

typedef float Sums[TILES][4];  // by tile of 8 tokens: (row, token), (row, token + 1), (row + 8, token), (row + 8, token + 1)

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

// Scales of whole rows n and n + 8: asked for before the first product, as their way from memory is a twentieth of a product's time.
struct RowScales {
  float low, high;
  __device__ __forceinline__ RowScales(const Problem& p, int row) : low(1.f), high(1.f) {
    if constexpr (GROUP == 0) {
      const float* scale = reinterpret_cast<const float*>(p.scale) + row;
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(low) : "l"(__cvta_generic_to_global(scale)));
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(high) : "l"(__cvta_generic_to_global(scale + 8)));
    }
  }
};

__device__ __forceinline__ void store(const Problem& p, float v, int token, int row) {
  if (p.x_scale != nullptr) v *= p.x_scale[token];
  if (p.bias != nullptr) v += bias_at(p.bias, p.bias_kind, row);
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

// A warp's sums into shared memory, by phase, token and row: of a lane those of its pair of tokens and its first row, and that + 8.
__device__ __forceinline__ void leave(const Sums& total, u32 to, int phase, int pair, int first) {
  const u32 place = to + 4 * ((phase * TOKENS + 2 * pair) * LINE + first);
#pragma unroll
  for (int t = 0; t < TILES; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) store_float(place + 4 * ((8 * t + i % 2) * LINE + i / 2 * 8), total[t][i]);
}
