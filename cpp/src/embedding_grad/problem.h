// The checked description of one EmbeddingGrad call, and its work on CUDA.
#ifndef ORT_OPS_EMBEDDING_GRAD_PROBLEM_H_
#define ORT_OPS_EMBEDDING_GRAD_PROBLEM_H_

#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::embedding_grad {

struct Problem {
  int64_t rows;
  int64_t cols;
  int64_t count;  // of indices
  OrtOpsDataType index_type;
  const void* indices;
  const float* dy;
  float* dtable;
};

// On CUDA (executor.h).
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::embedding_grad

#endif  // ORT_OPS_EMBEDDING_GRAD_PROBLEM_H_
