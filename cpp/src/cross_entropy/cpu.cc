// The CPU kernels of CrossEntropy and CrossEntropyGrad.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cross_entropy/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include <algorithm>
#include <cmath>
#include <limits>

#include "cross_entropy/problem.h"
#include "elements-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::cross_entropy {
namespace HWY_NAMESPACE {
using namespace ort_ops::HWY_NAMESPACE;  // elements-inl.h

// exp(v - shift). Highway's makes 0 of NaN.
HWY_INLINE V ShiftedExp(V v, V shift) {
  const V exponent = hn::Sub(v, shift);
  return hn::IfThenElse(hn::IsNaN(exponent), exponent, hn::Exp(D(), exponent));
}

// The row's largest score; NaN are passed over.
HWY_INLINE float Largest(const float* scores, int64_t classes) {
  const D d;
  V largest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto add = [d, &largest](V v) HWY_ATTR { largest = hn::IfThenElse(hn::Gt(v, largest), v, largest); };
  int64_t c = 0;
  for (; c + kLanes <= classes; c += kLanes) add(hn::LoadU(d, scores + c));
  if (c < classes) add(hn::LoadNOr(largest, d, scores + c, static_cast<size_t>(classes - c)));
  return hn::ReduceMax(d, largest);
}

HWY_INLINE float SumOfExponentials(const float* scores, int64_t classes, float shift) {
  const D d;
  const V shifts = hn::Set(d, shift);
  V sum = hn::Zero(d);
  int64_t c = 0;
  for (; c + kLanes <= classes; c += kLanes) sum = hn::Add(sum, ShiftedExp(hn::LoadU(d, scores + c), shifts));
  if (c < classes) {
    const auto count = static_cast<size_t>(classes - c);
    sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, count), ShiftedExp(hn::LoadN(d, scores + c, count), shifts)));
  }
  return hn::ReduceSum(d, sum);
}

void RunForward(const Forward& problem, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* scores = problem.scores + row * problem.classes;
    const float largest = Largest(scores, problem.classes);
    const float rest = std::log(SumOfExponentials(scores, problem.classes, largest));
    problem.log_sum_exp[row] = largest + rest;
    const int64_t label = problem.labels.At(row);
    // Not log_sum_exp - score, which would lose the digits of a small loss.
    problem.row_loss[row] = label == problem.labels.ignore_index ? 0.0f : rest - (scores[label] - largest);
  }
}

HWY_INLINE void ScaledProbabilities(const float* scores, int64_t classes, float shift, float scale, float* out) {
  const D d;
  const V shifts = hn::Set(d, shift);
  const V scales = hn::Set(d, scale);
  int64_t c = 0;
  for (; c + kLanes <= classes; c += kLanes) {
    hn::StoreU(hn::Mul(scales, ShiftedExp(hn::LoadU(d, scores + c), shifts)), d, out + c);
  }
  if (c == classes) return;
  const auto count = static_cast<size_t>(classes - c);
  hn::StoreN(hn::Mul(scales, ShiftedExp(hn::LoadN(d, scores + c, count), shifts)), d, out + c, count);
}

void RunBackward(const Backward& problem, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const float* scores = problem.scores + row * problem.classes;
    float* dscores = problem.dscores + row * problem.classes;
    const int64_t label = problem.labels.At(row);
    if (label == problem.labels.ignore_index) {
      std::fill_n(dscores, problem.classes, 0.0f);
      continue;
    }
    const float scale = problem.drow_loss[row];
    const float shift = problem.log_sum_exp[row];
    // expm1, because the label's probability may be near 1. Before dscores, which may be scores, is written.
    const float at_label = scale * std::expm1(scores[label] - shift);
    ScaledProbabilities(scores, problem.classes, shift, scale, dscores);
    dscores[label] = at_label;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::cross_entropy
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::cross_entropy {

HWY_EXPORT(RunForward);
HWY_EXPORT(RunBackward);

void RunRows(const Forward& problem, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(RunForward)(problem, begin, end);
}

void RunRows(const Backward& problem, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(RunBackward)(problem, begin, end);
}

}  // namespace ort_ops::cross_entropy
#endif  // HWY_ONCE
