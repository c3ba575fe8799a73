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
// TILE, WINDOW (tokens as computed beside), MASKED, RESIDENT (programs of a multiprocessor).

typedef unsigned int u32;
typedef long long i64;

constexpr int WARPS = 4, BITS = KIND == 0 ? 16 : KIND == 3 ? 4 : 8, ROW = WIDTH * BITS / 8;
// Bytes of a token that a lane reads at once, how often, and words in all: of keys a quarter of a token, of values an eighth.
constexpr int K_LANE = ROW / 4, K_PIECE = K_LANE < 16 ? K_LANE : 16, K_WORDS = K_LANE / 4;
constexpr int V_LANE = ROW / 8, V_PIECE = V_LANE < 16 ? V_LANE : 16, V_WORDS = V_LANE / 4;
constexpr int STEPS = WIDTH / 16, OCTETS = TILE / 8, RUN = V_PIECE * 8 / BITS;
constexpr bool BY_CHANNEL = SCALES == 4, BY_TOKEN = SCALES == 1 || SCALES == 4;
constexpr int SPAN = BY_CHANNEL ? GROUP : TILE;  // tokens of a warp's turn
constexpr u32 ALL = 0xFFFFFFFF;

struct Problem {
  const unsigned short* q;
  const char* k;
  const float* k_scale;
  const signed char* k_zero;
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

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ float exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <int BYTES>
__device__ __forceinline__ void load(u32* to, const void* from) {
  if constexpr (BYTES == 16) {
    const uint4 v = *static_cast<const uint4*>(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (BYTES == 8) {
    const uint2 v = *static_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *static_cast<const u32*>(from);
  }
}

// The float of one half of a word of queries.
__device__ __forceinline__ float half_of(u32 word, int high) {
#if BF16
  return __uint_as_float(high ? word & 0xFFFF0000 : word << 16);
#else
  float v;
  if (high) word >>= 16;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(v) : "r"(word));
  return v;
#endif
}

__device__ __forceinline__ u32 float16s(float low, float high) {
  u32 word;
  asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
  return word;
}

// Two numbers of the queries' dtype.
__device__ __forceinline__ u32 rounded(float low, float high) {
#if BF16
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(low), "f"(high));
  return word;
#else
  return float16s(low, high);
#endif
}

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

// float16 of eight nibbles: of places 0, 1, 2 and 3 of both halves of a word. (code ^ 8) in the fraction of 1024, less 1032; of
// the higher nibble of a byte 16 times as much, over 16, less 72.
__device__ __forceinline__ void nibbles(u32* h, u32 x) {
  asm("{\n.reg .b32 y, a, b, c, d;\n"
      "shr.u32 y, %4, 8;\n"
      "lop3.b32 a, %4, 0x000F000F, 0x64086408, 0x6A;\n"
      "lop3.b32 b, %4, 0x00F000F0, 0x64806480, 0x6A;\n"
      "lop3.b32 c, y, 0x000F000F, 0x64086408, 0x6A;\n"
      "lop3.b32 d, y, 0x00F000F0, 0x64806480, 0x6A;\n"
      "sub.f16x2 %0, a, %5;\n"
      "fma.rn.f16x2 %1, b, %6, %7;\n"
      "sub.f16x2 %2, c, %5;\n"
      "fma.rn.f16x2 %3, d, %6, %7;\n}"
      : "=r"(h[0]), "=r"(h[1]), "=r"(h[2]), "=r"(h[3])
      : "r"(x), "r"(0x64086408), "r"(0x2C002C00), "r"(0xD480D480));
}

__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

// Two bytes of a word, chosen by a selector that has 4 (0x64) in odd places: (code ^ 128) in the fraction of 1024, less 1152.
__device__ __forceinline__ u32 integers(u32 flipped, u32 selector) {
  u32 h;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(h) : "r"(prmt(flipped, 0x64646464, selector)), "r"(0x64806480));
  return h;
}

// Two e4m3 in a half of a word.
__device__ __forceinline__ u32 floats(u32 word, int high) {
  u32 h;
  if (high)
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, h;\n}" : "=r"(h) : "r"(word));
  else
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.rn.f16x2.e4m3x2 %0, l;\n}" : "=r"(h) : "r"(word));
  return h;
}

// Pairs of channels of a word of keys, PAIRS of them, in the order that `channel` says.
constexpr int PAIRS = 32 / BITS / 2;
__device__ __forceinline__ void key_pairs(u32 (&h)[PAIRS], u32 word) {
  if constexpr (KIND == 0) {
    h[0] = word;
  } else if constexpr (KIND == 1) {
    h[0] = floats(word, 0), h[PAIRS - 1] = floats(word, 1);
  } else if constexpr (KIND == 2) {
    const u32 flipped = word ^ 0x80808080;
    h[0] = integers(flipped, 0x4240), h[PAIRS - 1] = integers(flipped, 0x4341);
  } else {
    nibbles(h, word);
  }
}

// What stands at such a pair's ends: channels of a token.
__device__ __forceinline__ int channel(int word, int pair, int high, int quarter) {
  const int at = 4 * word, byte = at / K_PIECE * 4 * K_PIECE + quarter * K_PIECE + at % K_PIECE;
  const int within = KIND == 1 ? 2 * pair + high : pair + high * PAIRS;
  return byte * 8 / BITS + within;
}

// Both tokens' channels of a word of values, 2 * PAIRS of them, in order.
__device__ __forceinline__ void value_pairs(u32 (&h)[2 * PAIRS], u32 x, u32 y) {
  if constexpr (KIND == 0) {
    h[0] = prmt(x, y, 0x5410), h[1] = prmt(x, y, 0x7632);
  } else if constexpr (KIND == 1) {
    const u32 a = prmt(x, y, 0x5140), b = prmt(x, y, 0x7362);
    h[0] = floats(a, 0), h[1] = floats(a, 1), h[2] = floats(b, 0), h[3] = floats(b, 1);
  } else if constexpr (KIND == 2) {
    const u32 a = prmt(x, y, 0x5140) ^ 0x80808080, b = prmt(x, y, 0x7362) ^ 0x80808080;
    h[0] = integers(a, 0x4140), h[1] = integers(a, 0x4342), h[2] = integers(b, 0x4140), h[3] = integers(b, 0x4342);
  } else {
    u32 low[4], high[4];
    nibbles(low, prmt(x, y, 0x5410));
    nibbles(high, prmt(x, y, 0x7632));
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = low[i], h[4 + i] = high[i];
  }
}

// A lane's i-th channel of values.
__device__ __forceinline__ int value_channel(int i, int eighth) { return i / RUN * 8 * RUN + eighth * RUN + i % RUN; }

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

struct Place {
  const Problem& p;
  uint4* base;  // of this lane every 32nd one: queries over a power of two, where scales of channels multiply them
  const char *k, *v;
  const float *k_scale, *v_scale;
  const signed char* k_zero;
  const unsigned char* mask;
  int lane, quarter, eighth, last;  // last: of the stored tokens

  __device__ __forceinline__ int inside(int token) const { return min(token, last); }

  __device__ __forceinline__ void read_keys(Tile& t, int start) const {
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
      const int token = inside(start + 8 * i + eighth);
      const char* from = k + i64(token) * ROW + quarter * K_PIECE;
#pragma unroll
      for (int piece = 0; piece < K_LANE / K_PIECE; piece++)
        load<K_PIECE>(t.k[i] + piece * (K_PIECE / 4), from + piece * 4 * K_PIECE);
      if constexpr (SCALES == 1) t.k_scale[i] = k_scale[token];
    }
  }

  __device__ __forceinline__ void read_values(Tile& t, int start) const {
#pragma unroll
    for (int i = 0; i < OCTETS; i++) {
      const int own = inside(start + 8 * i + eighth);
      if constexpr (BY_TOKEN) t.v_scale[i] = v_scale[own];
      if constexpr (MASKED) t.seen[i] = mask[own];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const char* from = v + i64(inside(start + 8 * i + 2 * quarter + e)) * ROW + eighth * V_PIECE;
#pragma unroll
        for (int piece = 0; piece < V_LANE / V_PIECE; piece++)
          load<V_PIECE>(t.v[i][e] + piece * (V_PIECE / 4), from + piece * 8 * V_PIECE);
      }
    }
  }
};

// Queries as the second operand: of each step two words, and what scores are multiplied by for the lane's own two queries.
struct Queries {
  u32 raw[STEPS][2], halves[STEPS][2];  // as they are; over a power of two, and perhaps times scales of channels
  float factor[2], power[2], beside[2];
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
  q.factor[0] = q.factor[1] = at.p.factor;
  q.beside[0] = q.beside[1] = 0.0f;
  if constexpr (KIND != 0) {
    float x[STEPS][2][2];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) x[i][j / 2][j % 2] = half_of(q.raw[i][j / 2], j % 2);
    }
    give(q.power, divide(q.halves, x), at.lane);
    if constexpr (BY_CHANNEL) {
#pragma unroll
      for (int i = 0; i < STEPS / 2; i++)
        at.base[32 * i] = make_uint4(q.halves[2 * i][0], q.halves[2 * i][1], q.halves[2 * i + 1][0], q.halves[2 * i + 1][1]);
    }
    q.factor[0] *= q.power[0], q.factor[1] *= q.power[1];
    if constexpr (SCALES == 2 || SCALES == 3) q.factor[0] *= *at.k_scale, q.factor[1] *= *at.k_scale;
  }
}

// Queries times a group's scales of channels, over a power of two, and their products with its zero points.
__device__ __forceinline__ void take_scales(Queries& q, const Place& at, int group, int last) {
  if constexpr (BY_CHANNEL) {
    const float* scale = at.k_scale + i64(group) * WIDTH;
    const signed char* zero = at.k_zero + i64(group) * WIDTH;
    float x[K_WORDS][2 * PAIRS], most = 0.0f;
#pragma unroll
    for (int word = 0; word < K_WORDS; word++) {
      u32 s[2 * PAIRS];
#pragma unroll
      for (int i = 0; i < PAIRS / 2; i++) load<16>(s + 4 * i, scale + channel(word, 0, 0, at.quarter) + 4 * i);
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; i++) x[word][i] = __uint_as_float(s[i]), most = fmaxf(most, x[word][i]);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    const u32 power = __float_as_uint(most) & 0x7F800000;
    const float less = __uint_as_float(0x7F000000 - power), factor = __uint_as_float(power) * at.p.factor;
    q.factor[0] = q.power[0] * factor, q.factor[1] = q.power[1] * factor;
    u32 base[4];
#pragma unroll
    for (int place = 0; place < 2 * STEPS; place++) {
      const int word = place / PAIRS, low = channel(0, place % PAIRS, 0, 0), high = channel(0, place % PAIRS, 1, 0);
      if (place % 4 == 0) load<16>(base, at.base + place / 4 * 32);
      const u32 halves = float16s(x[word][low] * less, x[word][high] * less);
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(q.halves[place / 2][place % 2]) : "r"(base[place % 4]), "r"(halves));
    }
    if constexpr (ZERO) {
      // As a token whose codes are the zero points, in all rows.
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      u32 pairs[2 * STEPS];
#pragma unroll
      for (int word = 0; word < K_WORDS; word++) {
        u32 z[PAIRS < 2 ? 1 : PAIRS / 2];
        load<2 * PAIRS>(z, zero + channel(word, 0, 0, at.quarter));
#pragma unroll
        for (int i = 0; i < PAIRS / 2; i++) z[i] ^= 0x80808080;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
          const int low = channel(0, i, 0, 0), high = channel(0, i, 1, 0);
          const u32 both = prmt(z[low / 4], z[high / 4], low % 4 | (high % 4 + 4) << 8);
          pairs[word * PAIRS + i] = integers(both, 0x4240);
        }
      }
#pragma unroll
      for (int i = 0; i < STEPS; i++)
        multiply<false>(d, pairs[2 * i], pairs[2 * i], pairs[2 * i + 1], pairs[2 * i + 1], q.halves[i][0], q.halves[i][1]);
      q.beside[0] = d[0], q.beside[1] = d[1];
    }
    // What the warp's next group needs, on its way meanwhile.
    const int next = min(group + WARPS, last);
    if (at.lane < WIDTH / 32)
      asm volatile("prefetch.global.L1 [%0];" ::"l"(at.k_scale + i64(next) * WIDTH + 32 * at.lane));
    else if (ZERO && at.lane < WIDTH / 32 + WIDTH / 128 + 1)
      asm volatile("prefetch.global.L1 [%0];" ::"l"(at.k_zero + i64(next) * WIDTH + (at.lane - WIDTH / 32) * 64));
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

// How many tokens are read as they are stored (`reference.attention.window`).
__device__ __forceinline__ int stored(const Problem& p, int count) {
  return max(min(count - p.residual, count - count % p.open), 0);
}

// Attention to 16 slots of tokens as they were computed.
#if WINDOW
__device__ __forceinline__ void of_computed(Sums& sums, const Queries& q, const Place& at, i64 pair, int first, int count) {
  const Problem& p = at.p;
  const int slots = p.sinks + p.ring;
  float s[2][2], ones[2] = {1.0f, 1.0f}, d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  bool seen[2];
  u32 pairs[2][2 * STEPS];
  const unsigned short* k = p.k_computed + pair * slots * WIDTH;
  const unsigned short* v = p.v_computed + pair * slots * WIDTH;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int slot = first + 8 * i + at.eighth;
    int token = slot;
    if (slot >= p.sinks) {
      const int back = (count - 1 - slot) % max(p.ring, 1);
      token = count - 1 - (back < 0 ? back + p.ring : back);
    }
    seen[i] = slot < slots && token < count && (slot < p.sinks || token >= max(stored(p, count), p.sinks));
    if (MASKED && seen[i]) seen[i] = at.mask[token] != 0;
    const unsigned short* from = k + min(slot, slots - 1) * WIDTH;
#pragma unroll
    for (int word = 0; word < K_WORDS; word++) {
      u32 x[PAIRS];
      load<4 * PAIRS>(x, from + channel(word, 0, 0, at.quarter));
#pragma unroll
      for (int u = 0; u < PAIRS; u++) {
        const int low = channel(0, u, 0, 0), high = channel(0, u, 1, 0);  // in a word of `x` two each
        pairs[i][word * PAIRS + u] = KIND == 1 ? x[u] : prmt(x[low / 2], x[high / 2], low % 2 ? 0x7632 : 0x5410);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; i++)
    multiply<true>(d, pairs[0][2 * i], pairs[1][2 * i], pairs[0][2 * i + 1], pairs[1][2 * i + 1], q.raw[i][0], q.raw[i][1]);
#pragma unroll
  for (int i = 0; i < 4; i++) s[i / 2][i % 2] = seen[i / 2] ? d[i] * p.factor : -infinity();
  u32 w[2];
  weigh<true>(w, s, ones, sums);
  bool read[4];  // of the lane's slots of values: what nobody looks at may be NaN
#pragma unroll
  for (int e = 0; e < 4; e++) read[e] = __shfl_sync(ALL, int(seen[e / 2]), (2 * at.quarter + e % 2) * 4) != 0;
#pragma unroll
  for (int word = 0; word < V_WORDS; word++) {
    u32 x[4][PAIRS];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int slot = min(first + e / 2 * 8 + 2 * at.quarter + e % 2, slots - 1);
      load<4 * PAIRS>(x[e], v + slot * WIDTH + value_channel(2 * PAIRS * word, at.eighth));
#pragma unroll
      for (int u = 0; u < PAIRS; u++) x[e][u] = read[e] ? x[e][u] : 0;
    }
#pragma unroll
    for (int u = 0; u < PAIRS; u++)
      multiply<true>(sums.y[word * PAIRS + u], prmt(x[0][u], x[1][u], 0x5410), prmt(x[0][u], x[1][u], 0x7632),
                     prmt(x[2][u], x[3][u], 0x5410), prmt(x[2][u], x[3][u], 0x7632), w[0], w[1]);
  }
}
#endif

