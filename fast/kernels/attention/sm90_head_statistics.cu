// Of a part of the tokens of a head: sums of keys, and the largest magnitudes of values, by channels (128), for Hopper; `sm90_heads.py`
// launches it, `sm90_head_codes.cu` goes on. A thread has eight channels of each sixteenth token.

typedef unsigned int u32;
typedef long long i64;

struct Problem {
  const void* k;
  const void* v;
  float* sums;     // (pairs, parts, 128), of keys times share, lest they overflow
  float* largest;  // (pairs, parts, 128)
  float share;
  int tokens, each, parts, heads, blocks;         // each: tokens of a part; blocks: of 128 tokens
  int queries, query_heads, query_blocks, pairs;  // pairs: sequences times heads of keys
  i64 k_batch, k_head, k_token, v_batch, v_head, v_token, q_batch, q_head, q_token;
};

#include "head_codes.cuh"

constexpr int WIDTH = 128, ROWS = 16, TOGETHER = 4;

__device__ __forceinline__ void leave(float* memory, const float (&x)[EACH], int row, int lane) {
#pragma unroll
  for (int i = 0; i < EACH; i++) memory[row * WIDTH + lane * EACH + i] = x[i];
}

extern "C" __global__ __launch_bounds__(ROWS * LANES, 3) void sm90_head_statistics(const __grid_constant__ Problem p) {
  extern __shared__ float memory[];
  const int part = blockIdx.x % p.parts, pair = blockIdx.x / p.parts, lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  const i64 batch = pair / p.heads, head = pair % p.heads;
  const int end = min(p.tokens, (part + 1) * p.each);
  const char* k = static_cast<const char*>(p.k) + 2 * (batch * p.k_batch + head * p.k_head + EACH * lane);
  const char* v = static_cast<const char*>(p.v) + 2 * (batch * p.v_batch + head * p.v_head + EACH * lane);
  float sum[EACH], most[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) sum[i] = most[i] = 0.0f;
#pragma unroll 1
  for (int token = part * p.each + row; token < end; token += TOGETHER * ROWS) {
    uint4 keys[TOGETHER], values[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      const i64 at = token + i * ROWS;
      if (CENTER) keys[i] = read_eight(k + 2 * at * p.k_token, at < end);
      values[i] = read_eight(v + 2 * at * p.v_token, at < end);
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; i++) {
      float x[EACH];
      if (CENTER) {
        unpack(x, keys[i]);
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[j] = __fmaf_rn(x[j], p.share, sum[j]);
      }
      unpack(x, values[i]);
#pragma unroll
      for (int j = 0; j < EACH; j++) most[j] = larger(most[j], x[j]);
    }
  }
  leave(memory, sum, row, lane);
  leave(memory + ROWS * WIDTH, most, row, lane);
  __syncthreads();
  const int channel = threadIdx.x % WIDTH;
  const i64 to = (i64(pair) * p.parts + part) * WIDTH + channel;
  if (threadIdx.x < WIDTH) {
    float all = 0.0f;
    for (int i = 0; i < ROWS; i++) all = __fadd_rn(all, memory[i * WIDTH + channel]);
    if (CENTER) p.sums[to] = all;
  } else {
    float all = 0.0f;
    for (int i = 0; i < ROWS; i++) all = larger(all, memory[(ROWS + i) * WIDTH + channel]);
    p.largest[to] = all;
  }
}
