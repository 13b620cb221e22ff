// The checked description of one CrossEntropy or CrossEntropyGrad call, and its work on some of the rows, or on CUDA.
#ifndef ORT_OPS_CROSS_ENTROPY_PROBLEM_H_
#define ORT_OPS_CROSS_ENTROPY_PROBLEM_H_

#include <cstdint>

#include "cuda_device.h"
#include "ort_ops/ort_ops.h"

namespace ort_ops::cross_entropy {

struct Labels {
  const void* data;
  bool is_long;  // int64, else int32
  int64_t ignore_index;

  int64_t At(int64_t row) const {
    return is_long ? static_cast<const int64_t*>(data)[row] : static_cast<const int32_t*>(data)[row];
  }
};

// What both passes read.
struct Problem {
  int64_t rows;
  int64_t classes;
  const float* scores;
  Labels labels;
};

struct Forward : Problem {
  float* row_loss;
  float* log_sum_exp;
};

struct Backward : Problem {
  const float* drow_loss;
  const float* log_sum_exp;
  float* dscores;
};

// The rows [begin, end). The instruction set is chosen inside.
void RunRows(const Forward& problem, int64_t begin, int64_t end);
void RunRows(const Backward& problem, int64_t begin, int64_t end);

// On CUDA (executor.h).
OrtOpsStatus LaunchCuda(const Forward& problem, const CudaDevice& device, void* workspace, void* stream);
OrtOpsStatus LaunchCuda(const Backward& problem, const CudaDevice& device, void* workspace, void* stream);

}  // namespace ort_ops::cross_entropy

#endif  // ORT_OPS_CROSS_ENTROPY_PROBLEM_H_
