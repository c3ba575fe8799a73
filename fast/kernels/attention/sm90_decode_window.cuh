// Attention to 16 slots of tokens as they were computed: what `sm90_decode.cu` includes where there are some.

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
    seen[i] = slot < slots && token < count && (slot < p.sinks || token >= max(stored_tokens(count, p.residual, p.open), p.sinks));
    if (MASKED && seen[i]) seen[i] = at.mask[token - at.eighth] != 0;
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
