// GeluGrad as ONNX Runtime sees it.
#include "ort_ops/gelu_grad.h"

#include "descriptions.h"

namespace ort_ops {
namespace {

enum Input : size_t { kDy, kX };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_gelu_grad_get_workspace_size(call.inputs[kDy], call.inputs[kX], call.outputs[0],
                                              call.Text(0), workspace_bytes, executor);
}

size_t MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kDy, kX};
  static int outputs[] = {0, 0};
  *input_index = inputs;
  *output_index = outputs;
  return 2;
}

}  // namespace

const OpDescription kGeluGrad = {"GeluGrad",
                                 {{Variable(0), false}, {Variable(0), false}},
                                 {{Variable(0), false, kDy}},
                                 {{"approximate", "none"}},
                                 Plan,
                                 MayInplace,
                                 nullptr};

}  // namespace ort_ops
