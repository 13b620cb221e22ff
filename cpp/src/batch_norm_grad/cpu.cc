// The CPU kernel of BatchNormGrad.
//
// A channel is cut into segments that stay in the first-level cache. Each is summed in float about its own mean, and
// the sums are moved to the channel's mean in double (Chan, Golub and LeVeque, 1979): one pass over memory without the
// cancellation of sum(x^2) - sum(x)^2 / n.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "batch_norm_grad/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include <algorithm>
#include <cmath>

#include "batch_norm_grad/problem.h"
#include "elements-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::batch_norm_grad {
namespace HWY_NAMESPACE {
using namespace ort_ops::HWY_NAMESPACE;  // elements-inl.h

constexpr int64_t kSegment = 2048;

// Sums over elements, about a centre.
struct Sums {
  double count = 0;
  double centre = 0;
  double x = 0;       // of x - centre
  double square = 0;  // of (x - centre)^2
  double dy = 0;
  double product = 0;  // of dy * (x - centre)
};

HWY_INLINE float SumOf(const float* x, int64_t count) {
  const D d;
  V sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum = hn::Add(sum, hn::LoadU(d, x + i));
  if (i < count) sum = hn::Add(sum, hn::LoadN(d, x + i, static_cast<size_t>(count - i)));
  return hn::ReduceSum(d, sum);
}

HWY_INLINE Sums SumsOf(const float* dy, const float* x, int64_t count) {
  const D d;
  const float centre = SumOf(x, count) / static_cast<float>(count);
  const V centres = hn::Set(d, centre);
  V sum_x = hn::Zero(d);
  V sum_square = hn::Zero(d);
  V sum_dy = hn::Zero(d);
  V sum_product = hn::Zero(d);
  const auto add = [&](V gradient, V centred) HWY_ATTR {
    sum_x = hn::Add(sum_x, centred);
    sum_square = hn::Add(sum_square, hn::Mul(centred, centred));
    sum_dy = hn::Add(sum_dy, gradient);
    sum_product = hn::Add(sum_product, hn::Mul(gradient, centred));
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) add(hn::LoadU(d, dy + i), hn::Sub(hn::LoadU(d, x + i), centres));
  if (i < count) {
    const auto rest = static_cast<size_t>(count - i);
    add(hn::LoadN(d, dy + i, rest), hn::Sub(hn::LoadNOr(centres, d, x + i, rest), centres));
  }
  return {static_cast<double>(count),   centre,
          hn::ReduceSum(d, sum_x),      hn::ReduceSum(d, sum_square),
          hn::ReduceSum(d, sum_dy),     hn::ReduceSum(d, sum_product)};
}

// Adds the sums of another part, about the centre of `total`.
HWY_INLINE void Add(const Sums& part, Sums& total) {
  const double shift = part.centre - total.centre;
  total.count += part.count;
  total.x += part.x + part.count * shift;
  total.square += part.square + shift * (2 * part.x + part.count * shift);
  total.dy += part.dy;
  total.product += part.product + shift * part.dy;
}

// Calls work(offset, count) for each segment of the channel, in order.
template <class Work>
HWY_INLINE void ForEachSegment(const Problem& problem, int64_t channel, const Work& work) {
  for (int64_t instance = 0; instance < problem.batch; ++instance) {
    const int64_t offset = (instance * problem.channels + channel) * problem.size;
    for (int64_t begin = 0; begin < problem.size; begin += kSegment) {
      work(offset + begin, std::min(kSegment, problem.size - begin));
    }
  }
}

// dx = (dy - mean of dy) * slope - (x - mean) * pull.
struct Line {
  float mean;       // and what a float leaves of it
  float mean_rest;
  float mean_dy;
  float slope;
  float pull;
};

HWY_INLINE void WriteGradient(const Line& line, const float* dy, const float* x, int64_t count, float* dx) {
  const D d;
  const V mean = hn::Set(d, line.mean);
  const V mean_rest = hn::Set(d, line.mean_rest);
  const V mean_dy = hn::Set(d, line.mean_dy);
  const V slope = hn::Set(d, line.slope);
  const V pull = hn::Set(d, line.pull);
  const auto at = [&](V gradient, V value) HWY_ATTR {
    const V centred = hn::Sub(hn::Sub(value, mean), mean_rest);
    return hn::Sub(hn::Mul(hn::Sub(gradient, mean_dy), slope), hn::Mul(centred, pull));
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(at(hn::LoadU(d, dy + i), hn::LoadU(d, x + i)), d, dx + i);
  if (i == count) return;
  const auto rest = static_cast<size_t>(count - i);
  hn::StoreN(at(hn::LoadN(d, dy + i, rest), hn::LoadN(d, x + i, rest)), d, dx + i, rest);
}

void RunChannel(const Problem& problem, int64_t channel) {
  Sums sums;
  ForEachSegment(problem, channel, [&](int64_t offset, int64_t count) HWY_ATTR {
    const Sums part = SumsOf(problem.dy + offset, problem.x + offset, count);
    // About a centre far from all elements the sums would cancel as those about 0 do.
    if (sums.count == 0) sums.centre = part.centre;
    Add(part, sums);
  });
  if (sums.count == 0) {
    problem.dscale[channel] = 0;
    problem.dbias[channel] = 0;
    return;
  }
  const double shift = sums.x / sums.count;
  const double mean = sums.centre + shift;
  const double variance = std::max(sums.square / sums.count - shift * shift, 0.0);
  const double rstd = 1 / std::sqrt(variance + static_cast<double>(problem.epsilon));
  const double along = sums.product - shift * sums.dy;
  const double slope = static_cast<double>(problem.scale[channel]) * rstd;
  problem.dscale[channel] = static_cast<float>(along * rstd);
  problem.dbias[channel] = static_cast<float>(sums.dy);
  Line line;
  line.mean = static_cast<float>(mean);
  line.mean_rest = static_cast<float>(mean - static_cast<double>(line.mean));
  line.mean_dy = static_cast<float>(sums.dy / sums.count);
  line.slope = static_cast<float>(slope);
  line.pull = static_cast<float>(slope * rstd * rstd * along / sums.count);
  ForEachSegment(problem, channel, [&](int64_t offset, int64_t count) HWY_ATTR {
    WriteGradient(line, problem.dy + offset, problem.x + offset, count, problem.dx + offset);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::batch_norm_grad
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::batch_norm_grad {

HWY_EXPORT(RunChannel);

void RunChannel(const Problem& problem, int64_t channel) { HWY_DYNAMIC_DISPATCH(RunChannel)(problem, channel); }

}  // namespace ort_ops::batch_norm_grad
#endif  // HWY_ONCE
