// Products of rows sorted by expert and the weight of the expert of each: which tiles a persistent cluster has, and rows of a tile
// behind which the next expert's lie.
//
// Experts' tiles follow one another; clusters take them in turn, and each thread that asks counts those of the experts in front,
// by the row after the last one of each, which only the device knows. An expert has tiles of TOKENS rows, the last one of SMALL
// where that holds what is left.
//
// Before: Problem (ends, experts, words_each, scales_each, zeros_each), `copies.cuh`, `store.cuh`, TOKENS, SMALL, FEATURES, PAIR,
// CLUSTER.

struct Schedule {
  const Problem& p;
  const int columns;
  int next, expert = -1, first = 0, last = 0, token, feature;
  bool small = false;

  __device__ __forceinline__ Schedule(const Problem& p)
      : p(p), columns((p.features + FEATURES * PAIR - 1) / (FEATURES * PAIR)), next(blockIdx.x / CLUSTER) {}

  // The row after the last one that the tile may have, and what the weight of its expert begins with.
  __device__ __forceinline__ int limit() const { return last; }
  __device__ __forceinline__ const unsigned char* words() const { return p.words + expert * p.words_each; }
  __device__ __forceinline__ const float* scales() const { return p.scales + expert * p.scales_each; }
  __device__ __forceinline__ const int* zeros() const { return p.zeros + expert * p.zeros_each; }

  // Ends that are too large or not in order leave an expert without rows that others have.
  __device__ __forceinline__ bool next_expert() {
    if (++expert >= p.experts) return false;
    first = last;
    last = max(first, min(p.ends[expert], p.tokens));
    return true;
  }

  __device__ __forceinline__ bool take(u32 neighbour) {
    while (true) {
      const int along = (last - first + TOKENS - 1) / TOKENS;
      if (next < along * columns) {
        const int before = next / (p.group * columns) * p.group, size = min(p.group, along - before), at = next - before * columns;
        token = first + (before + at % size) * TOKENS;
        feature = (at / size * PAIR + int(neighbour)) * FEATURES;
        small = SMALL < TOKENS && last - token <= SMALL;
        next += gridDim.x / CLUSTER;
        return true;
      }
      next -= along * columns;
      if (!next_expert()) return false;
    }
  }
};

// The rows of a tile up to `limit`, straight to y: a box of the copy engine would go on into the next expert's.
template <class Finish, int HELD>
__device__ __forceinline__ void write_rows(const Problem& p, const Finish& finish, const Sum (&sum)[HELD], int thread, int token, int limit,
                                           int first) {
  const int feature = first + thread / 32 * 16 + thread % 32 / 4, own = token + thread % 4 * 2;
  unsigned short* y = static_cast<unsigned short*>(p.y);
#pragma unroll
  for (int i = 0; i < HELD; i += 2) {
    const u32 pair = finish.finished(sum[i], sum[i + 1], {}, i / 2 % 2);
    const int row = own + i / 4 * 8, at = feature + i / 2 % 2 * 8;
    if (row < limit) y[i64(row) * p.features + at] = static_cast<unsigned short>(pair);
    if (row + 1 < limit) y[i64(row + 1) * p.features + at] = static_cast<unsigned short>(pair >> 16);
  }
}
