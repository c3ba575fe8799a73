// Words of queries, keys and values as the tensor core takes them: loads, decoders, and which channel stands where.

template <int BYTES>
__device__ __forceinline__ void load(u32* to, const void* from) {
  if constexpr (BYTES == 16) {
    const uint4 v = *static_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (BYTES == 8) {
    const uint2 v = *static_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *static_cast<const u32*>(from);
  }
}

template <int BYTES>
__device__ __forceinline__ void store(u32* to, const u32* from) {
  if constexpr (BYTES == 16)
    *reinterpret_cast<uint4*>(to) = make_uint4(from[0], from[1], from[2], from[3]);
  else if constexpr (BYTES == 8)
    *reinterpret_cast<uint2*>(to) = make_uint2(from[0], from[1]);
  else
    *to = *from;
}

// `load` from global memory that nothing writes to; a constant in the address becomes part of the instruction.
template <int BYTES>
__device__ __forceinline__ void load_constant(u32* to, const void* from) {
  if constexpr (BYTES == 16)
    asm("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from));
  else if constexpr (BYTES == 8)
    asm("ld.global.nc.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
  else
    asm("ld.global.nc.b32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// The float of one half of a word of queries.
__device__ __forceinline__ float half_of(u32 word, int high) {
#if BF16
  return __uint_as_float(high ? word & 0xFFFF0000 : word << 16);
#else
  float v;
  if (high) word >>= 16;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(v) : "r"(word));
  return v;
#endif
}

// float16 of eight nibbles: of places 0, 1, 2 and 3 of both halves of a word. (code ^ 8) in the fraction of 1024, less 1032; of
// the higher nibble of a byte 16 times as much, over 16, less 72. RAISED: higher nibbles are 72 more, which saves instructions.
template <bool RAISED = false>
__device__ __forceinline__ void nibbles(u32* h, u32 x) {
  if constexpr (RAISED) {
    asm("{\n.reg .b32 y, a, c;\n"
        "shr.u32 y, %4, 8;\n"
        "lop3.b32 a, %4, 0x000F000F, 0x64086408, 0x6A;\n"
        "lop3.b32 %1, %4, 0x00F000F0, 0x54805480, 0x6A;\n"
        "lop3.b32 c, y, 0x000F000F, 0x64086408, 0x6A;\n"
        "lop3.b32 %3, y, 0x00F000F0, 0x54805480, 0x6A;\n"
        "sub.f16x2 %0, a, %5;\n"
        "sub.f16x2 %2, c, %5;\n}"
        : "=&r"(h[0]), "=&r"(h[1]), "=&r"(h[2]), "=&r"(h[3])
        : "r"(x), "r"(0x64086408));
    return;
  }
  asm("{\n.reg .b32 y, a, b, c, d;\n"
      "shr.u32 y, %4, 8;\n"
      "lop3.b32 a, %4, 0x000F000F, 0x64086408, 0x6A;\n"
      "lop3.b32 b, %4, 0x00F000F0, 0x64806480, 0x6A;\n"
      "lop3.b32 c, y, 0x000F000F, 0x64086408, 0x6A;\n"
      "lop3.b32 d, y, 0x00F000F0, 0x64806480, 0x6A;\n"
      "sub.f16x2 %0, a, %5;\n"
      "fma.rn.f16x2 %1, b, %6, %7;\n"
      "sub.f16x2 %2, c, %5;\n"
      "fma.rn.f16x2 %3, d, %6, %7;\n}"
      : "=r"(h[0]), "=r"(h[1]), "=r"(h[2]), "=r"(h[3])
      : "r"(x), "r"(0x64086408), "r"(0x2C002C00), "r"(0xD480D480));
}

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Two bytes of a word, chosen by a selector that has 4 (0x64) in odd places: (code ^ 128) in the fraction of 1024, less 1152.
__device__ __forceinline__ u32 integers(u32 flipped, u32 selector) {
  u32 h;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(h) : "r"(prmt(flipped, 0x64646464, selector)), "r"(0x64806480));
  return h;
}

// Two e4m3 in a half of a word.
__device__ __forceinline__ u32 floats(u32 word, int high) {
  u32 h;
  if (high)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(h) : "r"(word));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(h) : "r"(word));
  return h;
}

// Pairs of channels of a word of keys, PAIRS of them, in the order that `channel` says.
constexpr int PAIRS = 32 / BITS / 2;
// Whether higher nibbles of keys are 72 more: where zero points are taken off sums, that is, too.
constexpr bool RAISED_KEYS = KIND == 3 && BY_CHANNEL && ZERO;
__device__ __forceinline__ void key_pairs(u32 (&h)[PAIRS], u32 word) {
  if constexpr (KIND == 0) {
    h[0] = word;
  } else if constexpr (KIND == 1) {
    h[0] = floats(word, 0), h[PAIRS - 1] = floats(word, 1);
  } else if constexpr (KIND == 2) {
    const u32 flipped = word ^ 0x80808080;
    h[0] = integers(flipped, 0x4240), h[PAIRS - 1] = integers(flipped, 0x4341);
  } else {
    nibbles<RAISED_KEYS>(h, word);
  }
}

// What stands at such a pair's ends: channels of a token.
__device__ __forceinline__ int channel(int word, int pair, int high, int quarter) {
  const int at = 4 * word, byte = at / K_PIECE * 4 * K_PIECE + quarter * K_PIECE + at % K_PIECE;
  const int within = KIND == 1 ? 2 * pair + high : pair + high * PAIRS;
  return byte * 8 / BITS + within;
}

// Both tokens' channels of a word of values, 2 * PAIRS of them, in order.
__device__ __forceinline__ void value_pairs(u32 (&h)[2 * PAIRS], u32 x, u32 y) {
  if constexpr (KIND == 0) {
    h[0] = prmt(x, y, 0x5410), h[1] = prmt(x, y, 0x7632);
  } else if constexpr (KIND == 1) {
    const u32 a = prmt(x, y, 0x5140), b = prmt(x, y, 0x7362);
    h[0] = floats(a, 0), h[1] = floats(a, 1), h[2] = floats(b, 0), h[3] = floats(b, 1);
  } else if constexpr (KIND == 2) {
    const u32 a = prmt(x, y, 0x5140) ^ 0x80808080, b = prmt(x, y, 0x7362) ^ 0x80808080;
    h[0] = integers(a, 0x4140), h[1] = integers(a, 0x4342), h[2] = integers(b, 0x4140), h[3] = integers(b, 0x4342);
  } else {
    u32 low[4], high[4];
    nibbles(low, prmt(x, y, 0x5410));
    nibbles(high, prmt(x, y, 0x7632));
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = low[i], h[4 + i] = high[i];
  }
}

// A lane's i-th channel of values.
__device__ __forceinline__ int value_channel(int i, int eighth) { return i / RUN * 8 * RUN + eighth * RUN + i % RUN; }
