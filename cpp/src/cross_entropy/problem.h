// The checked description of one CrossEntropy or CrossEntropyGrad call, and its work on some of the rows.
#ifndef ORT_OPS_CROSS_ENTROPY_PROBLEM_H_
#define ORT_OPS_CROSS_ENTROPY_PROBLEM_H_

#include <cstdint>

namespace ort_ops::cross_entropy {

struct Labels {
  const void* data;
  bool is_long;  // int64, else int32
  int64_t ignore_index;

  int64_t At(int64_t row) const {
    return is_long ? static_cast<const int64_t*>(data)[row] : static_cast<const int32_t*>(data)[row];
  }
};

struct Problem {
  int64_t rows;
  int64_t classes;
  const float* scores;
  Labels labels;
  // The forward pass.
  float* row_loss;
  float* written_log_sum_exp;
  // The backward pass.
  const float* drow_loss;
  const float* log_sum_exp;
  float* dscores;
};

// The rows [begin, end). The instruction set is chosen inside.
void RunForward(const Problem& problem, int64_t begin, int64_t end);
void RunBackward(const Problem& problem, int64_t begin, int64_t end);

}  // namespace ort_ops::cross_entropy

#endif  // ORT_OPS_CROSS_ENTROPY_PROBLEM_H_
