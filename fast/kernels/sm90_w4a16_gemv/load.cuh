// What a program keeps in shared memory, and how it gets there: the weight by bulk copies, what is small before, x either way.
//
// Before: `copies.cuh`, Problem, sizes of stages; STREAMED: whether x comes in stages as the weight does.

// Part of K of a program: its first step and the one behind its last; its first group, or atom with factors, and how many it has.
struct Span {
  int first, last, group, groups;
  __device__ __forceinline__ Span(const Problem& p, int split) {
    const int steps = p.k / STEP;
    first = steps * split / SPLITS, last = steps * (split + 1) / SPLITS;
    group = GROUP == 0 ? 0 : group_of(first);
    groups = GROUP == 0 ? 1 : FACTORED ? 2 * (last - first) : group_of(last - 1) + EACH - group;
  }
  static __device__ __forceinline__ int group_of(int step) { return FACTORED ? 2 * step : step / GROUPED * EACH; }
  __device__ __forceinline__ int stages() const { return (last - first + STEPS - 1) / STEPS; }
};

// Shared memory: the table of levels, the ring, the sums, barriers; then what the host counted for a part of K: scales or factors, zero
// points, rows of x, whose pitch puts eight rows into eight groups of banks. STREAMED: those of a stage behind its words.
struct Ring {
  u32 table, stages, sums, full, empty, scale, zero, x, pitch;
  __device__ __forceinline__ Ring(u32 base, const Span& span)
      : table(base), stages(table + TABLE_BYTES), sums(stages + STAGES * STAGE_BYTES), full(sums + PHASES * TOKENS * LINE * 4),
        empty(full + 8 * STAGES), scale((empty + 8 * STAGES + 15) & ~15u), zero(scale + span.groups * SCALE_BYTES),
        x(STREAMED ? BLOCKS * BLOCK_BYTES : zero + (ZERO ? span.groups * ROWS * 2 : 0)),
        pitch(STREAMED ? PITCH : (span.last - span.first) * 2 * STEP + 16) {}
};

// Ask for the weight of the first stages before the kernel in front has ended: into the L2 cache, nothing is read of it.
__device__ __forceinline__ void prefetch(const Problem& p, const Span& span, int row, int lane) {
  const int bytes = min(STAGES * STEPS, span.last - span.first) * 2 * ATOM;
  if (lane < BLOCKS) {
    const char* from = p.words + (i64(row / 64 + lane) * (p.k / 64) + 2 * span.first) * ATOM;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes) : "memory");
  }
}

// One thread: copy the weight of a program's rows and part of K, stage by stage.
__device__ __forceinline__ void produce(const Problem& p, const Ring& ring, const Span& span, int row) {
  const char* from = p.words + (i64(row / 64) * (p.k / 64) + 2 * span.first) * ATOM;
  const i64 block = i64(p.k / 64) * ATOM;
#pragma unroll 1
  for (int i = 0; i < span.stages(); i++) {
    const int stage = i % STAGES;
    const u32 bar = ring.full + 8 * stage, to = ring.stages + stage * STAGE_BYTES;
    const u32 bytes = min(STEPS, span.last - span.first - i * STEPS) * 2 * ATOM;
    wait_for(ring.empty + 8 * stage, (i / STAGES & 1) ^ 1);
    expect_bytes(bar, BLOCKS * bytes);
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) copy_bytes(from + b * block + i64(i) * BLOCK_BYTES, to + b * BLOCK_BYTES, bar, bytes);
  }
}

// Rows of memory, `bytes` (a multiple of 16) of each, by all threads that multiply.
__device__ __forceinline__ void copy_rows(u32 to, u32 pitch, const char* from, i64 step, int rows, int bytes, int thread) {
  const int each = bytes / 16;
#pragma unroll 1
  for (int i = thread; i < rows * each; i += 32 * WARPS)
    copy_16(to + i / each * pitch + i % each * 16, from + i / each * step + i % each * 16);
}

// What is small, of the part of K; it is there after `settle`.
__device__ __forceinline__ void collect(const Problem& p, const Ring& ring, const Span& span, int row, int thread) {
  if (!STREAMED)
    copy_rows(ring.x, ring.pitch, p.x + i64(span.first) * 2 * STEP, i64(p.k) * 2, p.count, (span.last - span.first) * 2 * STEP, thread);
  if (FACTORED)  // behind the weight's own scale, n / 2 times
    copy_rows(ring.scale, SCALE_BYTES, p.scale + i64(p.n) * 2 + (i64(span.group) * p.n + row) / 2 * FACTOR_BYTES,
              i64(p.n) / 2 * FACTOR_BYTES, span.groups, SCALE_BYTES, thread);
  else if (GROUP > 0)
    copy_rows(ring.scale, SCALE_BYTES, p.scale + (i64(span.group) * p.n + row) * 4, i64(p.n) * 4, span.groups, SCALE_BYTES, thread);
  if (ZERO) copy_rows(ring.zero, ROWS * 2, p.zero + (i64(span.group) * p.n + row) * 2, i64(p.n) * 2, span.groups, ROWS * 2, thread);
}

__device__ __forceinline__ void settle() {
  asm volatile("cp.async.wait_all;\nbar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

// One warp: copy x stage by stage, a row of it in one go. A stage's barrier counts each lane once, when its copies have arrived.
__device__ __forceinline__ void produce_inputs(const Problem& p, const Ring& ring, const Span& span, int lane) {
  const char* from = p.x + i64(span.first) * 2 * STEP + lane * 16;
#pragma unroll 1
  for (int i = 0; i < span.stages(); i++) {
    const int stage = i % STAGES;
    const u32 to = ring.stages + stage * STAGE_BYTES + ring.x + lane * 16;
    const bool inside = lane * 8 < min(STEPS, span.last - span.first - i * STEPS) * STEP;
    wait_for(ring.empty + 8 * stage, (i / STAGES & 1) ^ 1);
#pragma unroll 4
    for (int token = 0; token < p.count; token++)
      if (inside) copy_16(to + token * PITCH, from + i64(token) * p.k * 2 + i64(i) * 2 * STEPS * STEP);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ring.full + 8 * stage) : "memory");
  }
}
