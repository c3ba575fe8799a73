// The sums of a warpgroup, 64 features by TOKENS, times scales, plus a bias, rounded once and written to y (tokens, features).
//
// Before: `words.cuh`, `copies.cuh`, Sum, Problem (tokens, features, y, x_scale, x_scale_step, scale, scale_step, bias, bias_kind), OUT,
// INTEGER, TOKENS, CHUNK (tokens of an outgoing tile), PITCH (its words of a token), SUMS, PAIR, SPLITS; CANONICAL, where every
// NaN is to be the quiet one without payload: those of sums and conversions have all bits but the sign, and infinity has fewer.

#ifndef CANONICAL
#define CANONICAL 0
#endif

__device__ __forceinline__ void store_word(u32 address, Sum value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(INTEGER ? u32(value) : __float_as_uint(value)) : "memory");
}

__device__ __forceinline__ float load_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void load_floats(float (&v)[8], u32 address) {
#pragma unroll
  for (int i = 0; i < 8; i += 4)
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[i]), "=f"(v[i + 1]), "=f"(v[i + 2]), "=f"(v[i + 3])
        : "r"(address + 4 * i) : "memory");
}

// Eight neighbouring sums, of this program or of another one of the cluster.
__device__ __forceinline__ void load_sums(Sum (&v)[8], u32 address) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    u32 w[4];
    if constexpr (SPLITS > 1)
      asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
          : "r"(address + 4 * i) : "memory");
    else
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
          : "r"(address + 4 * i) : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++) v[i + j] = INTEGER ? Sum(int(w[j])) : Sum(__uint_as_float(w[j]));
  }
}

// A float32 as a pattern in the low bits of the output's width.
__device__ __forceinline__ u32 rounded(float v) {
  unsigned short half = 0;
  if constexpr (OUT == BFLOAT16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  if constexpr (OUT == FLOAT16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  if constexpr (CANONICAL && OUT == FLOAT32) return min(__float_as_int(v), 0x7FC00000);
  return OUT == FLOAT32 ? __float_as_uint(v) : half;
}

// The scales and biases of a tile, which threads read before they multiply and leave in shared memory after it, where the loads of
// others would wait: words [0, TOKENS) for tokens, 64 scales and 64 biases of features. Adding -0 changes nothing.
struct Factors {
  static constexpr int EACH = (TOKENS + 127) / 128;
  float tokens[EACH], feature;

  __device__ __forceinline__ Factors(const Problem& p, int thread, int token, int first) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = token + thread + 128 * i;
      tokens[i] = p.x_scale != nullptr && at < p.tokens ? p.x_scale[p.x_scale_step * i64(at)] : 1.f;
    }
    const int at = first + thread % 64;
    if (thread < 64) feature = p.scale != nullptr && at < p.features ? p.scale[p.scale_step * i64(at)] : 1.f;
    else feature = p.bias != nullptr && at < p.features ? bias_at(p.bias, p.bias_kind, at) : __uint_as_float(0x80000000u);
  }

  __device__ __forceinline__ void leave(u32 side, int thread) const {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (thread + 128 * i < TOKENS) store_float(side + 4 * (thread + 128 * i), tokens[i]);
    store_float(side + 4 * (TOKENS + thread), feature);
  }
};

// What eight features of a thread are multiplied by, and what is added.
struct Epilogue {
  float scale[8], bias[8];
  u32 side;

  __device__ __forceinline__ Epilogue(u32 side, int thread) : side(side) {
    load_floats(scale, side + 4 * (TOKENS + thread % 8 * 8));
    load_floats(bias, side + 4 * (TOKENS + 64 + thread % 8 * 8));
  }

  // Sums times the token's scale, times the feature's, plus the bias, each rounded to float32; then one rounding, and stores.
  // at: of the token in the tile.
  __device__ __forceinline__ void store(const Problem& p, const Sum (&sum)[8], int at, int token, int feature) const {
    const float x_scale = load_float(side + 4 * at);
    u32 out[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float v = __fadd_rn(__fmul_rn(__fmul_rn(float(sum[i]), x_scale), scale[i]), bias[i]);
      out[i] = OUT == INT32 ? u32(sum[i]) : rounded(v);
    }
    const i64 place = i64(token) * p.features + feature;
    const bool whole = p.features % 8 == 0;
    if constexpr (OUT == BFLOAT16 || OUT == FLOAT16) {
      unsigned short* y = static_cast<unsigned short*>(p.y) + place;
      if (whole)
        *reinterpret_cast<uint4*>(y) = make_uint4(out[0] | out[1] << 16, out[2] | out[3] << 16, out[4] | out[5] << 16, out[6] | out[7] << 16);
      else
#pragma unroll
        for (int i = 0; i < 8; i++) if (feature + i < p.features) y[i] = static_cast<unsigned short>(out[i]);
    } else {
      u32* y = static_cast<u32*>(p.y) + place;
      if (whole) {
        *reinterpret_cast<uint4*>(y) = make_uint4(out[0], out[1], out[2], out[3]);
        *reinterpret_cast<uint4*>(y + 4) = make_uint4(out[4], out[5], out[6], out[7]);
      } else
#pragma unroll
        for (int i = 0; i < 8; i++) if (feature + i < p.features) y[i] = out[i];
    }
  }
};

// Tokens [first, first + CHUNK) of a warpgroup's sums into its outgoing tile: a row of PITCH words for each token.
template <int FIRST>
__device__ __forceinline__ void put(const Sum (&sum)[SUMS], u32 tile, int thread) {
  const int lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = FIRST / 2; i < (FIRST + CHUNK) / 2; i++) {
    const int token = i / 4 * 8 - FIRST + lane % 4 * 2 + i % 2;
    store_word(tile + 4 * (token * PITCH + row + i / 2 % 2 * 8), sum[i]);
  }
}

// Finish tokens of an outgoing tile, eight features a thread: every SPLITS-th pass of 16 tokens, from `pass` on. FIRST: of the chunk.
template <int FIRST>
__device__ __forceinline__ void take(const Problem& p, const Epilogue& e, u32 tile, int thread, int token, int feature, int pass) {
#pragma unroll 1
  for (; pass < CHUNK / 16; pass += SPLITS) {
    const int at = pass * 16 + thread / 8;
    if (token + FIRST + at >= p.tokens || feature >= p.features) continue;
    const u32 address = tile + 4 * (at * PITCH + thread % 8 * 8);
    Sum total[8];
    if constexpr (SPLITS == 1) {
      load_sums(total, address);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) total[i] = 0;
#pragma unroll 1
      for (int s = 0; s < SPLITS; s++) {
        u32 rank;
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        Sum part[8];
        load_sums(part, address_in(address, rank % PAIR + PAIR * s));
#pragma unroll
        for (int i = 0; i < 8; i++) total[i] += part[i];
      }
    }
    e.store(p, total, FIRST + at, token + FIRST + at, feature);
  }
}

template <int FIRST>
__device__ __forceinline__ void write(const Problem& p, const Epilogue& e, const Sum (&sum)[SUMS], u32 tile, int group, int thread, int token, int feature) {
  if constexpr (FIRST < TOKENS) {
    sync_group(group);  // the chunk before has left
    put<FIRST>(sum, tile, thread);
    sync_group(group);
    take<FIRST>(p, e, tile, thread, token, feature, 0);
    write<FIRST + CHUNK>(p, e, sum, tile, group, thread, token, feature);
  }
}
