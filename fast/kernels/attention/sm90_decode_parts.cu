// The parts of a context that `sm90_decode` attended to, added: of each query sums by channel, the largest score, the sum of weights.
// A program has one query; each of its warps takes every WARPS-th part, and reads several at a time.
//
// Defined: WIDTH, BF16 (of the result), BLOCK (tokens that parts are multiples of), AT_ONCE (parts that a warp reads at once).

#include "softmax.cuh"

constexpr int WARPS = 4, OWN = WIDTH / 32;  // channels of a lane

struct Problem {
  const float* parts;
  const float2* stats;
  const i64* length;
  unsigned short* y;
  int splits, residual, open, beside;  // beside: whether the part behind the last token has tokens as computed
};

__device__ __forceinline__ float share_of(float2 one, float top) {
  return one.x == -infinity() ? 0.0f : exponential(one.x - top);
}

// Parts that have a token, stored or as computed.
__device__ __forceinline__ int live_of(const Problem& p) {
  const int all = stored_tokens(int(*p.length), p.residual, p.open), each = blocks_of_a_part(all, BLOCK, p.splits);
  return max(1, min(parts_with_tokens(all, BLOCK, each) + p.beside, p.splits));
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void sm90_decode_parts(const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  float* sums = reinterpret_cast<float*>(memory);  // (WARPS, WIDTH)
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float2* stats = p.stats + i64(blockIdx.x) * p.splits;
  const float* parts = p.parts + i64(blockIdx.x) * p.splits * WIDTH + lane * OWN;
  const int live = live_of(p);  // of a number that was there before the parts
  asm volatile("griddepcontrol.wait;" ::: "memory");
  // The first parts of a warp are on their way while shares are made.
  float2 held[AT_ONCE][OWN / 2];
#pragma unroll
  for (int u = 0; u < AT_ONCE; u++) {
#pragma unroll
    for (int c = 0; c < OWN / 2; c++)
      held[u][c] = reinterpret_cast<const float2*>(parts + i64(min(warp + WARPS * u, live - 1)) * WIDTH)[c];
  }
  float top = -infinity(), total = 0.0f, own[OWN] = {};
  for (int i = lane; i < live; i += 32) top = fmaxf(top, stats[i].x);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(ALL, top, step));
  for (int i = lane; i < live; i += 32) {
    const float2 one = stats[i];
    total = __fmaf_rn(one.y, share_of(one, top), total);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(ALL, total, step);
#pragma unroll
  for (int u = 0; u < AT_ONCE; u++) {
    const int i = warp + WARPS * u;
    const float share = i < live ? share_of(stats[i], top) : 0.0f;
#pragma unroll
    for (int c = 0; c < OWN / 2; c++)
      own[2 * c] = __fmaf_rn(held[u][c].x, share, own[2 * c]), own[2 * c + 1] = __fmaf_rn(held[u][c].y, share, own[2 * c + 1]);
  }
#pragma unroll 8
  for (int i = warp + WARPS * AT_ONCE; i < live; i += WARPS) {
    const float share = share_of(stats[i], top);
#pragma unroll
    for (int c = 0; c < OWN; c += 2) {
      const float2 x = *reinterpret_cast<const float2*>(parts + i64(i) * WIDTH + c);
      own[c] = __fmaf_rn(x.x, share, own[c]), own[c + 1] = __fmaf_rn(x.y, share, own[c + 1]);
    }
  }
#pragma unroll
  for (int c = 0; c < OWN; c++) sums[warp * WIDTH + lane * OWN + c] = own[c];
  __syncthreads();
  for (int c = threadIdx.x; c < WIDTH; c += 32 * WARPS) {
    float sum = sums[c];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += sums[w * WIDTH + c];
    p.y[i64(blockIdx.x) * WIDTH + c] = static_cast<unsigned short>(rounded(sum / (total == 0.0f ? 1.0f : total), 0.0f));
  }
}
