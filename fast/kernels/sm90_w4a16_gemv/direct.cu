// y = x @ w.T * x_scale + bias as `sm90_w4a16_gemv.cu`, of 8 bits and of int4 in groups: no word of the weight goes through shared
// memory. A warp has 16 rows (a slab) of SLABS of a program, and every PHASES-th atom of 64 columns; its lanes load 16 bytes each of
// half an atom, of int4 of a whole one,
// operands of `mma.m16n8k16` where they are, LOADS of them ahead of what they multiply. x is in shared memory as a whole: warps copy
// it piece by piece, as many columns as one round of loads meets, and wait for a piece when they come to it.
//
// So programs may have any number of slabs, every multiprocessor has one, and the sums of a row are of PHASES parts, added in their
// order. A part's products go on from one to the next; with factors or groups those of an atom do, and atoms are added.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct TensorMap;

#include "problem.cuh"

constexpr int GROUPS = 1, CLUSTER = 1;
constexpr bool FACTORED = ELEMENT == E4M3_MX, NIBBLES = ELEMENT == INT4;
constexpr int SLAB = 512, PART = 4 * SLAB;                     // bytes that a warp loads at once: of 16 rows, and of 64
constexpr int WORDS = NIBBLES ? 1 : 2, ATOM = WORDS * PART;    // loads of an atom; bytes of 64 rows by 64 columns
constexpr int TILES = TOKENS / 8, WARPS = SLABS * PHASES, ROWS = 16 * SLABS, LINE = ROWS + 4;
constexpr int EACH = LOADS / WORDS, PIECE = EACH * PHASES * 64;  // atoms of a warp ahead; columns of x of a barrier
constexpr bool GROUPED = GROUP > 0 && !FACTORED;
constexpr int SCALES = GROUPED ? 2 : 1;                        // words of an atom's scales of a lane's rows, or of its factors
static_assert(LOADS % WORDS == 0, "atoms are whole");
static_assert(!GROUPED || GROUP % 64 == 0 && NIBBLES && !ZERO, "an atom has one scale of a row");

#include "words.cuh"
#include "copies.cuh"
#include "pairs.cuh"
#include "decode.cuh"
#include "factors.cuh"
#include "sums.cuh"

// Loading

__device__ __forceinline__ uint4 load_stream(const char* from) {
  uint4 w;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(__cvta_generic_to_global(from)));
  return w;
}

__device__ __forceinline__ u32 load_factor(const char* from) {
  u32 w;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(w) : "l"(__cvta_generic_to_global(from)));
  return w;
}

// x by pieces of columns: a warp copies a row's piece, whose barrier counts its lanes once their copies have arrived.
__device__ __forceinline__ void copy_inputs(const Problem& p, u32 to, u32 pitch, u32 bars, int warp, int lane) {
  const int pieces = (p.k + PIECE - 1) / PIECE;
#pragma unroll 1
  for (int i = warp; i < pieces * p.count; i += WARPS) {
    const int piece = i / p.count, token = i - piece * p.count;
    const u32 at = piece * PIECE * 2, end = min(PIECE * 2, p.k * 2 - int(at));
    const char* from = p.x + i64(token) * p.k * 2 + at;
#pragma unroll
    for (int j = 0; j < PIECE * 2; j += 512)
      if (j + lane * 16 < end)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
            ::"r"(to + token * pitch + at + j + lane * 16), "l"(__cvta_generic_to_global(from + j + lane * 16)) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bars + 8 * piece) : "memory");
  }
}

// What a warp multiplies: its atoms, every PHASES-th, some of them under way.
struct Stream {
  const char *words, *factors;
  i64 next;  // bytes from factors to those of the warp's next atom; of groups, to those of the next group
  int atoms, phase;
  uint4 w[LOADS];
  u32 f[EACH][SCALES];

  __device__ __forceinline__ Stream(const Problem& p, int slab, int phase, int lane)
      : words(p.words + (i64(slab / 4) * (p.k / 64) + phase) * ATOM + slab % 4 * SLAB + lane * 16),
        factors(GROUPED ? p.scale + (slab * 16 + lane / 4) * 4
                        : p.scale + i64(p.n) * 2 + (i64(phase) * (p.n / 2) + slab * 8 + lane / 4) * 4),
        next(GROUPED ? i64(p.n) * 4 : i64(p.n) * 2 * PHASES), atoms((p.k / 64 - phase + PHASES - 1) / PHASES), phase(phase) {}

  // Atom i in place j.
  __device__ __forceinline__ void load(int j, int i) {
    if (i >= atoms) return;
    const char* at = words + i64(i) * PHASES * ATOM;
#pragma unroll
    for (int part = 0; part < WORDS; part++) w[WORDS * j + part] = load_stream(at + part * PART);
    if (FACTORED) f[j][0] = load_factor(factors + i * next);
    if constexpr (GROUPED) {
      const char* scale = factors + (i * PHASES + phase) * 64 / GROUP * next;
      f[j][0] = load_factor(scale), f[j][1] = load_factor(scale + 32);
    }
  }

  // Ask for the first atoms, into the L2 cache: a line a lane.
  __device__ __forceinline__ void prefetch(int lane) const {
    if (lane % 8) return;
#pragma unroll
    for (int j = 0; j < EACH; j++)
#pragma unroll
      for (int part = 0; part < WORDS; part++)
        if (j < atoms)
          asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(words + i64(j) * PHASES * ATOM + part * PART)) : "memory");
  }
};

