// MaxPoolGrad on CUDA: one kernel finds the place of every window's maximum, another one adds up, for every element, the
// windows that have theirs there, in their order. So there are no atomic operations on floats.
#include "cuda_elements.cuh"
#include "cuda_launch.cuh"
#include "max_pool_grad/problem.h"

namespace ort_ops::max_pool_grad {

struct Arguments {
  Problem problem;
  int* places;  // of the windows' maxima, in their planes; -1 for a window that sees nothing
};

__device__ inline int64_t FirstOfThread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t StepOfGrid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

__global__ void FindMaxima(const __grid_constant__ Arguments arguments) {
  const Problem& problem = arguments.problem;
  const OrtOpsPoolWindow& window = problem.window;
  const int64_t windows = problem.windows[0] * problem.windows[1];
  for (int64_t i = FirstOfThread(); i < problem.planes * windows; i += StepOfGrid()) {
    const float* const x = problem.x + i / windows * problem.size[0] * problem.size[1];
    const int64_t row = i % windows / problem.windows[1] * window.strides[0] - window.pads[0];
    const int64_t col = i % windows % problem.windows[1] * window.strides[1] - window.pads[1];
    const int64_t end_row = min(problem.size[0], row + window.kernel[0]);
    const int64_t end_col = min(problem.size[1], col + window.kernel[1]);
    int place = -1;
    float largest = 0.0f;
    for (int64_t r = max(row, int64_t{0}); r < end_row; ++r) {
      for (int64_t c = max(col, int64_t{0}); c < end_col; ++c) {
        const int here = static_cast<int>(r * problem.size[1] + c);
        const float value = x[here];
        // Of NaN the last one.
        if (place < 0 || value > largest || value != value) {
          place = here;
          largest = value;
        }
      }
    }
    arguments.places[i] = place;
  }
}

// The windows of an axis that see the element: [begin, end).
struct Range {
  int64_t begin;
  int64_t end;
};

__device__ inline Range WindowsThatSee(const Problem& problem, int axis, int64_t element) {
  const int64_t stride = problem.window.strides[axis];
  const int64_t padded = element + problem.window.pads[axis];
  const int64_t after_first = padded - problem.window.kernel[axis];  // negative where the first window sees it
  return {after_first < 0 ? 0 : after_first / stride + 1, min(problem.windows[axis], padded / stride + 1)};
}

__global__ void AddWindows(const __grid_constant__ Arguments arguments) {
  const Problem& problem = arguments.problem;
  const int64_t elements = problem.size[0] * problem.size[1];
  for (int64_t i = FirstOfThread(); i < problem.planes * elements; i += StepOfGrid()) {
    const int64_t first_window = i / elements * problem.windows[0] * problem.windows[1];
    const int place = static_cast<int>(i % elements);
    const Range rows = WindowsThatSee(problem, 0, place / problem.size[1]);
    const Range cols = WindowsThatSee(problem, 1, place % problem.size[1]);
    float sum = 0.0f;
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      for (int64_t col = cols.begin; col < cols.end; ++col) {
        const int64_t here = first_window + row * problem.windows[1] + col;
        if (arguments.places[here] == place) sum += problem.dy[here];
      }
    }
    problem.dx[i] = sum;
  }
}

OrtOpsStatus PlanCuda(const Problem& problem, const CudaDevice&, size_t* workspace_bytes) {
  *workspace_bytes = static_cast<size_t>(problem.planes * problem.windows[0] * problem.windows[1]) * sizeof(int);
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream) {
  const Arguments arguments = {problem, static_cast<int*>(workspace)};
  const int64_t windows = problem.planes * problem.windows[0] * problem.windows[1];
  if (const auto status = StartForElements(FindMaxima, "FindMaxima", device, windows, 1, stream, arguments)) return status;
  const int64_t elements = problem.planes * problem.size[0] * problem.size[1];
  return StartForElements(AddWindows, "AddWindows", device, elements, 1, stream, arguments);
}

}  // namespace ort_ops::max_pool_grad
