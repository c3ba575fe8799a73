// Attention of many queries with operands in 8 bits, heads of 128 channels, for Hopper (sm_90a): `sm90.py` says what of and launches
// it; `products.h` is generated there. Codes are those of `fast.kernels.attention.quantize_heads`, steps those of `prefill`.
//
// A program has 128 queries of a head, 64 for each of two warpgroups; one thread of a third one loads tiles of 128 keys and of the
// transposed values by the tensor copy engine into a ring of STAGES. The warpgroups take turns: while one has the tensor core, the
// other makes weights of its scores, so that exponentials and products overlap. In its turn a warpgroup multiplies the weights and
// the values of a tile; behind that queries and keys of the next one, while it adds the first product to its sums. (Both at once
// would need 43 registers more than a thread has.)
//
// Weights never leave their thread: the tokens of values lie in the order in which threads have weights. Behind the 128 rows of a
// tile of values (channels) there are eight of ones, so that column 128 of the product is the sum of the weights as they are
// multiplied. A product starts at zero and is added in float32: sums in two levels, and no accumulator that is read while weights
// of the next tile are written to registers.
//
// Included are the generated header and `hopper/copies.cuh`.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap { char bytes[128]; };

struct Maps { TensorMap q, k, v; };

struct Problem {
  const float* q_scale;
  const float* k_scale;
  const float* v_scale;
  void* y;
  float factor;
  int queries, q_room, keys, k_room, offset;
  int heads, groups, rows, together;  // rows: heads of all sequences; together: of them at a time
};

constexpr int GROUPS = 2, CLUSTER = 1, WIDTH = 128, KEYS = 128, QUERIES = 64 * GROUPS, ONES = 8;
constexpr int SCORES = KEYS / 2, SUMS = (WIDTH + ONES) / 2;
constexpr int Q_BYTES = 64 * WIDTH, K_BYTES = KEYS * WIDTH, V_BYTES = WIDTH * KEYS, V_STEP = V_BYTES + ONES * KEYS;
constexpr int SCALE_BYTES = BY_TOKEN ? KEYS * 4 : 0;
constexpr float PEAK = 8.0f;

#include "products.h"  // start, multiply and finish: of Score (&)[SCORES], and of float (&)[SUMS]
#include "copies.cuh"

struct Ring {
  u32 q, k, v, scale, full_q, full_k, full_v, empty_k, empty_v;
  __device__ __forceinline__ Ring(u32 base)
      : q(base), k(q + GROUPS * Q_BYTES), v(k + STAGES * K_BYTES), scale(v + STAGES * V_STEP), full_q(scale + STAGES * SCALE_BYTES),
        full_k(full_q + 8), full_v(full_k + 8 * STAGES), empty_k(full_v + 8 * STAGES), empty_v(empty_k + 8 * STAGES) {}
};

