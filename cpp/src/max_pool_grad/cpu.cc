// The CPU kernel of MaxPoolGrad.
//
// A vector of windows side by side is searched at a time, element by element of all of them: no branch depends on the
// values, where half of all guesses would be wrong. Then dy is added window by window, in the order of the windows, so
// that sums where windows overlap have a fixed order.
#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "max_pool_grad/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include <algorithm>

#include "hwy/highway.h"
#include "max_pool_grad/problem.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::max_pool_grad {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Wide = hn::CappedTag<float, 16>;
// For rows of few windows.
using Narrow = hn::CappedTag<float, 4>;
using Narrowest = hn::CappedTag<float, 2>;

template <class D>
constexpr int64_t kLanesOf = static_cast<int64_t>(hn::MaxLanes(D()));

struct Range {
  int64_t begin;
  int64_t end;
};

// The windows of an axis whose element number `offset` is an element of the input.
Range WindowsThatSee(const Problem& problem, int axis, int64_t offset) {
  const int64_t stride = problem.window.strides[axis];
  const int64_t shift = offset - problem.window.pads[axis];  // the element of window 0
  const int64_t first = shift >= 0 ? 0 : (-shift + stride - 1) / stride;
  const int64_t end = shift >= problem.size[axis] ? 0 : (problem.size[axis] - shift - 1) / stride + 1;
  return {first, std::min(problem.windows[axis], end)};
}

// The elements of the windows [windows.begin, windows.end) of an axis, counted within a window, that are elements of the
// input in at least one of them.
Range ElementsSeen(const Problem& problem, int axis, Range windows) {
  const int64_t first = windows.begin * problem.window.strides[axis] - problem.window.pads[axis];
  const int64_t last = (windows.end - 1) * problem.window.strides[axis] - problem.window.pads[axis];
  return {std::max<int64_t>(0, -last), std::min(problem.window.kernel[axis], problem.size[axis] - first)};
}

// One row of windows, from the first row of the input that it sees.
struct Row {
  int64_t rows_seen;
  const float* x;
  const float* dy;
  float* dx;
};

template <class D>
HWY_INLINE hn::Vec<D> LoadEvery(D d, const float* x, int64_t stride, Range lanes) {
  alignas(64) float values[kLanesOf<D>] = {};
  for (int64_t lane = lanes.begin; lane < lanes.end; ++lane) values[lane] = x[lane * stride];
  return hn::Load(d, values);
}

// Searches the vector of windows that begins with number `search`, and adds dy to the maxima of the windows `cols`, which
// are among them. kWhole: all of them lie within the columns of the input.
template <bool kWhole, class D>
HWY_INLINE void AddToMaxima(D d, const Problem& problem, const Row& row, int64_t search, Range cols) {
  using V = hn::Vec<D>;
  const hn::RebindToSigned<D> di;
  constexpr int64_t kLanes = kLanesOf<D>;
  const int64_t stride = problem.window.strides[1];
  const int64_t width = problem.size[1];
  const int64_t begin = search * stride - problem.window.pads[1];  // the column where the first window begins
  const auto lane_numbers = hn::Iota(di, 0);
  const auto window_begins = hn::Mul(lane_numbers, hn::Set(di, static_cast<int32_t>(stride)));
  const Range elements = kWhole ? Range{0, problem.window.kernel[1]} : ElementsSeen(problem, 1, cols);

  V largest = hn::Zero(d);
  auto place = hn::Set(di, -1);  // counted from row.x
  for (int64_t i = 0; i < row.rows_seen; ++i) {
    const float* x = row.x + i * width;
    for (int64_t j = elements.begin; j < elements.end; ++j) {
      V value;
      auto seen = hn::FirstN(di, static_cast<size_t>(kLanes));
      if (!kWhole) {
        const Range windows = WindowsThatSee(problem, 1, j);
        const Range lanes = {std::max(windows.begin, cols.begin) - search, std::min(windows.end, cols.end) - search};
        value = LoadEvery(d, x + begin + j, stride, lanes);
        seen = hn::And(hn::Ge(lane_numbers, hn::Set(di, static_cast<int32_t>(lanes.begin))),
                       hn::Lt(lane_numbers, hn::Set(di, static_cast<int32_t>(lanes.end))));
      } else if (stride == 1) {
        value = hn::LoadU(d, x + begin + j);
      } else if (stride == 2 && problem.window.kernel[1] > 1) {
        // With the column before it, not with the one behind, which may lie behind the input.
        V even;
        V odd;
        hn::LoadInterleaved2(d, x + begin + std::max<int64_t>(j - 1, 0), even, odd);
        value = j == 0 ? even : odd;
      } else {
        value = LoadEvery(d, x + begin + j, stride, {0, kLanes});
      }
      const auto larger = hn::Or(hn::Gt(value, largest), hn::IsNaN(value));
      const auto taken = hn::And(seen, hn::Or(hn::RebindMask(di, larger), hn::Lt(place, hn::Zero(di))));
      largest = hn::IfThenElse(hn::RebindMask(d, taken), value, largest);
      place = hn::IfThenElse(taken, hn::Add(window_begins, hn::Set(di, static_cast<int32_t>(i * width + begin + j))), place);
    }
  }
  alignas(64) int32_t places[kLanes];
  hn::Store(place, di, places);
  for (int64_t col = cols.begin; col < cols.end; ++col) {
    if (places[col - search] >= 0) row.dx[places[col - search]] += row.dy[col];
  }
}

