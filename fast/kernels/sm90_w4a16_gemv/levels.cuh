// NF4: a level is HI + SECOND * MID, terms of one sign and one high byte (`fast/scale_factors.py`); a byte of a word has the codes of
// two columns, which are a register of either term. Rows n and n + 8 have a product each, whose operand has HI as its row n and MID as
// its row n + 8: what a 64-bit load brings is two registers of one operand, and none is moved.
//
// What costs is the integer unit, half an instruction of a warp a clock, and shared memory, 128 bytes a clock of a multiprocessor.
// So TABLED bytes of a word (0, 2 or 4, those of rows n first) are looked up, both registers at once, in a table of all bytes; the
// others are put together from tables of single bytes by `prmt`. A warp's word takes 32 permutations or the like, or 8 reads of 128
// bytes beside 4 to 6 others; half and half 18, and 4 reads (`select.py` has the clocks).
//
// The table has its 8 bytes sixteen times side by side: halves of a warp read 64 bits each in one go, and their lanes read pairs of
// banks of their own whatever the codes are.
//
// Before: `decode.cuh`; PLANES: of the levels' high bytes, low bytes of HI and of MID, four in a word.

constexpr int COPIES = 16, ENTRY = 8 * COPIES, TABLE_BYTES = ELEMENT == NF4 && TABLED > 0 ? 256 * ENTRY : 0;

// `__byte_perm` without its mask: a number of 8 and more is the sign of a byte, eight times.
__device__ __forceinline__ u32 permuted(u32 a, u32 b, u32 numbers) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(numbers));
  return d;
}

// Tables of bytes.
struct Levels {
  u32 bytes[3][4] = PLANES;

  // Kept in registers: instructions have one constant only, so assemblers would move one to a register for each permutation. none: 0,
  // which no compiler knows; and that the warp's first lane has the same none of them sees either, so nothing is computed anew.
  __device__ __forceinline__ void keep(u32 none) {
#pragma unroll
    for (int i = 0; i < 12; i++) bytes[i / 4][i % 4] = __shfl_sync(0xFFFFFFFF, bytes[i / 4][i % 4] ^ none, 0);
  }

  // Bytes of four levels: three bits of a code choose from either half of them, its highest bit, as bytes in `upper`, the half.
  __device__ __forceinline__ u32 chosen(int plane, u32 codes, u32 upper) const {
    const u32* t = bytes[plane];
    return logic<0xD8>(permuted(t[0], t[1], codes), permuted(t[2], t[3], codes), upper);
  }

  // The operand of row n, bytes 0 and 2, or of row n + 8, bytes 1 and 3, by permutations.
  __device__ __forceinline__ void permute(u32 (&a)[4], u32 word, int row) const {
    const u32 codes = permuted(word, 0, row ? 0x4431 : 0x4420) & 0x7777u;
    const u32 upper = permuted(word * 16, word, row ? 0xFBD9u : 0xEAC8u);
    const u32 top = chosen(0, codes, upper), first = chosen(1, codes, upper), second = chosen(2, codes, upper);
    a[0] = permuted(first, top, 0x5140), a[1] = permuted(second, top, 0x5140);
    a[2] = permuted(first, top, 0x7362), a[3] = permuted(second, top, 0x7362);
  }
};

// The same by the table.
__device__ __forceinline__ void load_levels(u32 (&a)[4], u32 table, u32 word, int row) {
#pragma unroll
  for (int i = 0; i < 4; i += 2)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
        : "=r"(a[i]), "=r"(a[i + 1]) : "r"(table + permuted(word, 0, 0x4440 + row + i) * ENTRY) : "memory");
}

// The first operands of a tile of 16 columns, of rows n and of n + 8: HI and MID at columns k, then both at k + 8. table: a lane's
// copies.
__device__ __forceinline__ void decode_levels(u32 (&low)[4], u32 (&high)[4], u32 word, const Levels& levels, u32 table) {
  if constexpr (TABLED > 0) load_levels(low, table, word, 0);
  else levels.permute(low, word, 0);
  if constexpr (TABLED > 2) load_levels(high, table, word, 1);
  else levels.permute(high, word, 1);
}

// The table, by so many threads: two copies each time.
__device__ __forceinline__ void fill_table(u32 table, int thread, int threads) {
  const Levels levels;
#pragma unroll 1
  for (int i = thread; i < TABLE_BYTES / 16; i += threads) {
    u32 terms[4];
    levels.permute(terms, i / (COPIES / 2), 0);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %1, %2};" ::"r"(table + 16 * i), "r"(terms[0]), "r"(terms[1]) : "memory");
  }
}
