// The checked description of one AdamW call, and its work on one piece of the elements, or on CUDA.
#ifndef ORT_OPS_ADAMW_PROBLEM_H_
#define ORT_OPS_ADAMW_PROBLEM_H_

#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::adamw {

struct Problem {
  int64_t count;
  const float* parameter;
  const float* gradient;
  const float* first_moment;
  const float* second_moment;
  // Scalars, read when the call runs; null where the caller left them out.
  const float* gradient_weight;
  const float* square_weight;
  const float* step_size;
  const float* inverse_root;
  const float* decay;
  const bool* update;
  float* parameter_updated;
  float* first_moment_updated;
  float* second_moment_updated;
  bool decays_last;
  float beta1;
  float beta2;
  float epsilon;
};

// Writes the elements [begin, end) of the three results. The instruction set is chosen inside.
void RunPiece(const Problem& problem, int64_t begin, int64_t end);

// On CUDA (executor.h).
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::adamw

#endif  // ORT_OPS_ADAMW_PROBLEM_H_
