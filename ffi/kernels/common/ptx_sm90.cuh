// Thin wrappers of Hopper's PTX: mbarriers, tensor copies (TMA), warpgroup matrix products (wgmma), named barriers,
// register budgets. For sm_90a only.
//
// Tiles in shared memory. A tensor copy with the 128-byte swizzle writes a box of rows of 64 elements of 16 bits as
// [row][128 bytes], where 16-byte chunk c of row r lies at chunk c ^ (r & 7): tiles start at multiples of 1024 bytes. A
// tile of more columns is several such panels, one after the other. wgmma reads it in both directions:
//   K-major (rows are M or N, the product runs over columns): a step of 16 columns is 32 bytes further on; groups of 8
//     rows are 1024 bytes apart.
//   MN-major (the product runs over rows): a step of 16 rows is 2048 bytes further on; groups of 8 rows are 1024 bytes
//     apart and panels a whole panel.
// Or panels of 8 rows each follow one another before the next 8 rows: groups are then as many times 1024 bytes apart.
//
// Fragments of a 64 x N accumulator, by warp w of the warpgroup and lane (g = lane / 4, c = lane % 4): d[n][2 h + e] is
// row 16 w + 8 h + g, column 8 n + 2 c + e. A 16-bit A operand from registers has the layout of mma.m16n8k16.
#ifndef TURBOATTN_KERNELS_COMMON_PTX_SM90_CUH_
#define TURBOATTN_KERNELS_COMMON_PTX_SM90_CUH_

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/dtypes.h"
#include "kernels/common/ptx.cuh"

namespace turboattn {

constexpr int kWarpgroup = 128;  // threads

// ---- mbarriers

#if defined(TURBOATTN_DEBUG_WAITS)
// A wait of more than a second stops the kernel and says where, in memory that outlives it.
struct WaitReport {
  int stopped, name, block, thread, parity;
  int marks[16];  // the last Mark() of each warp
};
static __device__ WaitReport* g_wait_report;
static __device__ int g_marks[1024][16];

__device__ inline void Mark(int mark) {
  if (threadIdx.x % 32 == 0) *const_cast<volatile int*>(&g_marks[blockIdx.x % 1024][threadIdx.x / 32]) = mark;
}
__device__ __forceinline__ void StopWait(int name, uint32_t parity) {
  if (g_wait_report != nullptr && atomicCAS(&g_wait_report->stopped, 0, 1) == 0) {
    g_wait_report->name = name;
    g_wait_report->block = blockIdx.x;
    g_wait_report->thread = threadIdx.x;
    g_wait_report->parity = static_cast<int>(parity);
    for (int w = 0; w < 16; ++w) {
      g_wait_report->marks[w] = *const_cast<volatile int*>(&g_marks[blockIdx.x % 1024][w]);
    }
    __threadfence_system();
  }
  asm volatile("trap;");
}
#else
__device__ __forceinline__ void Mark(int) {}
#endif

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to tensor copies.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// One arrival, of those that the barrier was made for, when the thread's cp.async so far have landed.
__device__ __forceinline__ void ArriveAfterCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Arrives, and holds the phase open until `bytes` bytes of tensor copies have landed.
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool TryWait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Waits for the end of the phase of this parity; a fresh barrier counts as just past a phase of parity 1. `name` is for
// debugging.
__device__ __forceinline__ void WaitBarrier(uint64_t* barrier, uint32_t parity, int name) {
  const uint32_t address = SharedAddress(barrier);
#if defined(TURBOATTN_DEBUG_WAITS)
  Mark(name);
  const long long start = clock64();
  while (!TryWait(address, parity)) {
    if (clock64() - start > 1500000000ll) StopWait(name, parity);
  }
  Mark(-name);
#else
  while (!TryWait(address, parity)) {
  }
#endif
}

// A place in a ring and the parity to wait for there.
template <int kSlots>
struct RingSlot {
  int index = 0;
  uint32_t parity;

  __device__ explicit RingSlot(uint32_t first_parity) : parity(first_parity) {}
  __device__ void Advance() {
    if (++index == kSlots) {
      index = 0;
      parity ^= 1u;
    }
  }
};

// ---- named barriers: ids 1 .. 15

__device__ __forceinline__ void SyncNamed(int id, int threads) {
  Mark(100 + id);
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
  Mark(-100 - id);
}
__device__ __forceinline__ void ArriveNamed(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// SyncNamed, and whether `condition` is true in any of the threads.
__device__ __forceinline__ bool SyncNamedOr(int id, int threads, bool condition) {
  uint32_t any;
  Mark(100 + id);
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, %3, p;\nselp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(condition)), "r"(id), "r"(threads)
      : "memory");
  Mark(-100 - id);
  return any != 0;
}

