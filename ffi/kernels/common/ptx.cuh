// Thin wrappers of the PTX that the sm80 family is built from: asynchronous copies, ldmatrix, mma m16n8k16.
//
// Fragment layouts of m16n8k16 (lane = threadIdx.x % 32, g = lane / 4, c = lane % 4):
//   A [16 x 16]: a0 (g, 2c..2c+1)  a1 (g+8, 2c..)  a2 (g, 2c+8..)  a3 (g+8, 2c+8..)
//   B [16 x 8]:  b0 (2c..2c+1, g)  b1 (2c+8.., g)
//   C [16 x 8]:  c0 (g, 2c)  c1 (g, 2c+1)  c2 (g+8, 2c)  c3 (g+8, 2c+1)
// ldmatrix.x4 reads four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8, and
// gets (row g, columns 2c, 2c+1) of each, with .trans (rows 2c, 2c+1, column g).
#ifndef TURBOATTN_KERNELS_COMMON_PTX_CUH_
#define TURBOATTN_KERNELS_COMMON_PTX_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/common/dtypes.h"

namespace turboattn {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory; zeros when !valid, and `from` is then not read (but must be a legal address).
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void CopyAsync4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// The line of L2 that holds p, before it is asked for.
__device__ __forceinline__ void Prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Words by which blocks tell each other: what a block has written before a barrier, and then added to the word, is
// there for who has read that. AddInOrder returns what the word was before.
__device__ __forceinline__ uint64_t AddInOrder(uint64_t* to, uint64_t x) {
  uint64_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], %2;" : "=l"(old) : "l"(to), "l"(x) : "memory");
  return old;
}
__device__ __forceinline__ uint64_t LoadInOrder(const uint64_t* from) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}

// In no order with other words, but not torn, and seen by all blocks' additions after it.
__device__ __forceinline__ void StoreWord(uint64_t* to, uint64_t x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending groups of this thread's copies are in flight.
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes of shared memory.
__device__ __forceinline__ uint4 LoadShared16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void StoreShared16(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
               : "memory");
}

__device__ __forceinline__ void LoadMatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void LoadMatrix4Transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Programmatic dependent launch (code compiled for 9.0 or newer; nothing elsewhere). A grid that was launched as a
// dependent of the one before it may start when all blocks of that one have said LaunchDependents(), and sees its
// results after WaitForPrerequisites().
__device__ __forceinline__ void LaunchDependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void WaitForPrerequisites() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Clusters (9.0). Code for older cards has no call that launches one.
__device__ __forceinline__ void ArriveAtCluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForCluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Where block `rank` of the cluster has what this one has at a shared address.
__device__ __forceinline__ uint32_t PeerAddress(uint32_t address, int rank) {
  uint32_t peer = address;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(rank));
#endif
  return peer;
}
__device__ __forceinline__ void StorePeer(uint32_t address, float4 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
#endif
}
__device__ __forceinline__ void StorePeer(uint32_t address, float2 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
#endif
}

// The transpose of an 8 x 8 matrix of 16-bit elements held as (row g, columns 2c, 2c+1).
__device__ __forceinline__ uint32_t TransposeMatrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c += a * b
template <class E>
__device__ __forceinline__ void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void Mma<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void Mma<fp16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same where `condition`, of all lanes, is not 0: a predicate, not a branch.
template <class E>
__device__ __forceinline__ void MmaIf(uint32_t condition, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1);
template <>
__device__ __forceinline__ void MmaIf<bf16>(uint32_t condition, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %10, 0;\n"
      "@p mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      "}\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(condition));
}
template <>
__device__ __forceinline__ void MmaIf<fp16>(uint32_t condition, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %10, 0;\n"
      "@p mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      "}\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(condition));
}

