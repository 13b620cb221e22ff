// ReluGrad as ONNX Runtime sees it.
#include "descriptions.h"
#include "ort_ops/relu_grad.h"

namespace ort_ops {
namespace {

enum Input : size_t { kDy, kY };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_relu_grad_get_workspace_size(call.inputs[kDy], call.inputs[kY], call.outputs[0], workspace_bytes,
                                              executor);
}

size_t MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kDy, kY};
  static int outputs[] = {0, 0};
  *input_index = inputs;
  *output_index = outputs;
  return 2;
}

}  // namespace

const OpDescription kReluGrad = {"ReluGrad",
                                 {{Variable(0), false}, {Variable(0), false}},
                                 {{Variable(0), false, kDy}},
                                 {},
                                 Plan,
                                 MayInplace,
                                 nullptr};

}  // namespace ort_ops
