// Words of a preshuffled weight as wgmma's first operand: what `dequantize` gives in the dtype of x, bit for bit.
//
// An atom has 64 rows by 64 columns. A thread has of each 16 columns four pairs of neighbouring columns k0 = 0, 1: pair 2 k3 + n3
// is of row n3 * 8 and column k3 * 8 behind its first ones, which is the register of that number in the fragment. Words by the
// bits of columns, and their pairs:
//
//     4 bits    [k5][k4]        nibbles 2 k3 + n3 and 4 more      128 threads of 4 words
//     8 bits    [k5] [k4][k3]   bytes n3 and n3 + 2               twice 128 threads of 4 words
//
// Elements become float32 exactly: integers in the fraction of a power of two, less that power and the zero point; e4m3 by way of
// float16. Times the scale, rounded once.

enum { INT4 = 0, INT8 = 1, E4M3 = 2, E2M1 = 3, E4M3_MX = 4, NF4 = 5 };  // from E2M1 on: `factors.cuh`, `levels.cuh`

typedef u32 Fragment[4];  // registers of an instruction's first operand

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// What is taken off an integer in the fraction of a float: of pair r, see above. 4 bits lie 4 r bits from the end.
__device__ __forceinline__ constexpr float offset_of(int r) { return ELEMENT == INT4 ? float((1 << (23 - 4 * r)) + 8) : float((1 << 23) + 128); }

// Of the rows n and n + 8 of a thread: scales, and what is added to integers where there are zero points.
struct Rows {
  float scale[2], less[4];

  __device__ __forceinline__ Rows() : scale{0.f, 0.f}, less{0.f, 0.f, 0.f, 0.f} {}

  // zeros: two zero points, 16 bits each, where there are any.
  __device__ __forceinline__ Rows(u32 scales, u32 zeros) {
    scale[0] = __uint_as_float(load_word(scales));
    scale[1] = __uint_as_float(load_word(scales + 32));
    if constexpr (ZERO) {
      const int both = int(load_word(zeros));
      const float zero[2] = {float(-(both << 16 >> 16)), float(-(both >> 16))};
#pragma unroll
      for (int r = 0; r < 4; r++) less[r] = __fadd_rn(-offset_of(r), zero[r % 2]);
    }
  }

  __device__ __forceinline__ float integer(u32 bits, int r) const { return __fadd_rn(__uint_as_float(bits), ZERO ? less[r] : -offset_of(r)); }
};

// Where the nibbles of pairs are. nibble: 15, which no compiler knows: assemblers, whose instructions have one constant only, would
// take two for each nibble in place of registers for these. Nor does one know that all come from it: it would shift again for each.
struct Masks {
  u32 at[4];
  __device__ __forceinline__ Masks(u32 nibble) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      at[r] = nibble << 4 * r;
      asm volatile("" : "+r"(at[r]));
    }
  }
};

// Two columns of a row, rounded once.
__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 d;
  if constexpr (HALF) asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low) : "memory");
  else asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low) : "memory");
  return d;
}

// The same, times its scale.
__device__ __forceinline__ u32 scaled(float first, float second, float scale) {
  const float low = __fmul_rn(first, scale), high = __fmul_rn(second, scale);
  return rounded(low, high);
}

// Fragments whose products were waited for. always: not 0, which no compiler knows. So they seem to be needed here, and no other
// value has their registers before: of operands of products in flight assemblers do not know that they are read.
__device__ __forceinline__ void hold(const Fragment& a, u32 address, int always) {
    asm volatile("{\n.reg .pred never;\nsetp.eq.s32 never, %5, 0;\n@never st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n}\n" ::"r"(address),
        "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(always) : "memory");
}

// 16 columns of a thread: one word.
__device__ __forceinline__ void decode_nibbles(Fragment& a, u32 word, const Rows& rows, const Masks& masks) {
  const u32 upper = word >> 16;
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const u32 power = u32(150 - 4 * r) << 23 | 8u << 4 * r;
    a[r] = scaled(rows.integer(word & masks.at[r] ^ power, r), rows.integer(upper & masks.at[r] ^ power, r), rows.scale[r % 2]);
  }
}

// Two e4m3 as float16, and one of those as float32: exactly.
__device__ __forceinline__ u32 halves_of(u32 bytes) {
  u32 d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(static_cast<unsigned short>(bytes)));
  return d;
}

__device__ __forceinline__ float float_of(u32 half) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(static_cast<unsigned short>(half)));
  return v;
}

// 16 columns of a thread: two words.
__device__ __forceinline__ void decode_bytes(Fragment& a, u32 first, u32 second, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const u32 word = r < 2 ? first : second;
    if constexpr (ELEMENT == E4M3) {
      const u32 pair = halves_of(__byte_perm(word, 0, 0x3120) >> 16 * (r % 2));  // bytes 0 and 2, or 1 and 3
      a[r] = scaled(float_of(pair), float_of(pair >> 16), rows.scale[r % 2]);
    } else {
      const u32 v = word ^ 0x80808080u;
      a[r] = scaled(rows.integer(__byte_perm(v, 0x4B000000u, 0x7440 + r % 2), r), rows.integer(__byte_perm(v, 0x4B000000u, 0x7442 + r % 2), r),
                    rows.scale[r % 2]);
    }
  }
}