// Two floats, each rounded to E (half to even), `low` in the low half.
template <class E>
__device__ __forceinline__ uint32_t Pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t Pack<bf16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t Pack<fp16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// (a & b) | c, which the compiler makes two instructions of when b and c are constants.
__device__ __forceinline__ uint32_t AndOr(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// a + b of two fp16 and a * b + c of two E, rounded once.
__device__ __forceinline__ uint32_t AddPair(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
template <class E>
__device__ __forceinline__ uint32_t FmaPair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  if constexpr (std::is_same_v<E, bf16>) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  }
  return sum;
}

// Each of two E, cut to -limit .. limit; `limit`: two E too. NaN stays NaN.
template <class E>
__device__ __forceinline__ uint32_t ClampPair(uint32_t pair, uint32_t limit);
template <>
__device__ __forceinline__ uint32_t ClampPair<bf16>(uint32_t pair, uint32_t limit) {
  asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(limit));
  asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(limit | 0x80008000u));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t ClampPair<fp16>(uint32_t pair, uint32_t limit) {
  asm("min.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(limit));
  asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(limit | 0x80008000u));
  return pair;
}

// The e4m3 values in the two low bytes as two fp16, which hold every e4m3.
__device__ __forceinline__ uint32_t Fp8ToFp16(uint32_t codes) {
  uint32_t pair;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
#else
  const uint32_t spread = __byte_perm(codes, 0, 0x1404);  // each in the high byte of a half
  const uint32_t body = spread & 0x7f007f00u;
  const uint32_t nan = (body + 0x01000100u) & 0x80008000u;  // the sign's place in a half
  // One place to the right, the exponent is where fp16 has it with a bias of 15 for 7: times 2^8 makes up for that.
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"((spread & 0x80008000u) | body >> 1), "r"(0x5c005c00u));
  pair |= nan - (nan >> 15);  // 0x7fff
#endif
  return pair;
}

// Whether one of the values in 16 bytes is Inf or NaN: an exponent of all ones carries into the sign's place when 1 is
// added to it. fp8 has NaN only, with the mantissa all ones too.
template <class E>
__device__ __forceinline__ bool HasNonFinite(uint4 packed) {
  constexpr bool kFp8 = std::is_same_v<E, fp8_e4m3>;
  constexpr uint32_t kExponents = kFp8 ? 0x7f7f7f7fu : std::is_same_v<E, bf16> ? 0x7f807f80u : 0x7c007c00u;
  constexpr uint32_t kOnes = kExponents & ~(kExponents << 1);  // the exponents' lowest bits
  const uint32_t carries = ((packed.x & kExponents) + kOnes) | ((packed.y & kExponents) + kOnes) |
                           ((packed.z & kExponents) + kOnes) | ((packed.w & kExponents) + kOnes);
  return (carries & (kFp8 ? 0x80808080u : 0x80008000u)) != 0;
}

// 2^x, within 2 ulp; 0 for -Inf.
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, within 1 ulp; 0 for Inf.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes to global memory, under a predicate: a branch would keep what is around it in order.
__device__ __forceinline__ void StoreIf(bool condition, uint4* to, uint4 x) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n"
      "}\n" ::"r"(static_cast<int>(condition)),
      "l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
      : "memory");
}

// A value that the compiler knows nothing about. It would turn base + constant into base | constant where it knows that
// the bits are free, which no address field of an instruction can hold.
__device__ __forceinline__ uint32_t Opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where 16-byte chunk `chunk` of row `row` lies in a tile of rows of kChunks chunks: chunks of eight consecutive rows
// fall into different banks, as ldmatrix needs, without padding.
template <int kChunks>
__device__ __forceinline__ int SwizzledChunk(int row, int chunk) {
  static_assert(kChunks == 2 || kChunks == 4 || kChunks == 8 || kChunks == 16 || kChunks == 32);
  return row * kChunks + (chunk ^ (kChunks == 2 ? (row >> 2) & 1 : kChunks == 4 ? (row >> 1) & 3 : row & 7));
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_PTX_CUH_
