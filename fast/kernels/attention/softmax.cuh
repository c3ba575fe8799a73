// What kernels of attention have in common: exponentials of base 2, results in 16 bits, and the tokens of parts of a context.
//
// Defined: BF16 (of results: bfloat16, else float16).

typedef unsigned int u32;
typedef long long i64;

constexpr u32 ALL = 0xFFFFFFFF;  // lanes

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 float16s(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
  return word;
}

// Two numbers of the queries' dtype.
__device__ __forceinline__ u32 rounded(float low, float high) {
#if BF16
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
  return word;
#else
  return float16s(low, high);
#endif
}

// How many tokens are read as they are stored, sinks included (`reference.attention.window`): all but the last `residual` ones and
// those of a group of `open` that is not full.
__device__ __forceinline__ int stored_tokens(int count, int residual, int open) {
  return max(min(count - residual, count - count % open), 0);
}

// Blocks of each part: those with tokens, divided evenly.
__device__ __forceinline__ int blocks_of_a_part(int tokens, int block, int parts) {
  return ((tokens + block - 1) / block + parts - 1) / parts;
}

// Parts that have tokens, of so many blocks each; none without tokens.
__device__ __forceinline__ int parts_with_tokens(int tokens, int block, int each) {
  const int some = max(1, each);
  return ((tokens + block - 1) / block + some - 1) / some;
}
