// Pairs of 16-bit floats in a register, decoded from words, and copies of 16 bytes without registers between.
//
// Before: u32; HALF: whether they are float16, else bfloat16.

template <int TABLE>
__device__ __forceinline__ u32 logic(u32 a, u32 b, u32 c) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(TABLE));
  return d;
}

__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ void copy_16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}
