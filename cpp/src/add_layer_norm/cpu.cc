// The CPU kernel of AddLayerNorm: a row at a time, which stays in the first cache levels between its three sweeps.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "add_layer_norm/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include <cmath>
#include <cstring>

#include "add_layer_norm/problem.h"
#include "elements-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::add_layer_norm {
namespace HWY_NAMESPACE {
using namespace ort_ops::HWY_NAMESPACE;  // elements-inl.h

HWY_INLINE Pair Sum(Pair u, Pair v) { return {hn::Add(u.a, v.a), hn::Add(u.b, v.b)}; }
HWY_INLINE Pair Zero() { return {hn::Zero(D()), hn::Zero(D())}; }
HWY_INLINE float Total(Pair v) { return hn::ReduceSum(D(), hn::Add(v.a, v.b)); }

// Writes round_T(x1 + x2) to x and returns its sum.
template <class T>
HWY_INLINE float AddRows(const T* x1, const T* x2, T* x, int64_t cols) {
  Pair sum = Zero();
  int64_t i = 0;
  for (; i + kGroup <= cols; i += kGroup) {
    sum = Sum(sum, Elements<T>::RoundAndStore(Sum(Elements<T>::Load(x1 + i), Elements<T>::Load(x2 + i)), x + i));
  }
  if (i < cols) {
    const TailCopy<T> last_x1(x1 + i, cols - i);
    const TailCopy<T> last_x2(x2 + i, cols - i);
    T last_x[kGroup];
    sum = Sum(sum, Elements<T>::RoundAndStore(
                       Sum(Elements<T>::Load(last_x1.elements), Elements<T>::Load(last_x2.elements)), last_x));
    std::memcpy(x + i, last_x, static_cast<size_t>(cols - i) * sizeof(T));
  }
  return Total(sum);
}

template <class T>
HWY_INLINE float SumRow(const T* x, int64_t cols) {
  Pair sum = Zero();
  int64_t i = 0;
  for (; i + kGroup <= cols; i += kGroup) sum = Sum(sum, Elements<T>::Load(x + i));
  if (i < cols) sum = Sum(sum, Elements<T>::Load(TailCopy<T>(x + i, cols - i).elements));
  return Total(sum);
}

HWY_INLINE Pair AddSquares(Pair sum, Pair centred) {
  return {hn::MulAdd(centred.a, centred.a, sum.a), hn::MulAdd(centred.b, centred.b, sum.b)};
}

// The sum of (x - mean)^2. The mean comes first: a sum of squares less a square of sums would cancel.
template <class T>
HWY_INLINE float SumSquares(const T* x, int64_t cols, float mean) {
  const V means = hn::Set(D(), mean);
  const auto centred = [means](Pair v) HWY_ATTR -> Pair { return {hn::Sub(v.a, means), hn::Sub(v.b, means)}; };
  Pair sum = Zero();
  int64_t i = 0;
  for (; i + kGroup <= cols; i += kGroup) sum = AddSquares(sum, centred(Elements<T>::Load(x + i)));
  if (i < cols) {
    const TailCopy<T> last(x + i, cols - i);
    sum = AddSquares(sum, OnlyTail<T>(centred(Elements<T>::Load(last.elements)), cols - i));
  }
  return Total(sum);
}

template <class T, class TGamma>
HWY_INLINE void Normalise(const T* x, const TGamma* gamma, const TGamma* beta, float mean, float rstd, T* y,
                          int64_t cols) {
  const V means = hn::Set(D(), mean);
  const V rstds = hn::Set(D(), rstd);
  const auto y_of = [means, rstds](Pair v, Pair g, Pair b) HWY_ATTR -> Pair {
    return {hn::MulAdd(hn::Mul(hn::Sub(v.a, means), rstds), g.a, b.a),
            hn::MulAdd(hn::Mul(hn::Sub(v.b, means), rstds), g.b, b.b)};
  };
  int64_t i = 0;
  for (; i + kGroup <= cols; i += kGroup) {
    const Pair shift = beta == nullptr ? Zero() : LoadInOrderOf<T>(beta + i);
    Elements<T>::Store(y_of(Elements<T>::Load(x + i), LoadInOrderOf<T>(gamma + i), shift), y + i);
  }
  if (i == cols) return;
  const TailCopy<T> last_x(x + i, cols - i);
  const TailCopy<TGamma> last_gamma(gamma + i, cols - i);
  const TailCopy<TGamma> last_beta(beta == nullptr ? gamma + i : beta + i, cols - i);
  const Pair shift = beta == nullptr ? Zero() : LoadInOrderOf<T>(last_beta.elements);
  T last_y[kGroup];
  Elements<T>::Store(y_of(Elements<T>::Load(last_x.elements), LoadInOrderOf<T>(last_gamma.elements), shift), last_y);
  std::memcpy(y + i, last_y, static_cast<size_t>(cols - i) * sizeof(T));
}

template <class T, class TGamma>
void RunRowsOf(const Problem& problem, int64_t begin, int64_t end) {
  const int64_t cols = problem.cols;
  const auto* gamma = static_cast<const TGamma*>(problem.gamma);
  const auto* beta = static_cast<const TGamma*>(problem.beta);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t offset = row * cols;
    const T* const x1 = static_cast<const T*>(problem.x1) + offset;
    T* const y = static_cast<T*>(problem.y) + offset;
    // A sum that nobody wants to keep lies where y will be written over it.
    T* const kept = problem.x == nullptr ? y : static_cast<T*>(problem.x) + offset;
    const T* x = x1;
    float sum = 0;
    if (problem.x2 != nullptr) {
      sum = AddRows(x1, static_cast<const T*>(problem.x2) + offset, kept, cols);
      x = kept;
    } else {
      sum = SumRow(x1, cols);
      if (problem.x != nullptr && kept != x1) std::memcpy(kept, x1, static_cast<size_t>(cols) * sizeof(T));
    }
    const float mean = Canonical(sum / static_cast<float>(cols));
    const float variance = SumSquares(x, cols, mean) / static_cast<float>(cols);
    const float rstd = Canonical(1.0f / std::sqrt(variance + problem.epsilon));
    Normalise(x, gamma, beta, mean, rstd, y, cols);
    if (problem.mean != nullptr) problem.mean[row] = mean;
    if (problem.rstd != nullptr) problem.rstd[row] = rstd;
  }
}

template <class T>
void RunRowsOfType(const Problem& problem, int64_t begin, int64_t end) {
  if (problem.gamma_type == ORT_OPS_FLOAT) return RunRowsOf<T, float>(problem, begin, end);
  return RunRowsOf<T, T>(problem, begin, end);
}

void RunRows(const Problem& problem, int64_t begin, int64_t end) {
  if (problem.type == ORT_OPS_FLOAT) return RunRowsOf<float, float>(problem, begin, end);
  if (problem.type == ORT_OPS_FLOAT16) return RunRowsOfType<hwy::float16_t>(problem, begin, end);
  return RunRowsOfType<hwy::bfloat16_t>(problem, begin, end);
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::add_layer_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::add_layer_norm {

HWY_EXPORT(RunRows);

void RunRows(const Problem& problem, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(RunRows)(problem, begin, end);
}

}  // namespace ort_ops::add_layer_norm
#endif  // HWY_ONCE
