// Words of a preshuffled weight as the first operand of `mma.m16n8k16`, and the instructions that this takes: integers and e4m3,
// whose scales are of sums. `levels.cuh` and `factors.cuh` have the others.
//
// Before: `words.cuh`; ELEMENT, HALF, ZERO.

// Of two tiles of 16 columns the second operand: rows of x are its columns.
__device__ __forceinline__ void load_inputs(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ u32 multiply_pairs(u32 a, u32 b) {
  u32 d;
  if constexpr (HALF) asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  else asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Two float32 as a pair of 16-bit floats, exactly where they are that.
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 d;
  if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// What is added to codes of rows n and n + 8: minus the zero point, and the offset that decoding leaves.
struct Less {
  u32 low, high;

  __device__ __forceinline__ Less() {
    constexpr u32 none = ELEMENT != INT4 ? 0u : HALF ? 0xE408E408u : 0xC308C308u;
    low = high = none;
  }

  __device__ __forceinline__ explicit Less(u32 zeros) {
    constexpr float offset = ELEMENT != INT4 ? 0.f : HALF ? 1032.f : 136.f;
    const float a = -offset - float(int(zeros << 16) >> 16), b = -offset - float(int(zeros) >> 16);
    low = pair_of(a, a), high = pair_of(b, b);
  }
};

// The first operand of a tile of 16 columns: elements of rows n, n + 8, n, n + 8 at columns k, k, k + 8, k + 8, two each.
// Four bits: one word. Its nibbles, lowest first: k0, k3, n3.
__device__ __forceinline__ void decode(u32 (&a)[4], u32 word, const Less& less) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    a[i] = add_pairs(logic<0x6A>(word >> (4 * i), 0x000F000Fu, HALF ? 0x64086408u : 0x43084308u), i % 2 ? less.high : less.low);
}

// Eight bits, bytes 0 and 2 or (odd) 1 and 3.
__device__ __forceinline__ u32 decode_bytes(u32 word, bool odd, u32 less) {
  if constexpr (ELEMENT == E4M3) {
    const u32 v = odd ? word : word << 8;
    const u32 u = (v >> (HALF ? 1 : 4)) & (HALF ? 0x3F803F80u : 0x07F007F0u);
    return multiply_pairs(logic<0xEA>(v, 0x80008000u, u), HALF ? 0x5C005C00u : 0x7B807B80u);
  }
  const u32 v = odd ? word >> 8 : word;
  u32 d;
  if constexpr (HALF) {
    d = add_pairs(logic<0x6A>(v, 0x00FF00FFu, 0x64806480u), 0xE480E480u);
  } else {
    const u32 sign = logic<0xEA>(v, 0x00800080u, 0x43004300u), rest = logic<0xEA>(v, 0x007F007Fu, 0x43004300u);
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(sign), "r"(0xBF80BF80u), "r"(rest));
  }
  return ZERO ? add_pairs(d, less) : d;
}

// Eight bits: two words, of columns k and k + 8. Their bytes, lowest first: k0, n3.
__device__ __forceinline__ void decode(u32 (&a)[4], u32 first, u32 second, const Less& less) {
  a[0] = decode_bytes(first, false, less.low), a[1] = decode_bytes(first, true, less.high);
  a[2] = decode_bytes(second, false, less.low), a[3] = decode_bytes(second, true, less.high);
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (HALF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
