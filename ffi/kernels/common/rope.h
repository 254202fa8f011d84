// Rotary embedding: angles and the rotation itself, for host and device.
//
// A float32 product of position and frequency is off by 0.03 rad near position 10^6. Frequencies are therefore given in
// turns (f / 2 pi) as 64-bit fixed point; the product with the position wraps modulo one turn in integers, exactly, for
// negative positions too.
#ifndef TURBOATTN_KERNELS_COMMON_ROPE_H_
#define TURBOATTN_KERNELS_COMMON_ROPE_H_

#include <cmath>
#include <cstdint>

#include "core/params.h"
#include "kernels/common/dtypes.h"

namespace turboattn {

struct SinCos {
  float cos;
  float sin;
};

// What pair j turns by at each position, in units of 2^-64 turns.
TA_HD uint64_t RopeStep(const uint32_t* turns, int64_t j) {
  return static_cast<uint64_t>(turns[2 * j]) << 32 | turns[2 * j + 1];
}

// Angle in [-pi, pi) after `position` steps.
TA_HD float RopeAngle(uint64_t step, int64_t position) {
  const uint64_t phase = static_cast<uint64_t>(position) * step;
  return MulRn(static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(phase >> 32))),
               1.46291807926715968e-9f);  // pi / 2^31
}

// The same for a per-sequence base: f_j = base^(-2j/dim), in double precision.
TA_HD float RopeAngleDynamic(float base, int64_t j, int32_t dim, int64_t position) {
  constexpr double kTwoPi = 6.283185307179586476925;
  const double frequency = pow(static_cast<double>(base), -2.0 * static_cast<double>(j) / static_cast<double>(dim));
  const double turns = static_cast<double>(position) * (frequency / kTwoPi);
  return static_cast<float>((turns - rint(turns)) * kTwoPi);
}

// Which of the three multimodal position axes turns pair j.
TA_HD int RopeAxis(const RopeParams& rope, int64_t j) {
  if (rope.sections_interleaved) {
    const int64_t axis = j % 3, cycle = j / 3;
    return axis == 1 && cycle < rope.section_h ? 1 : axis == 2 && cycle < rope.section_w ? 2 : 0;
  }
  if (rope.section_t + rope.section_h + rope.section_w == 0) return 0;
  return j < rope.section_t ? 0 : j < rope.section_t + rope.section_h ? 1 : 2;
}

// Position that turns pair j of packed token `token`, whose place in its sequence is `sequence_position`.
TA_HD int64_t RopePosition(const RopeParams& rope, int64_t j, int64_t token, int64_t sequence_position) {
  if (rope.positions == nullptr) return sequence_position;
  if (rope.position_axes == 1) return rope.positions[token];
  return rope.positions[token * 3 + RopeAxis(rope, j)];
}

// Cosine and sine of an angle in [-pi, pi]: on the GPU the operations of CUDA's cosf and sinf, with the same results,
// but the reduction to [-pi/4, pi/4] once for both and without their path for large angles.
TA_HD SinCos SinCosOf(float angle) {
#if defined(__CUDA_ARCH__)
  const float shifted = AddRn(MulRn(angle, 0.63661974668502807617f), 0x1.8p23f);  // quarter turns, in the low bits
  const uint32_t quarter = FloatToBits(shifted);
  const float quarters = SubRn(shifted, 0x1.8p23f);
  float x = fmaf(quarters, -1.5707962512969970703f, angle);
  x = fmaf(quarters, -7.5497894158615963534e-08f, x);
  x = fmaf(quarters, -5.3903029534742383927e-15f, x);
  const float square = MulRn(x, x);
  float sine = fmaf(square, BitsToFloat(0xb94d4153u), BitsToFloat(0x3c0885e4u));
  sine = fmaf(fmaf(square, sine, BitsToFloat(0xbe2aaaa8u)), MulRn(x, square), x);
  float cosine = fmaf(square, BitsToFloat(0x37cbac00u), -0.0013887860113754868507f);
  cosine = fmaf(square, fmaf(square, cosine, 0.041666727513074874878f), -0.4999999701976776123f);
  cosine = fmaf(cosine, square, 1.f);
  const bool odd = (quarter & 1) != 0;
  return {BitsToFloat(FloatToBits(odd ? sine : cosine) ^ ((quarter + 1) & 2) << 30),
          BitsToFloat(FloatToBits(odd ? cosine : sine) ^ (quarter & 2) << 30)};
#else
  return {cosf(angle), sinf(angle)};
#endif
}

// Cosine and sine times the attention factor.
TA_HD SinCos RopeTurn(const RopeParams& rope, float angle) {
  const SinCos turn = SinCosOf(angle);
  return {MulRn(turn.cos, rope.attention_factor), MulRn(turn.sin, rope.attention_factor)};
}

// The turn of pair j. b: the sequence, for the dynamic base.
TA_HD SinCos RopeSinCos(const RopeParams& rope, int64_t b, int64_t j, int64_t token, int64_t sequence_position) {
  const int64_t position = RopePosition(rope, j, token, sequence_position);
  const float angle = rope.turns != nullptr ? RopeAngle(RopeStep(rope.turns, j), position)
                                            : RopeAngleDynamic(rope.base[b], j, rope.dim, position);
  return RopeTurn(rope, angle);
}

// Columns of pair j within the head.
TA_HD int64_t RopeFirst(const RopeParams& rope, int64_t j) { return rope.offset + (rope.interleaved ? 2 * j : j); }
TA_HD int64_t RopeSecond(const RopeParams& rope, int64_t j) {
  return rope.offset + (rope.interleaved ? 2 * j + 1 : j + rope.dim / 2);
}

TA_HD void RopeRotate(SinCos turn, float* first, float* second) {
  const float x0 = *first, x1 = *second;
  *first = SubRn(MulRn(turn.cos, x0), MulRn(turn.sin, x1));
  *second = AddRn(MulRn(turn.cos, x1), MulRn(turn.sin, x0));
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_ROPE_H_
