// Hands a block to its type's kernel, and adds the blocks' sums.
#include "add_layer_norm_grad/cpu.h"

#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "add_layer_norm_grad/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "add_layer_norm_grad/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::add_layer_norm_grad {
namespace HWY_NAMESPACE {

void CombineTile(const Problem& problem, const Plan& plan, const float* partials, int64_t tile) {
  const int64_t begin = tile * plan.cols_per_tile;
  const int64_t end = std::min(problem.cols, begin + plan.cols_per_tile);
  float* const outputs[2] = {problem.dgamma, problem.dbeta};
  for (int64_t which = 0; which < 2; ++which) {
    if (outputs[which] == nullptr) continue;
    if (problem.type == ORT_OPS_BFLOAT16) {
      CombineColumns<hwy::bfloat16_t>(plan, partials, which, begin, end, outputs[which]);
    } else {
      CombineColumns<float>(plan, partials, which, begin, end, outputs[which]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::add_layer_norm_grad
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::add_layer_norm_grad {

HWY_EXPORT(CombineTile);

void RunBlock(const Problem& problem, const Plan& plan, float* partials, int64_t block) {
  if (problem.type == ORT_OPS_FLOAT) return RunFloatBlock(problem, plan, partials, block);
  if (problem.type == ORT_OPS_FLOAT16) return RunFloat16Block(problem, plan, partials, block);
  return RunBFloat16Block(problem, plan, partials, block);
}

void CombineTile(const Problem& problem, const Plan& plan, const float* partials, int64_t tile) {
  HWY_DYNAMIC_DISPATCH(CombineTile)(problem, plan, partials, tile);
}

}  // namespace ort_ops::add_layer_norm_grad
#endif  // HWY_ONCE