__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Multiplying

// First operands of two tiles, 32 columns: half of an atom. w: of NIBBLES the atom's words, else the half's.
__device__ __forceinline__ void operands(u32 (&a)[2][4], const uint4& w, int half, const Less& less, const Factors& factors) {
  if constexpr (NIBBLES) {
    decode(a[0], half ? w.z : w.x, less), decode(a[1], half ? w.w : w.y, less);
  } else if constexpr (FACTORED) {
    decode_factored(a[0], w.x, w.y, 2 * half, factors), decode_factored(a[1], w.z, w.w, 2 * half + 1, factors);
  } else {
    decode(a[0], w.x, w.y, less), decode(a[1], w.z, w.w, less);
  }
}

// The products of the atom in place j, atom i of the warp; the next one is asked for as soon as that is decoded. at: of x, its columns.
__device__ __forceinline__ void multiply_atom(Sums& sums, Stream& from, int j, int i, const u32 (&x)[TILES], u32 at, const Less& less) {
  Factors factors;
  if (FACTORED) factors.words[0] = from.f[j][0];
  u32 a[2][2][4];
#pragma unroll
  for (int half = 0; half < 2; half++) operands(a[half], from.w[WORDS * j + half % WORDS], half, less, factors);
  from.load(j, i + EACH);
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      u32 b[4];
      load_inputs(b, x[t] + at + half * 64);
      multiply(sums[t], a[half][0], b[0], b[1]);
      multiply(sums[t], a[half][1], b[2], b[3]);
    }
}

// The sums of a warp. bars: of x, a piece for each round.
__device__ __forceinline__ void consume(Sums& total, Stream& from, const u32 (&x)[TILES], u32 bars, const Less& less) {
  clear(total);
#pragma unroll 1
  for (int i = 0; i < from.atoms; i += EACH) {
    if (LATE && i + EACH >= from.atoms) launch_dependents();
    wait_for(bars + i / EACH * 8, 0);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      if (i + j >= from.atoms) break;
      const u32 at = (i + j) * PHASES * 128;
      if constexpr (FACTORED || GROUPED) {
        const float low = GROUPED ? __uint_as_float(from.f[j][0]) : 1.f, high = GROUPED ? __uint_as_float(from.f[j][SCALES - 1]) : 1.f;
        Sums sums;
        clear(sums);
        multiply_atom(sums, from, j, i + j, x, at, less);
        add_scaled(total, sums, low, high);
      } else {
        multiply_atom(total, from, j, i + j, x, at, less);
      }
    }
  }
}

// Add phases, and write the program's rows.
__device__ __forceinline__ void finish(const Problem& p, u32 sums, int thread) {
  asm volatile("bar.sync 0;" ::: "memory");
#pragma unroll 1
  for (int i = thread; i < p.count * ROWS; i += 32 * WARPS) {
    const int token = i / ROWS, at = i % ROWS;
    float total = 0.f;
#pragma unroll
    for (int phase = 0; phase < PHASES; phase++) total += __uint_as_float(load_word(sums + 4 * ((phase * TOKENS + token) * LINE + at)));
    store(p, total, token, blockIdx.x * ROWS + at);
  }
}

// Shared memory: rows of x, whose pitch puts eight rows into eight groups of banks; the sums; a barrier for each piece of x.
extern "C" __global__ __launch_bounds__(32 * WARPS, 1) void sm90_w4a16_gemv(const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), lane = thread % 32;
  const int own = warp % SLABS, slab = blockIdx.x * SLABS + own, phase = warp / SLABS;
  const u32 base = (shared_address(memory) + 15) & ~15u, pitch = p.k * 2 + 16, sums = base + p.count * pitch;
  const u32 bars = sums + PHASES * TOKENS * LINE * 4;
  for (int i = thread; i < (p.k + PIECE - 1) / PIECE; i += 32 * WARPS) init_barrier(bars + 8 * i, 32 * p.count);
  asm volatile("fence.mbarrier_init.release.cluster;\nbar.sync 0;" ::: "memory");
  Stream from(p, slab, phase, lane);
  if (AHEAD) from.prefetch(lane);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (!LATE) launch_dependents();
#pragma unroll
  for (int j = 0; j < EACH; j++) from.load(j, j);
  copy_inputs(p, base, pitch, bars, warp, lane);
  RowScales scales(p, slab * 16 + lane / 4);
  if constexpr (FACTORED) scales.low = scales.high = __uint_as_float(load_factor(p.scale)) * LACKING;
  Less less;
  if constexpr (ZERO) less = Less(load_factor(p.zero + (slab * 8 + lane / 4) * 4));
  u32 x[TILES];
#pragma unroll
  for (int t = 0; t < TILES; t++) x[t] = base + min(8 * t + lane % 8, p.count - 1) * pitch + lane / 8 * 16 + phase * 128;
  Sums total, scaled;
  consume(total, from, x, bars, less);
  clear(scaled);
  add_scaled(scaled, total, scales.low, scales.high);
  leave(scaled, sums, phase, lane % 4, own * 16 + lane / 4);
  finish(p, sums, thread);
}
