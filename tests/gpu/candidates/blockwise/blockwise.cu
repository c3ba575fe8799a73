// y = a @ b.T of e4m3 codes in blocks of 128 along K, for Hopper (sm_90a). `blockwise.py` says what it computes and launches it.
//
// One thread of a program's last warpgroup loads codes and scales, by the tensor copy engine. The other MULTIPLIERS warpgroups
// multiply, each WAVES times 64 rows. A block of 128 codes is summed by four wgmma in the tensor core, from zero; its sum times
// the product of both scales is added to a float32 register. Meanwhile other warpgroups have the tensor core; DOUBLE: this one
// has the next block in it, too. Programs are persistent. In a cluster of two, neighbours along N, each loads half of the rows
// of a for both.
//
// No header is included, so that NVRTC compiles this as nvcc does.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap { char bytes[128]; };

// Codes (rows, K); scales of blocks of 1 x 128 (blocks, rows), of 128 x 128 (rows / 128, blocks).
struct Maps { TensorMap a, b, scale_a, scale_b; };

constexpr int BLOCK = 128;         // codes of a block along K, columns of a tile
constexpr int SUMS = BLOCK / 2;    // sums that a thread holds of 64 rows of a tile
constexpr int SQUARES = 4;         // scales of 128 x 128 codes that are copied at a time, 16 bytes; the first one is wanted

struct Problem {
  const void* bias;                          // bfloat16, or null
  void* y;
  int m, n, k;
  int group;                                 // tiles along M that share their columns' codes in the L2 cache
};

// Barriers and copies

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void init_barrier(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
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

// Arrive at the same barrier of one of the cluster's programs.
__device__ __forceinline__ void arrive_at(u32 bar, u32 program) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(bar), "r"(program) : "memory");
}

// A box at (x, y) of a matrix into shared memory; `programs`: a bit for each program of the cluster that gets it, 0: this one.
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

template <int CLUSTER>
__device__ __forceinline__ void sync_cluster() {
  if constexpr (CLUSTER > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    asm volatile("bar.sync 0;" ::: "memory");
}

// The tensor core

// Rows of 128 bytes, swizzled by 128 bytes; 1024 bytes from eight rows to the next eight.
__device__ __forceinline__ u64 descriptor(u32 address) {
  return (u64(1) << 62) | (u64(1024 >> 4) << 32) | (u64(1) << 16) | ((address & 0x3FFFF) >> 4);
}

#define SUMS_8(p, i) "+f"(p[i]), "+f"(p[i + 1]), "+f"(p[i + 2]), "+f"(p[i + 3]), "+f"(p[i + 4]), "+f"(p[i + 5]), "+f"(p[i + 6]), "+f"(p[i + 7])
#define STEP(a, b, add) \
  "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
  a ", " b ", " add ", 1, 1;\n"

// Begin the sum of 64 rows by 128 columns over a block of K; the sums are there after `finish`. `never` is 0, which the compiler
// must not know: as it has to reckon with the old sums, it uses them before the tensor core overwrites them, and does not put
// the new ones into further registers, of which there are none left.
__device__ __forceinline__ void multiply(float (&p)[SUMS], u64 a, u64 b, int never) {
  asm volatile(
      "{\n.reg .b64 a1, a2, a3, b1, b2, b3;\n.reg .pred old;\nsetp.ne.b32 old, %66, 0;\n"
      "add.s64 a1, %64, 2;\nadd.s64 a2, %64, 4;\nadd.s64 a3, %64, 6;\n"
      "add.s64 b1, %65, 2;\nadd.s64 b2, %65, 4;\nadd.s64 b3, %65, 6;\n"
      "wgmma.fence.sync.aligned;\n"
      STEP("%64", "%65", "old") STEP("a1", "b1", "1") STEP("a2", "b2", "1") STEP("a3", "b3", "1")
      "wgmma.commit_group.sync.aligned;\n}\n"
      : SUMS_8(p, 0), SUMS_8(p, 8), SUMS_8(p, 16), SUMS_8(p, 24), SUMS_8(p, 32), SUMS_8(p, 40), SUMS_8(p, 48), SUMS_8(p, 56)
      : "l"(a), "l"(b), "r"(never) : "memory");
}

// Wait for all but the last LATER sums that were begun.
template <int LATER>
__device__ __forceinline__ void finish(float (&p)[SUMS]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;\n"
      : SUMS_8(p, 0), SUMS_8(p, 8), SUMS_8(p, 16), SUMS_8(p, 24), SUMS_8(p, 32), SUMS_8(p, 40), SUMS_8(p, 48), SUMS_8(p, 56)
      : "n"(LATER) : "memory");
}

// Output

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Four lanes hold a word each of four chunks of 16 bytes; afterwards each lane holds one chunk.
__device__ __forceinline__ void gather_chunks(u32 (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(0xFFFFFFFF, odd ? w[i] : w[i + 1], 1);
    (odd ? w[i] : w[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 got = __shfl_xor_sync(0xFFFFFFFF, upper ? w[i] : w[i + 2], 2);
    (upper ? w[i] : w[i + 2]) = got;
  }
}

__device__ __forceinline__ float2 bias_at(const Problem& p, int column) {
  if (p.bias == nullptr || column >= p.n) return make_float2(0.f, 0.f);
  const u32 word = *reinterpret_cast<const u32*>(static_cast<const unsigned short*>(p.bias) + column);
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000));
}

