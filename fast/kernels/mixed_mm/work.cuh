// What a cluster multiplies, one after the other: a tile, and the steps along K.
//
// With SPLITS every cluster has one tile, and its programs have parts of K. Without, clusters have tiles in turn; with DIVIDED only
// `whole` tiles so, and the pairs of steps of all others are divided evenly between the clusters, in the order of tiles and of K. A
// cluster begins with its last tile. So it has the beginning of at most one tile that another one ends, and has it first; and
// those whose sums it has to wait for have lower numbers: they were launched before.
//
// Before: Problem, `tiles.cuh`, SPLITS, DIVIDED.

struct Work {
  Tiles tiles;
  int first, last;  // steps
  u32 pairs;       // of steps of all divided tiles
  int begin, end;  // what is left of its own

  __device__ __forceinline__ Work(const Problem& p, int split) : tiles(p) {
    // The steps of a part of K, whole pairs.
    first = 2 * (i64(p.steps / 2) * split / SPLITS), last = 2 * (i64(p.steps / 2) * (split + 1) / SPLITS);
    pairs = (tiles.count() - (DIVIDED ? p.whole : 0)) * (p.steps / 2);
    begin = DIVIDED ? begin_of(cluster()) : 0, end = DIVIDED ? begin_of(cluster() + 1) : 0;
  }

  __device__ __forceinline__ static int cluster() { return blockIdx.x / CLUSTER; }

  // The first pair of steps of a cluster.
  __device__ __forceinline__ int begin_of(int cluster) const { return pairs * u32(cluster) / u32(tiles.step); }

  __device__ __forceinline__ bool take(const Problem& p, u32 neighbour) {
    if (!DIVIDED || tiles.next < p.whole) return tiles.take(neighbour);
    if (begin >= end) return false;
    const int each = p.steps / 2, tile = (end - 1) / each, from = max(begin, tile * each);
    tiles.place(p.whole + tile, neighbour);
    first = 2 * (from - tile * each), last = 2 * (end - tile * each);
    end = from;
    return true;
  }

  // The first feature that a program loads: one that has fewer than a tile left takes others once more, or all in vain, and does
  // not write them.
  __device__ __forceinline__ int feature(const Problem& p) const { return min(tiles.feature, p.features - FEATURES); }

  // Whether another cluster adds these sums to its own.
  __device__ __forceinline__ bool is_given(const Problem& p) const { return DIVIDED && last < p.steps; }

  // How many clusters in front of this one have sums of its tile.
  __device__ __forceinline__ int others(const Problem& p) const {
    if (!DIVIDED || first == 0) return 0;
    const int tile = end - first / 2;
    int count = 1;
    while (begin_of(cluster() - count) > tile) count++;
    return count;
  }
};
