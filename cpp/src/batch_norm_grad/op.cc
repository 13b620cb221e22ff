// BatchNormGrad as ONNX Runtime sees it.
#include "descriptions.h"
#include "ort_ops/batch_norm_grad.h"

namespace ort_ops {
namespace {

enum Input : size_t { kDy, kX, kScale };
enum Output : size_t { kDx, kDscale, kDbias };

constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  const auto& in = call.inputs;
  const auto& out = call.outputs;
  return ort_ops_batch_norm_grad_get_workspace_size(in[kDy], in[kX], in[kScale], out[kDx], out[kDscale], out[kDbias],
                                                    call.Number(0), workspace_bytes, executor);
}

// dx may take over either buffer: an element is written after the last read of the same element.
size_t MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kDy, kX};
  static int outputs[] = {kDx, kDx};
  *input_index = inputs;
  *output_index = outputs;
  return 2;
}

}  // namespace

const OpDescription kBatchNormGrad = {"BatchNormGrad",
                                      {{kFloat, false}, {kFloat, false}, {kFloat, false}},
                                      {{kFloat, false, kDy}, {kFloat, false, kScale}, {kFloat, false, kScale}},
                                      {{"epsilon", 1e-5f}},
                                      Plan,
                                      MayInplace,
                                      nullptr};

}  // namespace ort_ops
