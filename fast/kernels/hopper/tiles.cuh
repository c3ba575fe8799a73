// Which tiles a persistent cluster has, and where in a ring of stages it is.
//
// Before: Problem (tokens, features, group), TOKENS, FEATURES, PAIR, CLUSTER, STAGES.

// The tiles of a cluster, one after the other: groups of tokens first, so that what programs read at once stays in the L2 cache.
struct Tiles {
  int along_tokens, along_features, group, next, step, token, feature;

  __device__ __forceinline__ Tiles(const Problem& p)
      : along_tokens((p.tokens + TOKENS - 1) / TOKENS), along_features((p.features + FEATURES * PAIR - 1) / (FEATURES * PAIR)),
        group(p.group), next(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER) {}

  __device__ __forceinline__ bool take(u32 neighbour) {
    if (next >= along_tokens * along_features) return false;
    const int before = next / (group * along_features) * group, size = min(group, along_tokens - before);
    const int at = next - before * along_features;
    token = (before + at % size) * TOKENS;
    feature = (at / size * PAIR + int(neighbour)) * FEATURES;
    next += step;
    return true;
  }
};

// A stage of the ring, and the parity of its barriers' phase.
struct Place {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Where one of two warpgroups is some stages behind the other: the first says so, the second waits for it.
__device__ __forceinline__ void skew_arrive() { asm volatile("bar.arrive 4, 256;" ::: "memory"); }
__device__ __forceinline__ void skew_wait() { asm volatile("bar.sync 4, 256;" ::: "memory"); }
