// The sums of a warpgroup, 64 features by TOKENS, finished (`Biases`, or `Scaled` of `scaled.cuh`), rounded once and written to y
// (tokens, features) by the copy engine: CHUNK tokens at a time, from one of two buffers of CHUNK rows of 128 bytes, swizzled by
// as many.
//
// Before: `copies.cuh`, `output.cuh`, Maps (y), Problem, Sum, CHUNK, OUT.

constexpr int BUFFER = CHUNK * 128;

// Two float32 as neighbours of the output's dtype.
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
  u32 d;
  if constexpr (OUT == FLOAT16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  if constexpr (CANONICAL) asm("min.s16x2 %0, %0, %1;" : "+r"(d) : "r"(OUT == FLOAT16 ? 0x7E007E00 : 0x7FC07FC0));
  return d;
}

// Four matrices of 8 by 8, their rows where each eight threads say, transposed: a thread's pairs are of a column.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]),
      "r"(w[3]) : "memory");
}

// A box at (x, y) of a matrix from shared memory, what is within the matrix.
__device__ __forceinline__ void write_box(const TensorMap& map, u32 from, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(reinterpret_cast<u64>(&map)), "r"(from),
      "r"(x), "r"(y) : "memory");
}

// Of boxes that a thread writes, all but the last PENDING have left shared memory.
template <int PENDING>
__device__ __forceinline__ void wait_written() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }

// The biases of the features n and n + 8 of a thread; adding -0 changes nothing. Of tokens there is nothing to know.
struct Biases {
  struct Tokens {};
  float own[2];
  __device__ __forceinline__ Biases(const Problem& p, int thread, int first) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int at = first + thread / 32 * 16 + thread % 32 / 4 + 8 * i;
      own[i] = p.bias != nullptr && at < p.features ? bias_at(p.bias, p.bias_kind, at) : __uint_as_float(0x80000000u);
    }
  }

  __device__ __forceinline__ Tokens tokens_at(int) const { return {}; }
  // Sums of two tokens and a feature, finished. half: which of the features.
  __device__ __forceinline__ u32 finished(Sum low, Sum high, Tokens, int half) const {
    return rounded_pair(__fadd_rn(low, own[half]), __fadd_rn(high, own[half]));
  }
};

// HELD: sums of a thread, half as many as the tile has tokens. turn: which buffer is next. first: of the warpgroup's features.
template <class Finish, int HELD>
__device__ __forceinline__ void write_tile(const Maps& maps, const Problem& p, const Finish& finish, const Sum (&sum)[HELD], u32 buffers,
                                           u32& turn, int group, int thread, int token, int first) {
  const int lane = thread % 32, part = thread / 32 * 2 + lane / 8 % 2;  // 16 bytes of a row of 128
  const u32 own = (lane / 16 * 8 + lane % 8) * 128 + ((part ^ lane % 8) << 4);
#pragma unroll
  for (int from = 0; from < 2 * HELD; from += CHUNK) {
    const u32 buffer = buffers + turn * BUFFER;
    turn ^= 1;
    if (thread == 0) wait_written<1>();
    sync_group(group);
#pragma unroll
    for (int at = from; at < from + CHUNK; at += 16) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const auto of_tokens = finish.tokens_at(at + i * 4);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int place = at / 2 + (i + half) * 2;
          w[i + half] = finish.finished(sum[place], sum[place + 1], of_tokens, half);
        }
      }
      store_matrices(buffer + own + (at - from) * 128, w);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    sync_group(group);
    if (thread == 0) {
      if (token + from < p.tokens && first < p.features) write_box(maps.y, buffer, 2 * first, token + from);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
}
