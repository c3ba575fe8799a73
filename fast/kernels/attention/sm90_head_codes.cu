// Codes and scales of keys, values and queries of attention in 8 bits, heads of 128 channels, for Hopper, in the layouts of
// `quantize_heads`; `sm90_heads.py` launches it after `sm90_head_statistics.cu`. A program has 128 tokens of a head: of keys and of
// values in turn, which begin with what parts of the tokens left, whose sums give the mean key, added in one order by all programs;
// where there are some, of queries. TOKEN_MAJOR: of queries 128 rows at a time, of all heads of a token in front of the next one's.
//
// It may begin while the launch in front ends.

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

constexpr int WIDTH = 128, TOKENS = 128, THREADS = 256, WARPS = THREADS / 32;
constexpr int PAIRS = TOKENS / WARPS / 2;  // of tokens, which a warp has
constexpr float VALUE_TARGET = 448.0f, OVER_VALUE_TARGET = 1.0f / 448.0f;

// Of a head, what parts of its tokens left for a channel, made one: by half as many threads as there are, in one order.
template <class Join>
__device__ __forceinline__ float joined(const float* parts_of_pair, int parts, float* memory, const Join& join) {
  const int channel = threadIdx.x % WIDTH;
  float all = 0.0f;
#pragma unroll 8
  for (int part = threadIdx.x / WIDTH; part < parts; part += THREADS / WIDTH) all = join(all, parts_of_pair[part * WIDTH + channel]);
  memory[threadIdx.x] = all;
  __syncthreads();
  return join(memory[channel], memory[WIDTH + channel]);
}

// Keys less the mean; where that overflows the largest number, and what is not finite as it is. there: 1, or 0 for no key.
__device__ __forceinline__ void centered(float (&v)[EACH], const float (&mean)[EACH], float there) {
  float less[EACH], most = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; i++) less[i] = __fmaf_rn(-there, mean[i], v[i]), most = larger(most, less[i]);
  if (!(most <= LARGEST))
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const bool finite = fabsf(v[i]) <= LARGEST, over = fabsf(less[i]) == __uint_as_float(0x7F800000);
      less[i] = !finite ? v[i] : over ? (less[i] > 0.0f ? LARGEST : -LARGEST) : less[i];
    }
#pragma unroll
  for (int i = 0; i < EACH; i++) v[i] = less[i];
}

__device__ __forceinline__ void code_keys(const Problem& p, int pair, int block, float* memory) {
  const int lane = threadIdx.x % LANES, warp = threadIdx.x / 32, first = TOKENS / WARPS * warp + threadIdx.x % 32 / LANES;
  const i64 batch = pair / p.heads, head = pair % p.heads;
  const char* k = static_cast<const char*>(p.k) + 2 * (batch * p.k_batch + head * p.k_head + EACH * lane);
  uint4 words[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const i64 token = block * TOKENS + first + 2 * i;
    words[i] = read_eight(k + 2 * token * p.k_token, token < p.tokens);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float mean[EACH];
  if (CENTER) {
    const float own = joined(p.sums + i64(pair) * p.parts * WIDTH, p.parts, memory, [](float a, float b) { return __fadd_rn(a, b); });
    __syncthreads();
    if (threadIdx.x < WIDTH) {
      memory[threadIdx.x] = own;
      if (block == 0) p.mean[i64(pair) * WIDTH + threadIdx.x] = own;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < EACH; i++) mean[i] = memory[lane * EACH + i];
    // Signs turn keys and the mean: each difference is that of before, turned.
    if (ROTATE) turn_signs(mean, lane);
  }
  float v[PAIRS][EACH], most = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    if (ROTATE) turn_signs(words[i], lane);
    unpack(v[i], words[i]);
    if (CENTER) centered(v[i], mean, block * TOKENS + first + 2 * i < p.tokens ? 1.0f : 0.0f);
    if (ROTATE) mix(v[i], lane);
    if (!BY_TOKEN)
#pragma unroll
      for (int j = 0; j < EACH; j++) most = larger(most, v[i][j]);
  }
  float scale = 0.0f;
  if (!BY_TOKEN) {
#pragma unroll
    for (int far = 1; far < 32; far *= 2) most = larger(most, __shfl_xor_sync(0xFFFFFFFF, most, far));
    if (threadIdx.x % 32 == 0) memory[WIDTH + warp] = most;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) most = larger(most, memory[WIDTH + i]);
    scale = scale_of(most);
    if (threadIdx.x == 0) p.k_scale[i64(pair) * p.blocks + block] = scale;
  }
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const i64 token = (i64(pair) * p.blocks + block) * TOKENS + first + 2 * i;
    if (BY_TOKEN) {
      scale = scale_of(largest_of_row(v[i]));
      if (lane == 0) p.k_scale[token] = scale;
    }
    *reinterpret_cast<uint2*>(p.k_codes + token * WIDTH + EACH * lane) = codes_of(v[i], scale);
  }
}

