// The CPU kernel's two steps, each a set of independent tasks. Plain pointers; the instruction set is chosen
// inside.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_H_

#include <cstdint>

#include "add_layer_norm_grad/plan.h"
#include "add_layer_norm_grad/problem.h"

namespace ort_ops::add_layer_norm_grad {

// Writes dx of the block's rows, and the block's sums for dgamma and dbeta into the workspace (or into the
// outputs themselves, see Plan::sums_in_outputs).
void RunBlock(const Problem& problem, const Plan& plan, float* partials, int64_t block);

// RunBlock for tensors of one type.
void RunFloatBlock(const Problem& problem, const Plan& plan, float* partials, int64_t block);
void RunFloat16Block(const Problem& problem, const Plan& plan, float* partials, int64_t block);
void RunBFloat16Block(const Problem& problem, const Plan& plan, float* partials, int64_t block);

// Adds the blocks' sums for one tile of columns, in the order of the blocks, and writes dgamma and dbeta.
void CombineTile(const Problem& problem, const Plan& plan, const float* partials, int64_t tile);

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_CPU_H_
