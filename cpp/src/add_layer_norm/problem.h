// The checked description of one AddLayerNorm call, and its work on some of the rows, or on CUDA.
#ifndef ORT_OPS_ADD_LAYER_NORM_PROBLEM_H_
#define ORT_OPS_ADD_LAYER_NORM_PROBLEM_H_

#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::add_layer_norm {

struct Problem {
  int64_t rows;
  int64_t cols;
  OrtOpsDataType type;        // of x1, x2, y and x
  OrtOpsDataType gamma_type;  // of gamma and beta: `type` or float
  float epsilon;

  // Null where the caller left the tensor out: x2, beta, mean, rstd and x.
  const void* x1;
  const void* x2;
  const void* gamma;
  const void* beta;
  void* y;
  float* mean;
  float* rstd;
  void* x;
};

// The rows [begin, end). The instruction set is chosen inside.
void RunRows(const Problem& problem, int64_t begin, int64_t end);

// On CUDA (executor.h).
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::add_layer_norm

#endif  // ORT_OPS_ADD_LAYER_NORM_PROBLEM_H_
