// The checked description of one AddLayerNormGrad call: sizes and types, then the buffers. Knows no
// algorithm.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_PROBLEM_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_PROBLEM_H_

#include <cstddef>
#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::add_layer_norm_grad {

struct Problem {
  int64_t rows;
  int64_t cols;
  OrtOpsDataType type;        // of dy, x1, x2, dsum and dx
  OrtOpsDataType gamma_type;  // `type` or float

  // Null where the caller left the tensor out: x2, dsum and each output.
  const void* dy;
  const void* x1;
  const void* x2;
  const float* rstd;
  const float* mean;
  const void* gamma;
  const void* dsum;
  void* dx;
  float* dgamma;
  float* dbeta;
};

// The values of one call; null where the caller leaves one out.
struct Tensors {
  const OrtOpsTensor* dy;
  const OrtOpsTensor* x1;
  const OrtOpsTensor* x2;
  const OrtOpsTensor* rstd;
  const OrtOpsTensor* mean;
  const OrtOpsTensor* gamma;
  const OrtOpsTensor* dsum;
  const OrtOpsTensor* dx;
  const OrtOpsTensor* dgamma;
  const OrtOpsTensor* dbeta;
};

// Checks presence, types, ranks and shapes by the rules of ort_ops/add_layer_norm_grad.h. Throws std::bad_alloc at most.
OrtOpsStatus MakeProblem(const Tensors& tensors, Problem* problem);

// On CUDA (executor.h).
OrtOpsStatus PlanCuda(const Problem& problem, const CudaDevice& device, size_t* workspace_bytes);
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_PROBLEM_H_
