// Codes and scales of keys, values and queries of attention in 8 bits, heads of 128 channels, for Hopper, in the layouts of
// `quantize_heads`; `sm90_heads.py` launches it after `sm90_head_statistics.cu`. A program has 128 tokens of a head, of queries, of
// keys or of values. Those of keys and values begin with what parts of the tokens left, whose sums give the mean key, added in one
// order by all programs.
//
// Of queries and keys a thread has a row: its 128 channels come through shared memory, where sixteen bytes lie behind a row's other
// ones by the row, so that neither the warp that reads rows nor the copies that bring them meet a bank twice. All seven stages of
// the transform are then arithmetic in registers, in the order of `reference.layers.hadamard`, and a warp waits for its own rows
// alone. Codes go back the same way.
//
// It begins while the launch in front (statistics) runs, whose results only keys and values wait for: LEAD eighths of the queries come
// first, then keys and values, which the second-level cache still has, between other queries. Nothing older runs, as statistics
// begin behind all that is in front of them: codes of queries may be written at once.

typedef unsigned int u32;
typedef long long i64;

struct Problem {
  const void* k;
  const void* v;
  const float* sums;     // (pairs, parts, 128)
  const float* largest;  // (pairs, parts, 128)
  float* mean;           // (pairs, 128)
  unsigned char* k_codes;
  float* k_scale;
  unsigned char* v_codes;
  float* v_scale;
  const void* q;
  unsigned char* q_codes;
  float* q_scale;
  float share;
  int tokens, each, parts, heads, blocks;         // each: tokens of a part; blocks: of 128 tokens
  int queries, query_heads, query_blocks, pairs;  // pairs: sequences times heads of keys
  i64 k_batch, k_head, k_token, v_batch, v_head, v_token, q_batch, q_head, q_token;
};

#include "head_codes.cuh"

constexpr int WIDTH = 128, TOKENS = 128, THREADS = 128, WARPS = THREADS / 32, CHUNKS = WIDTH / EACH;
constexpr u32 ROW_BYTES = 2 * WIDTH, TILE_BYTES = TOKENS * ROW_BYTES;
constexpr u32 NEGATIVE = 0xD7E8;  // of sixteen channels, those that the transform negates
constexpr float VALUE_TARGET = 448.0f, OVER_VALUE_TARGET = 1.0f / 448.0f;

__device__ __forceinline__ void wait_for_statistics() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Where a row's sixteen bytes are, by the number among them. The tile begins at a multiple of a row.
__device__ __forceinline__ u32 place_of(u32 tile, u32 row, u32 chunk) { return (tile + row * ROW_BYTES + row % 8u * 16) ^ chunk * 16; }

__device__ __forceinline__ uint4 read_shared(u32 at) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(at) : "memory");
  return w;
}

__device__ __forceinline__ void write_shared(u32 at, const uint4& w) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}

__device__ __forceinline__ void copy_eight(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// A warp's 32 rows of tokens, begun; zeros where there are none. first: the first token's place in memory; count: tokens from the
// program's first one on.
__device__ __forceinline__ void begin_rows(u32 tile, const char* first, i64 token_step, int count) {
  const int lane = threadIdx.x % 32, chunk = lane % CHUNKS, start = threadIdx.x / 32 * 32, own = start + lane / CHUNKS;
  const char* from = first + 2 * (own * token_step + EACH * chunk);
  if (start + 32 <= count) {
#pragma unroll
    for (int i = 0; i < 32; i += 2) copy_eight(place_of(tile, own + i, chunk), from + 2 * i * token_step);
  } else {
#pragma unroll 1
    for (int i = 0; i < 32; i += 2)
      if (own + i < count)
        copy_eight(place_of(tile, own + i, chunk), from + 2 * i * token_step);
      else
        write_shared(place_of(tile, own + i, chunk), make_uint4(0, 0, 0, 0));
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ __forceinline__ void finish_rows() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncwarp();
}

// Sums and differences of channels 1, 2, 4, to 64 apart of what the signs have turned, times 128^-1/2; and the largest magnitude.
__device__ __forceinline__ float mix_row(float (&v)[WIDTH]) {
#pragma unroll
  for (int far = ROTATE ? 1 : WIDTH; far < WIDTH; far *= 2)
#pragma unroll
    for (int i = 0; i < WIDTH; i++)
      if (!(i & far)) {
        const float left = v[i], right = v[i + far];
        v[i] = __fadd_rn(left, right), v[i + far] = __fsub_rn(left, right);
      }
  float most[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < WIDTH; i++) {
    if (ROTATE) v[i] = __fmul_rn(v[i], 0.08838834764831845f);
    most[i % 4] = larger(most[i % 4], v[i]);
  }
  return larger(larger(most[0], most[1]), larger(most[2], most[3]));
}

// A row's channels in float32, by the transform's signs.
template <class Change>
__device__ __forceinline__ void read_row(float (&v)[WIDTH], u32 tile, const Change& change) {
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    float x[EACH];
    unpack(x, read_shared(place_of(tile, threadIdx.x, c)));
    change(x, c);
#pragma unroll
    for (int i = 0; i < EACH; i++) v[c * EACH + i] = ROTATE && NEGATIVE >> (c * EACH + i) % 16 & 1 ? -x[i] : x[i];
  }
}

// Codes of the threads' rows under their scales to a warp's 32 rows of memory.
__device__ __forceinline__ void leave_codes(unsigned char* codes, u32 tile, const float (&v)[WIDTH], float scale) {
  const int lane = threadIdx.x % 32, start = threadIdx.x / 32 * 32;
#pragma unroll
  for (int c = 0; c < WIDTH / 16; c++) {
    float x[2][EACH];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i / EACH][i % EACH] = v[16 * c + i];
    const uint2 low = codes_of(x[0], scale), high = codes_of(x[1], scale);
    write_shared(place_of(tile, threadIdx.x, c), make_uint4(low.x, low.y, high.x, high.y));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int row = start + 4 * i + lane / 8;
    *reinterpret_cast<uint4*>(codes + row * WIDTH + lane % 8 * 16) = read_shared(place_of(tile, row, lane % 8));
  }
}

