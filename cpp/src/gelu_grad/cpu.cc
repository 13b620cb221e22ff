// The CPU kernel of GeluGrad. Both forms are written with the distribution's two tails, so that nothing cancels where x
// is far below zero.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gelu_grad/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include <cstring>

#include "elements-inl.h"
#include "gelu_grad/problem.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::gelu_grad {
namespace HWY_NAMESPACE {
using namespace ort_ops::HWY_NAMESPACE;  // elements-inl.h

HWY_INLINE V Constant(float value) { return hn::Set(D(), value); }

// Phi(x) + x * phi(x). With e = exp(-x^2 / 2), the upper tail of the normal distribution at |x| is e times half of the
// scaled complementary error function of |x| / sqrt(2). That is approximated by P(t) / (|x| + 2.5) with
// t = (|x| - 2.5) / (|x| + 2.5), where P is a polynomial of degree 9 fitted over |x| <= 14.5, beyond which e is 0
// (largest relative error: 1.5e-8 of the fit, 2.9e-7 with the roundings of its evaluation).
HWY_INLINE V ExactDerivative(V x) {
  const V magnitude = hn::Abs(x);
  const V e = hn::Exp(D(), hn::Mul(hn::Mul(x, x), Constant(-0.5f)));
  const V inverse = hn::Div(Constant(1.0f), hn::Add(magnitude, Constant(2.5f)));
  const V t = hn::Mul(hn::Sub(magnitude, Constant(2.5f)), inverse);
  V p = Constant(-0.0001572665642015636f);
  p = hn::MulAdd(p, t, Constant(-0.0003108646487817168f));
  p = hn::MulAdd(p, t, Constant(0.0006843443843536079f));
  p = hn::MulAdd(p, t, Constant(0.0025232969783246517f));
  p = hn::MulAdd(p, t, Constant(-0.0016009609680622816f));
  p = hn::MulAdd(p, t, Constant(-0.016386020928621292f));
  p = hn::MulAdd(p, t, Constant(0.009235914796590805f));
  p = hn::MulAdd(p, t, Constant(0.13198696076869965f));
  p = hn::MulAdd(p, t, Constant(-0.43369200825691223f));
  p = hn::MulAdd(p, t, Constant(0.7066566348075867f));
  const V tail = hn::Mul(e, hn::Mul(p, inverse));
  const V distribution = hn::IfThenElse(hn::Lt(x, hn::Zero(D())), tail, hn::Sub(Constant(1.0f), tail));
  const V density = hn::Mul(e, Constant(0.3989422804014327f));
  return hn::MulAdd(x, density, distribution);
}

// With u = sqrt(2 / pi) * (x + 0.044715 x^3): 0.5 * (1 + tanh(u)) is the logistic function s of 2u, and the derivative
// s + x * 2 s (1 - s) * du/dx. Beyond |x| = 13 both tails are 0 in float; x is held there inside of u, so that its
// powers stay finite, but not outside, so that an infinite x gives NaN as the formula does.
HWY_INLINE V TanhDerivative(V x) {
  const V one = Constant(1.0f);
  const V limit = Constant(13.0f);
  const V near_x = hn::IfThenElse(hn::Gt(hn::Abs(x), limit), hn::CopySign(limit, x), x);
  const V square = hn::Mul(near_x, near_x);
  const V twice_u = hn::Mul(near_x, hn::MulAdd(square, Constant(0.0713548162726f), Constant(1.5957691216057308f)));
  const V twice_slope = hn::MulAdd(square, Constant(0.2140644488178f), Constant(1.5957691216057308f));
  const V e = hn::Exp(D(), hn::Neg(hn::Abs(twice_u)));
  const V upper = hn::Div(one, hn::Add(one, e));
  const V lower = hn::Mul(e, upper);
  const V s = hn::IfThenElse(hn::Lt(x, hn::Zero(D())), lower, upper);
  return hn::MulAdd(hn::Mul(x, hn::Mul(lower, upper)), twice_slope, s);
}

template <bool kTanh>
HWY_INLINE Pair Gradient(Pair dy, Pair x) {
  if constexpr (kTanh) return {hn::Mul(dy.a, TanhDerivative(x.a)), hn::Mul(dy.b, TanhDerivative(x.b))};
  return {hn::Mul(dy.a, ExactDerivative(x.a)), hn::Mul(dy.b, ExactDerivative(x.b))};
}

template <class T, bool kTanh>
HWY_NOINLINE void RunElements(const T* dy, const T* x, T* dx, int64_t count) {
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    Elements<T>::Store(Gradient<kTanh>(Elements<T>::Load(dy + i), Elements<T>::Load(x + i)), dx + i);
  }
  if (i == count) return;
  const TailCopy<T> last_dy(dy + i, count - i);
  const TailCopy<T> last_x(x + i, count - i);
  T last_dx[kGroup];
  Elements<T>::Store(Gradient<kTanh>(Elements<T>::Load(last_dy.elements), Elements<T>::Load(last_x.elements)), last_dx);
  std::memcpy(dx + i, last_dx, static_cast<size_t>(count - i) * sizeof(T));
}

template <class T>
void RunPieceOf(const Problem& problem, int64_t begin, int64_t end) {
  const auto run = problem.is_tanh ? RunElements<T, true> : RunElements<T, false>;
  run(static_cast<const T*>(problem.dy) + begin, static_cast<const T*>(problem.x) + begin,
      static_cast<T*>(problem.dx) + begin, end - begin);
}

void RunPiece(const Problem& problem, int64_t begin, int64_t end) {
  if (problem.type == ORT_OPS_FLOAT) return RunPieceOf<float>(problem, begin, end);
  if (problem.type == ORT_OPS_FLOAT16) return RunPieceOf<hwy::float16_t>(problem, begin, end);
  return RunPieceOf<hwy::bfloat16_t>(problem, begin, end);
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::gelu_grad
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::gelu_grad {

HWY_EXPORT(RunPiece);

void RunPiece(const Problem& problem, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(RunPiece)(problem, begin, end);
}

}  // namespace ort_ops::gelu_grad
#endif  // HWY_ONCE
