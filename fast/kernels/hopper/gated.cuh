// silu(gate) * up of 16-bit floats, the bits of `reference.swiglu`: the steps of `fast/kernels/layers/swiglu.py`, which says
// why they round right for every gate.
//
// Before: u32, HALF; rounding to 16 bits is that of `cvt.rn`, NaN as the one NaN of the dtype.

__device__ __forceinline__ float widened(u32 half) {
  if constexpr (!HALF) return __uint_as_float(half << 16);
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(static_cast<unsigned short>(half)));
  return v;
}

__device__ __forceinline__ u32 narrowed(float v) {
  unsigned short half;
  if constexpr (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  return (half & 0x7FFF) > (HALF ? 0x7C00 : 0x7F80) ? (HALF ? 0x7E00 : 0x7FC0) : half;
}

// 2**f for |f| <= 0.5, by Horner's rule.
__device__ __forceinline__ float power_of_fraction(float f) {
  float p;
  if constexpr (HALF) {
    p = fmaf(f, 0.00015352316f, 0.0013400171f);
    p = fmaf(p, f, 0.00961845f);
    p = fmaf(p, f, 0.055503294f);
    p = fmaf(p, f, 0.24022648f);
    p = fmaf(p, f, 0.6931472f);
  } else {
    p = fmaf(f, 0.009561853f, 0.05590428f);
    p = fmaf(p, f, 0.24025892f);
    p = fmaf(p, f, 0.6931105f);
  }
  return fmaf(p, f, 1.f);
}

// v / (1 + exp(-v)) for -104 <= v <= 64 (bfloat16) or |v| <= 32 (float16), on the right side of every tie of 16-bit floats. The
// sum with 1.5 * 2**23 is rounded to an integer; d and q are 2**32 times less and more than what they stand for.
__device__ __forceinline__ float silu(float v) {
  constexpr float INTEGER = 12582912.f, LOG2E = 1.4426950216293335f, LOG2E_REST = 1.925963033500e-8f, SCALE = 0x1p-32f;
  const float z = fmaf(v, -LOG2E, INTEGER), k = z - INTEGER;
  float f = fmaf(v, -LOG2E, -k);
  if constexpr (HALF) f = fmaf(v, -LOG2E_REST, f);
  const float d = fmaf(__uint_as_float((__float_as_uint(z) << 23) + ((127 - 32) << 23)), power_of_fraction(f), SCALE);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  float q = __fmul_rn(v, r);
  if constexpr (HALF) q = fmaf(fmaf(-q, d, v), r, q);
  return fmaf(q, SCALE, __uint_as_float(HALF ? (127 - 48) << 23 : 8));
}

// Of patterns. The sign of silu is the gate's, also that of zeros; beyond the upper bound, and of NaN, it is the gate.
__device__ __forceinline__ u32 gated(u32 gate, u32 up) {
  constexpr float LOW = HALF ? -32.f : -104.f, TOP = HALF ? 32.f : 64.f;
  const float g = widened(gate);
  const u32 made = (narrowed(silu(fminf(fmaxf(g, LOW), TOP))) & 0x7FFF) | (gate & 0x8000);
  return narrowed(__fmul_rn(widened(g <= TOP ? made : gate), widened(up)));
}
