// Which tiles a persistent cluster has: of TOKENS tokens first, then of SMALL, so that the last ones end together.
//
// A column of FEATURES * PAIR features has whole[0] tiles of TOKENS, of the `cut` last columns whole[1], and as many of SMALL as
// hold the other tokens. Clusters take tiles in turn; those of SMALL the `shares` clusters that would be next take alone.
//
// Before: Problem (tokens, features, group, cut, whole, shares), TOKENS, SMALL, FEATURES, PAIR, CLUSTER.

struct Schedule {
  const Problem& p;
  const int columns;
  int part = 0, next, step, token, feature;
  bool small = false;

  __device__ __forceinline__ Schedule(const Problem& p)
      : p(p), columns((p.features + FEATURES * PAIR - 1) / (FEATURES * PAIR)), next(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER) {}

  // As of products of experts, see `experts.cuh`: here all rows have one weight.
  __device__ __forceinline__ int limit() const { return p.tokens; }
  __device__ __forceinline__ const unsigned char* words() const { return p.words; }
  __device__ __forceinline__ const float* scales() const { return p.scales; }
  __device__ __forceinline__ const int* zeros() const { return p.zeros; }

  // Parts: tiles of TOKENS of the first columns and of those that are cut, then of SMALL of both.
  __device__ __forceinline__ bool take(u32 neighbour) {
    for (; part < (SMALL < TOKENS ? 4 : 1); part++) {
      const bool cut = part % 2;
      const int whole = p.whole[cut], first = cut ? columns - p.cut : 0, along_features = cut ? p.cut : columns - p.cut;
      small = part > 1;
      const int along_tokens = small ? max(0, p.tokens - whole * TOKENS + SMALL - 1) / SMALL : whole;
      if (next < along_tokens * along_features) {
        const int before = next / (p.group * along_features) * p.group, size = min(p.group, along_tokens - before);
        const int at = next - before * along_features;
        token = small ? whole * TOKENS + (before + at % size) * SMALL : (before + at % size) * TOKENS;
        feature = ((first + at / size) * PAIR + int(neighbour)) * FEATURES;
        next += step;
        return true;
      }
      next -= along_tokens * along_features;
      if (part == 1) {
        step = p.shares;
        if (next >= step) return false;
      }
    }
    return false;
  }
};
