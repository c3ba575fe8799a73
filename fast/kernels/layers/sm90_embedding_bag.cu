// Sums of rows of a table for Hopper, at most 128 bytes of each: `sm90_embedding_bag.py` says of which tables and launches it.
//
// A warp has neighbouring bags, and their ids are one run of ids: ROWS of them after each other are read into shared memory by
// asynchronous copies, STAGES - 1 such pieces ahead of the sums, across the ends of bags, and ids one piece ahead of these. So
// no load waits for ids but the first ones, and what is in flight depends neither on registers nor on how long bags are.
// Eight lanes copy a row, a lane adds four of its elements; where a row's last line is shorter, lanes behind it store nothing.
// A scale comes with the others of its sixteen bytes, past the first-level cache, which has too few lines for all that are in
// flight; its row's lane then puts it where all lanes read it.
//
// The bits are those of `reference.embedding_bag`: products and sums are rounded one by one, in the order of ids. Products that
// overflow stop at the largest float32; a piece without a scale of 2^119 leaves that out.
//
// Defined: FORMAT (of codes), WIDE (ids of 64 bits), MEAN, OUTPUT (0: float32, 1: bfloat16, 2: float16), WARPS (of a program),
// ROWS, STAGES, RESIDENT (programs of a multiprocessor).

typedef unsigned int u32;
typedef long long i64;

enum { INT8 = 0, E4M3 = 1 };
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
constexpr u32 ALL = 0xFFFFFFFF, NOTHING = 0xFFFFFFFF;
constexpr u32 INFINITY_BITS = 0x7F800000, NAN_BITS = 0x7FC00000, LARGE_BITS = 0x7B000000;
// Bytes of a line, of a scale's copy, of a piece; where scales lie that all lanes read.
constexpr int LINE = 128, COPY = 16, STAGE = ROWS * (LINE + COPY), SCALES_AT = STAGES * STAGE;
constexpr i64 LONGEST = 0x40000000;

#if WIDE
typedef i64 Id;
#else
typedef int Id;
#endif

struct Problem {
  const char* codes;
  const char* scale;
  const Id* ids;
  const Id* offsets;
  char* out;
  i64 count;         // of ids
  u32 bags, rows;
  u32 each, parts;   // bags of a warp; lines of a row
  u32 width;         // bytes of a row
  u32 stride, scale_stride;  // bytes from a row to the next one
};

extern "C" __device__ __noinline__ void __assertfail(const char*, const char*, u32, const char*, decltype(sizeof(0)));

__device__ __forceinline__ float value(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 pattern(float v) { return __float_as_uint(v); }

__device__ __forceinline__ void copy16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void copy4(u32 to, const char* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}

// Of a row's scale with its neighbours, or alone where these go beyond the last one; where in its copy it lies.
__device__ __forceinline__ u32 copy_scale(const Problem& p, u32 to, u32 row) {
  const char* from = p.scale + static_cast<unsigned long long>(row) * p.scale_stride;
  const char* last = p.scale + static_cast<unsigned long long>(p.rows - 1) * p.scale_stride;
  const u32 beyond = static_cast<u32>(reinterpret_cast<unsigned long long>(from)) % 16;
  if (row == NOTHING) return 0;
  if (from - beyond + 12 <= last)
    copy16(to, from - beyond);
  else
    copy4(to + beyond, from);
  return beyond;
}

// What a lane knows of its warp's ids: where scales of its rows lie in their copies, the next piece's id, how many ids there are,
// whether one was outside of the table, whether the lane copies a part of rows.
struct Ahead {
  const Id* ids;
  u32 beyond[STAGES - 1];
  Id own;
  int at, last;
  bool outside, copies;
};

__device__ __forceinline__ void read_ids(Ahead& ahead) {
  const int at = ahead.at + threadIdx.x % 32;
  ahead.own = at < ahead.last && threadIdx.x % 32 < ROWS ? ahead.ids[at] : 0;
}

// Begin to read the rows of the next ids, their scales behind them, and the ids that follow. Where the lane's scale lies in its copy
// in the first of the pieces that are read already.
__device__ __forceinline__ u32 fetch(const Problem& p, const char* codes, u32 stage, Ahead& ahead) {
  const u32 lane = threadIdx.x % 32;
  const bool there = lane < ROWS && ahead.at + static_cast<int>(lane) < ahead.last;
  const bool inside = static_cast<unsigned long long>(static_cast<i64>(ahead.own)) < p.rows;
  ahead.outside |= there && !inside;
  const u32 row = there && inside ? static_cast<u32>(ahead.own) : NOTHING;
  const u32 first = ahead.beyond[0];
#pragma unroll
  for (int i = 0; i < STAGES - 2; i++) ahead.beyond[i] = ahead.beyond[i + 1];
  ahead.beyond[STAGES - 2] = copy_scale(p, stage + ROWS * LINE + COPY * lane, row);
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    const u32 one = __shfl_sync(ALL, row, 4 * i + lane / 8);
    const char* line = codes + static_cast<unsigned long long>(one) * p.stride;
    if (one != NOTHING && ahead.copies) copy16(stage + 4 * i * LINE + 16 * lane, line);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
  ahead.at += ROWS;
  read_ids(ahead);
  return first;
}

// Values of the four codes of a word. An integer and 128 are the last byte of a float of 2^23 and more.
__device__ __forceinline__ void decoded(float* v, u32 word) {
  if constexpr (FORMAT == INT8) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = __fadd_rn(value(__byte_perm(word ^ 0x80808080, 0x4B000000, 0x7540 + i)), -8388736.0f);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
      asm("{\n.reg .b16 c, e, l, h;\n.reg .b32 pair;\nmov.b32 {c, e}, %2;\ncvt.rn.f16x2.e4m3x2 pair, c;\nmov.b32 {l, h}, pair;\n"
          "cvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
          : "=f"(v[2 * i]), "=f"(v[2 * i + 1]) : "r"(i ? word >> 16 : word));
  }
}

