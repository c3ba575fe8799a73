// Sums of a part of K, which another cluster adds to its own: float32 in global memory, and a mark for each warpgroup's, 0 before
// the launch. Of a warpgroup 128 threads have four sums side by side, SUMS / 4 times.
//
// Before: Problem, Sum, SUMS, `copies.cuh`, `work.cuh`.

// Number of the sums of a cluster's warpgroup.
__device__ __forceinline__ int part_of(int cluster, int neighbour, int group) { return (cluster * PAIR + neighbour) * GROUPS + group; }

__device__ __forceinline__ void give_part(const Problem& p, const Sum (&sum)[SUMS], int part, int group, int thread) {
  float* to = p.parts + i64(part) * 128 * SUMS + 4 * thread;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 128 * i), "f"(sum[i]), "f"(sum[i + 1]), "f"(sum[i + 2]),
        "f"(sum[i + 3]) : "memory");
  sync_group(group);  // the mark's release is for what all of them wrote
  if (thread == 0) asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p.marks + part), "r"(1) : "memory");
}

__device__ __forceinline__ void add_part(const Problem& p, Sum (&sum)[SUMS], int part, int group, int thread) {
  if (thread == 0) {
    u32 mark;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(mark) : "l"(p.marks + part) : "memory");
    while (mark == 0);
  }
  sync_group(group);
  const float* from = p.parts + i64(part) * 128 * SUMS + 4 * thread;
#pragma unroll
  for (int i = 0; i < SUMS; i += 4) {
    float v[4];
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(from + 128 * i)
        : "memory");
#pragma unroll
    for (int j = 0; j < 4; j++) sum[i + j] = __fadd_rn(sum[i + j], v[j]);
  }
}

// The sums of the clusters before, the nearest one first: always in the same order.
__device__ __forceinline__ void add_others(const Problem& p, const Work& work, Sum (&sum)[SUMS], int neighbour, int group, int thread) {
  const int others = work.others(p);
#pragma unroll 1
  for (int i = 1; i <= others; i++) add_part(p, sum, part_of(work.cluster() - i, neighbour, group), group, thread);
}
