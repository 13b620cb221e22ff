// MaxPoolGrad: its checks and its kernel.
//
// Whoever has a plane (a channel of an instance) writes all of it, one row of windows after the other: so additions
// where windows overlap have a fixed order.
#include <algorithm>
#include <memory>

#include "elementwise.h"
#include "executor.h"
#include "ort_ops/max_pool_grad.h"
#include "tensor_checks.h"

namespace ort_ops::max_pool_grad {
namespace {

struct Problem {
  int64_t planes;
  int64_t size[2];
  int64_t windows[2];
  OrtOpsPoolWindow window;
  const float* dy;
  const float* x;
  float* dx;
};

struct Range {
  int64_t begin;
  int64_t end;
};

// Windows side by side that are searched together.
constexpr int64_t kWindowsTogether = 256;

// The windows of an axis, within `wanted`, whose element number `offset` is an element of the input.
Range WindowsThatSee(const Problem& problem, int axis, int64_t offset, Range wanted) {
  const int64_t stride = problem.window.strides[axis];
  const int64_t shift = offset - problem.window.pads[axis];  // the element of window 0
  const int64_t first = shift >= 0 ? 0 : (-shift + stride - 1) / stride;
  const int64_t end = shift >= problem.size[axis] ? 0 : (problem.size[axis] - shift - 1) / stride + 1;
  return {std::max(wanted.begin, first), std::min(wanted.end, end)};
}

// Adds dy to the maxima of the windows `cols` of row number `row` of windows. Element by element of all windows, not
// window by window: so that no branch depends on the values, where half of all guesses would be wrong.
void AddToMaxima(const Problem& problem, const float* x, int64_t row, Range cols, const float* dy, float* dx) {
  float largest[kWindowsTogether];
  int64_t place[kWindowsTogether];
  std::fill_n(largest, cols.end - cols.begin, 0.0f);
  std::fill_n(place, cols.end - cols.begin, -1);
  for (int64_t i = 0; i < problem.window.kernel[0]; ++i) {
    const int64_t input_row = row * problem.window.strides[0] + i - problem.window.pads[0];
    if (input_row < 0 || input_row >= problem.size[0]) continue;
    for (int64_t j = 0; j < problem.window.kernel[1]; ++j) {
      const Range seen = WindowsThatSee(problem, 1, j, cols);
      const int64_t offset = input_row * problem.size[1] + j - problem.window.pads[1];
      for (int64_t col = seen.begin; col < seen.end; ++col) {
        const int64_t here = offset + col * problem.window.strides[1];
        const float value = x[here];
        float& most = largest[col - cols.begin];
        int64_t& where = place[col - cols.begin];
        const bool is_larger = (where < 0) | (value > most) | (value != value);
        most = is_larger ? value : most;
        where = is_larger ? here : where;
      }
    }
  }
  for (int64_t col = cols.begin; col < cols.end; ++col) {
    if (place[col - cols.begin] >= 0) dx[place[col - cols.begin]] += dy[col];
  }
}

void RunPlane(const Problem& problem, int64_t plane) {
  const int64_t elements = problem.size[0] * problem.size[1];
  const float* x = problem.x + plane * elements;
  float* dx = problem.dx + plane * elements;
  const float* dy = problem.dy + plane * problem.windows[0] * problem.windows[1];
  std::fill_n(dx, elements, 0.0f);
  for (int64_t row = 0; row < problem.windows[0]; ++row) {
    for (int64_t col = 0; col < problem.windows[1]; col += kWindowsTogether) {
      const Range cols = {col, std::min(problem.windows[1], col + kWindowsTogether)};
      AddToMaxima(problem, x, row, cols, dy + row * problem.windows[1], dx);
    }
  }
}

class Executor final : public OrtOpsExecutor {
 public:
  explicit Executor(const Problem& problem) : OrtOpsExecutor(0), problem_(problem) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    const int64_t elements = std::max<int64_t>(1, problem_.size[0] * problem_.size[1]);
    const int64_t planes_per_task = std::max<int64_t>(1, kElementsPerTask / elements);
    const int64_t tasks = problem_.planes / planes_per_task + (problem_.planes % planes_per_task != 0);
    return ParallelFor(parallel_for, tasks, [&](int64_t task) {
      const int64_t end = std::min(problem_.planes, (task + 1) * planes_per_task);
      for (int64_t plane = task * planes_per_task; plane < end; ++plane) RunPlane(problem_, plane);
    });
  }

