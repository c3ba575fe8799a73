// What a program does when all of its warps have left their sums: adds them in the order of K, and writes y.
//
// Before: Problem, sizes of stages, `words.cuh`, `copies.cuh`.

__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Of a token four rows of sums.
struct Four {
  float v[4];
  __device__ __forceinline__ void operator+=(const Four& other) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] += other.v[i];
  }
};

__device__ __forceinline__ Four load_four(u32 address) {
  Four f;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(f.v[0]), "=f"(f.v[1]), "=f"(f.v[2]), "=f"(f.v[3]) : "r"(address) : "memory");
  return f;
}

// Into the shared memory of one of the cluster's programs.
__device__ __forceinline__ void send(u32 address, int program, const Four& f) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address_in(address, program)), "f"(f.v[0]), "f"(f.v[1]),
               "f"(f.v[2]), "f"(f.v[3]) : "memory");
}

__device__ __forceinline__ u32 rounded(const Problem& p, float v, int row) {
  if (p.bias != nullptr) v += bias_at(p.bias, p.bias_kind, row);
  unsigned short half;
  if constexpr (HALF) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(v));
  else asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(v));
  return half;
}

// Four rows of y, eight bytes at once where rows of y are whole such pieces.
__device__ __forceinline__ void store_rows(const Problem& p, const Four& f, int token, int row) {
  unsigned short* to = static_cast<unsigned short*>(p.y) + i64(token) * p.n + row;
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (row + i < p.n) v[i] = rounded(p, f.v[i], row + i);
  if (p.n % 4 == 0) {
    if (row < p.n) *reinterpret_cast<uint2*>(to) = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (row + i < p.n) to[i] = v[i];
  }
}

// Sums `stride` apart, in their order.
template <int COUNT>
__device__ __forceinline__ Four sum_of(u32 place, u32 stride) {
  Four total = {};
#pragma unroll
  for (int i = 0; i < COUNT; i++) total += load_four(place + i * stride);
  return total;
}

// Add what the warps left, four rows a thread. Of parts of K every SPLITS-th part of the rows is a program's to add and write: the
// others send it their sums, behind its own. left: of its tiles.
__device__ __forceinline__ void finish(const Problem& p, u32 left, int row, int split, int thread) {
  constexpr int FOURS = ROWS / 4, SHARE = FOURS / SPLITS, SENT = TOKENS * SHARE * 16;
  const u32 received = left + TILES * PHASES * LEFT;
  if constexpr (SPLITS > 1) wait_cluster();  // for all of its programs to run
#pragma unroll 1
  for (int i = thread; i < p.count * FOURS; i += THREADS) {
    const int token = i / FOURS, four = i % FOURS, at = four * 4;
    const Four total = sum_of<PHASES>(left + at / 16 * PHASES * LEFT + 4 * (token * LINE + at % 16), LEFT);
    if constexpr (SPLITS > 1) send(received + split * SENT + (token * SHARE + four % SHARE) * 16, four / SHARE, total);
    else store_rows(p, total, token, row + at);
  }
  if constexpr (SPLITS > 1) {
    sync_cluster();
#pragma unroll 1
    for (int i = thread; i < p.count * SHARE; i += THREADS)
      store_rows(p, sum_of<SPLITS>(received + i * 16, SENT), i / SHARE, row + (split * SHARE + i % SHARE) * 4);
  }
}
