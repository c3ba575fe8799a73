// Copies of a program's operands into shared memory, by all of its threads, without registers between.
//
// Before: `problem.cuh`, `words.cuh`, `decode.cuh`.

__device__ __forceinline__ void copy_4(u32 to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// A thread's pieces of a matrix, BYTES of each row in a stage, PIECE at once. What tells one from another is found once, as a loop that
// multiplies has no time to divide: offsets of the first stage's pieces from the program's begin, and places in a stage. REPEATED: rows
// behind the last one are the last one again, as their sums are not written; else they are not copied.
template <int MATRIX_ROWS, int BYTES, int PITCH, int PIECE, bool REPEATED>
struct Pieces {
  static constexpr int EACH = BYTES / PIECE, ALL = MATRIX_ROWS * EACH, COUNT = (ALL + THREADS - 1) / THREADS;
  // Rows of a thread's pieces are equally far apart where passes of all threads are whole rows.
  static constexpr bool REGULAR = THREADS % EACH == 0 && !REPEATED;
  u32 from[REGULAR ? 1 : COUNT], to[REGULAR ? 1 : COUNT], pass;
  int last;  // of a piece that exists, its number less the thread's

  // rows: that exist; step: bytes from row to row.
  __device__ __forceinline__ Pieces(int thread, int rows, u32 step) : pass(THREADS / EACH * step), last((REPEATED ? ALL : rows * EACH) - thread) {
#pragma unroll
    for (int j = 0; j < (REGULAR ? 1 : COUNT); j++) {
      const int i = thread + j * THREADS, row = i / EACH, piece = i % EACH;
      from[j] = (REPEATED ? min(row, rows - 1) : row) * step + piece * PIECE;
      to[j] = row * PITCH + piece * PIECE;
    }
  }

  __device__ __forceinline__ bool exists(int j) const { return (REPEATED && (j + 1) * THREADS <= ALL) || j * THREADS < last; }

  __device__ __forceinline__ u32 place(int j) const { return REGULAR ? to[0] + j * (THREADS / EACH * PITCH) : to[REGULAR ? 0 : j]; }

  __device__ __forceinline__ void copy(u32 stage, const char* begin) const {
#pragma unroll
    for (int j = 0; j < COUNT; j++)
      if (exists(j)) {
        const char* source = begin + (REGULAR ? from[0] + j * pass : from[REGULAR ? 0 : j]);
        if constexpr (PIECE == 16) copy_16(stage + place(j), source);
        else copy_4(stage + place(j), source);
      }
  }

  // Pair each eight elements in place, those that this thread has copied and that have arrived.
  __device__ __forceinline__ void pair(u32 stage) const {
#pragma unroll
    for (int j = 0; j < COUNT; j++)
      if (exists(j)) {
        u32 b[4];
        paired(b, load_words(stage + place(j)));
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(stage + place(j)), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]) : "memory");
      }
  }
};

// What a thread copies of each stage.
struct Copies {
  static constexpr int SCALE_PIECE = SCALES % 4 == 0 ? 16 : 4;
  const char *codes, *scale, *x;  // where the program's rows begin
  Pieces<ROWS, CODE_BYTES, CODE_PITCH, 16, true> of_codes;
  Pieces<ROWS, SCALES * 4, SCALE_PITCH, SCALE_PIECE, true> of_scale;
  Pieces<TOKENS, X_BYTES, X_PITCH, 16, false> of_x;

  __device__ __forceinline__ Copies(const Problem& p, const Place& at, int thread)
      : codes(p.codes + at.row * (i64(p.k) * BITS / 8)), scale(p.scale + i64(at.row) * at.groups * 4), x(p.x + i64(at.token) * p.k * 2),
        of_codes(thread, p.n - at.row, p.k / 8 * BITS), of_scale(thread, p.n - at.row, at.groups * 4),
        of_x(thread, at.tokens, p.k * 2) {}

  // Stage `index` of K into the place of the ring that begins at `stage`.
  __device__ __forceinline__ void load(u32 stage, int index) const {
    const int group = GROUP >= COLUMNS ? index / (GROUP / COLUMNS) : index * SCALES;
    of_codes.copy(stage, codes + i64(index) * CODE_BYTES);
    of_scale.copy(stage + SCALE_AT, scale + group * 4);
    of_x.copy(stage + X_AT, x + i64(index) * X_BYTES);
  }
};

// Zero points of all groups of the program's rows, before the first stage. Words where rows are whole words, else bytes.
__device__ __forceinline__ void load_zeros(const Problem& p, const Place& at, u32 to, int thread) {
  const char* zero = p.zero + i64(at.row) * at.groups;
  const int last = p.n - at.row - 1;  // rows behind the last one are the last one again: their sums are not written
  if (at.groups % 4 == 0) {
    const int words = at.groups / 4;
#pragma unroll 4
    for (int i = thread; i < ROWS * words; i += THREADS) {
      const int row = i / words, word = i % words;
      copy_4(to + row * at.zero_pitch + word * 4, zero + min(row, last) * at.groups + word * 4);
    }
  } else {
#pragma unroll 4
    for (int i = thread; i < ROWS * at.groups; i += THREADS) {
      const int row = i / at.groups, group = i % at.groups;
      const u32 z = static_cast<unsigned char>(zero[min(row, last) * at.groups + group]);
      asm volatile("st.shared.u8 [%0], %1;" ::"r"(to + row * at.zero_pitch + group), "r"(z) : "memory");
    }
  }
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// The oldest stage under way is there, of this thread's copies.
__device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory"); }