// stmatrix.x4: four 8 x 8 matrices of 16-bit elements, as ldmatrix reads them (see ptx.cuh).
__device__ __forceinline__ void StoreMatrix4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- tensor copies

// True in one lane of a whole warp: the compiler knows of this one that it is one, and makes no loop over lanes of a
// tensor copy.
__device__ __forceinline__ bool ElectLane() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at these coordinates, innermost first, into shared memory; zeros where it lies outside the tensor.
__device__ __forceinline__ void CopyBox4(uint32_t to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2,
                                         int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(SharedAddress(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// `bytes` bytes, a multiple of 16, as both addresses are.
__device__ __forceinline__ void CopyBytes(uint32_t to, const void* from, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
               : "memory");
}

// Ordinary stores to shared memory before it are seen by tensor copies and wgmma after a following barrier.
__device__ __forceinline__ void FenceAsyncProxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- register budgets, by whole warpgroups

template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- wgmma

// Registers that a wgmma reads or writes must have their values before this.
__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// WgmmaWait<0>() for the two arms of a branch that whole warpgroups take. ptxas moves arithmetic across a wait, but not
// across a branch; the texts differ so that the compiler does not make one wait of two.
__device__ __forceinline__ void WgmmaWaitInArm0() {
  asm volatile("wgmma.wait_group.sync.aligned 0;  // 0" ::: "memory");
}
__device__ __forceinline__ void WgmmaWaitInArm1() {
  asm volatile("wgmma.wait_group.sync.aligned 0;  // 1" ::: "memory");
}

// Accumulators and A fragments change hands between the compiler and a running wgmma: it must not move them before.
template <int kTiles>
__device__ __forceinline__ void HoldRegisters(float (&d)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    asm volatile("" : "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])::"memory");
  }
}
template <int kTiles>
__device__ __forceinline__ void HoldRegisters(uint32_t (&a)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
  }
}

// Descriptor of a swizzled tile at `address`: panels `panel_bytes` apart (MN-major only), groups of 8 rows
// `group_bytes`.
__device__ __forceinline__ uint64_t TileDescriptor(uint32_t address, int panel_bytes, int group_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  return kSwizzle128 << 62 | static_cast<uint64_t>(group_bytes >> 4) << 32 |
         static_cast<uint64_t>(panel_bytes >> 4) << 16 | (address & 0x3ffffu) >> 4;
}
// The same tile `bytes` further on.
__device__ __forceinline__ uint64_t MoveDescriptor(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

// d = a b^T (+ d when accumulate != 0), 64 x kN x 16: both operands in shared memory, K-major.
template <class E, int kN>
__device__ void WgmmaShared(float (&d)[kN / 8][4], uint64_t a, uint64_t b, int accumulate);
// d += a b, 64 x kN x 16: a in registers, b in shared memory, MN-major.
template <class E, int kN>
__device__ void WgmmaRegisters(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b);
// d = a b^T (+ d when accumulate != 0), 64 x kN x 16: a in registers, b in shared memory, K-major.
template <class E, int kN>
__device__ void WgmmaRegistersByRows(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate);

// clang-format off
// kN / 2 accumulator registers a thread, then the other operands.
#define TA_ACC8(d, n) \
  "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3]), "+f"(d[n + 1][0]), "+f"(d[n + 1][1]), \
      "+f"(d[n + 1][2]), "+f"(d[n + 1][3])
#define TA_ACC32(d, n) TA_ACC8(d, n), TA_ACC8(d, n + 2), TA_ACC8(d, n + 4), TA_ACC8(d, n + 6)
#define TA_REGS_0 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TA_REGS_32 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TA_REGS_64 \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define TA_REGS_96 \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define TA_WGMMA_SHARED(E, TYPE, N, REGS, A, B, P, ...)                                                       \
  template <>                                                                                                 \
  __device__ __forceinline__ void WgmmaShared<E, N>(float (&d)[N / 8][4], uint64_t a, uint64_t b,             \
                                                    int accumulate) {                                         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N           \
                 "k16.f32." TYPE "." TYPE " {" REGS "}, " A ", " B ", p, 1, 1, 0, 0;\n}"                      \
                 : __VA_ARGS__                                                                                \
                 : "l"(a), "l"(b), "r"(accumulate)                                                            \
                 : "memory");                                                                                 \
  }
#define TA_WGMMA_REGISTERS(E, TYPE, N, REGS, A, B, ...)                                                       \
  template <>                                                                                                 \
  __device__ __forceinline__ void WgmmaRegisters<E, N>(float (&d)[N / 8][4], const uint32_t (&a)[4],          \
                                                       uint64_t b) {                                          \
    asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32."     \
                 TYPE "." TYPE " {" REGS "}, {" A "}, " B ", p, 1, 1, 1;\n}"                                  \
                 : __VA_ARGS__                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)                                         \
                 : "memory");                                                                                 \
  }
#define TA_WGMMA_REGISTERS_BY_ROWS(E, TYPE, N, REGS, A, B, P, ...)                                            \
  template <>                                                                                                 \
  __device__ __forceinline__ void WgmmaRegistersByRows<E, N>(float (&d)[N / 8][4], const uint32_t (&a)[4],    \
                                                             uint64_t b, int accumulate) {                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N           \
                 "k16.f32." TYPE "." TYPE " {" REGS "}, {" A "}, " B ", p, 1, 1, 0;\n}"                       \
                 : __VA_ARGS__                                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)                        \
                 : "memory");                                                                                 \
  }

