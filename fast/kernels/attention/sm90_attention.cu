// Attention of many queries with operands in 8 bits, heads of 128 channels, for Hopper (sm_90a): `sm90.py` says what of and launches
// it; `products.h` is generated there. Codes are those of `fast.kernels.attention.quantize_heads`, steps those of `prefill`.
//
// A program has 128 queries of a head, 64 for each of two warpgroups, then others, until all are done; one thread of a third
// warpgroup loads tiles of 128 keys and of the transposed values by the tensor copy engine into a ring of STAGES.
//
// A warpgroup makes weights of a tile while the tensor core multiplies scores of the next one; in the middle of it these have
// come, and are looked at between exponentials, which take the special unit longer than all else takes the others. Then it
// multiplies weights and values, adds the product to its sums, and gives the scores after next: this it does in turn with the
// other warpgroup, which makes weights meanwhile. Registers of a thread: 66 sums, 64 scores, 16 words of weights, 68 of a product
// or 64 exponents.
//
// Weights never leave their thread: the tokens of values lie in the order in which threads have weights. Behind the 128 rows of a
// tile of values (channels) there are eight of ones, so that column 128 of the product is the sum of the weights as they are
// multiplied. A product starts at zero and is added in float32: sums in two levels.
//
// Included are the generated header, `hopper/copies.cuh` and `head_codes.cuh`.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap { char bytes[128]; };

struct Maps { TensorMap k, v, q; };

struct Problem {
  const void* q;  // scales of queries
  const float* k_scale;
  const float* v_scale;
  void* y;
  float factor;
  int queries, q_room, keys, k_room, offset;
  int heads, groups, rows, together;  // rows: heads of all sequences; together: of them at a time
  int token_major;                    // codes of queries are (B, T, H, 128), else (B, H, T, 128); their scales are (B, H, T)
};

constexpr int GROUPS = 2, CLUSTER = 1, WIDTH = 128, KEYS = 128, QUERIES = 64 * GROUPS, ONES = 8;
constexpr int SCORES = KEYS / 2, SUMS = (WIDTH + ONES) / 2, WORDS = KEYS / 8;
constexpr int Q_BYTES = 64 * WIDTH, K_BYTES = KEYS * WIDTH, V_BYTES = WIDTH * KEYS, V_STEP = V_BYTES + ONES * KEYS;
constexpr int SCALE_BYTES = BY_TOKEN ? KEYS * 4 : 0;
constexpr int MULTIPLYING = 240, OTHERS = 24;  // registers of a thread
constexpr float PEAK = 8.0f;

#include "products.h"  // start, multiply and finish: of Score (&)[SCORES], and of float (&)[SUMS]
#include "copies.cuh"
#include "head_codes.cuh"  // e4m3s_of

struct Ring {
  u32 q, k, v, scale, full_q, empty_q, full_k, full_v, empty_k, empty_v;
  __device__ __forceinline__ Ring(u32 base)
      : q(base), k(q + Q_STAGES * GROUPS * Q_BYTES), v(k + STAGES * K_BYTES), scale(v + STAGES * V_STEP),
        full_q(scale + STAGES * SCALE_BYTES), empty_q(full_q + 8 * Q_STAGES), full_k(empty_q + 8 * Q_STAGES),
        full_v(full_k + 8 * STAGES), empty_k(full_v + 8 * STAGES), empty_v(empty_k + 8 * STAGES) {}
};

