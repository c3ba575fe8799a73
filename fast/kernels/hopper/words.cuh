// Words of shared memory; dtypes of outputs and biases by number, and an element of a bias as float32.
//
// Before: u32.

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, INT32 = 3 };

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 w;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
  return w;
}

__device__ __forceinline__ uint4 load_words(u32 address) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(address) : "memory");
  return w;
}

__device__ __forceinline__ void store_float(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ float bias_at(const void* bias, int kind, int at) {
  if (kind == FLOAT32) return static_cast<const float*>(bias)[at];
  const unsigned short half = static_cast<const unsigned short*>(bias)[at];
  if (kind == BFLOAT16) return __uint_as_float(u32(half) << 16);
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(half));
  return v;
}
