// What a launch is given, how shared memory is divided, and a program's place in the product.
//
// Before: u32, i64; BITS, GROUP (columns of a group), ZERO, TOKENS, SLABS, HEIGHT, PHASES, SPLITS, STEPS, STAGES.

struct Problem {
  const char* x;              // (count, k) of 16 bits
  const char* codes;          // (n, k * BITS / 8): rows are little-endian streams of bits
  const char* scale;          // float32 (n, k / GROUP)
  const char* zero;           // int8 (n, k / GROUP); not read without ZERO
  const void* bias;           // (n); may be null
  void* y;                    // (count, n)
  int count, n, k;
  int bias_kind;              // FLOAT32, ...; that of y is OUT
};

constexpr int CLUSTER = SPLITS, GROUPS = 1;
constexpr int WARPS = SLABS * PHASES, THREADS = 32 * WARPS, TILES = TOKENS / 8;
constexpr int ROWS = 16 * HEIGHT * SLABS, LINE = ROWS + 4;         // rows of the weight of a program; words of a row of sums
constexpr int COLUMNS = 128 * STEPS;                               // of a stage
constexpr int UNIT = GROUP == 32 ? 32 : 64, CHUNKS = UNIT / 32;    // columns that are summed before they are scaled
constexpr int UNITS = COLUMNS / UNIT / PHASES;                     // of a stage, of a warp: every PHASES-th
constexpr int SCALES = GROUP >= COLUMNS ? 1 : COLUMNS / GROUP;     // of a row in a stage
constexpr bool PAIRED = TOKENS > 8;                                // x is paired in shared memory once, and not by each warp again
static_assert(GROUP % COLUMNS == 0 || COLUMNS % GROUP == 0, "a stage has whole groups, or a part of one");
static_assert(UNITS * PHASES * UNIT == COLUMNS, "warps have whole units of a stage");

// Bytes of rows in shared memory. Eight neighbours lie in different banks: rows of codes are an odd number of 16 bytes apart, rows of x
// 64 bytes more than whole lines, rows of many scales four words more than a multiple of eight.
constexpr int CODE_BYTES = COLUMNS * BITS / 8, CODE_PITCH = CODE_BYTES / 16 % 2 ? CODE_BYTES : CODE_BYTES + 16;
constexpr int SCALE_PITCH = 4 * (SCALES > 4 ? SCALES + 4 : SCALES);
constexpr int X_BYTES = 2 * COLUMNS, X_PITCH = X_BYTES + 64;
// Of a stage: codes, scales, x. The sums take the place of the ring when all of it has been read.
constexpr int SCALE_AT = ROWS * CODE_PITCH, X_AT = SCALE_AT + ROWS * SCALE_PITCH, STAGE_BYTES = X_AT + TOKENS * X_PITCH;
constexpr int SUM_BYTES = PHASES * TOKENS * LINE * 4, RING_BYTES = STAGES * STAGE_BYTES;
constexpr int ZERO_AT = RING_BYTES > SUM_BYTES ? RING_BYTES : SUM_BYTES;

// A program's rows of the weight and of x, its stages along K, and bytes of a row of zero points in shared memory.
struct Place {
  int row, token, tokens, first, last, groups, zero_pitch;
  __device__ __forceinline__ Place(const Problem& p, int split) {
    const int tile = blockIdx.x / SPLITS, across = (p.count + TOKENS - 1) / TOKENS, stages = p.k / COLUMNS;
    row = tile / across * ROWS, token = tile % across * TOKENS;
    tokens = min(TOKENS, p.count - token);
    first = stages * split / SPLITS, last = stages * (split + 1) / SPLITS;
    groups = p.k / GROUP, zero_pitch = (groups + 3) / 4 * 4 + 4;
  }
};
