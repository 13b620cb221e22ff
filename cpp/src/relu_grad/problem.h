// The checked description of one ReluGrad call, and its work on CUDA.
#ifndef ORT_OPS_RELU_GRAD_PROBLEM_H_
#define ORT_OPS_RELU_GRAD_PROBLEM_H_

#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::relu_grad {

struct Problem {
  int64_t count;
  OrtOpsDataType type;
  const void* dy;
  const void* y;
  void* dx;
};

// On CUDA (executor.h).
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::relu_grad

#endif  // ORT_OPS_RELU_GRAD_PROBLEM_H_
