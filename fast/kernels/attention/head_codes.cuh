// Eight-bit codes of rows of 128 channels, sixteen lanes a row and eight channels a lane, or fewer lanes with more pieces of eight, by
// the rules of `reference.attention.quantized`: the Hadamard transform, a row's or more rows' scale, codes. Rounding is float32's, step
// by step: nothing is contracted.
//
// Before: u32. Defined: INTEGER (codes are int8, else e4m3), ROTATE, BF16 (of 16-bit inputs: bfloat16, else float16).

constexpr int LANES = 16, EACH = 8;
constexpr u32 NOT_A_NUMBER = 0x7FC00000;
constexpr float LARGEST = 3.4028234663852886e38f, LEAST_SCALE = 1.1754943508222875e-38f, NEAREST = 12582912.0f;
constexpr float TARGET = INTEGER ? 127.0f : 448.0f, OVER_TARGET = INTEGER ? 1.0f / 127.0f : 1.0f / 448.0f;

// Sixteen bytes of global memory that nothing writes to, zeros where `there` is false: without a branch, behind which a warp's
// shuffles would be checked one by one.
__device__ __forceinline__ uint4 read_eight(const void* x, bool there) {
  uint4 w = make_uint4(0, 0, 0, 0);
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w) : "l"(__cvta_generic_to_global(x)), "r"(u32(there)));
  return w;
}

__device__ __forceinline__ void unpack(float& low, float& high, u32 word) {
#if BF16
  low = __uint_as_float(word << 16), high = __uint_as_float(word & 0xFFFF0000);
#else
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(word));
#endif
}

__device__ __forceinline__ void unpack(float (&v)[EACH], const uint4& w) {
  unpack(v[0], v[1], w.x), unpack(v[2], v[3], w.y), unpack(v[4], v[5], w.z), unpack(v[6], v[7], w.w);
}

// Signs of the transform, on pairs of 16-bit floats: the sixteen of `reference.layers.hadamard.SIGNS_16`, eight a lane.
__device__ __forceinline__ void turn_signs(uint4& w, int lane) {
  const bool odd = lane % 2;
  w.x ^= odd ? 0x80008000u : 0u, w.y ^= odd ? 0x00008000u : 0x80000000u;
  w.z ^= odd ? 0x00008000u : 0x80000000u, w.w ^= 0x80008000u;
}

// The same on floats.
__device__ __forceinline__ void turn_signs(float (&v)[EACH], int lane) {
  const u32 odd = u32(lane) << 31, even = ~odd & 0x80000000u;
  const u32 signs[EACH] = {odd, odd, odd, even, odd, even, 0x80000000u, 0x80000000u};
#pragma unroll
  for (int i = 0; i < EACH; i++) v[i] = __uint_as_float(__float_as_uint(v[i]) ^ signs[i]);
}

// The sum of both, and the left one less the right one.
__device__ __forceinline__ void add_and_subtract(float& left, float& right) {
  const float sum = __fadd_rn(left, right);
  right = __fsub_rn(left, right), left = sum;
}

// Sums and differences of channels 1, 2, 4, to 64 apart, times 128^-1/2. PIECES of a row in a lane, lane + i LANES / PIECES the i-th:
// pieces are 8 channels apart, so that first partners are in the same piece, then in other lanes, then in the lane's other pieces.
template <int PIECES>
__device__ __forceinline__ void mix(float (&v)[PIECES][EACH], int lane) {
#pragma unroll
  for (int far = 1; far < EACH; far *= 2)
#pragma unroll
    for (int i = 0; i < PIECES * EACH; i++)
      if (!(i & far)) add_and_subtract(v[i / EACH][i % EACH], v[i / EACH][i % EACH + far]);
#pragma unroll
  for (int far = 1; far < LANES / PIECES; far *= 2) {
    const float sign = lane & far ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < PIECES * EACH; i++) {
      float& one = v[i / EACH][i % EACH];
      one = __fmaf_rn(sign, one, __shfl_xor_sync(0xFFFFFFFF, one, far));
    }
  }
#pragma unroll
  for (int far = 1; far < PIECES; far *= 2)
#pragma unroll
    for (int i = 0; i < PIECES * EACH; i++)
      if (!(i / EACH & far)) add_and_subtract(v[i / EACH][i % EACH], v[i / EACH + far][i % EACH]);
#pragma unroll
  for (int i = 0; i < PIECES * EACH; i++) v[i / EACH][i % EACH] = __fmul_rn(v[i / EACH][i % EACH], 0.08838834764831845f);
}

// The same of sixteen lanes.
__device__ __forceinline__ void mix(float (&v)[EACH], int lane) { mix(reinterpret_cast<float (&)[1][EACH]>(v), lane); }

// Of a and |b|; NaN stays.
__device__ __forceinline__ float larger(float a, float b) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(fabsf(b)));
  return a;
}

// The largest magnitude of a row, of which a lane has PIECES.
template <int PIECES>
__device__ __forceinline__ float largest_of_row(const float (&v)[PIECES][EACH]) {
  float most = fabsf(v[0][0]);
#pragma unroll
  for (int i = 1; i < PIECES * EACH; i++) most = larger(most, v[i / EACH][i % EACH]);
#pragma unroll
  for (int far = 1; far < LANES / PIECES; far *= 2) most = larger(most, __shfl_xor_sync(0xFFFFFFFF, most, far));
  return most;
}

// The same of sixteen lanes.
__device__ __forceinline__ float largest_of_row(const float (&v)[EACH]) {
  return largest_of_row(reinterpret_cast<const float (&)[1][EACH]>(v));
}

// most / TARGET, rounded once, at least 2^-126; NaN where a magnitude is not finite. `fast.kernels.sm90.bit_tricks.quotient`.
__device__ __forceinline__ float scale_of(float most, float target = TARGET, float over = OVER_TARGET) {
  const float first = __fmul_rn(most, over), exact = __fmaf_rn(__fmaf_rn(first, -target, most), over, first);
  return most <= LARGEST ? fmaxf(exact, LEAST_SCALE) : __uint_as_float(NOT_A_NUMBER);
}

// 1 / scale, rounded once: a step of Newton's. `fast.kernels.sm90.bit_tricks.reciprocal_rn`.
__device__ __forceinline__ float inverse_of(float scale) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(scale));
  return __fmaf_rn(__fmaf_rn(-scale, guess, 1.0f), guess, guess);
}

__device__ __forceinline__ u32 bytes_of(float a, float b, float c, float d) {
  const u32 low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040);
  return __byte_perm(low, __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040), 0x5410);
}

__device__ __forceinline__ u32 e4m3s_of(float a, float b, float c, float d) {
  u32 word;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

// Codes of a lane's channels under a scale; where that is NaN 0, or NaN in e4m3.
__device__ __forceinline__ uint2 codes_of(const float (&v)[EACH], float scale) {
  const float inverse = inverse_of(scale);
  float t[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    t[i] = __fmul_rn(v[i], inverse);
    if (INTEGER) t[i] = __fadd_rn(t[i], NEAREST);
  }
  if (!INTEGER) return make_uint2(e4m3s_of(t[0], t[1], t[2], t[3]), e4m3s_of(t[4], t[5], t[6], t[7]));
  const u32 kept = __float_as_uint(scale) == NOT_A_NUMBER ? 0 : 0xFFFFFFFF;
  return make_uint2(bytes_of(t[0], t[1], t[2], t[3]) & kept, bytes_of(t[4], t[5], t[6], t[7]) & kept);
}
