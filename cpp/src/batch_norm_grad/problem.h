// The checked description of one BatchNormGrad call, and its work on one channel, or on CUDA.
#ifndef ORT_OPS_BATCH_NORM_GRAD_PROBLEM_H_
#define ORT_OPS_BATCH_NORM_GRAD_PROBLEM_H_

#include <cstddef>
#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::batch_norm_grad {

struct Problem {
  int64_t batch;
  int64_t channels;
  int64_t size;  // elements of one channel of one instance
  float epsilon;
  const float* dy;
  const float* x;
  const float* scale;
  float* dx;
  float* dscale;
  float* dbias;
};

// The instruction set is chosen inside.
void RunChannel(const Problem& problem, int64_t channel);

// On CUDA (executor.h).
OrtOpsStatus PlanCuda(const Problem& problem, const CudaDevice& device, size_t* workspace_bytes);
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::batch_norm_grad

#endif  // ORT_OPS_BATCH_NORM_GRAD_PROBLEM_H_
