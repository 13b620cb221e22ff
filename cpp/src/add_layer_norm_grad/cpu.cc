// Compiles cpu-inl.h for every instruction set and calls the best one that the processor has.
#include "add_layer_norm_grad/cpu.h"

#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "add_layer_norm_grad/cpu.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "add_layer_norm_grad/cpu-inl.h"

#if HWY_ONCE
namespace ort_ops::add_layer_norm_grad {

HWY_EXPORT(RunBlock);
HWY_EXPORT(CombineTile);

void RunBlock(const Problem& problem, const Plan& plan, float* partials, int64_t block) {
  HWY_DYNAMIC_DISPATCH(RunBlock)(problem, plan, partials, block);
}

void CombineTile(const Problem& problem, const Plan& plan, const float* partials, int64_t tile) {
  HWY_DYNAMIC_DISPATCH(CombineTile)(problem, plan, partials, tile);
}

}  // namespace ort_ops::add_layer_norm_grad
#endif  // HWY_ONCE
