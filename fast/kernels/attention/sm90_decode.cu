// Attention of one query of each head over a stored cache, for Hopper: `sm90_decode.py` says what of and launches it.
//
// A program has a part of the tokens of one key head, its WARPS warps tiles of TILE tokens in turn, each with sums of its own that
// are added at the end: nothing waits for a barrier before that. Up to eight queries share a key head; they are the eight columns
// of `mma.m16n8k16`, tokens are the rows of its first operand in the product of scores, channels of values in the second one.
//
// Codes go from memory to the registers that the tensor core reads: what stands where in the reduction is free, so a lane reads
// bytes of a token that lie side by side and queries are permuted alike. Of values a register has to have two tokens of one
// channel: those of neighbouring tokens are exchanged by PRMT. Weights are transposed by `movmatrix`, eight tokens by eight queries.
//
// Codes become float16 exactly, beside queries over a power of two each. A token's scale of keys multiplies its score; that of
// values its weight, before that is rounded to 16 bits, over a power of two that follows tiles' largest weights times their largest
// scales. What nobody looks at has a scale of 0 and is no part of that. Values as computed have no scale: their weights are rounded
// over a power so small that it is that of the stored ones.
//
// Defined: KIND (0: 16-bit values, 1: e4m3, 2: int8, 3: int4), WIDTH, HEADS (queries of a key head), BF16 (of queries and values),
// SCALES (0: none, 1: a token, 2: one of all, 3: one of a head, 4: keys by channel of GROUP tokens, values by token), ZERO, GROUP,
// TILE, WINDOW (tokens as computed beside), MASKED, RESIDENT (programs of a multiprocessor), CLUSTER (1, or parts of a key head, which
// lie in a cluster and add their sums in each other's shared memory).

#include "softmax.cuh"

constexpr int WARPS = 4, BITS = KIND == 0 ? 16 : KIND == 3 ? 4 : 8, ROW = WIDTH * BITS / 8;
// Bytes of a token that a lane reads at once, how often, and words in all: of keys a quarter of a token, of values an eighth.
constexpr int K_LANE = ROW / 4, K_PIECE = K_LANE < 16 ? K_LANE : 16, K_WORDS = K_LANE / 4;
constexpr int V_LANE = ROW / 8, V_PIECE = V_LANE < 16 ? V_LANE : 16, V_WORDS = V_LANE / 4;
constexpr int STEPS = WIDTH / 16, OCTETS = TILE / 8, RUN = V_PIECE * 8 / BITS;
constexpr bool BY_CHANNEL = SCALES == 4, BY_TOKEN = SCALES == 1 || SCALES == 4;
constexpr bool HAS_NAN = KIND < 2;  // codes of values
constexpr int SPAN = BY_CHANNEL ? GROUP : TILE;  // tokens of a warp's turn

#include "sm90_decode_codes.cuh"

struct Problem {
  const unsigned short* q;
  const char* k;
  const float* k_scale;
  const unsigned char* k_zero;
  const char* v;
  const float* v_scale;
  const unsigned short* k_computed;
  const unsigned short* v_computed;
  const i64* length;
  const unsigned char* mask;
  unsigned short* y;
  float* parts;  // (key heads of all, queries, parts, WIDTH)
  float* stats;  // the largest score of each and its sum of weights
  i64 q_batch, q_head, mask_batch;
  float factor;
  int key_heads, k_room, room, splits, sinks, ring, residual, open;  // open: tokens of a group that is quantized when it is full
};

__device__ __forceinline__ u32 transposed(u32 word) {
  u32 found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(word));
  return found;
}

// Products of float16, or of the queries' dtype.
template <bool COMPUTED>
__device__ __forceinline__ void multiply(float (&d)[4], u32 a, u32 b, u32 c, u32 e, u32 f, u32 g) {
  if constexpr (COMPUTED && BF16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b), "r"(c), "r"(e), "r"(f), "r"(g));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b), "r"(c), "r"(e), "r"(f), "r"(g));
}

// Largest, or added, of the lanes that have other tokens.
__device__ __forceinline__ float largest(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(ALL, x, step));
  return x;
}

__device__ __forceinline__ float added(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(ALL, x, step);
  return x;
}

// What a lane knows of its own two queries, 2 * (lane % 4) and the next one: the largest score so far, the power of two that sums
// are over (the same without scales of tokens), its own part of the weights' sum; sums by channel.
struct Sums {
  float top[2], over[2], total[2], y[STEPS][4];
};