 private:
  const Problem problem_;
};

// Far above any image's size, and small enough that no sum or product of these overflows.
constexpr int64_t kMaxNumber = int64_t{1} << 30;

OrtOpsStatus CheckNumbers(const char* name, const int64_t* numbers, int count, int64_t least) {
  for (int i = 0; i < count; ++i) {
    if (numbers[i] >= least && numbers[i] <= kMaxNumber) continue;
    return Fail(ORT_OPS_INVALID_PARAMETER, "%s must be at least %lld and at most 2^30; got %lld", name,
                static_cast<long long>(least), static_cast<long long>(numbers[i]));
  }
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus CheckWindow(const OrtOpsPoolWindow* window) {
  if (window == nullptr) return Fail(ORT_OPS_NULL_POINTER, "window is required; got a null pointer");
  if (const auto status = CheckNumbers("kernel_shape", window->kernel, 2, 1)) return status;
  if (const auto status = CheckNumbers("strides", window->strides, 2, 1)) return status;
  return CheckNumbers("pads", window->pads, 4, 0);
}

// How many windows there may be on an axis. With ceil_mode the standard's versions differ on whether one that begins in
// the padding counts.
Range WindowCounts(const OrtOpsPoolWindow& window, int axis, int64_t size) {
  const int64_t steps = size + window.pads[axis] + window.pads[axis + 2] - window.kernel[axis];
  if (steps < 0) return {0, window.ceil_mode};
  const int64_t whole = steps / window.strides[axis] + 1;
  return {whole, whole + (window.ceil_mode && steps % window.strides[axis] != 0)};
}

OrtOpsStatus Check(const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* dx,
                   const OrtOpsPoolWindow* window) {
  if (const auto status = CheckWindow(window)) return status;
  if (const auto status = CheckTensor("x", x, 1)) return status;
  if (const auto status = CheckType("x", *x, ORT_OPS_FLOAT, "")) return status;
  if (x->rank != 4) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "x must be [batch,channels,height,width]; got %s", ShapeText(*x).c_str());
  }
  if (const auto status = CheckTensor("dy", dy, 1)) return status;
  if (const auto status = CheckType("dy", *dy, ORT_OPS_FLOAT, "")) return status;
  const Range heights = WindowCounts(*window, 0, x->dims[2]);
  const Range widths = WindowCounts(*window, 1, x->dims[3]);
  if (dy->rank != 4 || dy->dims[0] != x->dims[0] || dy->dims[1] != x->dims[1] || dy->dims[2] < heights.begin ||
      dy->dims[2] > heights.end || dy->dims[3] < widths.begin || dy->dims[3] > widths.end) {
    const int64_t expected[] = {x->dims[0], x->dims[1], heights.end, widths.end};
    return Fail(ORT_OPS_INVALID_PARAMETER, "dy must be %s, the shape of MaxPool(x) with x %s; got %s",
                ShapeText(expected, 4).c_str(), ShapeText(*x).c_str(), ShapeText(*dy).c_str());
  }
  return CheckLike("dx", dx, "x", *x);
}

}  // namespace
}  // namespace ort_ops::max_pool_grad

extern "C" OrtOpsStatus ort_ops_max_pool_grad_get_workspace_size(const OrtOpsTensor* dy, const OrtOpsTensor* x,
                                                                 const OrtOpsTensor* dx,
                                                                 const OrtOpsPoolWindow* window,
                                                                 size_t* workspace_bytes, OrtOpsExecutor** executor) {
  using namespace ort_ops;
  using namespace ort_ops::max_pool_grad;
  return PhaseOne(workspace_bytes, executor, [&](std::unique_ptr<OrtOpsExecutor>& made) {
    if (const auto status = Check(dy, x, dx, window)) return status;
    const Problem problem = {ElementCount(x->dims, 2),
                             {x->dims[2], x->dims[3]},
                             {dy->dims[2], dy->dims[3]},
                             *window,
                             static_cast<const float*>(dy->data),
                             static_cast<const float*>(x->data),
                             static_cast<float*>(dx->data)};
    made = std::make_unique<Executor>(problem);
    return ORT_OPS_SUCCESS;
  });
}
