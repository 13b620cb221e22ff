// How one call is cut into tasks, and how much workspace that takes: from the shape and the type alone, so
// that the result does not depend on the threads that happen to run it.
//
// The rows are cut into blocks of equally many rows. A block writes its rows' dx and its own partial dgamma
// and dbeta; then the partial sums are added in the order of the blocks, in double precision, in tiles of
// columns.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_PLAN_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_PLAN_H_

#include <cstddef>
#include <cstdint>

#include "add_layer_norm_grad/problem.h"

namespace ort_ops::add_layer_norm_grad {

struct Plan {
  int64_t rows_per_block;
  int64_t blocks;
  // One block can sum straight into dgamma and dbeta: then there are no partial sums and no workspace.
  bool sums_in_outputs;
  int64_t partial_stride;  // floats from one row of partial sums to the next; each block has one for dgamma, one for dbeta
  int64_t cols_per_tile;
  int64_t tiles;
  size_t workspace_bytes;
};

Plan MakePlan(const Problem& problem);

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_PLAN_H_