// Weights of scores, in 16 bits and transposed: tokens 8 i + 2 (lane % 4) and the next one of query lane / 4.
template <bool COMPUTED, int COUNT>
__device__ __forceinline__ void weigh(u32 (&w)[COUNT], float (&s)[COUNT][2], const float (&scale)[COUNT], Sums& sums) {
  float most[2] = {s[0][0], s[0][1]}, shrink[2], base[2], share[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 1; i < COUNT; i++) most[0] = fmaxf(most[0], s[i][0]), most[1] = fmaxf(most[1], s[i][1]);
  // Of 16 bits the largest weights that fit, as small values have small scales.
  float power = BF16 ? -64.0f : -14.0f;
  if constexpr (BY_TOKEN && !COMPUTED) {
    float longest = scale[0];
#pragma unroll
    for (int i = 1; i < COUNT; i++) longest = fmaxf(longest, scale[i]);
    const int exponent = int(__float_as_uint(largest(longest)) >> 23 & 255);
    power = float(min(max(exponent, 1), 253) - 127);
  }
#pragma unroll
  for (int c = 0; c < 2; c++) {
    const float found = largest(most[c]), top = fmaxf(sums.top[c], found);
    base[c] = top == -infinity() ? 0.0f : top;  // no difference of infinities
    const float less = exponential(sums.top[c] - base[c]);
    sums.total[c] *= less;
    sums.top[c] = top;
    if constexpr (BY_TOKEN) {
      const float over = fmaxf(sums.over[c], found + power), at = over == -infinity() ? 0.0f : over;
      shrink[c] = exponential(sums.over[c] - at);
      share[c] = exponential(base[c] - at);
      sums.over[c] = over;
    } else {
      shrink[c] = less;
    }
  }
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float p[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      p[c] = exponential(s[i][c] - base[c]);
      sums.total[c] += p[c];
      if constexpr (BY_TOKEN) p[c] *= share[c];  // first: a share of a tile of tiny scales is large
      if constexpr (BY_TOKEN && !COMPUTED) p[c] *= scale[i];
    }
    w[i] = transposed(COMPUTED ? rounded(p[0], p[1]) : float16s(p[0], p[1]));
  }
  // Seldom beyond the first tiles.
  if (__any_sync(ALL, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
    for (int m = 0; m < STEPS; m++) {
#pragma unroll
      for (int i = 0; i < 4; i++) sums.y[m][i] *= shrink[i % 2];
    }
  }
}

// What a lane has read of a tile: of keys tokens 8 i + lane / 4, of values 8 i + 2 (lane % 4) and the next one.
struct Tile {
  u32 k[OCTETS][K_WORDS], v[OCTETS][2][V_WORDS];
  float k_scale[OCTETS], v_scale[OCTETS];
  unsigned char seen[OCTETS];
};

// Words that a warp's shared memory has for scales and zero points of a quarter of the channels.
constexpr int SHARED_ROW = 8 * STEPS + 4;

struct Place {
  const Problem& p;
  uint4* base;  // of this lane every 32nd one: queries over a power of two, where scales of channels multiply them
  u32* shared;  // of the warp: a group's scales and zero points in 16 bits
  const char *k, *v;  // of the lane's own first token and bytes, as scales of tokens
  const float *k_scale, *v_scale;
  const unsigned char* k_zero;
  const unsigned char* mask;
  int lane, quarter, eighth, last;  // last: of the stored tokens

  // What the lane's own two queries were divided by, behind zero points.
  __device__ __forceinline__ float* powers() const {
    return reinterpret_cast<float*>(shared + 4 * SHARED_ROW + 2 * quarter);
  }

  // On to the tile so many tokens behind; kept in registers, and not made anew for each tile.
  __device__ __forceinline__ void advance(int tokens) {
    k += i64(tokens) * ROW, v += i64(tokens) * ROW;
    if constexpr (SCALES == 1) k_scale += tokens;
    if constexpr (BY_TOKEN) v_scale += tokens;
    asm("" : "+l"(k), "+l"(v));
    if constexpr (BY_TOKEN) asm("" : "+l"(v_scale));
    if constexpr (SCALES == 1) asm("" : "+l"(k_scale));
  }

