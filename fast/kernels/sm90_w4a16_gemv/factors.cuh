// Elements whose scales are factors (`fast/scale_factors.py`), multiplied into them as pairs of bfloat16: exact. Bits of e2m1, put into a
// bfloat16 as they are, are 2**126 too small, of e4m3 2**120, which factors make up for, but for 2**8 of blocks of 16 columns.
//
// Factors of a pair of rows n and n + 8 for an atom's 64 columns:
//
//     GROUP 16    four words, bfloat16 of n, the low half, and of n + 8
//     GROUP 32    one word, exponent fields: n's of blocks 0 and 1, then those of n + 8
//
// Before: `decode.cuh`.

constexpr int FACTOR_BYTES = GROUP == 16 ? 16 : 4;  // of a pair of rows and an atom
constexpr float LACKING = GROUP == 16 ? 256.f : 1.f;

// The factors of a lane's rows in an atom.
struct Factors {
  u32 words[4];

  __device__ __forceinline__ Factors() : words{0, 0, 0, 0} {}

  __device__ __forceinline__ explicit Factors(u32 address) : Factors() {
    if constexpr (GROUP == 16) {
      const uint4 w = load_words(address);
      words[0] = w.x, words[1] = w.y, words[2] = w.z, words[3] = w.w;
    } else {
      words[0] = load_word(address);
    }
  }

  // Of row n or n + 8, twice, for tile i of the atom's four of 16 columns.
  __device__ __forceinline__ u32 pair(int i, int row) const {
    if constexpr (GROUP == 16) return __byte_perm(words[i], 0, row ? 0x3232 : 0x1010);
    return (words[0] >> (16 * row + i / 2 * 8) & 255) * 0x00800080u;
  }
};

// Nibbles of pair r of a word: signs at bits 15 and 31, the others from bits 6 and 22 on, both by one product.
__device__ __forceinline__ u32 small_e2m1(u32 word, int r) {
  const u32 v = r / 2 ? word >> 8 : word;
  return (r % 2 ? (v & 0x00F000F0u) * (1 << 8 | 1 << 2) : (v & 0x000F000Fu) * (1 << 12 | 1 << 6)) & 0x81C081C0u;
}

// Bytes 0 and 2 or (odd) 1 and 3.
__device__ __forceinline__ u32 small_e4m3(u32 word, bool odd) {
  const u32 v = odd ? word : word << 8;
  return logic<0xEA>(v, 0x80008000u, v >> 4 & 0x07F007F0u);
}

// Tile i of an atom. Four bits: one word. Eight bits: two words, of columns k and k + 8.
__device__ __forceinline__ void decode_factored(u32 (&a)[4], u32 first, u32 second, int i, const Factors& factors) {
  const u32 rows[2] = {factors.pair(i, 0), factors.pair(i, 1)};
#pragma unroll
  for (int r = 0; r < 4; r++)
    a[r] = multiply_pairs(ELEMENT == E2M1 ? small_e2m1(first, r) : small_e4m3(r < 2 ? first : second, r % 2), rows[r % 2]);
}