// A scale for each query.
__device__ __forceinline__ void code_queries(const Problem& p, int pair, int block, u32 tile) {
  const i64 batch = pair / p.query_heads, head = pair % p.query_heads, row = (i64(pair) * p.query_blocks + block) * TOKENS;
  const char* q = static_cast<const char*>(p.q) + 2 * (batch * p.q_batch + head * p.q_head + i64(block) * TOKENS * p.q_token);
  begin_rows(tile, q, p.q_token, p.queries - block * TOKENS);
  finish_rows();
  float v[WIDTH];
  read_row(v, tile, [](float (&)[EACH], int) {});
  const float scale = scale_of(mix_row(v));
  p.q_scale[row + threadIdx.x] = scale;
  leave_codes(p.q_codes + row * WIDTH, tile, v, scale);
}

// A number of global memory, 0 where `there` is false.
__device__ __forceinline__ float read_one(const float* x, bool there) {
  float v = 0.0f;
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p ld.global.f32 %0, [%1];\n}"
      : "+f"(v) : "l"(__cvta_generic_to_global(x)), "r"(u32(there)) : "memory");
  return v;
}

// Of a head, what parts of its tokens left for a thread's channel, made one: of every second part, then of both. Zeros change nothing.
template <class Join>
__device__ __forceinline__ float joined(const float* parts_of_pair, int parts, const Join& join) {
  constexpr int TOGETHER = 16;
  float all[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int first = 0; first < parts; first += TOGETHER) {
    float x[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) x[i] = read_one(parts_of_pair + (first + i) * WIDTH + threadIdx.x, first + i < parts);
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) all[i % 2] = join(all[i % 2], x[i]);
  }
  return join(all[0], all[1]);
}

// Keys less the mean. careful: where that overflows the largest number, and what is not finite as it is. there: 1, or 0 for no key.
__device__ __forceinline__ void centered(float (&x)[EACH], const float* mean, float there, bool careful) {
  float less[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) less[i] = __fmaf_rn(-there, mean[i], x[i]);
  if (careful)
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const bool finite = fabsf(x[i]) <= LARGEST, over = fabsf(less[i]) == __uint_as_float(0x7F800000);
      less[i] = !finite ? x[i] : over ? (less[i] > 0.0f ? LARGEST : -LARGEST) : less[i];
    }
#pragma unroll
  for (int i = 0; i < EACH; i++) x[i] = less[i];
}

// The mean key of a head to shared memory.
__device__ __forceinline__ void leave_mean(const Problem& p, int pair, int block, float* memory) {
  const float own = joined(p.sums + i64(pair) * p.parts * WIDTH, p.parts, [](float a, float b) { return __fadd_rn(a, b); });
  memory[threadIdx.x] = own;
  if (block == 0) p.mean[i64(pair) * WIDTH + threadIdx.x] = own;
  __syncthreads();
}

// A thread's row of keys, transformed, and its largest magnitude: where that is not finite, once more and with more care, as some
// difference from the mean may be none.
__device__ __forceinline__ float make_keys(float (&v)[WIDTH], u32 tile, const float* mean, bool there) {
#pragma unroll 1
  for (bool careful = false;; careful = true) {
    read_row(v, tile, [=](float (&x)[EACH], int c) {
      if (CENTER) centered(x, mean + EACH * c, there ? 1.0f : 0.0f, careful);
    });
    const float most = mix_row(v);
    if (!CENTER || careful || most <= LARGEST) return most;
  }
}