// Four tokens at a time, whose places follow each other: a word for each channel, by way of shared memory to rows of channels.
__device__ __forceinline__ void code_values(const Problem& p, int pair, int block, float* memory) {
  constexpr int QUADS = TOKENS / 4, MANY = QUADS * LANES / THREADS;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  const i64 batch = pair / p.heads, head = pair % p.heads;
  const char* v = static_cast<const char*>(p.v) + 2 * (batch * p.v_batch + head * p.v_head + EACH * lane);
  uint4 words[MANY][4];
#pragma unroll
  for (int i = 0; i < MANY; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int quad = row + i * (THREADS / LANES);
      const i64 token = block * TOKENS + quad / 4 * 16 + quad % 4 * 2 + j / 2 * 8 + j % 2;
      words[i][j] = read_eight(v + 2 * token * p.v_token, token < p.tokens);
    }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const float most = joined(p.largest + i64(pair) * p.parts * WIDTH, p.parts, memory, larger);
  const float own = scale_of(most, VALUE_TARGET, OVER_VALUE_TARGET);
  __syncthreads();
  if (threadIdx.x < WIDTH) {
    memory[threadIdx.x] = inverse_of(own);
    if (block == 0) p.v_scale[i64(pair) * WIDTH + threadIdx.x] = own;
  }
  __syncthreads();
  u32* tile = reinterpret_cast<u32*>(memory + WIDTH);
#pragma unroll
  for (int i = 0; i < MANY; i++) {
    float x[4][EACH];
#pragma unroll
    for (int j = 0; j < 4; j++) unpack(x[j], words[i][j]);
    const int quad = row + i * (THREADS / LANES);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const float by = memory[lane * EACH + j];
      tile[(lane * EACH + j) * QUADS + (quad ^ 2 * lane)] =
          e4m3s_of(__fmul_rn(x[0][j], by), __fmul_rn(x[1][j], by), __fmul_rn(x[2][j], by), __fmul_rn(x[3][j], by));
    }
  }
  __syncthreads();
  const i64 room = i64(p.blocks) * TOKENS;
#pragma unroll
  for (int i = threadIdx.x; i < WIDTH * QUADS / 4; i += THREADS) {
    const int channel = i / (QUADS / 4), four = i % (QUADS / 4), turned = channel / EACH;
    const uint4 w = *reinterpret_cast<const uint4*>(tile + channel * QUADS + 4 * (four ^ turned / 2));
    const uint4 out = turned % 2 ? make_uint4(w.z, w.w, w.x, w.y) : w;
    *reinterpret_cast<uint4*>(p.v_codes + (i64(pair) * WIDTH + channel) * room + block * TOKENS + 16 * four) = out;
  }
}

// A scale for each query.
__device__ __forceinline__ void code_queries(const Problem& p, int pair, int block) {
  const int lane = threadIdx.x % LANES, first = TOKENS / WARPS * (threadIdx.x / 32) + threadIdx.x % 32 / LANES;
  const i64 batch = pair / p.query_heads, head = pair % p.query_heads;
  const char* q = static_cast<const char*>(p.q) + 2 * (batch * p.q_batch + head * p.q_head + EACH * lane);
  uint4 words[PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const i64 token = block * TOKENS + first + 2 * i;
    words[i] = read_eight(q + 2 * token * p.q_token, token < p.queries);
  }
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const i64 token = (i64(pair) * p.query_blocks + block) * TOKENS + first + 2 * i;
    float v[EACH];
    if (ROTATE) turn_signs(words[i], lane);
    unpack(v, words[i]);
    if (ROTATE) mix(v, lane);
    const float scale = scale_of(largest_of_row(v));
    if (i == 0) asm volatile("griddepcontrol.wait;" ::: "memory");  // what is written may be read by what was launched before
    if (lane == 0) p.q_scale[token] = scale;
    *reinterpret_cast<uint2*>(p.q_codes + token * WIDTH + EACH * lane) = codes_of(v, scale);
  }
}

#if TOKEN_MAJOR
// Sixteen bytes of global memory to shared memory, zeros where `there` is false: by the thread that alone reads them.
__device__ __forceinline__ void copy_eight(u32 to, const void* x, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(x)), "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ uint4 copied_eight(u32 from) {
  uint4 w;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(from) : "memory");
  return w;
}

