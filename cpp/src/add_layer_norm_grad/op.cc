// AddLayerNormGrad as ONNX Runtime sees it.
#include "ort_ops/add_layer_norm_grad.h"

#include "descriptions.h"

namespace ort_ops {
namespace {

enum Input : size_t { kDy, kX1, kX2, kRstd, kMean, kGamma, kDsum };
enum Output : size_t { kDx, kDgamma, kDbeta };

constexpr SlotType kData = Variable(0);
constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  const auto& in = call.inputs;
  const auto& out = call.outputs;
  return ort_ops_add_layer_norm_grad_get_workspace_size(in[kDy], in[kX1], in[kX2], in[kRstd], in[kMean], in[kGamma],
                                                        in[kDsum], out[kDx], out[kDgamma], out[kDbeta],
                                                        workspace_bytes, executor);
}

// An element of dx is written after the last read of the same element.
size_t MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kDsum, kDy};
  static int outputs[] = {kDx, kDx};
  *input_index = inputs;
  *output_index = outputs;
  return 2;
}

}  // namespace

const OpDescription kAddLayerNormGrad = {
    "AddLayerNormGrad",
    {{kData, false}, {kData, false}, {kData, true}, {kFloat, false}, {kFloat, false}, {Variable(1), false}, {kData, true}},
    {{kData, true, kDy}, {kFloat, true, kGamma}, {kFloat, true, kGamma}},
    {},
    Plan,
    MayInplace,
    nullptr};

}  // namespace ort_ops