TA_WGMMA_SHARED(bf16, "bf16", 64, TA_REGS_0, "%32", "%33", "%34", TA_ACC32(d, 0))
TA_WGMMA_SHARED(fp16, "f16", 64, TA_REGS_0, "%32", "%33", "%34", TA_ACC32(d, 0))
TA_WGMMA_SHARED(bf16, "bf16", 128, TA_REGS_0 ", " TA_REGS_32, "%64", "%65", "%66", TA_ACC32(d, 0), TA_ACC32(d, 8))
TA_WGMMA_SHARED(fp16, "f16", 128, TA_REGS_0 ", " TA_REGS_32, "%64", "%65", "%66", TA_ACC32(d, 0), TA_ACC32(d, 8))
TA_WGMMA_REGISTERS(bf16, "bf16", 64, TA_REGS_0, "%32, %33, %34, %35", "%36", TA_ACC32(d, 0))
TA_WGMMA_REGISTERS(fp16, "f16", 64, TA_REGS_0, "%32, %33, %34, %35", "%36", TA_ACC32(d, 0))
TA_WGMMA_REGISTERS(bf16, "bf16", 128, TA_REGS_0 ", " TA_REGS_32, "%64, %65, %66, %67", "%68", TA_ACC32(d, 0), TA_ACC32(d, 8))
TA_WGMMA_REGISTERS(fp16, "f16", 128, TA_REGS_0 ", " TA_REGS_32, "%64, %65, %66, %67", "%68", TA_ACC32(d, 0), TA_ACC32(d, 8))
TA_WGMMA_REGISTERS(bf16, "bf16", 256, TA_REGS_0 ", " TA_REGS_32 ", " TA_REGS_64 ", " TA_REGS_96, "%128, %129, %130, %131", "%132", TA_ACC32(d, 0), TA_ACC32(d, 8), TA_ACC32(d, 16), TA_ACC32(d, 24))
TA_WGMMA_REGISTERS(fp16, "f16", 256, TA_REGS_0 ", " TA_REGS_32 ", " TA_REGS_64 ", " TA_REGS_96, "%128, %129, %130, %131", "%132", TA_ACC32(d, 0), TA_ACC32(d, 8), TA_ACC32(d, 16), TA_ACC32(d, 24))
TA_WGMMA_REGISTERS_BY_ROWS(bf16, "bf16", 64, TA_REGS_0, "%32, %33, %34, %35", "%36", "%37", TA_ACC32(d, 0))
TA_WGMMA_REGISTERS_BY_ROWS(fp16, "f16", 64, TA_REGS_0, "%32, %33, %34, %35", "%36", "%37", TA_ACC32(d, 0))
// clang-format on

#undef TA_WGMMA_SHARED
#undef TA_WGMMA_REGISTERS
#undef TA_WGMMA_REGISTERS_BY_ROWS
#undef TA_ACC8
#undef TA_ACC32
#undef TA_REGS_0
#undef TA_REGS_32
#undef TA_REGS_64
#undef TA_REGS_96

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_PTX_SM90_CUH_