// AddToMaxima for the commonest windows: 2 by 2, side by side, all within the input. No window shares an element of dx
// with another, so a vector of them is written at once, and written again where vectors of windows overlap.
template <class D>
HWY_INLINE void WriteMaximaOfTwoByTwo(D d, const Problem& problem, const Row& row, int64_t search) {
  using V = hn::Vec<D>;
  const int64_t width = problem.size[1];
  const int64_t begin = search * 2 - problem.window.pads[1];
  V first;
  V second;
  V third;
  V fourth;
  hn::LoadInterleaved2(d, row.x + begin, first, second);
  hn::LoadInterleaved2(d, row.x + width + begin, third, fourth);
  V largest = first;
  const auto is_larger = [&](V value) HWY_ATTR {
    const auto larger = hn::Or(hn::Gt(value, largest), hn::IsNaN(value));
    largest = hn::IfThenElse(larger, value, largest);
    return larger;
  };
  const auto second_larger = is_larger(second);
  const auto third_larger = is_larger(third);
  const auto fourth_larger = is_larger(fourth);
  const V for_fourth = hn::Add(hn::LoadU(d, row.dy + search), hn::Zero(d));  // no -0, as a sum that began with 0
  const V for_third = hn::IfThenZeroElse(fourth_larger, for_fourth);
  const V for_second = hn::IfThenZeroElse(third_larger, for_third);
  const V for_first = hn::IfThenZeroElse(second_larger, for_second);
  hn::StoreInterleaved2(for_first, hn::IfThenElseZero(second_larger, for_second), d, row.dx + begin);
  hn::StoreInterleaved2(hn::IfThenElseZero(third_larger, for_third), hn::IfThenElseZero(fourth_larger, for_fourth), d,
                        row.dx + width + begin);
}

void AddBorder(const Problem& problem, const Row& row, Range cols) {
  for (int64_t col = cols.begin; col < cols.end; col += kLanesOf<Narrow>) {
    AddToMaxima<false>(Narrow(), problem, row, col, {col, std::min(cols.end, col + kLanesOf<Narrow>)});
  }
}

// At least a vector of windows; the last vector begins where it ends with the last window.
template <class D>
void AddWhole(D d, const Problem& problem, const Row& row, Range cols) {
  constexpr int64_t kLanes = kLanesOf<D>;
  const OrtOpsPoolWindow& window = problem.window;
  const bool two_by_two = window.kernel[1] == 2 && window.strides[0] == 2 && window.strides[1] == 2 &&
                          window.kernel[0] == 2 && row.rows_seen == 2;
  for (int64_t col = cols.begin; col < cols.end; col += kLanes) {
    const int64_t search = std::min(col, cols.end - kLanes);
    if (two_by_two) {
      WriteMaximaOfTwoByTwo(d, problem, row, search);
    } else {
      AddToMaxima<true>(d, problem, row, search, {col, std::min(cols.end, col + kLanes)});
    }
  }
}

void RunPlane(const Problem& problem, int64_t plane) {
  const int64_t width = problem.size[1];
  const int64_t elements = problem.size[0] * width;
  const float* x = problem.x + plane * elements;
  float* dx = problem.dx + plane * elements;
  std::fill_n(dx, elements, 0.0f);
  const int64_t first = std::min(WindowsThatSee(problem, 1, 0).begin, problem.windows[1]);
  const Range whole = {first, std::max(first, WindowsThatSee(problem, 1, problem.window.kernel[1] - 1).end)};
  const int64_t count = whole.end - whole.begin;
  for (int64_t i = 0; i < problem.windows[0]; ++i) {
    const Range rows = ElementsSeen(problem, 0, {i, i + 1});
    const int64_t offset = (i * problem.window.strides[0] - problem.window.pads[0] + rows.begin) * width;
    const float* dy = problem.dy + (plane * problem.windows[0] + i) * problem.windows[1];
    if (rows.begin >= rows.end) continue;
    const Row row = {rows.end - rows.begin, x + offset, dy, dx + offset};
    AddBorder(problem, row, {0, whole.begin});
    if (count >= kLanesOf<Wide>) {
      AddWhole(Wide(), problem, row, whole);
    } else if (count >= kLanesOf<Narrow>) {
      AddWhole(Narrow(), problem, row, whole);
    } else if (count >= kLanesOf<Narrowest>) {
      AddWhole(Narrowest(), problem, row, whole);
    } else {
      AddBorder(problem, row, whole);
    }
    AddBorder(problem, row, {whole.end, problem.windows[1]});
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::max_pool_grad
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::max_pool_grad {

HWY_EXPORT(RunPlane);

void RunPlane(const Problem& problem, int64_t plane) { HWY_DYNAMIC_DISPATCH(RunPlane)(problem, plane); }

}  // namespace ort_ops::max_pool_grad
#endif  // HWY_ONCE
