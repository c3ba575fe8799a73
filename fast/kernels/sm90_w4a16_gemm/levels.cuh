// NF4: levels by their codes from a table in shared memory, times the scale of a block, rounded once: see `decode.cuh`.
//
// Byte r of a word is pair r, its first column the low nibble. The table has each of 16 levels 32 times side by side, so that
// lanes read banks of their own whatever the codes are. The address of a level takes one instruction, a product of bytes: a
// nibble, left where it is, times the distance of levels over the power of two that its place is, plus a lane's first copy.
//
// Before: `words.cuh`, `decode.cuh`, Problem, CONSUMERS.

constexpr int LEVEL = 128, TABLE_BYTES = ELEMENT == NF4 ? 16 * LEVEL : 0;  // bytes of a level's copies

// Products of bytes, their sum plus c.
__device__ __forceinline__ u32 dot(u32 a, u32 b, u32 c) {
  u32 d;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Not volatile, other than what is in front of it: the table stays as it is.
__device__ __forceinline__ float level_at(u32 address) {
  float v;
  asm("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}

// 16 columns of a thread: one word. table: a lane's copies.
__device__ __forceinline__ void decode_levels(Fragment& a, u32 word, const Rows& rows, u32 table) {
  const u32 low = word & 0x0F0F0F0Fu, high = word & 0xF0F0F0F0u;
#pragma unroll
  for (int r = 0; r < 4; r++)
    a[r] = scaled(level_at(dot(low, u32(LEVEL) << 8 * r, table)), level_at(dot(high, u32(LEVEL / 16) << 8 * r, table)),
                  rows.scale[r % 2]);
}

// Fill the table, by all that multiply: the levels of a weight lie behind its scales. Where a lane's first copy is no compiler
// knows, or it might read before others wrote.
__device__ __forceinline__ u32 filled_table(u32 table, const Problem& p, int thread) {
  if constexpr (ELEMENT != NF4) return 0;
  const float* levels = p.scales + i64(p.steps) * p.features;
#pragma unroll 1
  for (int i = thread; i < TABLE_BYTES / 4; i += 128 * CONSUMERS) store_float(table + 4 * i, levels[i / 32]);
  asm volatile("bar.sync 9, %0;" ::"n"(128 * CONSUMERS) : "memory");
  u32 own = table + 4 * (thread % 32);
  asm volatile("" : "+r"(own)::"memory");
  return own;
}