// A stage of a ring, and the parity of its barriers' phase.
struct Place {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The same of the ring of queries, whose length is a power of two, in one register: how many units there were.
static_assert((Q_STAGES & (Q_STAGES - 1)) == 0, "a ring of queries of a power of two");
struct QueryPlace {
  int count = 0;
  __device__ __forceinline__ int stage() const { return count % unsigned(Q_STAGES); }
  __device__ __forceinline__ u32 parity() const { return count / unsigned(Q_STAGES) % 2; }
  __device__ __forceinline__ void advance() { count++; }
};

// What a program has to do at a time: tiles with most keys first, some heads after others.
struct Work {
  int row, first, tiles, free;  // row: of heads; free: tiles that all of its queries see
  __device__ __forceinline__ Work(const Problem& p, int unit) {
    const int along = (p.queries + QUERIES - 1) / QUERIES, each = p.together * along;
    const int group = unit / each, at = unit % each, heads = min(p.together, p.rows - group * p.together);
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

// The units of a program, of all: forwards and backwards in turn, so that all programs have as much to do.
struct Units {
  int all, round = 0;
  __device__ __forceinline__ Units(const Problem& p) : all(p.rows * ((p.queries + QUERIES - 1) / QUERIES)) {}
  __device__ __forceinline__ bool more() const { return round * int(gridDim.x) < all; }
  __device__ __forceinline__ int unit() const {
    return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
};

__device__ __forceinline__ int key_head(const Problem& p, int row) {
  return row / p.heads * (p.heads / p.groups) + row % p.heads / p.groups;
}

// One thread: of each unit the queries, then all tiles.
__device__ __forceinline__ void produce(const Maps& maps, const Problem& p, const Ring& ring) {
  Place at;
  QueryPlace of_queries;
#pragma unroll 1
  for (Units units(p); units.more(); units.round++) {
    if (units.unit() >= units.all) continue;
    const Work work(p, units.unit());
    if (work.tiles == 0) continue;
    const int pair = key_head(p, work.row);
    const u32 full = ring.full_q + 8 * of_queries.stage(), to = ring.q + of_queries.stage() * GROUPS * Q_BYTES;
    wait_for(ring.empty_q + 8 * of_queries.stage(), of_queries.parity() ^ 1);
    expect_bytes(full, GROUPS * Q_BYTES);
    const int x = p.token_major ? work.row % p.heads * WIDTH : 0, y = p.token_major ? work.row / p.heads : work.row;
    for (int g = 0; g < GROUPS; g++) copy_box(maps.q, to + g * Q_BYTES, full, x, y * p.q_room + work.first + 64 * g, 0);
    of_queries.advance();
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
__device__ __forceinline__ void give_sums(float (&d)[SUMS], const u32 (&p)[WORDS], u32 v) {
  const u64 b = descriptor(v, KEYS);
  start(d, p[0], p[1], p[2], p[3], b);
#pragma unroll
  for (int i = 1; i < KEYS / 32; i++) multiply(d, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], b + 2 * i);
  commit();
}

__device__ __forceinline__ void add(float (&y)[SUMS], const float (&d)[SUMS], const float (&shrink)[2]) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) y[i] = __fmaf_rn(y[i], shrink[i / 2 % 2], d[i]);
}

// Registers keep what they hold until here, and what is made of it later is made after this.
template <int FROM, int TO, int COUNT>
__device__ __forceinline__ void keep(u32 (&p)[COUNT]) {
#pragma unroll
  for (int i = FROM; i < TO; i++) asm volatile("" : "+r"(p[i])::"memory");
}
template <int FROM, int TO, int COUNT>
__device__ __forceinline__ void keep(int (&p)[COUNT]) {
#pragma unroll
  for (int i = FROM; i < TO; i++) asm volatile("" : "+r"(p[i])::"memory");
}
template <int FROM, int TO, int COUNT>
__device__ __forceinline__ void keep(float (&p)[COUNT]) {
#pragma unroll
  for (int i = FROM; i < TO; i++) asm volatile("" : "+f"(p[i])::"memory");
}

// A thread's two rows of queries, at lane / 4 and 8 below. A weight is 2^(x c + base).
struct Rows {
  float factor[2], top[2], shrink[2], c[2], base[2];
  int end;  // how many keys the first one sees, less those in front of a thread's own ones
  // How many of a tile's keys from its own first one on a thread's queries see: what is compared with them is a constant.
  __device__ __forceinline__ int left(const Problem& p, int row, int key) const {
    const int all = p.keys - 2 * int(threadIdx.x % 4);
    return (CAUSAL ? min(end + 8 * row, all) : all) - key;
  }
};

template <class T>
__device__ __forceinline__ T largest(const T (&x)[SCORES], int row) {
  T most = x[2 * row];
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) most = max(most, max(x[4 * n + 2 * row], x[4 * n + 2 * row + 1]));
  return most;
}

__device__ __forceinline__ float value_of(int s) { return __int_as_float(s); }
__device__ __forceinline__ float value_of(float s) { return s; }
__device__ __forceinline__ void set(int& s, float v) { s = __float_as_int(v); }
__device__ __forceinline__ void set(float& s, float v) { s = v; }

// Scores become float32 in their registers, those of keys that are not seen the least one; and the largest of each row.
template <bool MASKED>
__device__ __forceinline__ void settle(
    Score (&s)[SCORES], float (&most)[2], const Problem& p, const Rows& rows, u32 scales, int key) {
  const int left[2] = {rows.left(p, 0, key), rows.left(p, 1, key)};
  if (!MASKED && !BY_TOKEN)
    for (int r = 0; r < 2; r++) most[r] = float(largest(s, r));
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
    float2 each = {1.0f, 1.0f};
    if (BY_TOKEN) each = pair_at(scales + 4 * (8 * n + 2 * (threadIdx.x % 4)));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v = float(s[4 * n + i]);
      if (BY_TOKEN) v *= i % 2 ? each.y : each.x;
      set(s[4 * n + i], MASKED && 8 * n + i % 2 >= left[i / 2] ? -__int_as_float(0x7F800000) : v);
    }
  }
  if (MASKED || BY_TOKEN)
    for (int r = 0; r < 2; r++) {
      float top = value_of(s[2 * r]);
#pragma unroll
      for (int n = 0; n < KEYS / 8; n++)
        top = fmaxf(top, fmaxf(value_of(s[4 * n + 2 * r]), value_of(s[4 * n + 2 * r + 1])));
      most[r] = top;
    }
}