// A finite code's product with a finite scale stops at the largest float32.
__device__ __forceinline__ float saturated(float product, float scale) {
  const bool over = (pattern(product) & 0x7FFFFFFF) == INFINITY_BITS && (pattern(scale) & 0x7FFFFFFF) < INFINITY_BITS;
  return value(pattern(product) - over);
}

// Add rows of a piece, from one on to before another.
template <bool SATURATED>
__device__ __forceinline__ void add(float* total, const char* stage, const float* scales, int from, int to) {
  const char* line = stage + threadIdx.x % 32 * 4;
#pragma unroll 4
  for (int i = from; i < to; i++) {
    const float scale = scales[i];
    float v[4];
    decoded(v, *reinterpret_cast<const u32*>(line + i * LINE));
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float product = __fmul_rn(v[j], scale);
      if (SATURATED) product = saturated(product, scale);
      total[j] = __fadd_rn(total[j], product);
    }
  }
}

// Two sums as a pair, NaN canonical.
__device__ __forceinline__ u32 narrowed(float low, float high) {
  u32 pair, result;
  if constexpr (OUTPUT == BFLOAT16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("min.s16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0x7FC07FC0));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    asm("min.s16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0x7E007E00));
  }
  return result;
}

__device__ __forceinline__ void store(char* out, i64 at, const float* total) {
  if constexpr (OUTPUT == FLOAT32) {
    u32 v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = (pattern(total[j]) & 0x7FFFFFFF) > INFINITY_BITS ? NAN_BITS : pattern(total[j]);
    *reinterpret_cast<uint4*>(out + 4 * at) = make_uint4(v[0], v[1], v[2], v[3]);
  } else {
    *reinterpret_cast<uint2*>(out + 2 * at) = make_uint2(narrowed(total[0], total[1]), narrowed(total[2], total[3]));
  }
}

// Where a bag ends, behind the first one's start; of offsets that are none something that stops.
__device__ __forceinline__ int end_of(const Problem& p, u32 bag, i64 start) {
  const i64 end = bag + 1 < p.bags ? static_cast<i64>(p.offsets[bag + 1]) : p.count;
  return static_cast<int>(max(min(min(end, p.count) - start, LONGEST), i64(0)));
}

extern "C" __global__ __launch_bounds__(32 * WARPS, RESIDENT) void sm90_embedding_bag(const __grid_constant__ Problem p) {
  extern __shared__ __align__(16) char memory[];
  const int lane = threadIdx.x % 32, warp = WARPS == 1 ? 0 : __shfl_sync(ALL, threadIdx.x / 32, 0);
  const u32 unit = blockIdx.x * WARPS + warp, part = unit % p.parts, first = unit / p.parts * p.each;
  if (first >= p.bags) return;
  const int bags = min(p.each, p.bags - first);
  const i64 start = max(min(static_cast<i64>(p.offsets[first]), p.count), i64(0));
  const int own_end = end_of(p, min(first + lane, first + bags - 1), start), last = __shfl_sync(ALL, own_end, bags - 1);
  const u32 wide = min(LINE, p.width - part * LINE);
  const char* codes = p.codes + part * LINE + lane % 8 * 16;
  char* stages = memory + warp * (SCALES_AT + ROWS * 4);
  float* scales = reinterpret_cast<float*>(stages + SCALES_AT);
  const u32 shared = static_cast<u32>(__cvta_generic_to_shared(stages));
  Ahead ahead = {p.ids + start, {}, 0, 0, last, false, lane % 8 * 16 < wide};
  read_ids(ahead);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch(p, codes, shared + i * STAGE, ahead);
  int slot = STAGES - 1, at = 0, ready = 0;
  bool large = false;
  for (int bag = 0; bag < bags; bag++) {
    const int begin = at, end = min(__shfl_sync(ALL, own_end, bag), last);
    float total[4] = {};
    while (at < end) {
      if (at == ready) {
        __syncwarp();  // all lanes have read what is read over
        const u32 beyond = fetch(p, codes, shared + slot * STAGE, ahead);
        slot = slot == STAGES - 1 ? 0 : slot + 1;
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
        const bool there = lane < min(ROWS, last - ready);
        const char* copy = stages + slot * STAGE + ROWS * LINE + COPY * lane + beyond;
        const float scale = there ? *reinterpret_cast<const float*>(copy) : 0.0f;
        if (there) scales[lane] = scale;
        __syncwarp();
        large = __any_sync(ALL, (pattern(scale) & 0x7FFFFFFF) >= LARGE_BITS);
        ready += ROWS;
      }
      const int to = min(end, ready), base = ready - ROWS;
      if (large)
        add<true>(total, stages + slot * STAGE, scales, at - base, to - base);
      else
        add<false>(total, stages + slot * STAGE, scales, at - base, to - base);
      at = to;
    }
    if (MEAN) {
      const float count = static_cast<float>(max(end - begin, 1));
#pragma unroll
      for (int j = 0; j < 4; j++) total[j] = __fdiv_rn(total[j], count);
    }
    if (4 * lane < wide) store(p.out, static_cast<i64>(first + bag) * p.width + part * LINE + 4 * lane, total);
  }
  if (__any_sync(ALL, ahead.outside))
    __assertfail("embedding_bag: an id is outside of its table; map unknown ids to a row of their own", __FILE__, __LINE__,
                 "sm90_embedding_bag", 1);
}
