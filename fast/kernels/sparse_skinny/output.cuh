// What a program does when all of its warps have left their sums: adds them in the order of K, and writes y.
//
// Before: Problem, sizes of stages, `copies.cuh`, `store_float`.

// Of a token four rows of sums.
struct Four {
  float v[4];
  __device__ __forceinline__ void operator+=(const Four& other) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] += other.v[i];
  }
};

template <bool CLUSTERED>
__device__ __forceinline__ Four load_four(u32 address) {
  Four f;
#define LOAD(SPACE)                                                                                       \
  asm volatile("ld." SPACE ".v4.f32 {%0, %1, %2, %3}, [%4];"                                               \
               : "=f"(f.v[0]), "=f"(f.v[1]), "=f"(f.v[2]), "=f"(f.v[3]) : "r"(address) : "memory")
  if constexpr (CLUSTERED) LOAD("shared::cluster");
  else LOAD("shared");
#undef LOAD
  return f;
}

__device__ __forceinline__ void store_four(u32 address, const Four& f) {
#pragma unroll
  for (int i = 0; i < 4; i++) store_float(address + 4 * i, f.v[i]);
}

// The place of row `at` of a program's rows in its first warp's sums.
__device__ __forceinline__ u32 place_of(u32 base, int token, int at) { return base + at / 16 * TILE + 4 * (token * LINE + at % 16); }

__device__ __forceinline__ float bias_at(const Problem& p, int row) {
  if (p.bias_kind == FLOAT32) return static_cast<const float*>(p.bias)[row];
  const unsigned short half = static_cast<const unsigned short*>(p.bias)[row];
  if (p.bias_kind == BFLOAT16) return __uint_as_float(u32(half) << 16);
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
  return v;
}

__device__ __forceinline__ u32 rounded(const Problem& p, float v, int row) {
  if (p.bias != nullptr) v += bias_at(p, row);
  unsigned short half;
  if constexpr (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  return half;
}

// Four rows of y, eight bytes at once where rows of y are whole such pieces.
__device__ __forceinline__ void store_rows(const Problem& p, const Four& f, int token, int row) {
  unsigned short* to = static_cast<unsigned short*>(p.y) + i64(token) * p.n + row;
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (row + i < p.n) v[i] = rounded(p, f.v[i], row + i);
  if (p.n % 4 == 0) {
    if (row < p.n) *reinterpret_cast<uint2*>(to) = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (row + i < p.n) to[i] = v[i];
  }
}

// Sums of the warps, and of the cluster's programs, in the order of K.
__device__ __forceinline__ Four sum_of_phases(u32 place) {
  Four total = {};
#pragma unroll
  for (int phase = 0; phase < PHASES; phase++) total += load_four<false>(place + phase * PART);
  return total;
}

__device__ __forceinline__ Four sum_of_splits(u32 place) {
  Four total = {};
#pragma unroll
  for (int split = 0; split < SPLITS; split++) total += load_four<true>(address_in(place, split));
  return total;
}

// Add what the warps left, four rows a thread. Of parts of K the sum takes the place of the first warp's; then every SPLITS-th part
// of the rows is a program's to add and write.
__device__ __forceinline__ void finish(const Problem& p, u32 base, int row, int split, int thread) {
  constexpr int FOURS = ROWS / 4, SHARE = FOURS / SPLITS;
#pragma unroll 1
  for (int i = thread; i < p.count * FOURS; i += THREADS) {
    const int token = i / FOURS, at = i % FOURS * 4;
    const u32 place = place_of(base, token, at);
    const Four total = sum_of_phases(place);
    if constexpr (SPLITS > 1) store_four(place, total);
    else store_rows(p, total, token, row + at);
  }
  if constexpr (SPLITS > 1) {
    sync_cluster();
#pragma unroll 1
    for (int i = thread; i < p.count * SHARE; i += THREADS) {
      const int token = i / SHARE, at = (split * SHARE + i % SHARE) * 4;
      store_rows(p, sum_of_splits(place_of(base, token, at)), token, row + at);
    }
    sync_cluster();  // nobody leaves before others have read its sums
  }
}
