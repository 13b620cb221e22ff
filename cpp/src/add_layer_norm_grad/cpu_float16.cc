// The blocks of float16 tensors, a translation unit of their own so that the types compile side by side.
#include "add_layer_norm_grad/cpu.h"

#include "cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "add_layer_norm_grad/cpu_float16.cc"
#include "hwy/foreach_target.h"  // must come before highway.h
//
#include "add_layer_norm_grad/cpu-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ort_ops::add_layer_norm_grad {
namespace HWY_NAMESPACE {

void RunFloat16Block(const Problem& problem, const Plan& plan, float* partials, int64_t block) {
  if (problem.gamma_type == ORT_OPS_FLOAT) {
    RunBlockOf<hwy::float16_t, float>(problem, plan, partials, block);
  } else {
    RunBlockOf<hwy::float16_t, hwy::float16_t>(problem, plan, partials, block);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ort_ops::add_layer_norm_grad
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ort_ops::add_layer_norm_grad {

HWY_EXPORT(RunFloat16Block);

void RunFloat16Block(const Problem& problem, const Plan& plan, float* partials, int64_t block) {
  HWY_DYNAMIC_DISPATCH(RunFloat16Block)(problem, plan, partials, block);
}

}  // namespace ort_ops::add_layer_norm_grad
#endif  // HWY_ONCE
