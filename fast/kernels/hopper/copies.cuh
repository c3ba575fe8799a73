// Barriers in shared memory, copies of the tensor copy engine, and descriptors of what wgmma reads there.
//
// Before: u32, u64, TensorMap, and GROUPS (warpgroups that multiply) and CLUSTER (programs of a cluster).

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void init_barrier(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

// The barriers of a ring of `stages`, which the other programs of a cluster see after `sync_cluster`. full, empty: how often each
// is arrived at in a phase.
__device__ __forceinline__ void init_ring(u32 full_at, u32 empty_at, int stages, u32 full, u32 empty) {
  for (int s = 0; s < stages; s++) {
    init_barrier(full_at + 8 * s, full);
    init_barrier(empty_at + 8 * s, empty);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank = 0;
  if constexpr (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void wait_for(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra again;\nfinished:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// An address in the shared memory of one of the cluster's programs.
__device__ __forceinline__ u32 address_in(u32 address, u32 program) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(program));
  return remote;
}

__device__ __forceinline__ void arrive_at(u32 bar, u32 program) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(bar, program)) : "memory");
}

// A box at (x, y) of a matrix into shared memory, of this program or of all whose bit is set.
__device__ __forceinline__ void copy_box(const TensorMap& map, u32 to, u32 bar, int x, int y, unsigned short programs) {
  const u64 address = reinterpret_cast<u64>(&map);
  if (programs) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(address), "r"(bar), "r"(x), "r"(y), "h"(programs) : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(address), "r"(bar), "r"(x), "r"(y) : "memory");
  }
}

__device__ __forceinline__ void copy_bytes(const void* from, u32 to, u32 bar, u32 bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(bar) : "memory");
}

__device__ __forceinline__ void sync_cluster() {
  if constexpr (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    asm volatile("bar.sync 0;" ::: "memory");
}

// The threads of one multiplying warpgroup; of all.
__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
__device__ __forceinline__ void sync_groups() { asm volatile("bar.sync 3, %0;" ::"n"(128 * GROUPS) : "memory"); }

// Rows of `width` bytes along K, swizzled by as many; eight rows to the next eight.
__device__ __forceinline__ u64 descriptor(u32 address, u32 width) {
  return (u64(width == 128 ? 1 : 2) << 62) | (u64(8 * width >> 4) << 32) | (u64(1) << 16) | ((address & 0x3FFFF) >> 4);
}
