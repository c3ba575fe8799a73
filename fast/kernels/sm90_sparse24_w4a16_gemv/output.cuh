// What a program does when all of its warps have left their sums: adds them in the order of K, and writes y.
//
// Before: Problem, sizes of stages, `words.cuh`, `copies.cuh`, `gated.cuh`.

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

// Four rows of y, eight bytes at once where rows of y are whole such pieces. v: of rows from `row` on of t.
__device__ __forceinline__ void store_rows(const Problem& p, const Tile& t, const u32 (&v)[4], int token, int row) {
  unsigned short* to = static_cast<unsigned short*>(t.y) + i64(token) * t.n + row;
  if (t.n % 4 == 0) {
    if (row < t.n) *reinterpret_cast<uint2*>(to) = make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (row + i < t.n) to[i] = v[i];
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

// Four rows of a program's sums: their tile, and the first of them in it. Where GATED, fours of a gate's tile and of what it
// gates take turns, so that who has a share of the rows has both.
struct Rows {
  int tile, at;
  __device__ __forceinline__ explicit Rows(int four)
      : tile(PRODUCTS == GATED ? four / 8 * 2 + four % 2 : four / 4), at((PRODUCTS == GATED ? four / 2 : four) % 4 * 4) {}
};

// The sum of what the warps left of four rows of a token.
__device__ __forceinline__ Four sum_of_warps(u32 left, int token, int four) {
  const Rows rows(four);
  return sum_of<PHASES>(left + rows.tile * PHASES * LEFT + 4 * (token * LINE + rows.at), LEFT);
}

// Write four rows of a token.
__device__ __forceinline__ void write(const Problem& p, const Four& f, int token, int first, int four) {
  const Rows rows(four);
  const Tile t = tile_of(p, first + rows.tile);
  const int row = t.row + rows.at;
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (row + i < t.n) v[i] = rounded(p, f.v[i], row + i);
  store_rows(p, t, v, token, row);
}

// The same of a gate's four rows and of those that it gates, the next.
__device__ __forceinline__ void write_gated(const Problem& p, const Four& gate, const Four& up, int token, int first, int four) {
  const Rows rows(four);
  const Tile t = tile_of(p, first + rows.tile);
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = gated(rounded(p, gate.v[i], 0), rounded(p, up.v[i], 0));
  store_rows(p, t, v, token, t.row + rows.at);
}

// Add what the warps left, four rows a thread. Of parts of K every SPLITS-th part of the rows is a program's to add and write: the
// others send it their sums, behind its own. left: of its tiles, of which `first` is the first.
__device__ __forceinline__ void finish(const Problem& p, u32 left, int first, int split, int thread) {
  constexpr int FOURS = ROWS / 4, SHARE = FOURS / SPLITS, SENT = TOKENS * SHARE * 16, EACH = PRODUCTS == GATED ? 2 : 1;
  const u32 received = left + TILES * PHASES * LEFT;
  if constexpr (SPLITS > 1) {
    wait_cluster();  // for all of its programs to run
#pragma unroll 1
    for (int i = thread; i < p.count * FOURS; i += THREADS) {
      const int token = i / FOURS, four = i % FOURS;
      send(received + split * SENT + (token * SHARE + four % SHARE) * 16, four / SHARE, sum_of_warps(left, token, four));
    }
    sync_cluster();
  }
  const auto total = [&](int token, int own) {
    if constexpr (SPLITS > 1) return sum_of<SPLITS>(received + (token * SHARE + own) * 16, SENT);
    else return sum_of_warps(left, token, own);
  };
#pragma unroll 1
  for (int i = thread; i < p.count * (SHARE / EACH); i += THREADS) {
    const int token = i / (SHARE / EACH), own = i % (SHARE / EACH) * EACH;
    const int four = split * SHARE + own;
    if constexpr (PRODUCTS == GATED) write_gated(p, total(token, own), total(token, own + 1), token, first, four);
    else write(p, total(token, own), token, first, four);
  }
}
