// Words of a preshuffled weight as wgmma's first operand: what `dequantize` gives in the dtype of x, bit for bit.
//
// An atom has 64 rows by 64 columns. A thread has of each 16 columns four pairs of neighbouring columns k0 = 0, 1: pair 2 k3 + n3
// is of row n3 * 8 and column k3 * 8 behind its first ones, which is the register of that number in the fragment. Words by the
// bits of columns, and their pairs:
//
//     4 bits    [k5][k4]        nibbles 2 k3 + n3 and 4 more      128 threads of 4 words
//     8 bits    [k5] [k4][k3]   bytes n3 and n3 + 2               twice 128 threads of 4 words
//
// Elements less zero points are exact in bfloat16: shifts and masks into the fraction of a power of two, less that power
// (`fast/kernels/linear_small/decode.py` has the same for Triton). Times the scale in float32, rounded once.

enum { INT4 = 0, INT8 = 1, E4M3 = 2 };

typedef u32 Fragment[4];  // registers of an instruction's first operand

__device__ __forceinline__ u32 add_pairs(u32 a, u32 b) {
  u32 d;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// a - b
__device__ __forceinline__ u32 subtract_pairs(u32 a, u32 b) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(b), "r"(0xBF80BF80u), "r"(a));
  return d;
}

// The same value twice.
__device__ __forceinline__ u32 pair_of(float v) {
  u32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(v));
  return d;
}

__device__ __forceinline__ uint4 load_four(u32 address) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(address) : "memory");
  return w;
}

__device__ __forceinline__ u32 load_word(u32 address) {
  u32 w;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w) : "r"(address) : "memory");
  return w;
}

// Of the rows n and n + 8 of a thread: scales, and what is added to their elements as they are unpacked.
struct Rows {
  float scale[2];
  u32 less[2];

  // zeros: two zero points, 16 bits each, where there are any.
  __device__ __forceinline__ Rows(u32 scales, u32 zeros) {
    scale[0] = __uint_as_float(load_word(scales));
    scale[1] = __uint_as_float(load_word(scales + 32));
    constexpr int OFFSET = ELEMENT == INT4 ? 136 : 0;
    less[0] = less[1] = 0xC308C308u;  // -136
    if constexpr (ZERO) {
      const int both = int(load_word(zeros));
      less[0] = pair_of(float(-OFFSET - (both << 16 >> 16)));
      less[1] = pair_of(float(-OFFSET - (both >> 16)));
    }
  }
};

// A pair of columns of a row, times its scale.
__device__ __forceinline__ u32 scaled(u32 pair, float scale) {
  const float low = __fmul_rn(__uint_as_float(pair << 16), scale), high = __fmul_rn(__uint_as_float(pair & 0xFFFF0000u), scale);
  u32 d;
  if constexpr (HALF) asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low) : "memory");
  else asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low) : "memory");
  return d;
}

// Fragments whose products were waited for. always: not 0, which no compiler knows. So they seem to be needed here, and no other
// value has their registers before: of operands of products in flight assemblers do not know that they are read.
__device__ __forceinline__ void hold(const Fragment (&a)[4], u32 address, int always) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("{\n.reg .pred never;\nsetp.eq.s32 never, %5, 0;\n@never st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n}\n" ::"r"(address),
        "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(always) : "memory");
}

// 16 columns of a thread: one word.
__device__ __forceinline__ void decode_nibbles(Fragment& a, u32 word, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 4; r++)
    a[r] = scaled(add_pairs((word >> 4 * r & 0x000F000Fu) ^ 0x43084308u, rows.less[r % 2]), rows.scale[r % 2]);
}

// Bytes n3 and n3 + 2 of a word.
__device__ __forceinline__ u32 unpacked_bytes(u32 word, int n3, const Rows& rows) {
  if constexpr (ELEMENT == E4M3) {
    const u32 v = n3 ? word : word << 8;
    return multiply_pairs((v & 0x80008000u) | (v >> 4 & 0x07F007F0u), 0x7B807B80u);  // 2**120
  } else {
    const u32 v = n3 ? word >> 8 : word;
    const u32 made = subtract_pairs((v & 0x007F007Fu) | 0x43004300u, (v & 0x00800080u) | 0x43004300u);
    return ZERO ? add_pairs(made, rows.less[n3]) : made;
  }
}

// 16 columns of a thread: two words.
__device__ __forceinline__ void decode_bytes(Fragment& a, u32 first, u32 second, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 4; r++)
    a[r] = scaled(unpacked_bytes(r < 2 ? first : second, r % 2, rows), rows.scale[r % 2]);
}