__device__ __forceinline__ void code_keys(const Problem& p, int pair, int block, u32 tile, float* memory) {
  const i64 batch = pair / p.heads, head = pair % p.heads, row = (i64(pair) * p.blocks + block) * TOKENS;
  const char* k = static_cast<const char*>(p.k) + 2 * (batch * p.k_batch + head * p.k_head + i64(block) * TOKENS * p.k_token);
  begin_rows(tile, k, p.k_token, p.tokens - block * TOKENS);
  wait_for_statistics();
  if (CENTER) leave_mean(p, pair, block, memory);
  finish_rows();
  float v[WIDTH];
  float most = make_keys(v, tile, memory, block * TOKENS + int(threadIdx.x) < p.tokens);
  if (!BY_TOKEN) {
    __syncwarp();
#pragma unroll
    for (int far = 1; far < 32; far *= 2) most = larger(most, __shfl_xor_sync(0xFFFFFFFF, most, far));
    if (threadIdx.x % 32 == 0) memory[WIDTH + threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) most = larger(most, memory[WIDTH + i]);
  }
  const float scale = scale_of(most);
  if (BY_TOKEN) p.k_scale[row + threadIdx.x] = scale;
  if (!BY_TOKEN && threadIdx.x == 0) p.k_scale[i64(pair) * p.blocks + block] = scale;
  __syncwarp();
  leave_codes(p.k_codes + row * WIDTH, tile, v, scale);
}

// Four tokens at a time, whose places follow each other: a word for each channel, by way of shared memory to rows of channels.
__device__ __forceinline__ void code_values(const Problem& p, int pair, int block, u32 tile, u32* codes, float* memory) {
  constexpr int QUADS = TOKENS / 4, MANY = QUADS * LANES / THREADS;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  const i64 batch = pair / p.heads, head = pair % p.heads;
  const char* v = static_cast<const char*>(p.v) + 2 * (batch * p.v_batch + head * p.v_head + i64(block) * TOKENS * p.v_token);
  begin_rows(tile, v, p.v_token, p.tokens - block * TOKENS);
  wait_for_statistics();
  const float most = joined(p.largest + i64(pair) * p.parts * WIDTH, p.parts, larger);
  const float own = scale_of(most, VALUE_TARGET, OVER_VALUE_TARGET);
  memory[threadIdx.x] = inverse_of(own);
  if (block == 0) p.v_scale[i64(pair) * WIDTH + threadIdx.x] = own;
  finish_rows();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < MANY; i++) {
    const int quad = row + i * (THREADS / LANES), token = quad / 4 * 16 + quad % 4 * 2;
    float x[4][EACH];
#pragma unroll
    for (int j = 0; j < 4; j++) unpack(x[j], read_shared(place_of(tile, token + j / 2 * 8 + j % 2, lane)));
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const float by = memory[lane * EACH + j];
      codes[(lane * EACH + j) * QUADS + (quad ^ 2 * lane)] =
          e4m3s_of(__fmul_rn(x[0][j], by), __fmul_rn(x[1][j], by), __fmul_rn(x[2][j], by), __fmul_rn(x[3][j], by));
    }
  }
  __syncthreads();
  const i64 room = i64(p.blocks) * TOKENS;
#pragma unroll
  for (int i = threadIdx.x; i < WIDTH * QUADS / 4; i += THREADS) {
    const int channel = i / (QUADS / 4), four = i % (QUADS / 4), turned = channel / EACH;
    const uint4 w = *reinterpret_cast<const uint4*>(codes + channel * QUADS + 4 * (four ^ turned / 2));
    const uint4 out = turned % 2 ? make_uint4(w.z, w.w, w.x, w.y) : w;
    *reinterpret_cast<uint4*>(p.v_codes + (i64(pair) * WIDTH + channel) * room + block * TOKENS + 16 * four) = out;
  }
}

extern "C" __global__ __launch_bounds__(THREADS, 3) void sm90_head_codes(const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const u32 start = u32(__cvta_generic_to_shared(memory)), tile = (start + ROW_BYTES - 1) & ~(ROW_BYTES - 1);
  u32* codes = reinterpret_cast<u32*>(memory + (tile - start) + TILE_BYTES);
  float* numbers = reinterpret_cast<float*>(codes + WIDTH * TOKENS / 4);
  const int others = 2 * p.pairs * p.blocks, queries = int(gridDim.x) - others, lead = queries * LEAD / 8, at = int(blockIdx.x) - lead;
  const int turns = 2 * min(others, queries - lead);  // programs of both kinds in turn
  const bool other = at >= 0 && (at < turns ? at % 2 == 0 : others > queries - lead);
  if (!other) {
    const int one = at < 0 ? int(blockIdx.x) : at < turns ? lead + at / 2 : int(blockIdx.x) - others;
    const Part part = part_of(one, p.query_heads, p.query_blocks, IN_TURN);
    return code_queries(p, part.pair, part.block, tile);
  }
  const int one = at < turns ? at / 2 : at - turns / 2;
  const Part part = part_of(one / 2, p.heads, p.blocks, IN_TURN);
  if (one % 2 == 0)
    code_keys(p, part.pair, part.block, tile, numbers);
  else
    code_values(p, part.pair, part.block, tile, codes, numbers);
}
