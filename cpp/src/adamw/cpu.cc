// The CPU kernel of AdamW: no fused multiply-adds, so that it gives the same bits as a chain of standard operators.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "adamw/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "adamw/problem.h"
#include "elements-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::adamw {
namespace HWY_NAMESPACE {
using namespace ort_ops::HWY_NAMESPACE;  // elements-inl.h

struct Scalars {
  V beta1;
  V beta2;
  V gradient_weight;
  V square_weight;
  V inverse_root;
  V epsilon;
  V step_size;
  V decay_first;
  V decay_last;
};

struct State {
  V parameter;
  V first_moment;
  V second_moment;
};

HWY_INLINE State Updated(const State& old, V gradient, const Scalars& s) {
  const V first = hn::Add(hn::Mul(old.first_moment, s.beta1), hn::Mul(gradient, s.gradient_weight));
  const V second =
      hn::Add(hn::Mul(old.second_moment, s.beta2), hn::Mul(hn::Mul(gradient, gradient), s.square_weight));
  const V root = hn::Add(hn::Mul(hn::Sqrt(second), s.inverse_root), s.epsilon);
  const V move = hn::Mul(hn::Div(first, root), s.step_size);
  // A multiplication by 1 changes no bit, so one line serves both forms.
  const V parameter = hn::Mul(hn::Sub(hn::Mul(old.parameter, s.decay_first), move), s.decay_last);
  return {parameter, first, second};
}

void RunPiece(const Problem& problem, int64_t begin, int64_t end) {
  const D d;
  const auto scalar = [d](const float* value) HWY_ATTR { return hn::Set(d, value == nullptr ? 1.0f : *value); };
  const V one = hn::Set(d, 1.0f);
  const V decay = scalar(problem.decay);
  const Scalars scalars = {hn::Set(d, problem.beta1),
                           hn::Set(d, problem.beta2),
                           scalar(problem.gradient_weight),
                           scalar(problem.square_weight),
                           scalar(problem.inverse_root),
                           hn::Set(d, problem.epsilon),
                           scalar(problem.step_size),
                           problem.decays_last ? one : decay,
                           problem.decays_last ? decay : one};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    const State old = {hn::LoadU(d, problem.parameter + i), hn::LoadU(d, problem.first_moment + i),
                       hn::LoadU(d, problem.second_moment + i)};
    const State updated = Updated(old, hn::LoadU(d, problem.gradient + i), scalars);
    hn::StoreU(updated.parameter, d, problem.parameter_updated + i);
    hn::StoreU(updated.first_moment, d, problem.first_moment_updated + i);
    hn::StoreU(updated.second_moment, d, problem.second_moment_updated + i);
  }
  if (i == end) return;
  const auto count = static_cast<size_t>(end - i);
  const State old = {hn::LoadN(d, problem.parameter + i, count), hn::LoadN(d, problem.first_moment + i, count),
                     hn::LoadN(d, problem.second_moment + i, count)};
  const State updated = Updated(old, hn::LoadN(d, problem.gradient + i, count), scalars);
  hn::StoreN(updated.parameter, d, problem.parameter_updated + i, count);
  hn::StoreN(updated.first_moment, d, problem.first_moment_updated + i, count);
  hn::StoreN(updated.second_moment, d, problem.second_moment_updated + i, count);
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::adamw
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::adamw {

HWY_EXPORT(RunPiece);

void RunPiece(const Problem& problem, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(RunPiece)(problem, begin, end);
}

}  // namespace ort_ops::adamw
#endif  // HWY_ONCE