// The same of queries whose heads lie side by side, (B, T, H, 128), and codes with them. A chunk is 128 rows that follow each other,
// PIECES of a row in a lane; a program has each `step`-th one of a sequence. The next one is copied to shared memory meanwhile, so
// that as much is under way however many registers codes take.
struct Rows {
  static constexpr int PIECES = 4, OWN = LANES / PIECES, TOGETHER = 32 / OWN, MANY = TOKENS / WARPS / TOGETHER;
  static constexpr int CHUNK = TOKENS * WIDTH * 2;  // bytes
  const Problem& p;
  const int sequence, lane, first;
  const u32 memory;
  const char* q;

  __device__ __forceinline__ Rows(const Problem& p, int sequence, float* memory)
      : p(p), sequence(sequence), lane(threadIdx.x % OWN), first(TOKENS / WARPS * (threadIdx.x / 32) + threadIdx.x % 32 / OWN),
        memory(static_cast<u32>(__cvta_generic_to_shared(memory)) + 16 * threadIdx.x),
        q(static_cast<const char*>(p.q) + 2 * (sequence * p.q_batch + EACH * lane)) {}

  // Of the i-th row of a thread in a chunk.
  struct Place {
    int row, token, head;
    __device__ __forceinline__ Place(const Rows& rows, int chunk, int i)
        : row(chunk * TOKENS + rows.first + i * TOGETHER), token(unsigned(row) / unsigned(rows.p.query_heads)),
          head(row - token * rows.p.query_heads) {}
  };

  __device__ __forceinline__ void ask(int chunk, int chunks, int stage) const {
    const u32 to = memory + stage * CHUNK;
    if (chunk < chunks)
#pragma unroll
      for (int i = 0; i < MANY; i++) {
        const Place at(*this, chunk, i);
        const char* from = q + 2 * (at.token * p.q_token + at.head * WIDTH);
#pragma unroll
        for (int j = 0; j < PIECES; j++)
          copy_eight(to + 16 * THREADS * (i * PIECES + j), from + 2 * EACH * OWN * j, at.token < p.queries);
      }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ __forceinline__ void code(uint4 (&words)[PIECES], const Place& at) const {
    const i64 room = i64(p.query_blocks) * TOKENS;
    float v[PIECES][EACH];
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
      if (ROTATE) turn_signs(words[j], lane);
      unpack(v[j], words[j]);
    }
    if (ROTATE) mix(v, lane);
    const float scale = scale_of(largest_of_row(v));
    if (lane == 0) p.q_scale[(i64(sequence) * p.query_heads + at.head) * room + at.token] = scale;
    unsigned char* to = p.q_codes + (sequence * room * p.query_heads + at.row) * WIDTH + EACH * lane;
#pragma unroll
    for (int j = 0; j < PIECES; j++) *reinterpret_cast<uint2*>(to + EACH * OWN * j) = codes_of(v[j], scale);
  }

  __device__ __forceinline__ void code_all(int chunk, int step) const {
    const int chunks = p.query_blocks * p.query_heads;
    ask(chunk, chunks, 0);
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll 1
    for (int stage = 0; chunk < chunks; chunk += step, stage ^= 1) {
      ask(chunk + step, chunks, stage ^ 1);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      const u32 from = memory + stage * CHUNK;
      uint4 words[MANY][PIECES];
#pragma unroll
      for (int i = 0; i < MANY * PIECES; i++) words[i / PIECES][i % PIECES] = copied_eight(from + 16 * THREADS * i);
#pragma unroll
      for (int i = 0; i < MANY; i++) code(words[i], Place(*this, chunk, i));
    }
  }
};
#endif

extern "C" __global__ __launch_bounds__(THREADS, 2) void sm90_head_codes(const __grid_constant__ Problem p) {
  extern __shared__ float memory[];
  const int others = 2 * p.pairs * p.blocks, queries = int(gridDim.x) - others;  // programs
#if TOKEN_MAJOR
  // Those of queries, which wait for memory least, and others in turn, as long as there are both.
  const int at = blockIdx.x, both = 2 * min(queries, others), own = at < both ? at / 2 : at - both / 2;
  if (at < both ? at % 2 == 0 : queries > others) {
    const int step = queries / (p.pairs / p.heads);  // programs of a sequence
    Rows(p, own / step, memory).code_all(own % step, step);
    return;
  }
#else
  const int own = blockIdx.x;
  if (own >= others) return code_queries(p, (own - others) / p.query_blocks, (own - others) % p.query_blocks);
#endif
  const int pair = own / 2 / p.blocks, block = own / 2 % p.blocks;
  if (own % 2 == 0)
    code_keys(p, pair, block, memory);
  else
    code_values(p, pair, block, memory);
}
