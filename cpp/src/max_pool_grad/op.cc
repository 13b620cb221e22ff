// MaxPoolGrad as ONNX Runtime sees it.
#include <algorithm>

#include "descriptions.h"
#include "last_error.h"
#include "ort_ops/max_pool_grad.h"

namespace ort_ops {
namespace {

enum Input : size_t { kDy, kX };
enum Attribute : size_t { kKernelShape, kStrides, kPads, kCeilMode };

constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);

template <size_t kCount>
OrtOpsStatus CopyNumbers(const char* name, const std::vector<int64_t>& from, int64_t (&to)[kCount]) {
  if (from.size() != kCount) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have %d numbers; got %d", name, static_cast<int>(kCount),
                static_cast<int>(from.size()));
  }
  std::copy(from.begin(), from.end(), to);
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  OrtOpsPoolWindow window;
  if (const auto status = CopyNumbers("kernel_shape", call.Integers(kKernelShape), window.kernel)) return status;
  if (const auto status = CopyNumbers("strides", call.Integers(kStrides), window.strides)) return status;
  if (const auto status = CopyNumbers("pads", call.Integers(kPads), window.pads)) return status;
  window.ceil_mode = call.Integer(kCeilMode) != 0;
  return ort_ops_max_pool_grad_get_workspace_size(call.inputs[kDy], call.inputs[kX], call.outputs[0], &window,
                                                  workspace_bytes, executor);
}

using Integers = std::vector<int64_t>;

}  // namespace

const OpDescription kMaxPoolGrad = {"MaxPoolGrad",
                                    {{kFloat, false}, {kFloat, false}},
                                    {{kFloat, false, kX}},
                                    {{"kernel_shape", Integers{1, 1}},
                                     {"strides", Integers{1, 1}},
                                     {"pads", Integers{0, 0, 0, 0}},
                                     {"ceil_mode", int64_t{0}}},
                                    Plan,
                                    nullptr,
                                    nullptr};

}  // namespace ort_ops
