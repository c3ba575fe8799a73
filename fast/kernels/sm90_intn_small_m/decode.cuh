// Packed codes as the first operand of `mma.m16n8k16`, rows of x as the second.
//
// A lane has eight neighbouring columns of each 32, those of 8 t to 8 t + 7 for lane 4 g + t, and so has its place in both operands:
// sums over columns do not depend on their order. Codes i and i + 4 of the eight are a pair in a register, as they are as far apart as
// they are wide, four times; x is paired alike.
//
// Before: `problem.cuh`, `words.cuh`; BITS, SIGNED, HALF, ZERO.

__device__ __forceinline__ u32 twice(float v) {
  u32 d;
  if constexpr (HALF) asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(v));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(d) : "f"(v));
  return d;
}

// Minus a zero point, twice.
__device__ __forceinline__ u32 load_less(u32 address) {
  int z;
  asm volatile("ld.shared.s8 %0, [%1];" : "=r"(z) : "r"(address) : "memory");
  return twice(-float(z));
}

// Bits of a 16-bit float behind its exponent.
constexpr int MANTISSA = HALF ? 10 : 7;

// The pattern of a power of two, twice.
__device__ constexpr u32 power(int exponent) { return u32(HALF ? (exponent + 15) << 10 : (exponent + 127) << 7) * 0x10001u; }

// Codes at PLACE of both halves of a word as floats. Beside the exponent of 128, or 1024, a code counts ones, or as many as its place
// says; of two's complement the sign is turned, which adds half of the range. A fused multiply-add takes both off and rounds once: all
// results are integers that 16 bits hold, of codes and of zero points up to 8 bits.
template <int PLACE>
__device__ __forceinline__ u32 floats_of(u32 word, u32 less) {
  static_assert(PLACE + BITS <= MANTISSA, "a code is behind the exponent");
  constexpr u32 turned = SIGNED ? 1u << (BITS - 1) : 0u, mask = ((1u << BITS) - 1) << PLACE;
  const u32 v = logic<0x6A>(word, mask * 0x10001u, power(MANTISSA) | (turned << PLACE) * 0x10001u);
  u32 d;
  if constexpr (PLACE == 0) {
    // The bits of 128 + turned are those of 128 and, behind them, of turned.
    d = add_pairs(v, power(MANTISSA) | turned * 0x10001u | 0x80008000u);
  } else {
    const u32 offset = twice(-float((1 << MANTISSA) >> PLACE) - float(turned));
    if constexpr (HALF) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(v), "r"(power(-PLACE)), "r"(offset));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(v), "r"(power(-PLACE)), "r"(offset));
  }
  return ZERO ? add_pairs(d, less) : d;
}

// Codes INDEX to COUNT - 1 of both halves of a word, of which BASE bits have been shifted away.
template <int INDEX, int COUNT, int BASE = 0>
__device__ __forceinline__ void unpack(u32* pairs, u32 word, u32 less) {
  if constexpr (INDEX < COUNT) {
    constexpr int place = INDEX * BITS - BASE;
    if constexpr (place + BITS > MANTISSA) {
      unpack<INDEX, COUNT, INDEX * BITS>(pairs, word >> place, less);
    } else {
      pairs[INDEX] = floats_of<place>(word, less);
      unpack<INDEX + 1, COUNT, BASE>(pairs, word, less);
    }
  }
}

// Where a lane's codes of 32 columns begin: the first word; what tells their bytes from others in that word and the next, bits before
// them, or which bytes codes 0 and 1, and of 6 bits 2 and 3, are in.
struct Window {
  u32 word, shift, first, second;
  __device__ __forceinline__ explicit Window(int t) : word(t * BITS / 4), shift(t * BITS % 4 * 8) {
    const u32 bytes = t * BITS % 4 * 0x1111u;
    first = (BITS == 2 ? 0x1100u : 0x4310u) + bytes, second = 0x5421u + bytes;
  }
};

// Eight codes, four pairs. address: of the lane's first word.
__device__ __forceinline__ void decode(u32 (&pairs)[4], u32 address, const Window& at, u32 less) {
  const u32 low = load_word(address);
  if constexpr (BITS == 4) {
    unpack<0, 4>(pairs, low, less);
  } else if constexpr (BITS == 2) {
    unpack<0, 4>(pairs, __byte_perm(low, low, at.first), less);
  } else if constexpr (BITS == 6) {  // four codes are three bytes, codes 2 and 3 begin within the second
    const u32 high = load_word(address + 4);
    unpack<0, 2>(pairs, __byte_perm(low, high, at.first), less);
    unpack<0, 2>(pairs + 2, __byte_perm(low, high, at.second) >> 4, less);
  } else {
    const u64 both = (u64(load_word(address + 4)) << 32 | low) >> at.shift;
    const u32 codes = u32(both), others = u32(both >> (4 * BITS));
    const u32 first = __byte_perm(codes, others, 0x5410);
    unpack<0, BITS == 3 ? 4 : 2>(pairs, first, less);
    if constexpr (BITS == 5) unpack<0, 2>(pairs + 2, __byte_perm(codes >> 10, others >> 10, 0x5410), less);
  }
}

// Eight elements of a row of x, paired as the codes.
__device__ __forceinline__ void paired(u32 (&b)[4], const uint4& w) {
  b[0] = __byte_perm(w.x, w.z, 0x5410), b[1] = __byte_perm(w.x, w.z, 0x7632);
  b[2] = __byte_perm(w.y, w.w, 0x5410), b[3] = __byte_perm(w.y, w.w, 0x7632);
}

__device__ __forceinline__ void load_inputs(u32 (&b)[4], u32 address) {
  const uint4 w = load_words(address);
  if constexpr (PAIRED) b[0] = w.x, b[1] = w.y, b[2] = w.z, b[3] = w.w;
  else paired(b, w);
}

__device__ __forceinline__ void multiply(float (&sum)[4], const u32 (&low)[4], const u32 (&high)[4], int half, u32 b0, u32 b1) {
  const u32 a0 = low[2 * half], a1 = high[2 * half], a2 = low[2 * half + 1], a3 = high[2 * half + 1];
  if constexpr (HALF)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
