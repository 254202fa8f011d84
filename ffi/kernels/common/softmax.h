// The state of an online softmax and how two states become one.
#ifndef TURBOATTN_KERNELS_COMMON_SOFTMAX_H_
#define TURBOATTN_KERNELS_COMMON_SOFTMAX_H_

#include <cmath>

#include "kernels/common/dtypes.h"

namespace turboattn {

// Over the keys seen so far: max of the scores, and sum of exp(score - max). No key yet: (-Inf, 0).
struct SoftmaxState {
  float max;
  float sum;
};

TA_HD SoftmaxState EmptySoftmax() { return {-Infinity(), 0.f}; }

// exp(x - max), where both may be -Inf: no key, hence 0 and not exp(-Inf + Inf) = NaN.
TA_HD float ExpRelative(float x, float max) { return x == -Infinity() ? 0.f : expf(x - max); }

// Factors that bring two partial results to their common maximum.
struct MergeWeights {
  float first;
  float second;
};

// *state takes in `other`, whose keys are disjoint from its own. The weights are for the two unnormalised value sums.
TA_HD MergeWeights MergeSoftmax(SoftmaxState* state, SoftmaxState other) {
  const float max = other.max > state->max ? other.max : state->max;
  const MergeWeights weights = {ExpRelative(state->max, max), ExpRelative(other.max, max)};
  *state = {max, state->sum * weights.first + other.sum * weights.second};
  return weights;
}

// The sink joins the denominator as a key without a value; call it once per row. The maximum includes it, so nothing
// overflows. The weight is for the unnormalised value sum.
TA_HD float AddSink(SoftmaxState* state, float sink) {
  return MergeSoftmax(state, {sink, sink == -Infinity() ? 0.f : 1.f}).first;
}

// Natural log of the denominator; -Inf when there is no key and no sink.
TA_HD float LogSumExp(SoftmaxState state) { return state.sum == 0.f ? -Infinity() : state.max + logf(state.sum); }

// 1 / denominator, and 0 for a row that saw nothing: its output is 0.
TA_HD float InverseSum(SoftmaxState state) { return state.sum == 0.f ? 0.f : 1.f / state.sum; }

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_SOFTMAX_H_
