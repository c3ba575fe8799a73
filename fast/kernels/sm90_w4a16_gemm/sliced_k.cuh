// Sliced K: K_SLICES warpgroups multiply the same features by the same tokens, the second one every other stage. Its
// sums are added to those of the first through shared memory, GATHERED tokens at a time, and the first one writes the tile.
//
// Before: `copies.cuh`, Sum, GROUPS, K_SLICES, STAGES, TOKENS.

constexpr int GATHERED = TOKENS < 64 ? TOKENS : 64, SUMS_BYTES = K_SLICES > 1 ? GROUPS * GATHERED * 256 : 0;
static_assert(K_SLICES <= 2 && STAGES % K_SLICES == 0);  // else parities of a stage would be those of every other phase

// A stage of those that a warpgroup takes, and the parity of its barriers' phase.
struct Own {
  int stage;
  u32 parity = 0;
  __device__ __forceinline__ Own(int slice) : stage(slice) {}
  __device__ __forceinline__ void advance() {
    stage += K_SLICES;
    if (stage >= STAGES) stage -= STAGES, parity ^= 1;
  }
};

__device__ __forceinline__ void arrive_named(int barrier) { asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void sync_named(int barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }

// Four sums of a thread to shared memory, or added from there.
__device__ __forceinline__ void leave_sums(const Sum* sum, u32 address) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(sum[0]), "f"(sum[1]), "f"(sum[2]), "f"(sum[3]) : "memory");
}
__device__ __forceinline__ void add_sums(Sum* sum, u32 address) {
  const uint4 w = load_words(address);
  const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) sum[i] = __fadd_rn(sum[i], __uint_as_float(words[i]));
}

// Whether a warpgroup has all sums afterwards. place: a thread's in shared memory; opening: whether nothing was left there before.
template <int HELD>
__device__ __forceinline__ bool gathered(Sum (&sum)[HELD], u32 place, int group, int slice, bool& opening) {
  if constexpr (K_SLICES > 1) {
    const int left = 5 + group, taken = 7 + group;
#pragma unroll
    for (int from = 0; from < HELD; from += GATHERED / 2) {
      const int to = from + GATHERED / 2 < HELD ? from + GATHERED / 2 : HELD;
      if (slice > 0) {
        if (!opening) sync_named(taken);
#pragma unroll
        for (int i = from; i < to; i += 4) leave_sums(sum + i, place + (i - from) * 512);
        arrive_named(left);
      } else {
        if (!opening) arrive_named(taken);
        sync_named(left);
#pragma unroll
        for (int i = from; i < to; i += 4) add_sums(sum + i, place + (i - from) * 512);
      }
      opening = false;
    }
  }
  return slice == 0;
}
