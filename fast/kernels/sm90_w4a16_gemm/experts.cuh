// Products of rows sorted by expert and the weight of the expert of each: which tiles a persistent cluster has, and rows of a tile
// behind which the next expert's lie.
//
// Experts' tiles follow one another; clusters take them in turn, and each thread that asks counts those of the experts in front,
// by the row after the last one of each, which only the device knows. An expert has tiles of TOKENS rows, the last one of SMALL
// where that holds what is left. Those of SMALL come behind the whole ones of all experts: they fill the last wave.
//
// Before: Problem (ends, experts, words_each, scales_each, zeros_each), `copies.cuh`, `store.cuh`, TOKENS, SMALL, FEATURES, PAIR,
// CLUSTER.

struct Schedule {
  const Problem& p;
  // Twice as many experts as there are: small tiles are those of the second half. What is kept is little, registers are scarce.
  int next, expert = -1, first = 0, last = 0, token, feature;
  bool small = false;

  __device__ __forceinline__ Schedule(const Problem& p) : p(p), next(blockIdx.x / CLUSTER) {}

  // The row after the last one that the tile may have, and what the weight of its expert begins with.
  __device__ __forceinline__ int limit() const { return last; }
  __device__ __forceinline__ int index() const { return SMALL < TOKENS && expert >= p.experts ? expert - p.experts : expert; }
  __device__ __forceinline__ const unsigned char* words() const { return p.words + index() * p.words_each; }
  __device__ __forceinline__ const float* scales() const { return p.scales + index() * p.scales_each; }
  __device__ __forceinline__ const int* zeros() const { return p.zeros + index() * p.zeros_each; }

  // Ends that are too large or not in order leave an expert without rows that others have.
  __device__ __forceinline__ bool next_expert() {
    if (++expert >= (SMALL < TOKENS ? 2 : 1) * p.experts) return false;
    first = index() ? last : 0;
    last = max(first, min(p.ends[index()], p.tokens));
    return true;
  }

  // Tiles of the expert, of SMALL or whole ones.
  __device__ __forceinline__ int along() const {
    const int rows = last - first, left = rows % TOKENS;
    const int fewer = SMALL < TOKENS && left > 0 && left <= SMALL;
    return small ? fewer : (rows + TOKENS - 1) / TOKENS - fewer;
  }

  __device__ __forceinline__ bool take(u32 neighbour) {
    const int columns = (p.features + FEATURES * PAIR - 1) / (FEATURES * PAIR);
    while (true) {
      small = SMALL < TOKENS && expert >= p.experts;
      const int each = along();
      if (next < each * columns) {
        const int before = next / (p.group * columns) * p.group, size = min(p.group, each - before), at = next - before * columns;
        const int whole = small ? (last - first) / TOKENS : 0;
        token = first + (whole + before + at % size) * TOKENS;
        feature = (at / size * PAIR + int(neighbour)) * FEATURES;
        next += gridDim.x / CLUSTER;
        return true;
      }
      next -= each * columns;
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
