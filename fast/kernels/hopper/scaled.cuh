// How `store.cuh` finishes sums that have scales: as `Epilogue` of `output.cuh`, from registers of the sums' own layout.
//
// Before: `store.cuh` and what it is after.

// Scales and biases of the features n and n + 8 of a thread, which reads them before it multiplies; and of a part of the tokens,
// which it leaves in shared memory after that: TOKENS words.
struct Scaled {
  typedef float2 Tokens;
  static constexpr int EACH = (TOKENS + 127) / 128;
  float tokens[EACH], scale[2];
  Biases bias;
  u32 side;

  __device__ __forceinline__ Scaled(const Problem& p, u32 side, int thread, int token, int first) : bias(p, thread, first), side(side) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int at = token + thread + 128 * i;
      tokens[i] = p.x_scale != nullptr && at < p.tokens ? p.x_scale[p.x_scale_step * i64(at)] : 1.f;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = first + thread / 32 * 16 + thread % 32 / 4 + 8 * i;
      scale[i] = p.scale != nullptr && at < p.features ? p.scale[p.scale_step * i64(at)] : 1.f;
    }
  }

  // The tile before has been read when its last chunk was; `write_tile` meets before it reads.
  __device__ __forceinline__ void leave(int thread) const {
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (thread + 128 * i < TOKENS) store_float(side + 4 * (thread + 128 * i), tokens[i]);
  }

  // at: of the first of eight tokens in the tile.
  __device__ __forceinline__ float2 tokens_at(int at) const {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(side + 8 * (threadIdx.x % 4) + 4 * at) : "memory");
    return v;
  }

  // Each step is rounded to float32.
  __device__ __forceinline__ u32 finished(Sum low, Sum high, float2 of_tokens, int half) const {
    return rounded_pair(__fadd_rn(__fmul_rn(__fmul_rn(float(low), of_tokens.x), scale[half]), bias.own[half]),
                        __fadd_rn(__fmul_rn(__fmul_rn(float(high), of_tokens.y), scale[half]), bias.own[half]));
  }
};