  // A tile that ends inside is read from one address of each kind; of others the last token is read again.
  template <bool WHOLE, int BYTES>
  __device__ __forceinline__ void read(u32* to, const void* from, int start, int constant, int own, int size, int behind) const {
    const char* at = static_cast<const char*>(from);
    if constexpr (WHOLE)
      load_constant<BYTES>(to, at + (constant * size + behind));
    else
      load_constant<BYTES>(to, at + i64(min(constant, last - own - start)) * size + behind);
  }

  template <bool WHOLE>
  __device__ __forceinline__ void keys(Tile& t, int start) const {
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
#pragma unroll
      for (int piece = 0; piece < K_LANE / K_PIECE; piece++)
        read<WHOLE, K_PIECE>(t.k[i] + piece * (K_PIECE / 4), k, start, 8 * i, eighth, ROW, piece * 4 * K_PIECE);
      if constexpr (SCALES == 1) read<WHOLE, 4>(reinterpret_cast<u32*>(t.k_scale + i), k_scale, start, 8 * i, eighth, 4, 0);
    }
  }

  template <bool WHOLE>
  __device__ __forceinline__ void values(Tile& t, int start) const {
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
      if constexpr (BY_TOKEN) read<WHOLE, 4>(reinterpret_cast<u32*>(t.v_scale + i), v_scale, start, 8 * i, eighth, 4, 0);
      if constexpr (MASKED) t.seen[i] = mask[WHOLE ? start + 8 * i : min(start + 8 * i, last - eighth)];
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int piece = 0; piece < V_LANE / V_PIECE; piece++)
          read<WHOLE, V_PIECE>(t.v[i][e] + piece * (V_PIECE / 4), v, start, 8 * i + e, 2 * quarter, ROW, piece * 8 * V_PIECE);
      }
    }
  }

  __device__ __forceinline__ void read_keys(Tile& t, int start) const {
    if (start + TILE - 1 <= last)
      keys<true>(t, start);
    else
      keys<false>(t, start);
  }

  __device__ __forceinline__ void read_values(Tile& t, int start) const {
    if (start + TILE - 1 <= last)
      values<true>(t, start);
    else
      values<false>(t, start);
  }
};

// Queries as the second operand: of each step two words, and what scores are multiplied by for the lane's own two queries.
struct Queries {
  u32 raw[STEPS][2], halves[STEPS][2];  // as they are; over a power of two, and perhaps times scales of channels
  float factor[2], beside[2];
};

// A number of the query lane / 4 to those lanes that have its scores.
__device__ __forceinline__ void give(float (&to)[2], float x, int lane) {
#pragma unroll
  for (int c = 0; c < 2; c++) to[c] = __shfl_sync(ALL, x, (2 * (lane % 4) + c) * 4);
}

// Numbers as float16 over a power of two, which comes back: the largest one below all lanes' of a query.
__device__ __forceinline__ float divide(u32 (&halves)[STEPS][2], const float (&x)[STEPS][2][2]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) most = fmaxf(most, fabsf(x[i][j / 2][j % 2]));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
  const u32 power = __float_as_uint(most) & 0x7F800000;
  const float less = __uint_as_float(0x7F000000 - power);
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) halves[i][j] = float16s(x[i][j][0] * less, x[i][j][1] * less);
  }
  return __uint_as_float(power);
}

__device__ __forceinline__ void read_queries(Queries& q, const Place& at, const unsigned short* from) {
#pragma unroll
  for (int word = 0; word < K_WORDS; word++) {
#pragma unroll
    for (int pair = 0; pair < PAIRS; pair++) {
      u32 made = 0;
      if (at.eighth < HEADS)
        made = from[channel(word, pair, 0, at.quarter)] | u32(from[channel(word, pair, 1, at.quarter)]) << 16;
      const int place = word * PAIRS + pair;
      q.raw[place / 2][place % 2] = made;
    }
  }
  if constexpr (KIND == 0) q.factor[0] = q.factor[1] = at.p.factor;
  q.beside[0] = q.beside[1] = 0.0f;
  if constexpr (KIND != 0) {
    float x[STEPS][2][2];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) x[i][j / 2][j % 2] = half_of(q.raw[i][j / 2], j % 2);
    }
    give(q.factor, divide(q.halves, x), at.lane);
    if constexpr (BY_CHANNEL) {
#pragma unroll
      for (int i = 0; i < STEPS / 2; i++)
        at.base[32 * i] = make_uint4(q.halves[2 * i][0], q.halves[2 * i][1], q.halves[2 * i + 1][0], q.halves[2 * i + 1][1]);
    }
    if constexpr (BY_CHANNEL) {
#pragma unroll
      for (int c = 0; c < 2; c++) at.powers()[c] = q.factor[c];
    }
    q.factor[0] *= at.p.factor, q.factor[1] *= at.p.factor;
    if constexpr (SCALES == 2 || SCALES == 3) q.factor[0] *= *at.k_scale, q.factor[1] *= *at.k_scale;
  }
}

