// Phase one of MaxPoolGrad, and what its executor hands to the caller's threads: whole planes.
#include <algorithm>
#include <limits>
#include <memory>

#include "elementwise.h"
#include "executor.h"
#include "max_pool_grad/problem.h"
#include "tensor_checks.h"

namespace ort_ops::max_pool_grad {
namespace {

class Executor final : public ExecutorOf<Problem> {
 public:
  explicit Executor(const Problem& its_problem) : ExecutorOf(its_problem, 0) {}

  OrtOpsStatus Run(void*, const OrtOpsParallelFor* parallel_for) const override {
    const int64_t elements = std::max<int64_t>(1, problem.size[0] * problem.size[1]);
    const int64_t planes_per_task = std::max<int64_t>(1, kElementsPerTask / elements);
    const int64_t tasks = problem.planes / planes_per_task + (problem.planes % planes_per_task != 0);
    return ParallelFor(parallel_for, tasks, [&](int64_t task) {
      const int64_t end = std::min(problem.planes, (task + 1) * planes_per_task);
      for (int64_t plane = task * planes_per_task; plane < end; ++plane) RunPlane(problem, plane);
    });
  }
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

struct Counts {
  int64_t least;
  int64_t most;
};

// How many windows there may be on an axis. With ceil_mode the standard's versions differ on whether one that begins in
// the padding counts.
Counts WindowCounts(const OrtOpsPoolWindow& window, int axis, int64_t size) {
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
  // The kernel counts the elements of a channel in 32 bits.
  if (x->dims[2] > std::numeric_limits<int32_t>::max() / std::max<int64_t>(1, x->dims[3])) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "x must have fewer than 2^31 elements in a channel; got %s",
                ShapeText(*x).c_str());
  }
  if (const auto status = CheckTensor("dy", dy, 1)) return status;
  if (const auto status = CheckType("dy", *dy, ORT_OPS_FLOAT, "")) return status;
  const Counts heights = WindowCounts(*window, 0, x->dims[2]);
  const Counts widths = WindowCounts(*window, 1, x->dims[3]);
  if (dy->rank != 4 || dy->dims[0] != x->dims[0] || dy->dims[1] != x->dims[1] || dy->dims[2] < heights.least ||
      dy->dims[2] > heights.most || dy->dims[3] < widths.least || dy->dims[3] > widths.most) {
    const int64_t expected[] = {x->dims[0], x->dims[1], heights.most, widths.most};
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
