// NF4: a level is HI + SECOND * MID, terms of one sign and one high byte (`fast/codebook_scales.py`); a byte of a word has the codes of
// two columns, which are a register of either operand.
//
// What costs is the integer unit, half an instruction of a warp a clock, and shared memory, 128 bytes a clock of a multiprocessor.
// So the last TABLED bytes of a word (0, 2 or 4) are looked up, both registers at once, in a table of all bytes; the others are put
// together from tables of single bytes by `prmt`. A word of 32 lanes takes 32 permutations or the like, or 8 reads of 128 bytes; half
// and half 20 and 4, each some 40 clocks of a quarter, beside the memory's 30.
//
// The table has its 8 bytes sixteen times side by side: halves of a warp read 64 bits each in one go, and their lanes read pairs of
// banks of their own whatever the codes are.
//
// Before: `decode.cuh`; PLANES: of the levels' high bytes, low bytes of HI and of MID, four in a word.

constexpr u32 LEVELS[3][4] = PLANES;
constexpr int COPIES = 16, ENTRY = 8 * COPIES, TABLE_BYTES = ELEMENT == NF4 && TABLED > 0 ? 256 * ENTRY : 0;

// `__byte_perm` without its mask: a number of 8 and more is the sign of a byte, eight times.
__device__ __forceinline__ u32 permuted(u32 a, u32 b, u32 numbers) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(numbers));
  return d;
}

// Bytes of four levels: three bits of a code choose from either half of them, its highest bit, as bytes in `upper`, the half.
template <int PLANE>
__device__ __forceinline__ u32 chosen(u32 codes, u32 upper) {
  constexpr u32 a = LEVELS[PLANE][0], b = LEVELS[PLANE][1], c = LEVELS[PLANE][2], d = LEVELS[PLANE][3];
  return logic<0xD8>(permuted(a, b, codes), permuted(c, d, codes), upper);
}

// Both terms of bytes 0 and 1, or (high) 2 and 3, by permutations.
__device__ __forceinline__ void permute_levels(u32* hi, u32* mid, u32 word, bool high) {
  const u32 codes = (high ? word >> 16 : word) & 0x7777u;
  const u32 upper = permuted(word << 4, word, high ? 0xFBEAu : 0xD9C8u);
  const u32 top = chosen<0>(codes, upper), first = chosen<1>(codes, upper), second = chosen<2>(codes, upper);
  hi[0] = permuted(first, top, 0x5140), hi[1] = permuted(first, top, 0x7362);
  mid[0] = permuted(second, top, 0x5140), mid[1] = permuted(second, top, 0x7362);
}

// The first operand of a tile of 16 columns, both terms: rows n, n + 8, n, n + 8 at columns k, k, k + 8, k + 8. table: a lane's copies.
__device__ __forceinline__ void decode_levels(u32 (&hi)[4], u32 (&mid)[4], u32 word, u32 table) {
#pragma unroll
  for (int i = 0; i < 4 - TABLED; i += 2) permute_levels(hi + i, mid + i, word, i == 2);
#pragma unroll
  for (int i = 4 - TABLED; i < 4; i++)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(hi[i]), "=r"(mid[i]) : "r"(table + (word >> 8 * i & 255) * ENTRY) : "memory");
}

// The table, by so many threads: two copies each time.
__device__ __forceinline__ void fill_table(u32 table, int thread, int threads) {
#pragma unroll 1
  for (int i = thread; i < TABLE_BYTES / 16; i += threads) {
    u32 hi[2], mid[2];
    permute_levels(hi, mid, i / (COPIES / 2), false);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %1, %2};" ::"r"(table + 16 * i), "r"(hi[0]), "r"(mid[0]) : "memory");
  }
}