// A stage of the ring, and the parity of its barriers' phase.
struct Place {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// What a program has to do: those with most keys first, some heads at a time.
struct Work {
  int row, first, tiles, free;  // row: of heads; free: tiles that all of its queries see
  __device__ __forceinline__ Work(const Problem& p) {
    const int along = (p.queries + QUERIES - 1) / QUERIES, each = p.together * along;
    const int group = blockIdx.x / each, at = blockIdx.x % each, heads = min(p.together, p.rows - group * p.together);
    row = group * p.together + at % heads;
    first = (along - 1 - at / heads) * QUERIES;
    int end = p.keys, all = p.keys;
    if (CAUSAL) {
      end = min(end, first + QUERIES + p.offset);
      all = max(0, min(all, first + p.offset + 1));
    }
    tiles = max(0, (end + KEYS - 1) / KEYS);
    free = all / KEYS;
  }
};

__device__ __forceinline__ int key_head(const Problem& p, int row) {
  return row / p.heads * (p.heads / p.groups) + row % p.heads / p.groups;
}

// One thread: the queries, then all tiles.
__device__ __forceinline__ void produce(const Maps& maps, const Problem& p, const Ring& ring, const Work& work) {
  const int pair = key_head(p, work.row);
  expect_bytes(ring.full_q, GROUPS * Q_BYTES);
  for (int g = 0; g < GROUPS; g++)
    copy_box(maps.q, ring.q + g * Q_BYTES, ring.full_q, 0, work.row * p.q_room + work.first + 64 * g, 0);
  Place at;
#pragma unroll 1
  for (int tile = 0; tile < work.tiles; tile++, at.advance()) {
    wait_for(ring.empty_k + 8 * at.stage, at.parity ^ 1);
    const u32 bar = ring.full_k + 8 * at.stage;
    expect_bytes(bar, K_BYTES + SCALE_BYTES);
    copy_box(maps.k, ring.k + at.stage * K_BYTES, bar, 0, pair * p.k_room + tile * KEYS, 0);
    if (BY_TOKEN)
      copy_bytes(p.k_scale + i64(pair) * p.k_room + tile * KEYS, ring.scale + at.stage * SCALE_BYTES, bar, SCALE_BYTES);
    wait_for(ring.empty_v + 8 * at.stage, at.parity ^ 1);
    expect_bytes(ring.full_v + 8 * at.stage, V_BYTES);
    copy_box(maps.v, ring.v + at.stage * V_STEP, ring.full_v + 8 * at.stage, tile * KEYS, pair * WIDTH, 0);
  }
}

__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four weights of e4m3, the first one lowest.
__device__ __forceinline__ u32 rounded(float a, float b, float c, float d) {
  u32 word;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}" : "=r"(word) : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

__device__ __forceinline__ float2 pair_at(u32 address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

// Queries by keys of a tile, all given to the tensor core.
__device__ __forceinline__ void give_scores(Score (&s)[SCORES], u32 q, u32 k) {
  const u64 a = descriptor(q, WIDTH), b = descriptor(k, WIDTH);
  start(s, a, b);
#pragma unroll
  for (int i = 1; i < WIDTH / 32; i++) multiply(s, a + 2 * i, b + 2 * i);
  commit();
}

// Weights by values of a tile, and by ones.
__device__ __forceinline__ void give_sums(float (&d)[SUMS], const u32 (&p)[KEYS / 8], u32 v) {
  const u64 b = descriptor(v, KEYS);
  start(d, p[0], p[1], p[2], p[3], b);
#pragma unroll
  for (int i = 1; i < KEYS / 32; i++) multiply(d, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], b + 2 * i);
  commit();
}

// A thread's two rows of queries, at lane / 4 and 8 below.
struct Rows {
  float factor[2], top[2], shrink[2];
  int end[2];  // the first key that is not seen
};

// Weights of a tile's scores, in e4m3; and what earlier sums shrink by.
template <bool MASKED>
__device__ __forceinline__ void weigh(
    u32 (&p)[KEYS / 8], const Score (&s)[SCORES], Rows& rows, float k_scale, u32 scales, int key) {
  const int lane = threadIdx.x % 4;
  // How many of the keys from its own first one on a thread's queries see: what is compared with them is a constant.
  const int left[2] = {rows.end[0] - key - 2 * lane, rows.end[1] - key - 2 * lane};
  float x[SCORES];
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
    float2 each = {1.0f, 1.0f};
    if (BY_TOKEN) each = pair_at(scales + 4 * (8 * n + 2 * lane));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v = float(s[4 * n + i]);
      if (BY_TOKEN) v *= i % 2 ? each.y : each.x;
      if (MASKED) v = 8 * n + i % 2 < left[i / 2] ? v : -__int_as_float(0x7F800000);
      x[4 * n + i] = v;
    }
  }
  float c[2], base[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = x[2 * r];
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) most = fmaxf(most, fmaxf(x[4 * n + 2 * r], x[4 * n + 2 * r + 1]));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
    c[r] = rows.factor[r] * k_scale;
    const float top = fmaxf(rows.top[r], ceilf(most * c[r]));
    const float at = MASKED && top == -__int_as_float(0x7F800000) ? 0.0f : top;  // no difference of infinities
    rows.shrink[r] = exponential(rows.top[r] - at);
    rows.top[r] = top;
    base[r] = PEAK - at;
  }
#pragma unroll
  for (int j = 0; j < KEYS / 16; j++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = exponential(__fmaf_rn(x[8 * j + 4 * (i / 2) + 2 * r + i % 2], c[r], base[r]));
      p[j / 2 * 4 + j % 2 * 2 + r] = rounded(w[0], w[1], w[2], w[3]);
    }
  }
}

__device__ __forceinline__ void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(group + 2) : "memory"); }
__device__ __forceinline__ void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(group + 2) : "memory"); }

__device__ __forceinline__ void store_pair(void* y, i64 at, float a, float b) {
#if OUT == 0
  *reinterpret_cast<float2*>(static_cast<float*>(y) + at) = make_float2(a, b);
#else
  u32 word;
#if OUT == 1
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(a), "f"(b));
#else
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(a), "f"(b));
#endif
  *reinterpret_cast<u32*>(static_cast<unsigned short*>(y) + at) = word;
#endif
}

