// The checked description of one GeluGrad call, and its work on one piece of the elements, or on CUDA.
#ifndef ORT_OPS_GELU_GRAD_PROBLEM_H_
#define ORT_OPS_GELU_GRAD_PROBLEM_H_

#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::gelu_grad {

struct Problem {
  int64_t count;
  OrtOpsDataType type;
  bool is_tanh;
  const void* dy;
  const void* x;
  void* dx;
};

// Writes dx[begin, end). The instruction set is chosen inside.
void RunPiece(const Problem& problem, int64_t begin, int64_t end);

// On CUDA (executor.h).
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::gelu_grad

#endif  // ORT_OPS_GELU_GRAD_PROBLEM_H_