// A group's scales of channels over a power of two, which comes back, and its zero points, in 16 bits, where all lanes find them:
// by the places of a quarter, zero points twice, as two rows of an operand. Each lane makes some of one quarter; `scale` and `zero`
// are of the first.
constexpr int OWN_PLACES = WIDTH / 64;
__device__ __forceinline__ int own_channel(int lane) {
  const int first = lane % 8 * OWN_PLACES;
  return channel(first / PAIRS, first % PAIRS, 0, lane / 8);
}

__device__ __forceinline__ u32 share_scales(const Place& at, const float* scale, const unsigned char* zero) {
  float x[OWN_PLACES][2], most = 0.0f;
  u32 z[2 * OWN_PLACES];
#pragma unroll
  for (int i = 0; i < OWN_PLACES; i++) {
    const int low = channel(0, i, 0, 0), high = channel(0, i, 1, 0);
    x[i][0] = scale[low], x[i][1] = scale[high];
    if constexpr (ZERO) z[2 * i] = prmt(zero[low], zero[high], 0x5410);
    most = fmaxf(most, fmaxf(x[i][0], x[i][1]));
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
  const u32 power = __float_as_uint(most) & 0x7F800000;
  const float less = __uint_as_float(0x7F000000 - power);
  int lane = at.lane;
  asm volatile("" : "+r"(lane));  // the address is made anew: no register waits for it
  u32 halves[OWN_PLACES], *to = at.shared + lane / 8 * SHARED_ROW + lane % 8 * 4 * OWN_PLACES;
#pragma unroll
  for (int i = 0; i < OWN_PLACES; i++) {
    halves[i] = float16s(x[i][0] * less, x[i][1] * less);
    // (code ^ 128) in the fraction of 1024, less 1152, or less 1080 where codes are 72 more: those of odd places.
    const bool raised = RAISED_KEYS && (OWN_PLACES == 2 ? i : lane) % 2 == 1;
    if constexpr (ZERO)
      asm("sub.f16x2 %0, %1, %2;" : "=r"(z[2 * i]) : "r"(z[2 * i] ^ 0x64806480), "r"(raised ? 0x64386438 : 0x64806480));
    z[2 * i + 1] = z[2 * i];
  }
  __syncwarp();  // all have read those of the group before
  if constexpr (ZERO) store<8 * OWN_PLACES>(to, z);
  store<4 * OWN_PLACES>(to + 2 * OWN_PLACES, halves);
  __syncwarp();
  return power;
}

// Queries times a group's scales of channels, over a power of two, and their products with its zero points.
__device__ __forceinline__ void take_scales(Queries& q, const Place& at, int group, int last) {
  if constexpr (BY_CHANNEL) {
    const i64 first = i64(group) * WIDTH, next = i64(min(group + WARPS, last)) * WIDTH;
    const int own = own_channel(at.lane);
    const u32 power = share_scales(at, at.k_scale + first + own, at.k_zero + first + own);
    const float factor = __uint_as_float(power) * at.p.factor;
    q.factor[0] = at.powers()[0] * factor, q.factor[1] = at.powers()[1] * factor;
    // What the warp's next group needs, on its way meanwhile.
    asm volatile("prefetch.global.L1 [%0];" ::"l"(at.k_scale + next + own));
    if constexpr (ZERO) asm volatile("prefetch.global.L1 [%0];" ::"l"(at.k_zero + next + own));
    const u32* from = at.shared + at.quarter * SHARED_ROW;
    u32 base[4];
    float d[2][4] = {};  // two sums, which wait for each other less
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      u32 halves[2], z[4];
      if (i % 2 == 0) load<16>(base, at.base + 16 * i);
#pragma unroll
      for (int j = 0; j < 2; j += OWN_PLACES) {
        load<4 * OWN_PLACES>(halves + j, from + 4 * (2 * i + j) + 2 * OWN_PLACES);
        if constexpr (ZERO) load<8 * OWN_PLACES>(z + 2 * j, from + 4 * (2 * i + j));
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(q.halves[i][j]) : "r"(base[i % 2 * 2 + j]), "r"(halves[j]));
      // As a token whose codes are the zero points, in all rows.
      if constexpr (ZERO) multiply<false>(d[i % 2], z[0], z[1], z[2], z[3], q.halves[i][0], q.halves[i][1]);
    }
    q.beside[0] = d[0][0] + d[1][0], q.beside[1] = d[0][1] + d[1][1];
  }
}

