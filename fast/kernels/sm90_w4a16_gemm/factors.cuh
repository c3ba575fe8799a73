// Elements whose scales are factors (`fast/scale_factors.py`), pairs of bfloat16 like those of `decode.cuh`.
//
// Bits of e2m1 in a bfloat16 are 2**126 too small, of e4m3 2**120. Factors of a pair of rows n and n + 8 in a stage:
//
//     PARTS 2    one word     exponent fields, n's of blocks 0 and 1, then those of n + 8; they have what elements lack, but for
//                             2**S, which is the weight's own scale: bits times factor times 2**S are exact in bfloat16
//     PARTS 4    four words   bfloat16 of n, the low half, and of n + 8: scales times 2**118. The weight's own scale is any float32:
//                             scales times it are rounded to float32, and elements times that rounded once more, as `dequantize`
//
// Before: `decode.cuh`.

// The nibbles of pair r as bfloat16: signs at bits 15 and 31, the others from bits 6 and 22 on, both by one product.
__device__ __forceinline__ u32 small_e2m1(u32 word, int r) {
  const u32 v = r / 2 ? word >> 8 : word;
  return (r % 2 ? (v & 0x00F000F0u) * (1 << 8 | 1 << 2) : (v & 0x000F000Fu) * (1 << 12 | 1 << 6)) & 0x81C081C0u;
}

__device__ __forceinline__ float first_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// `multiply_pairs` as what a fragment gets: it stays behind the wait for the products that read the register.
__device__ __forceinline__ u32 multiply_last(u32 a, u32 b) {
  if constexpr (HALF) {
    const u32 pair = multiply_pairs(a, b);
    return rounded(first_of(pair), second_of(pair));
  }
  u32 d;
  asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b) : "memory");
  return d;
}

// The bytes of pair r of e4m3 as bfloat16, 2**120 too small.
__device__ __forceinline__ u32 small_e4m3(u32 word, int r) {
  const u32 v = r % 2 ? word : word << 8;
  return (v & 0x80008000u) | (v >> 4 & 0x07F007F0u);
}

// The factors of a thread's rows in a stage.
struct Factored {
  u32 words[PARTS == 4 ? 4 : 1];

  __device__ __forceinline__ Factored() {
#pragma unroll
    for (u32& w : words) w = 0;
  }

  // from: where its factors are.
  __device__ __forceinline__ void load(u32 from) {
    if constexpr (PARTS == 4) {
      const uint4 w = load_words(from);
      words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
    } else {
      words[0] = load_word(from);
    }
  }

  // Of row n or n + 8, twice, for 16 columns, number i of the stage's four.
  __device__ __forceinline__ u32 power(int i, int row) const { return (words[0] >> (16 * row + i / 2 * 8) & 255) * 0x00800080u; }

  // The same of blocks of 16 columns, as float32.
  __device__ __forceinline__ float scale(int i, int row, float own) const {
    const u32 w = words[PARTS == 4 ? i : 0];
    return __fmul_rn(__fmul_rn(row ? second_of(w) : first_of(w), 0x1p-118f), own);
  }

  __device__ __forceinline__ void decode_nibbles(int i, Fragment& a, u32 word, float own) const {
    if constexpr (PARTS == 4) {
      const float scales[2] = {scale(i, 0, own), scale(i, 1, own)};
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const u32 pair = multiply_pairs(small_e2m1(word, r), 0x7E807E80u);  // 2**126
        a[r] = scaled(first_of(pair), second_of(pair), scales[r % 2]);
      }
    } else {
      const u32 powers[2] = {power(i, 0), power(i, 1)}, both = twice(own);
#pragma unroll
      for (int r = 0; r < 4; r++) a[r] = multiply_last(multiply_pairs(small_e2m1(word, r), powers[r % 2]), both);
    }
  }

  __device__ __forceinline__ void decode_bytes(int i, Fragment& a, u32 first, u32 second, float own) const {
    const u32 powers[2] = {power(i, 0), power(i, 1)}, both = twice(own);
#pragma unroll
    for (int r = 0; r < 4; r++)
      a[r] = multiply_last(multiply_pairs(small_e4m3(r < 2 ? first : second, r), powers[r % 2]), both);
  }

  // A power of two as a pair of bfloat16.
  static __device__ __forceinline__ u32 twice(float own) { return __byte_perm(__float_as_uint(own), 0, 0x3232); }
};