// Write 64 rows by 128 columns, of which this thread has two rows, as bfloat16.
__device__ __forceinline__ void write(const float (&sum)[SUMS], const Problem& p, int row, int first, int lane) {
  const int q = lane & 3;
#pragma unroll
  for (int part = 0; part < BLOCK / 32; part++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = part * 16 + i * 4 + half * 2;
        const float2 bias = bias_at(p, first + part * 32 + i * 8 + 2 * q);
        words[i] = pack(sum[at] + bias.x, sum[at + 1] + bias.y);
      }
      gather_chunks(words, lane);
      const int r = row + 8 * half, column = first + part * 32 + q * 8;
      if (r < p.m && column < p.n)
        *reinterpret_cast<uint4*>(static_cast<unsigned short*>(p.y) + i64(r) * p.n + column) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// The tiles of a program, one after the other: groups of rows first, so that what programs read at once stays in the L2 cache.
template <int ROWS, int CLUSTER>
struct Tiles {
  int rows, columns, group, next, step, row, column;

  __device__ __forceinline__ Tiles(const Problem& p)
      : rows((p.m + ROWS - 1) / ROWS), columns((p.n + BLOCK * CLUSTER - 1) / (BLOCK * CLUSTER)), group(p.group),
        next(blockIdx.x / CLUSTER), step(gridDim.x / CLUSTER) {}

  __device__ __forceinline__ bool take(u32 program) {
    if (next >= rows * columns) return false;
    const int before = next / (group * columns) * group, size = min(group, rows - before), at = next - before * columns;
    row = (before + at % size) * ROWS;
    column = (at / size * CLUSTER + int(program)) * BLOCK;
    next += step;
    return true;
  }
};

// A stage of the ring in shared memory, and the parity of the barriers' phase.
template <int STAGES>
struct Place {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

template <int MULTIPLIERS, int WAVES, bool DOUBLE, int STAGES, int CLUSTER, bool ROWS_OF_B>
__device__ __forceinline__ void body(const Maps& maps, const Problem& p) {
  constexpr int ROWS = 64 * WAVES * MULTIPLIERS, A_BYTES = ROWS * BLOCK, B_BYTES = BLOCK * BLOCK;
  constexpr int SCALES = ROWS + BLOCK;  // floats of a stage
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  const u32 b_codes = base + STAGES * A_BYTES, scales = b_codes + STAGES * B_BYTES;
  const u32 full = scales + STAGES * SCALES * 4, empty = full + STAGES * 8;
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = __shfl_sync(0xFFFFFFFF, thread / 32, 0), role = warp / 4;  // the same for the warp, as the compiler sees
  u32 program = 0;
  if constexpr (CLUSTER > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(program));

  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) {
      init_barrier(full + 8 * s, 1);
      init_barrier(empty + 8 * s, CLUSTER * MULTIPLIERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  sync_cluster<CLUSTER>();

  Tiles<ROWS, CLUSTER> tiles(p);
  const int blocks = (p.k + BLOCK - 1) / BLOCK;
  Place<STAGES> at;
  if (role == MULTIPLIERS) {
    if constexpr (MULTIPLIERS == 3) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (warp == MULTIPLIERS * 4 && lane == 0) {
      while (tiles.take(program))
#pragma unroll 1
        for (int block = 0; block < blocks; block++, at.advance()) {
          wait_for(empty + 8 * at.stage, at.parity ^ 1);
          const u32 bar = full + 8 * at.stage, part = A_BYTES / CLUSTER * program;
          expect_bytes(bar, A_BYTES + B_BYTES + 4 * (ROWS + (ROWS_OF_B ? BLOCK : SQUARES)));
          copy_box(maps.a, base + at.stage * A_BYTES + part, bar, block * BLOCK, tiles.row + ROWS / CLUSTER * program,
                   CLUSTER > 1 ? (1 << CLUSTER) - 1 : 0);
          copy_box(maps.b, b_codes + at.stage * B_BYTES, bar, block * BLOCK, tiles.column, 0);
          copy_box(maps.scale_a, scales + at.stage * SCALES * 4, bar, tiles.row, block, 0);
          copy_box(maps.scale_b, scales + (at.stage * SCALES + ROWS) * 4, bar, ROWS_OF_B ? tiles.column : block,
                   ROWS_OF_B ? block : tiles.column / BLOCK, 0);
        }
    }
    __syncwarp();
  } else {
    if constexpr (MULTIPLIERS == 3) asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int first_row = role * 64 * WAVES, own_row = first_row + (warp % 4) * 16 + lane / 4;
    const int never = p.k < 0;
    float part[DOUBLE ? 2 : 1][SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; i++) part[0][i] = part[DOUBLE ? 1 : 0][i] = 0.f;
    const float* all_scales = reinterpret_cast<const float*>(memory + (scales - shared_address(memory)));
    while (tiles.take(program)) {
      float sum[WAVES][SUMS];
#pragma unroll
      for (int w = 0; w < WAVES; w++)
#pragma unroll
        for (int i = 0; i < SUMS; i++) sum[w][i] = 0.f;

      // Begin the sums of a block; a wave of them.
      auto begin = [&](float (&to)[SUMS], int stage, int w) {
        const u64 a = descriptor(base + stage * A_BYTES + first_row * BLOCK), b = descriptor(b_codes + stage * B_BYTES);
        multiply(to, a + w * (64 * BLOCK >> 4), b, never);
      };
      auto read_scales = [&](int stage, int w) {
        const float* scale = all_scales + stage * SCALES;
        const float whole = ROWS_OF_B ? 1.f : scale[ROWS];
        return make_float2(scale[own_row + 64 * w] * whole, scale[own_row + 64 * w + 8] * whole);
      };
      auto release = [&](int stage) {
        if (ROWS_OF_B) __syncwarp();
        if (lane < CLUSTER) arrive_at(empty + 8 * stage, lane);
      };
      auto add = [&](float (&to)[SUMS], const float (&from)[SUMS], float2 s, int stage) {
#pragma unroll
        for (int i = 0; i < SUMS; i += 4) {
          const float2 c = ROWS_OF_B ? *reinterpret_cast<const float2*>(all_scales + stage * SCALES + ROWS + 2 * i + 2 * (lane & 3))
                                     : make_float2(1.f, 1.f);
          to[i] += from[i] * (s.x * c.x);
          to[i + 1] += from[i + 1] * (s.x * c.y);
          to[i + 2] += from[i + 2] * (s.y * c.x);
          to[i + 3] += from[i + 3] * (s.y * c.y);
        }
      };

      if constexpr (DOUBLE) {
        // The tensor core always has the next block while this one is added.
        static_assert(WAVES == 1);
        wait_for(full + 8 * at.stage, at.parity);
        begin(part[0], at.stage, 0);
        float2 s = read_scales(at.stage, 0);
        int before = at.stage;
        at.advance();
        auto next = [&](float (&now)[SUMS], float (&then)[SUMS]) {
          wait_for(full + 8 * at.stage, at.parity);
          begin(then, at.stage, 0);
          const float2 later = read_scales(at.stage, 0);
          finish<1>(now);
          if (!ROWS_OF_B) release(before);
          add(sum[0], now, s, before);
          if (ROWS_OF_B) release(before);
          s = later, before = at.stage;
          at.advance();
        };
        auto last = [&](float (&now)[SUMS]) {
          finish<0>(now);
          if (!ROWS_OF_B) release(before);
          add(sum[0], now, s, before);
          if (ROWS_OF_B) release(before);
        };
        int block = 1;
        for (; block + 1 < blocks; block += 2) {
          next(part[0], part[1]);
          next(part[1], part[0]);
        }
        if (block < blocks) {
          next(part[0], part[1]);
          last(part[1]);
        } else {
          last(part[0]);
        }
      } else {
        for (int block = 0; block < blocks; block++, at.advance()) {
          wait_for(full + 8 * at.stage, at.parity);
#pragma unroll
          for (int w = 0; w < WAVES; w++) {
            begin(part[0], at.stage, w);
            const float2 s = read_scales(at.stage, w);
            finish<0>(part[0]);
            if (!ROWS_OF_B && w == WAVES - 1) release(at.stage);
            add(sum[w], part[0], s, at.stage);
            if (ROWS_OF_B && w == WAVES - 1) release(at.stage);
          }
        }
      }
#pragma unroll
      for (int w = 0; w < WAVES; w++) write(sum[w], p, tiles.row + own_row + 64 * w, tiles.column, lane);
    }
  }
  sync_cluster<CLUSTER>();
}

#define KERNEL(NAME, MULTIPLIERS, WAVES, DOUBLE, STAGES, CLUSTER, ROWS_OF_B) \
  extern "C" __global__ __launch_bounds__(128 * (MULTIPLIERS + 1), 1) __cluster_dims__(CLUSTER, 1, 1) void NAME( \
      const __grid_constant__ Maps maps, const __grid_constant__ Problem p) { \
    body<MULTIPLIERS, WAVES, DOUBLE, STAGES, CLUSTER, ROWS_OF_B>(maps, p); \
  }
// NAME for scales of b of 128 x 128, NAME_rows for 1 x 128.
#define BOTH(NAME, ...) KERNEL(NAME, __VA_ARGS__, false) KERNEL(NAME##_rows, __VA_ARGS__, true)

BOTH(g3w1_c2, 3, 1, false, 5, 2)
BOTH(g3w1_c1, 3, 1, false, 5, 1)
BOTH(g2w1_c2, 2, 1, false, 6, 2)
BOTH(g2w1_c1, 2, 1, false, 6, 1)
BOTH(g2w1d_c2, 2, 1, true, 6, 2)
BOTH(g2w2_c2, 2, 2, false, 4, 2)