// Scores of a tile before scales.
__device__ __forceinline__ void score(float (&s)[OCTETS][2], const Queries& q, const Tile& t) {
#pragma unroll
  for (int j = 0; j < OCTETS / 2; j++) {
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    u32 low[2 * STEPS], high[2 * STEPS];  // of tokens 16 j + lane / 4, and 8 behind
#pragma unroll
    for (int word = 0; word < K_WORDS; word++) {
      u32 a[PAIRS], b[PAIRS];
      key_pairs(a, t.k[2 * j][word]);
      key_pairs(b, t.k[2 * j + 1][word]);
#pragma unroll
      for (int i = 0; i < PAIRS; i++) low[word * PAIRS + i] = a[i], high[word * PAIRS + i] = b[i];
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const u32* b = KIND == 0 ? q.raw[i] : q.halves[i];
      multiply<KIND == 0>(d, low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1], b[0], b[1]);
    }
    s[2 * j][0] = d[0], s[2 * j][1] = d[1], s[2 * j + 1][0] = d[2], s[2 * j + 1][1] = d[3];
  }
}

// The weighted values of a tile.
__device__ __forceinline__ void add_values(Sums& sums, const u32 (&w)[OCTETS], const Tile& t) {
#pragma unroll
  for (int j = 0; j < OCTETS / 2; j++) {
#pragma unroll
    for (int word = 0; word < V_WORDS; word++) {
      u32 low[2 * PAIRS], high[2 * PAIRS];
      value_pairs(low, t.v[2 * j][0][word], t.v[2 * j][1][word]);
      value_pairs(high, t.v[2 * j + 1][0][word], t.v[2 * j + 1][1][word]);
#pragma unroll
      for (int u = 0; u < PAIRS; u++)
        multiply<KIND == 0>(sums.y[word * PAIRS + u], low[2 * u], low[2 * u + 1], high[2 * u], high[2 * u + 1], w[2 * j], w[2 * j + 1]);
    }
  }
}

#if WINDOW
#include "sm90_decode_window.cuh"
#endif

// Values that nobody looks at are 0: of NaN even a weight of 0 makes NaN.
__device__ __forceinline__ void hide_values(Tile& t, const Place& at) {
  u32 hidden = 0;  // a bit an octet, of the token that the lane has scores of
#pragma unroll
  for (int i = 0; i < OCTETS; i++) hidden |= u32(t.seen[i] == 0) << i;
  if (!__any_sync(ALL, hidden != 0)) return;
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const u32 own = __shfl_sync(ALL, hidden, (2 * at.quarter + e) * 4);
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
#pragma unroll
      for (int word = 0; word < V_WORDS; word++) t.v[i][e][word] = own >> i & 1 ? 0 : t.v[i][e][word];
    }
  }
}

// A tile's scores times scales, -infinity where nobody looks; values have a scale of 0 there.
__device__ __forceinline__ void scale_scores(
    float (&s)[OCTETS][2], const Queries& q, Tile& t, const Place& at, int start, int end) {
#pragma unroll
  for (int i = 0; i < OCTETS; i++) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float x = s[i][c];
      if constexpr (ZERO) x -= q.beside[c];
      x *= q.factor[c];
      if constexpr (SCALES == 1) x *= t.k_scale[i];
      s[i][c] = x;
    }
  }
  const int least = WINDOW ? at.p.sinks : 0;
  if (!MASKED && start + TILE <= end && start >= least) return;
#pragma unroll
  for (int i = 0; i < OCTETS; i++) {
    const int token = start + 8 * i + at.eighth;
    const bool seen = token < end && token >= least && (!MASKED || t.seen[i]);
    if constexpr (BY_TOKEN) t.v_scale[i] = seen ? t.v_scale[i] : 0.0f;
    s[i][0] = seen ? s[i][0] : -infinity(), s[i][1] = seen ? s[i][1] : -infinity();
    if constexpr (MASKED && HAS_NAN) t.seen[i] = seen;
  }
  if constexpr (MASKED && HAS_NAN) hide_values(t, at);
}