// A warpgroup: 64 queries.
__device__ __forceinline__ void attend(const Problem& p, const Ring& ring, const Work& work, int group, int thread) {
  const int lane = thread % 32, pair = key_head(p, work.row), first = work.first + 64 * group + thread / 32 * 16 + lane / 4;
  const float* k_scale = p.k_scale + i64(pair) * (p.k_room / KEYS);
  Rows rows;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    rows.top[r] = -__int_as_float(0x7F800000);
    rows.end[r] = CAUSAL ? min(p.keys, first + 8 * r + p.offset + 1) : p.keys;
    rows.factor[r] = p.q_scale[i64(work.row) * p.q_room + first + 8 * r] * p.factor;
  }
  const u32 q = ring.q + group * Q_BYTES;
  float y[SUMS];
#pragma unroll
  for (int i = 0; i < SUMS; i++) y[i] = 0.0f;
  auto release = [&](u32 bar) {
    if (lane == 0) arrive_at(bar, 0);
  };
  if (work.tiles > 0) {
    Place at;
    wait_for(ring.full_q, 0);
    wait_for(ring.full_k, 0);
    Score s[SCORES];
    if (group == 1) give_turn(0);
    fence();
    give_scores(s, q, ring.k);
    finish<0>(s);
#pragma unroll 1
    for (int tile = 0; tile < work.tiles; tile++) {
      u32 w[KEYS / 8];
      const float of_tile = BY_TOKEN ? 1.0f : k_scale[tile];
      const u32 scales = ring.scale + at.stage * SCALE_BYTES;
      if (tile < work.free)
        weigh<false>(w, s, rows, of_tile, scales, tile * KEYS);
      else
        weigh<true>(w, s, rows, of_tile, scales, tile * KEYS);
      release(ring.empty_k + 8 * at.stage);
      Place next = at;
      next.advance();
      const bool more = tile + 1 < work.tiles;
      float d[SUMS];
      wait_for(ring.full_v + 8 * at.stage, at.parity);
      if (more) wait_for(ring.full_k + 8 * next.stage, next.parity);
      take_turn(group);
      fence();
      give_sums(d, w, ring.v + at.stage * V_STEP);
      finish<0>(d);
      if (more) {
        fence();
        give_scores(s, q, ring.k + next.stage * K_BYTES);
      }
      if (more || group == 0) give_turn(1 - group);  // nobody waits for the last one
      release(ring.empty_v + 8 * at.stage);
#pragma unroll
      for (int i = 0; i < SUMS; i++) y[i] = __fmaf_rn(y[i], rows.shrink[i / 2 % 2], d[i]);
      finish<0>(s);
      at = next;
    }
  }
  const i64 batch = work.row / p.heads, head = work.row % p.heads;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float total = y[WIDTH / 2 + 2 * r], over = reciprocal(total == 0.0f ? 1.0f : total);
    if (first + 8 * r < p.queries) {
      const i64 row = ((batch * p.queries + first + 8 * r) * p.heads + head) * WIDTH;
#pragma unroll
      for (int n = 0; n < WIDTH / 8; n++) {
        const int channel = 8 * n + 2 * (lane % 4);
        const float2 scale = *reinterpret_cast<const float2*>(p.v_scale + i64(pair) * WIDTH + channel);
        store_pair(p.y, row + channel, y[4 * n + 2 * r] * over * scale.x, y[4 * n + 2 * r + 1] * over * scale.y);
      }
    }
  }
}

extern "C" __global__ __launch_bounds__(128 * (GROUPS + 1), 1) void sm90_attention(
    const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const Ring ring((shared_address(memory) + 1023) & ~1023u);
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), role = warp / 4;
  if (thread == 0) {
    init_barrier(ring.full_q, 1);
    for (int s = 0; s < STAGES; s++) {
      init_barrier(ring.full_k + 8 * s, 1);
      init_barrier(ring.full_v + 8 * s, 1);
      init_barrier(ring.empty_k + 8 * s, GROUPS * 4);
      init_barrier(ring.empty_v + 8 * s, GROUPS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // The rows of ones, which no copy writes to.
  for (int i = thread; i < STAGES * ONES * KEYS / 4; i += 128 * (GROUPS + 1)) {
    const u32 at = ring.v + i / (ONES * KEYS / 4) * V_STEP + V_BYTES + i % (ONES * KEYS / 4) * 4;
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(0x38383838) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  sync_cluster();
  const Work work(p);
  if (role == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == GROUPS * 4 && thread % 32 == 0) produce(maps, p, ring, work);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    attend(p, ring, work, role, thread % 128);
  }
}