// The largest score of each row so far, and what earlier sums shrink by.
__device__ __forceinline__ void raise(Rows& rows, const float (&found)[2], float k_scale) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float most = found[r];
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 1));
    most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, 2));
    // Of zeros by zeros the least number, or what is hidden would be infinity times 0. NaN stays.
    asm("max.NaN.f32 %0, %1, 0f00000001;" : "=f"(rows.c[r]) : "f"(rows.factor[r] * k_scale));
    const float top = fmaxf(rows.top[r], ceilf(most * rows.c[r]));
    const float at = top == -__int_as_float(0x7F800000) ? 0.0f : top;  // no difference of infinities
    rows.shrink[r] = exponential(rows.top[r] - at);
    rows.top[r] = top;
    rows.base[r] = PEAK - at;
  }
}

// Exponents of weights.
__device__ __forceinline__ void lower(float (&x)[SCORES], const Score (&s)[SCORES], const Rows& rows) {
#pragma unroll
  for (int i = 0; i < SCORES; i++) x[i] = __fmaf_rn(value_of(s[i]), rows.c[i / 2 % 2], rows.base[i / 2 % 2]);
}

// Words FROM to TO of the weights of a tile, in e4m3.
template <int FROM, int TO>
__device__ __forceinline__ void weigh(u32 (&p)[WORDS], const float (&x)[SCORES]) {
#pragma unroll
  for (int j = FROM; j < TO; j++) {
    const int at = j / 4 * 16 + j / 2 % 2 * 8 + j % 2 * 2;
    float w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = exponential(x[at + 4 * (i / 2) + i % 2]);
    p[j] = e4m3s_of(w[0], w[1], w[2], w[3]);
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

// The queries of a warpgroup in all units.
struct Group {
  const Problem& p;
  const Ring& ring;
  const int group, lane;
  Place at;  // of the tile whose values come next
  QueryPlace of_queries;

  __device__ __forceinline__ Group(const Problem& p, const Ring& ring, int group)
      : p(p), ring(ring), group(group), lane(threadIdx.x % 32) {
    if (group == 1) give_turn(0);
  }

  __device__ __forceinline__ void release(u32 bar) {
    if (lane == 0) arrive_at(bar, 0);
  }

  __device__ __forceinline__ void attend(const Work& work) {
    const int pair = key_head(p, work.row), first = work.first + own_row();
    Rows rows;
    float y[SUMS];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      rows.top[r] = -__int_as_float(0x7F800000);
      rows.factor[r] = static_cast<const float*>(p.q)[i64(work.row) * p.q_room + first + 8 * r] * p.factor;
    }
    rows.end = first + p.offset + 1 - 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < SUMS; i++) y[i] = 0.0f;
    if (work.tiles > 0) add_tiles(y, rows, work, p.k_scale + i64(pair) * (p.k_room / KEYS));
    store(y, work, pair);
  }

  // A thread's first row.
  __device__ __forceinline__ int own_row() const {
    const int thread = threadIdx.x;
    return thread / 32 * 16 + thread % 32 / 4;
  }

  // Scores of a tile in float32, and the rows' largest ones; meanwhile other work.
  template <class Others>
  __device__ __forceinline__ void settle_tile(
      Score (&s)[SCORES], Rows& rows, const Work& work, int tile, const Place& place, float k_scale, const Others& others) {
    const u32 scales = ring.scale + place.stage * SCALE_BYTES;
    float most[2];
    if (tile < work.free) {
      settle<false>(s, most, p, rows, scales, tile * KEYS);
      raise(rows, most, k_scale);
      others();
    } else {
      settle<true>(s, most, p, rows, scales, tile * KEYS);
      raise(rows, most, k_scale);
      others();
    }
    release(ring.empty_k + 8 * place.stage);
  }

  __device__ __forceinline__ void wait_for_keys(const Place& place) { wait_for(ring.full_k + 8 * place.stage, place.parity); }

  __device__ __forceinline__ void give_tile(Score (&s)[SCORES], const Place& place) {
    fence();
    give_scores(s, ring.q + of_queries.stage() * GROUPS * Q_BYTES + group * Q_BYTES, ring.k + place.stage * K_BYTES);
  }

  // All tiles. Waits for keys and values stand where they part what is in front from what is behind: the compiler moves nothing
  // across their loops, and would else make all exponentials in front of the wait for scores, or largest ones behind products.
  __device__ __forceinline__ void add_tiles(float (&y)[SUMS], Rows& rows, const Work& work, const float* k_scale) {
    Score s[SCORES];
    float x[SCORES];
    u32 w[WORDS];
    Place ahead = at;  // of the tile whose scores come next
    float of_tile = BY_TOKEN ? 1.0f : k_scale[0];
    wait_for(ring.full_q + 8 * of_queries.stage(), of_queries.parity());
    wait_for_keys(ahead);
    give_tile(s, ahead);
    finish<0>(s);
    settle_tile(s, rows, work, 0, ahead, of_tile, [] {});
    lower(x, s, rows);
    ahead.advance();
    if (work.tiles > 1) {
      wait_for_keys(ahead);
      give_tile(s, ahead);
    }
#pragma unroll 1
    for (int tile = 1;; tile++) {
      const bool more = tile < work.tiles;
      const float shrink[2] = {rows.shrink[0], rows.shrink[1]};
      float d[SUMS];
      if (!BY_TOKEN && more) of_tile = k_scale[tile];
      weigh<0, WORDS / 2>(w, x);
      keep<0, WORDS / 2>(w);
      wait_for(ring.full_v + 8 * at.stage, at.parity);
      finish<0>(s);
      keep<SCORES / 2, SCORES>(x);
      auto others = [&] { weigh<WORDS / 2, WORDS>(w, x); };
      if (more)
        settle_tile(s, rows, work, tile, ahead, of_tile, others);
      else
        others();
      keep<0, WORDS>(w);
      keep<0, SCORES>(s);
      keep<0, 2>(rows.top);
      keep<0, 2>(rows.shrink);
      Place next = ahead;
      next.advance();
      if (tile + 1 < work.tiles) wait_for_keys(next);
      take_turn(group);
      fence();
      give_sums(d, w, ring.v + at.stage * V_STEP);
      finish<0>(d);
      keep<0, WORDS>(w);
      release(ring.empty_v + 8 * at.stage);
      at.advance();
      add(y, d, shrink);
      if (!more) break;
      lower(x, s, rows);
      keep<0, SCORES>(x);
      ahead = next;
      if (tile + 1 < work.tiles) give_tile(s, ahead);
      give_turn(1 - group);
    }
    give_turn(1 - group);
    release(ring.empty_q + 8 * of_queries.stage());
    of_queries.advance();
  }

  __device__ __forceinline__ void store(const float (&y)[SUMS], const Work& work, int pair) {
    const i64 batch = work.row / p.heads, head = work.row % p.heads;
    const int first = work.first + own_row();
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
};

extern "C" __global__ __launch_bounds__(128 * (GROUPS + 1), 1) void sm90_attention(
    const __grid_constant__ Maps maps, const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  const Ring ring((shared_address(memory) + 1023) & ~1023u);
  const int thread = threadIdx.x, warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), role = warp / 4;
  if (thread == 0) {
    for (int s = 0; s < Q_STAGES; s++) {
      init_barrier(ring.full_q + 8 * s, 1);
      init_barrier(ring.empty_q + 8 * s, GROUPS * 4);
    }
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
  if (role == GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OTHERS));
    if (warp == GROUPS * 4 && thread % 32 == 0) produce(maps, p, ring);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING));
    Group group(p, ring, role);
#pragma unroll 1
    for (Units units(p); units.more(); units.round++)
      if (units.unit() < units.all) group.attend(Work(p, units.unit()));
    if (role == 0) take_turn(0);  // the other's last one
  }
}
