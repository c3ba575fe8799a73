// Copies of a program's operands into shared memory, by all of its threads, without registers between.
//
// Before: `problem.cuh`.

__device__ __forceinline__ void copy_16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

__device__ __forceinline__ void copy_4(u32 to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// Rows behind the last one are the last one again: their sums are not written.
__device__ __forceinline__ i64 row_of(const Problem& p, const Place& at, int row) { return min(at.row + row, p.n - 1); }

// Stage `index` of K into a place of the ring.
__device__ __forceinline__ void load_stage(const Problem& p, const Place& at, u32 to, int index, int thread) {
  const i64 row_bytes = i64(p.k) * BITS / 8;
  constexpr int PIECES = CODE_BYTES / 16;
#pragma unroll
  for (int i = thread; i < ROWS * PIECES; i += THREADS) {
    const int row = i / PIECES, piece = i % PIECES;
    copy_16(to + row * CODE_PITCH + piece * 16, p.codes + row_of(p, at, row) * row_bytes + i64(index) * CODE_BYTES + piece * 16);
  }
  const int group = GROUP >= COLUMNS ? index / (GROUP / COLUMNS) : index * SCALES;
  constexpr int WIDE = SCALES % 4 == 0 ? 4 : 1, COPIES = SCALES / WIDE;
#pragma unroll
  for (int i = thread; i < ROWS * COPIES; i += THREADS) {
    const int row = i / COPIES, part = i % COPIES * WIDE;
    const char* from = p.scale + (row_of(p, at, row) * at.groups + group + part) * 4;
    if constexpr (WIDE == 4) copy_16(to + SCALE_AT + row * SCALE_PITCH + part * 4, from);
    else copy_4(to + SCALE_AT + row * SCALE_PITCH + part * 4, from);
  }
  constexpr int EACH = X_BYTES / 16;
  const char* x = p.x + (i64(at.token) * p.k + i64(index) * COLUMNS) * 2;
#pragma unroll
  for (int i = thread; i < TOKENS * EACH; i += THREADS) {
    const int token = i / EACH, piece = i % EACH;
    if (token < at.tokens) copy_16(to + X_AT + token * X_PITCH + piece * 16, x + i64(token) * p.k * 2 + piece * 16);
  }
}

// Zero points of all groups of the program's rows, before the first stage. Words where rows are whole words, else bytes.
__device__ __forceinline__ void load_zeros(const Problem& p, const Place& at, u32 to, int thread) {
  if (at.groups % 4 == 0) {
    const int words = at.groups / 4;
#pragma unroll 4
    for (int i = thread; i < ROWS * words; i += THREADS) {
      const int row = i / words, word = i % words;
      copy_4(to + row * at.zero_pitch + word * 4, reinterpret_cast<const char*>(p.zero) + row_of(p, at, row) * at.groups + word * 4);
    }
  } else {
#pragma unroll 4
    for (int i = thread; i < ROWS * at.groups; i += THREADS) {
      const int row = i / at.groups, group = i % at.groups;
      const u32 z = static_cast<unsigned char>(p.zero[row_of(p, at, row) * at.groups + group]);
      asm volatile("st.shared.u8 [%0], %1;" ::"r"(to + row * at.zero_pitch + group), "r"(z) : "memory");
    }
  }
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The oldest stage under way is there, of this thread's copies.
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }
