// One step of Adam or AdamW on bfloat16 parameters for Hopper, states in 4 or 8 bits: `sm90_step.py` says what of and launches it.
//
// A lane has two runs of eight neighbouring elements of a block, LANES lanes a block, so that a block's largest magnitude takes
// three or four exchanges for sixteen elements. A run is what one counter of Philox rounds. A warp has 32 / LANES blocks a turn.
//
// The bits are those of `reference.optim.update`: roots and reciprocals are correctly rounded by the sequences of
// `fast.kernels.optim.kernel`, for exponents that are not rare (`host.is_ordinary`). Codes of 4 bits are looked up in a register
// of another lane. They are found as in `fast.kernels.optim.nibbles`, by additions whose carry is the rounding; e2m1's on the grid of
// its scale, a power of two, as it stands. Squares stop at the largest float32: only a turn in which a root is not finite computes
// that minimum, once more from its start; nothing was written before.
//
// Defined: BITS (of codes), BLOCK, ADAM (its decay is added to gradients), ROUNDS (parameters are rounded stochastically), MASTER
// (bits of errors beside parameters, 0: none), WARPS, TURNS (of a warp), RESIDENT (programs of a multiprocessor), STAGES (turns of
// which a warp reads ahead, less one).

typedef unsigned int u32;
typedef long long i64;

constexpr int RUN = 8, RUNS = 2, EACH = RUN * RUNS, LANES = BLOCK / EACH, AT_ONCE = 32 / LANES;
constexpr u32 ALL = 0xFFFFFFFF, INFINITY_BITS = 0x7F800000, NAN_BITS = 0x7FC00000, ONE = 0x3F800000;
constexpr float LARGEST = 3.402823466e38f, ROOT_FLOOR = 5.684341886080802e-14f;  // 2^-44
constexpr int COLUMNS = 13, NUMBERS = 12;  // of a row of `tensors` and of `numbers`
constexpr int CODE_WORDS = RUN * BITS / 32, ERROR_WORDS = RUN * MASTER / 32;

struct Problem {
  const int* tiles;       // row and first block of each program
  const i64* tensors;     // addresses and counts of each parameter
  const float* numbers;   // of its step
  u32 first_keys[10], second_keys[10];  // of Philox, a round each
  u32 powers[2];          // 4, 256
};

// Where the words of a turn lie in shared memory, from a warp's stage on: 32 lanes after each other, in the order of their size.
constexpr int NEXT = LANES * RUN;  // from a lane's first run to its second
constexpr int G_AT = 0, P_AT = RUNS * 512, FIRST_AT = 2 * P_AT, SECOND_AT = FIRST_AT + RUNS * CODE_WORDS * 128;
constexpr int ERROR_AT = SECOND_AT + RUNS * CODE_WORDS * 128, SCALES_AT = ERROR_AT + RUNS * ERROR_WORDS * 128, STAGE = SCALES_AT + 256;

struct Rule {
  float first, first_rest, second, second_rest, size, root, eps, keep, decay;
};

// A parameter: where its elements begin, and what counters of its random bits begin with.
struct Tensor {
  char *p, *g, *first, *second, *error;
  float *first_scale, *second_scale;
  u32 parameter, step, offset;
};

// What a lane looks up: values of its codes.
struct Tables {
  float first, second;
};

struct Scale {
  float stored, factor;
};

__device__ __forceinline__ float value(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 pattern(float v) { return __float_as_uint(v); }

__device__ __forceinline__ float larger(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

// From 0 to 1; NaN is 0.
__device__ __forceinline__ float saturated_product(float a, float b) {
  float v;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}

// sqrt(v), correctly rounded, of 2^-101 and more; NaN of infinity.
__device__ __forceinline__ float square_root(float v) {
  float guess;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(v));
  const float root = __fmul_rn(v, guess), rest = __fmaf_rn(-root, root, v);
  return __fmaf_rn(rest, __fmul_rn(guess, 0.5f), root);
}

// 1 / v, correctly rounded, of 2^-126 to 2^125.
__device__ __forceinline__ float reciprocal(float v) {
  float guess;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(guess) : "f"(v));
  return __fmaf_rn(__fmaf_rn(-v, guess, 1.0f), guess, guess);
}

// x times a power plus y. What the compiler does not know to be a power it multiplies, and leaves the integer units to others.
__device__ __forceinline__ u32 scaled_sum(u32 x, u32 power, u32 y) {
  u32 v;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(v) : "r"(x), "r"(power), "r"(y));
  return v;
}

// Element i of bfloat16 in words.
__device__ __forceinline__ float element(const u32* words, int i) {
  return value(i % 2 ? words[i / 2] & 0xFFFF0000 : words[i / 2] << 16);
}

// A copy to a place of shared memory, which the lane that asks for it alone reads.
template <int WORDS>
__device__ __forceinline__ void fetch(u32 to, const void* from) {
  if constexpr (WORDS == 4)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
  else if constexpr (WORDS == 2)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" :: "r"(to), "l"(from) : "memory");
  else if constexpr (WORDS == 1)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
}

template <int WORDS>
__device__ __forceinline__ void load(u32* to, u32 from) {
  if constexpr (WORDS == 4)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from));
  else if constexpr (WORDS == 2)
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
  else if constexpr (WORDS == 1)
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(from));
}

template <int WORDS>
__device__ __forceinline__ void store(void* to, const u32* from) {
  if constexpr (WORDS == 4)
    __stcs(static_cast<uint4*>(to), make_uint4(from[0], from[1], from[2], from[3]));
  else if constexpr (WORDS == 2)
    __stcs(static_cast<uint2*>(to), make_uint2(from[0], from[1]));
  else if constexpr (WORDS == 1)
    __stcs(static_cast<u32*>(to), from[0]);
}

// Four words of random bits for a run.
__device__ __forceinline__ void random_words(u32* words, const Problem& problem, const Tensor& t, u32 run) {
  u32 c0 = run, c1 = 0, c2 = t.parameter, c3 = t.step;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const unsigned long long first = static_cast<unsigned long long>(c0) * 0xD2511F53u;
    const unsigned long long second = static_cast<unsigned long long>(c2) * 0xCD9E8D57u;
    c0 = static_cast<u32>(second >> 32) ^ c1 ^ problem.first_keys[i];
    c2 = static_cast<u32>(first >> 32) ^ c3 ^ problem.second_keys[i];
    c1 = static_cast<u32>(second), c3 = static_cast<u32>(first);
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// 16 bits of element i: in bits 8 to 23 for codes of 4 bits, in the lowest ones for 8.
__device__ __forceinline__ u32 random_of(const u32* words, int i) {
  constexpr u32 LOW = BITS == 4 ? 0x4104 : 0x4410, HIGH = BITS == 4 ? 0x4324 : 0x4432;
  return __byte_perm(words[i / 2], 0, i % 2 ? HIGH : LOW);
}

// The largest pattern of a block's lanes.
__device__ __forceinline__ u32 largest_of_block(u32 v) {
#pragma unroll
  for (int i = 1; i < LANES; i *= 2) v = max(v, __shfl_xor_sync(ALL, v, i));
  return v;
}

// A power of two, TARGET times which is no less than the block's largest magnitude.
template <u32 TARGET>
__device__ __forceinline__ Scale power_scale(u32 largest, u32 least) {
  const u32 field = (largest + 0x7FFFFF - (TARGET & 0x7FFFFF)) >> 23;
  const u32 scale = max(static_cast<int>((field - ((TARGET >> 23) - 127)) << 23), static_cast<int>(least));
  const bool finite = largest < INFINITY_BITS;
  return {value(finite ? scale : NAN_BITS), value(finite ? (254u << 23) - scale : NAN_BITS)};
}

// A fifteenth of the largest root, correctly rounded.
__device__ __forceinline__ Scale ratio_scale(u32 largest) {
  const float first = __fmul_rn(value(largest), 1.0f / 15.0f);
  const float scale = fmaxf(__fmaf_rn(__fmaf_rn(first, -15.0f, value(largest)), 1.0f / 15.0f, first), ROOT_FLOOR);
  return {scale, reciprocal(scale)};
}

// Nibbles in the bytes that SELECTED says (of eight words, a digit of the selector a byte) as a word.
__device__ __forceinline__ u32 nibbles_of_bytes(const u32* d) {
  u32 half[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 low = __byte_perm(d[i], d[i + 2], 0x0073), high = __byte_perm(d[i + 4], d[i + 6], 0x7300);
    half[i] = __byte_perm(low, high, 0x7610);
  }
  return half[1] * 16 + half[0];
}

// e2m1 codes of a run. Below its scale an element lies on a fixed grid, as 1 + y does, y in units of the scale; above, on that of
// its exponent. So codes are what both patterns are above those of the scale and of 1.
__device__ __forceinline__ u32 e2m1_codes(const float* m, const u32* words, Scale scale, const Problem& problem) {
  const u32 grid = pattern(scale.stored) + ONE;
  u32 digits[RUN], signs = 0;
#pragma unroll
  for (int i = RUN - 1; i >= 0; i--) {
    const float above = fmaxf(fabsf(m[i]), scale.stored);
    const float below = __fadd_rz(saturated_product(fabsf(m[i]), scale.factor), 1.0f);
    const u32 code = pattern(above) + pattern(below) - grid;
    digits[i] = scaled_sum(code, problem.powers[0], random_of(words, i));
    signs = __funnelshift_l(pattern(m[i]), signs, 4);
  }
  const u32 codes = signs & 0x88888888 | nibbles_of_bytes(digits) & 0x77777777;
  return pattern(scale.stored) >= INFINITY_BITS ? 0 : codes;
}

// Integers of a run of roots, 1 at least: 128 + y has the integer in its fraction from bit 16 on.
__device__ __forceinline__ u32 uint4_codes(const float* root, const u32* words, Scale scale, const Problem& problem) {
  u32 digits[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    const float y = fmaxf(__fmul_rn(root[i], scale.factor), 1.0f);
    const u32 fixed = pattern(__fadd_rz(y, 128.0f));
    digits[i] = scaled_sum(fixed, problem.powers[1], random_of(words, i));
  }
  return nibbles_of_bytes(digits);
}

// Two e4m3 codes.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

// e4m3 codes of a run, rounded stochastically to three bits of fraction, then to nearest. ROOT: the smallest normal number at least.
template <bool ROOT>
__device__ __forceinline__ void e4m3_codes(u32* codes, const float* v, const u32* words, Scale scale) {
  float y[RUN];
#pragma unroll
  for (int i = 0; i < RUN; i++) {
    y[i] = __fmul_rn(v[i], scale.factor);
    if (ROOT) y[i] = fmaxf(y[i], 0.015625f);
    y[i] = value(pattern(y[i]) + random_of(words, i) * 16 & 0xFFF00000);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    codes[i] = e4m3_pair(y[4 * i], y[4 * i + 1]) | e4m3_pair(y[4 * i + 2], y[4 * i + 3]) << 16;
    if (!ROOT && pattern(scale.stored) >= INFINITY_BITS) codes[i] = 0x7F7F7F7F;
  }
}

// Values of a run of codes of a moment, squares of roots, without scales. own: what this lane is looked up for.
template <bool ROOT>
__device__ __forceinline__ void decoded(float* v, const u32* codes, float own) {
  if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < RUN; i++) v[i] = __shfl_sync(ALL, own, codes[0] >> 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      asm("{\n.reg .b16 c, e, l, h;\n.reg .b32 pair;\nmov.b32 {c, e}, %2;\ncvt.rn.f16x2.e4m3x2 pair, c;\nmov.b32 {l, h}, pair;\n"
          "cvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
          : "=f"(v[2 * i]), "=f"(v[2 * i + 1]) : "r"(i % 2 ? codes[i / 2] >> 16 : codes[i / 2]));
      if (ROOT) v[2 * i] = __fmul_rn(v[2 * i], v[2 * i]), v[2 * i + 1] = __fmul_rn(v[2 * i + 1], v[2 * i + 1]);
    }
  }
}

// Parameter i of a run as float32, with its error.
__device__ __forceinline__ float master(const u32* p, const u32* error, int i) {
  if constexpr (MASTER == 8) {
    // A byte with its sign above it, which `__byte_perm` does not make, at bit 8.
    const u32 selector[4] = {0x8804, 0x9914, 0xAA24, 0xBB34};
    u32 wide;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(wide) : "r"(error[i / 4]), "r"(selector[i % 4]));
    return value(pattern(element(p, i)) + wide);
  } else if constexpr (MASTER == 16) {
    return value(pattern(element(p, i)) + (static_cast<int>(i % 2 ? error[i / 2] : error[i / 2] << 16) >> 16));
  } else {
    return element(p, i);
  }
}

// Two neighbours' parameters: in words the bfloat16s, below the errors.
__device__ __forceinline__ u32 rounded(float low, float high, u32 random, u32* errors) {
  u32 pair;
  if constexpr (MASTER != 0) {
    // Any NaN is the quiet one; ties go away from zero.
    constexpr u32 HALF = MASTER < 16 ? 1u << (15 - MASTER & 31) : 0;
    errors[0] = min(static_cast<int>(pattern(low)), static_cast<int>(NAN_BITS)) + HALF;
    errors[1] = min(static_cast<int>(pattern(high)), static_cast<int>(NAN_BITS)) + HALF;
    pair = __byte_perm(errors[0] + 0x8000, errors[1] + 0x8000, 0x7632);
  } else if constexpr (ROUNDS != 0) {
    // The even element takes the upper half of their word.
    const u32 a = min(static_cast<int>(pattern(low)), static_cast<int>(NAN_BITS)) + (random >> 16);
    const u32 b = min(static_cast<int>(pattern(high)), static_cast<int>(NAN_BITS)) + (random & 0xFFFF);
    pair = __byte_perm(a, b, 0x7632);
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

// Errors of a run, of the patterns that `rounded` left.
__device__ __forceinline__ void packed_errors(u32* words, const u32* errors) {
  if constexpr (MASTER == 8) {
#pragma unroll
    for (int i = 0; i < 2; i++)
      words[i] = __byte_perm(__byte_perm(errors[4 * i], errors[4 * i + 1], 0x0051),
                             __byte_perm(errors[4 * i + 2], errors[4 * i + 3], 0x0051), 0x5410);
  } else if constexpr (MASTER == 16) {
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = __byte_perm(errors[2 * i], errors[2 * i + 1], 0x5410);
  }
}

// One element's step: its moments, root and parameter.
template <bool CLAMPED>
__device__ __forceinline__ float moved(float p, float g, float& m, float& v, float beta, float square, const Rule& n) {
  if (ADAM) g = __fmaf_rn(n.decay, p, g);
  m = __fmaf_rn(m, beta, __fmul_rn(n.first_rest, g));
  v = __fmaf_rn(v, square, __fmul_rn(n.second_rest, __fmul_rn(g, g)));
  if (CLAMPED) v = fminf(v, LARGEST);
  v = square_root(v);
  const float inverse = reciprocal(__fmaf_rn(v, n.root, n.eps));
  return __fmaf_rn(p, n.keep, -__fmul_rn(__fmul_rn(m, n.size), inverse));
}

// Begin to read a lane's part of a turn.
__device__ __forceinline__ void fetch_turn(u32 stage, const Tensor& t, int block) {
  const int lane = threadIdx.x % 32;
  const i64 at = i64(block) * BLOCK + lane % LANES * RUN;
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    fetch<4>(stage + G_AT + r * 512 + lane * 16, t.g + 2 * at + r * 2 * NEXT);
    fetch<4>(stage + P_AT + r * 512 + lane * 16, t.p + 2 * at + r * 2 * NEXT);
    constexpr int CODE = CODE_WORDS * 128, ERROR = ERROR_WORDS * 128;
    fetch<CODE_WORDS>(stage + FIRST_AT + r * CODE + lane * CODE / 32, t.first + at * BITS / 8 + r * NEXT * BITS / 8);
    fetch<CODE_WORDS>(stage + SECOND_AT + r * CODE + lane * CODE / 32, t.second + at * BITS / 8 + r * NEXT * BITS / 8);
    fetch<ERROR_WORDS>(stage + ERROR_AT + r * ERROR + lane * ERROR / 32, t.error + at * MASTER / 8 + r * NEXT * MASTER / 8);
  }
  fetch<1>(stage + SCALES_AT + lane * 4, t.first_scale + block);
  fetch<1>(stage + SCALES_AT + 128 + lane * 4, t.second_scale + block);
}

// A turn of a warp: AT_ONCE blocks, of which this lane has a part of one. CLAMPED: squares stop at the largest float32; false where
// they have to.
template <bool CLAMPED>
__device__ __forceinline__ bool turn(
    const Problem& problem, const Tensor& t, const Rule& n, const Tables& tables, u32 stage, int block, bool exists) {
  const int lane = threadIdx.x % 32;
  const i64 at = i64(block) * BLOCK + lane % LANES * RUN;
  u32 p[RUNS][4], g[RUNS][4], first[RUNS][CODE_WORDS], second[RUNS][CODE_WORDS], error[RUNS][ERROR_WORDS + 1], scales[2];
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    constexpr int CODE = CODE_WORDS * 128, ERROR = ERROR_WORDS * 128;
    load<4>(g[r], stage + G_AT + r * 512 + lane * 16);
    load<4>(p[r], stage + P_AT + r * 512 + lane * 16);
    load<CODE_WORDS>(first[r], stage + FIRST_AT + r * CODE + lane * CODE / 32);
    load<CODE_WORDS>(second[r], stage + SECOND_AT + r * CODE + lane * CODE / 32);
    load<ERROR_WORDS>(error[r], stage + ERROR_AT + r * ERROR + lane * ERROR / 32);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) load<1>(scales + i, stage + SCALES_AT + 128 * i + lane * 4);
  const float first_scale = value(scales[0]), second_scale = value(scales[1]);
  const float beta = __fmul_rn(n.first, first_scale), square = __fmul_rn(n.second, __fmul_rn(second_scale, second_scale));
  const u32 run = (t.offset + block) * (BLOCK / RUN) + lane % LANES;
  float m[RUNS][RUN], v[RUNS][RUN], top = 0.0f;
  u32 root_top = 0, words[RUNS][4];
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    if (ROUNDS) random_words(words[r], problem, t, run + r * LANES);
    decoded<false>(m[r], first[r], tables.first);
    decoded<true>(v[r], second[r], tables.second);
    u32 errors[RUN];
#pragma unroll
    for (int i = 0; i < RUN; i += 2) {
      float found[2];
#pragma unroll
      for (int j = i; j < i + 2; j++) {
        found[j - i] = moved<CLAMPED>(master(p[r], error[r], j), element(g[r], j), m[r][j], v[r][j], beta, square, n);
        top = larger(top, fabsf(m[r][j]));
        root_top = max(root_top, pattern(v[r][j]));
      }
      p[r][i / 2] = rounded(found[0], found[1], words[r][i / 2], errors + i);
    }
    packed_errors(error[r], errors);
  }
  if (!CLAMPED && __any_sync(ALL, root_top >= INFINITY_BITS)) return false;
  const u32 largest = largest_of_block(pattern(top) & 0x7FFFFFFF), largest_root = largest_of_block(root_top);
  constexpr u32 TARGET = BITS == 4 ? 0x40C00000 : 0x43E00000;  // 6, 448
  const Scale first_new = power_scale<TARGET>(largest, 1u << 23);
  const Scale second_new = BITS == 4 ? ratio_scale(largest_root) : power_scale<TARGET>(largest_root, pattern(ROOT_FLOOR));
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    if (!ROUNDS) random_words(words[r], problem, t, run + r * LANES);
    if constexpr (BITS == 4) {
      first[r][0] = e2m1_codes(m[r], words[r], first_new, problem);
      second[r][0] = uint4_codes(v[r], words[r], second_new, problem);
    } else {
      e4m3_codes<false>(first[r], m[r], words[r], first_new);
      e4m3_codes<true>(second[r], v[r], words[r], second_new);
    }
  }
  if (exists) {
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      store<4>(t.p + 2 * at + r * 2 * NEXT, p[r]);
      store<CODE_WORDS>(t.first + at * BITS / 8 + r * NEXT * BITS / 8, first[r]);
      store<CODE_WORDS>(t.second + at * BITS / 8 + r * NEXT * BITS / 8, second[r]);
      store<ERROR_WORDS>(t.error + at * MASTER / 8 + r * NEXT * MASTER / 8, error[r]);
    }
  }
  if (exists && lane % LANES == 0) t.first_scale[block] = first_new.stored, t.second_scale[block] = second_new.stored;
  return true;
}

// Values of a lane's codes: e2m1's, and squares of integers.
__device__ __forceinline__ Tables tables_of(int lane) {
  const int magnitude = lane & 7, code = lane & 15;
  const u32 normal = (126 + (magnitude >> 1) << 23) + ((magnitude & 1) << 22);
  const u32 e2m1 = magnitude > 1 ? normal : magnitude ? 0x3F000000 : 0;
  return {value(e2m1 | (lane & 8) << 28), static_cast<float>(code * code)};
}

extern "C" __global__ __launch_bounds__(32 * WARPS, RESIDENT) void sm90_step(const __grid_constant__ Problem problem) {
  extern __shared__ __align__(16) char memory[];
  const int lane = threadIdx.x % 32, warp = WARPS == 1 ? 0 : __shfl_sync(ALL, threadIdx.x / 32, 0);
  const int which = problem.tiles[2 * blockIdx.x], begin = problem.tiles[2 * blockIdx.x + 1];
  const i64* row = problem.tensors + i64(which) * COLUMNS;
  const float* n = problem.numbers + i64(which) * NUMBERS;
  if (n[10] != 0.0f) return;  // the step is left out
  const int last = min(static_cast<int>(row[8]), begin + TURNS * WARPS * AT_ONCE);
  const Rule rule = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]};
  const Tensor t = {reinterpret_cast<char*>(row[0]), reinterpret_cast<char*>(row[1]), reinterpret_cast<char*>(row[2]),
                    reinterpret_cast<char*>(row[4]), reinterpret_cast<char*>(row[6]), reinterpret_cast<float*>(row[3]),
                    reinterpret_cast<float*>(row[5]), static_cast<u32>(row[11]), static_cast<u32>(n[9]), static_cast<u32>(row[12])};
  const Tables tables = tables_of(lane);
  const u32 stages = static_cast<u32>(__cvta_generic_to_shared(memory)) + warp * STAGES * STAGE;
  constexpr int STEP = WARPS * AT_ONCE;
  // First blocks of turns, the same for all lanes; those behind the last block compute it once more and write nothing.
  int ahead = begin + warp * AT_ONCE, slot = 0;
  const int own = lane / LANES;
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++, ahead += STEP) {
    if (ahead < last) fetch_turn(stages + i * STAGE, t, min(ahead + own, last - 1));
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  for (int at = begin + warp * AT_ONCE; at < last; at += STEP, ahead += STEP) {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
    const u32 stage = stages + slot * STAGE, before = stages + (slot == 0 ? STAGES - 1 : slot - 1) * STAGE;
    // The stage of the turn before, whose values are in registers.
    if (ahead < last) fetch_turn(before, t, min(ahead + own, last - 1));
    asm volatile("cp.async.commit_group;" ::: "memory");
    const int block = min(at + own, last - 1);
    const bool exists = at + own < last;
    if (!turn<false>(problem, t, rule, tables, stage, block, exists)) turn<true>(problem, t, rule, tables, stage, block, exists);
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }
}
