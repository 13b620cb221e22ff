// The checked description of one MaxPoolGrad call, and its work on one plane (a channel of an
// instance), or on CUDA.
#ifndef ORT_OPS_MAX_POOL_GRAD_PROBLEM_H_
#define ORT_OPS_MAX_POOL_GRAD_PROBLEM_H_

#include <cstddef>
#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/max_pool_grad.h"

namespace ort_ops::max_pool_grad {

struct Problem {
  int64_t planes;
  int64_t size[2];
  int64_t windows[2];
  OrtOpsPoolWindow window;
  const float* dy;
  const float* x;
  float* dx;
};

// The instruction set is chosen inside.
void RunPlane(const Problem& problem, int64_t plane);

// On CUDA (executor.h).
OrtOpsStatus PlanCuda(const Problem& problem, const CudaDevice& device, size_t* workspace_bytes);
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::max_pool_grad

#endif  // ORT_OPS_MAX_POOL_GRAD_PROBLEM_H_