// The turns of a warp: of spans of SPAN tokens each WARPS-th one of a part.
__device__ __forceinline__ void begin(Tile& t, Place& at, int first, int end) {
  if (first >= end) return;
  at.advance(first);
  at.read_keys(t, first);
  at.read_values(t, first);
}

__device__ __forceinline__ void attend(Sums& sums, Queries& q, Tile& t, Place& at, int first, int end) {
  if (first >= end) return;
  if (WINDOW) begin(t, at, first, end);
#pragma unroll 1
  for (int start = first; start < end;) {
    if constexpr (BY_CHANNEL) {
      if (start % GROUP == 0) take_scales(q, at, start / GROUP, (end - 1) / GROUP);
    }
    int next = start + TILE;
    if (next % SPAN == 0) next += (WARPS - 1) * SPAN;
    const int ahead = next < end ? next : start;
    float s[OCTETS][2];
    score(s, q, t);
    scale_scores(s, q, t, at, start, end);
    at.advance(ahead - start);
    at.read_keys(t, ahead);
    u32 w[OCTETS];
    weigh<KIND == 0>(w, s, t.v_scale, sums);
    add_values(sums, w, t);
    at.read_values(t, ahead);
    start = next;
  }
}

#include "sm90_decode_sums.cuh"

#if CLUSTER > 1
#define TOGETHER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TOGETHER
#endif

extern "C" __global__ __launch_bounds__(32 * WARPS, RESIDENT) TOGETHER void sm90_decode(const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
  const int split = blockIdx.x % p.splits, pair = blockIdx.x / p.splits;
  const int batch = pair / p.key_heads, key_head = pair % p.key_heads;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const int count = int(*p.length), all = stored_tokens(count, p.residual, p.open);
  constexpr int BLOCK = WARPS * SPAN;
  // Tokens as computed are of the part behind the last token, which has no others, or of the last part. Other parts behind it
  // are not read.
  const int each = blocks_of_a_part(all, BLOCK, p.splits), first = split * each * BLOCK;
  const int beside = WINDOW ? min(parts_with_tokens(all, BLOCK, each), p.splits - 1) : 0;
  if (CLUSTER == 1 && split != beside && first >= all) return;
  const int quarter = lane % 4, eighth = lane / 4;
  Place at = {p, shared.base[warp][0] + lane, reinterpret_cast<u32*>(shared.scales[warp]),
              p.k + (i64(pair) * p.k_room + eighth) * ROW + quarter * K_PIECE,
              p.v + (i64(pair) * p.room + 2 * quarter) * ROW + eighth * V_PIECE,
              p.k_scale, p.v_scale, p.k_zero, p.mask + batch * p.mask_batch + eighth, lane, quarter, eighth, all - 1};
  if (SCALES == 1) at.k_scale += i64(pair) * p.room + eighth;
  if (BY_CHANNEL) {
    const i64 first = i64(pair) * (p.k_room / GROUP) * WIDTH;
    at.k_scale += first, at.k_zero += first;
  }
  if (BY_TOKEN) at.v_scale += i64(pair) * p.room + eighth;
  if (SCALES == 3) at.k_scale += key_head, at.v_scale += key_head;
  if (BY_CHANNEL) asm("" : "+r"(at.quarter), "+r"(at.eighth));
  // What adds parts may come, and waits for them.
  if constexpr (CLUSTER == 1) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int own = first + warp * SPAN, end = min(first + each * BLOCK, all);
  Tile t;
  if (!WINDOW) begin(t, at, own, end);
  Queries q;
  read_queries(q, at, p.q + batch * p.q_batch + (key_head * HEADS + min(at.eighth, HEADS - 1)) * p.q_head);
  Sums sums;
#pragma unroll
  for (int c = 0; c < 2; c++) sums.top[c] = sums.over[c] = -infinity(), sums.total[c] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * STEPS; i++) sums.y[i / 4][i % 4] = 0.0f;
#if WINDOW
  if (split == beside) {
    for (int slot = 16 * warp; slot < p.sinks + p.ring; slot += 16 * WARPS) of_computed(sums, q, at, pair, slot, count);
  }
#endif
  attend(sums, q, t, at, own, end);
  give_out(shared, sums, at, pair, split, warp);
}