// A tile's scores times scales, -infinity where nobody looks; values have a scale of 0 there.
__device__ __forceinline__ void scale_scores(
    float (&s)[OCTETS][2], const Queries& q, Tile& t, const Place& at, int start, int end) {
  const int least = WINDOW ? at.p.sinks : 0;
  const bool whole = start + TILE <= end && start >= least;
#pragma unroll
  for (int i = 0; i < OCTETS; i++) {
    const int token = start + 8 * i + at.eighth;
    const bool seen = (whole || (token < end && token >= least)) && (!MASKED || t.seen[i]);
    if constexpr (BY_TOKEN) t.v_scale[i] = seen ? t.v_scale[i] : 0.0f;
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float x = s[i][c];
      if constexpr (ZERO) x -= q.beside[c];
      x *= q.factor[c];
      if constexpr (SCALES == 1) x *= t.k_scale[i];
      s[i][c] = seen ? x : -infinity();
    }
  }
}

// The turns of a warp: of spans of SPAN tokens each WARPS-th one of a part.
__device__ __forceinline__ void attend(Sums& sums, Queries& q, const Place& at, int first, int end) {
  if (first >= end) return;
  Tile t;
  t.k_scale[0] = 1.0f;
  at.read_keys(t, first);
  at.read_values(t, first);
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
    at.read_keys(t, ahead);
    u32 w[OCTETS];
    weigh<KIND == 0>(w, s, t.v_scale, sums);
    add_values(sums, w, t);
    at.read_values(t, ahead);
    start = next;
  }
}

struct Shared {
  float top[WARPS][8], total[WARPS][8], y[WARPS][8][WIDTH + 4];
  uint4 base[WARPS][BY_CHANNEL ? STEPS / 2 : 1][32];
};

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
    if (p.splits == 1) {
      const float found = y / (total == 0.0f ? 1.0f : total);
      p.y[(pair * HEADS + head) * WIDTH + channel] = static_cast<unsigned short>(rounded(found, 0.0f));
    } else {
      const i64 place = (pair * HEADS + head) * p.splits + split;
      p.parts[place * WIDTH + channel] = y;
      if (channel == 0) p.stats[2 * place] = top, p.stats[2 * place + 1] = total;
    }
  }
}

extern "C" __global__ __launch_bounds__(32 * WARPS, RESIDENT) void sm90_decode(const __grid_constant__ Problem p) {
  extern __shared__ char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
  const int split = blockIdx.x % p.splits, pair = blockIdx.x / p.splits;
  const int batch = pair / p.key_heads, key_head = pair % p.key_heads;
  const int count = int(*p.length), all = stored(p, count);
  constexpr int BLOCK = WARPS * SPAN;
  // Parts behind the last token are not read; the first one has the tokens as computed.
  const int each = ((all + BLOCK - 1) / BLOCK + p.splits - 1) / p.splits, first = split * each * BLOCK;
  if (split > 0 && first >= all) return;
  Place at = {p, shared.base[warp][0] + lane, p.k + i64(pair) * p.k_room * ROW, p.v + i64(pair) * p.room * ROW, p.k_scale, p.v_scale, p.k_zero,
              p.mask + batch * p.mask_batch, lane, lane % 4, lane / 4, all - 1};
  if (SCALES == 1) at.k_scale += i64(pair) * p.room;
  if (BY_CHANNEL) at.k_scale += i64(pair) * (p.k_room / GROUP) * WIDTH, at.k_zero += i64(pair) * (p.k_room / GROUP) * WIDTH;
  if (BY_TOKEN) at.v_scale += i64(pair) * p.room;
  if (SCALES == 3) at.k_scale += key_head, at.v_scale += key_head;
  Queries q;
  read_queries(q, at, p.q + batch * p.q_batch + (key_head * HEADS + min(at.eighth, HEADS - 1)) * p.q_head);
  Sums sums;
#pragma unroll
  for (int c = 0; c < 2; c++) sums.top[c] = sums.over[c] = -infinity(), sums.total[c] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4 * STEPS; i++) sums.y[i / 4][i % 4] = 0.0f;
#if WINDOW
  if (split == 0) {
    for (int slot = 16 * warp; slot < p.sinks + p.ring; slot += 16 * WARPS) of_computed(sums, q, at, pair, slot, count);
  }
#endif
  attend(sums, q, at, first + warp * SPAN, min(first + each * BLOCK, all));
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");  // what adds parts may begin, and waits for them
  give_out(shared, sums, at, pair, split, warp);
}
