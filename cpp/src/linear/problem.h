// The checked description of one Linear or LinearGrad call.
#ifndef ORT_OPS_LINEAR_PROBLEM_H_
#define ORT_OPS_LINEAR_PROBLEM_H_

#include <cstdint>

namespace ort_ops::linear {

// The sizes of a layer, and where it finds w.
struct Layer {
  int64_t rows;
  int64_t in;
  int64_t out;
  const float* w;
  bool w_is_transposed;  // [out, in]
};

struct Forward : Layer {
  const float* x;
  const float* b;  // null: none
  float* y;
};

// dx and db are null where nobody wants them.
struct Backward : Layer {
  const float* dy;
  const float* x;
  float* dx;
  float* db;
  float* dw;
};

}  // namespace ort_ops::linear

#endif  // ORT_OPS_LINEAR_PROBLEM_H_
