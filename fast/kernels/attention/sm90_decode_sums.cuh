// The sums of a program's warps, added in shared memory, and of parts of a context in a cluster: what `sm90_decode.cu` gives out.

struct Shared {
  float top[WARPS][8], total[WARPS][8], of_part[2][8], y[WARPS][8][WIDTH + 4];  // of_part: of all warps
  uint4 base[WARPS][BY_CHANNEL ? STEPS / 2 : 1][32];
  uint4 scales[WARPS][BY_CHANNEL ? SHARED_ROW + 2 : 1];
};

// A number of the shared memory of a program of the cluster.
__device__ __forceinline__ float number_in(const float& own, int program) {
  u32 address;
  float found;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(u32(__cvta_generic_to_shared(&own))), "r"(program));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(found) : "r"(address) : "memory");
  return found;
}

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The result of a cluster, of whose sums by channel each program adds some: shared.y[0] and shared.of_part.
__device__ __forceinline__ void add_in_cluster(const Shared& shared, unsigned short* y, int program) {
  wait_for_cluster();
  for (int i = program * 32 * WARPS + threadIdx.x; i < HEADS * WIDTH; i += CLUSTER * 32 * WARPS) {
    const int head = i / WIDTH, channel = i % WIDTH;
    float tops[CLUSTER], top = -infinity(), total = 0.0f, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) tops[c] = number_in(shared.of_part[0][head], c), top = fmaxf(top, tops[c]);
#pragma unroll
    for (int c = 0; c < CLUSTER; c++) {
      const float share = tops[c] == -infinity() ? 0.0f : exponential(tops[c] - top);
      total = __fmaf_rn(number_in(shared.of_part[1][head], c), share, total);
      sum = __fmaf_rn(number_in(shared.y[0][head][channel], c), share, sum);
    }
    y[i] = static_cast<unsigned short>(rounded(sum / (total == 0.0f ? 1.0f : total), 0.0f));
  }
  wait_for_cluster();
}

// The sums of all warps, and what they are of: a part, or the result.
__device__ __forceinline__ void give_out(Shared& shared, Sums& sums, const Place& at, i64 pair, int split, int warp) {
  const Problem& p = at.p;
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const float total = added(sums.total[c]);
    if (at.eighth == 0) {
      shared.top[warp][2 * at.quarter + c] = sums.top[c];
      shared.total[warp][2 * at.quarter + c] = total;
    }
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const int head = 2 * at.quarter + c;
    float top = shared.top[0][head];
#pragma unroll
    for (int i = 1; i < WARPS; i++) top = fmaxf(top, shared.top[i][head]);
    const float over = BY_TOKEN ? sums.over[c] : sums.top[c];
    const float share = over == -infinity() ? 0.0f : exponential(over - top);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++)
      shared.y[warp][head][value_channel(i, at.eighth)] = sums.y[i / 2][i % 2 * 2 + c] * share;
  }
  __syncthreads();
  const float of_all = SCALES == 2 || SCALES == 3 ? *at.v_scale : 1.0f;
  for (int i = threadIdx.x; i < HEADS * WIDTH; i += 32 * WARPS) {
    const int head = i / WIDTH, channel = i % WIDTH;
    float top = shared.top[0][head], total = 0.0f, y = 0.0f;
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, shared.top[w][head]);
    for (int w = 0; w < WARPS; w++) {
      if (shared.top[w][head] != -infinity()) total += shared.total[w][head] * exponential(shared.top[w][head] - top);
      y += shared.y[w][head][channel];
    }
    y *= of_all;
    if constexpr (CLUSTER > 1) {
      shared.y[0][head][channel] = y;
      if (channel == 0) shared.of_part[0][head] = top, shared.of_part[1][head] = total;
    } else if (p.splits == 1) {
      const float found = y / (total == 0.0f ? 1.0f : total);
      p.y[(pair * HEADS + head) * WIDTH + channel] = static_cast<unsigned short>(rounded(found, 0.0f));
    } else {
      const i64 place = (pair * HEADS + head) * p.splits + split;
      p.parts[place * WIDTH + channel] = y;
      if (channel == 0) p.stats[2 * place] = top, p.stats[2 * place + 1] = total;
    }
  }
  if constexpr (CLUSTER > 1) add_in_cluster(shared, p.y + pair * HEADS * WIDTH, split);
}
