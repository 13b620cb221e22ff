// The checked description of one MaxPoolGrad call, and its work on one plane: a channel of an instance.
#ifndef ORT_OPS_MAX_POOL_GRAD_PROBLEM_H_
#define ORT_OPS_MAX_POOL_GRAD_PROBLEM_H_

#include <cstdint>

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

}  // namespace ort_ops::max_pool_grad

#endif  // ORT_OPS_MAX_POOL_GRAD_PROBLEM_H_
