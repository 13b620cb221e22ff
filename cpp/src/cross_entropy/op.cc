// CrossEntropy and CrossEntropyGrad as ONNX Runtime sees them.
#include "descriptions.h"
#include "ort_ops/cross_entropy.h"

namespace ort_ops {
namespace {

constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
constexpr SlotType kLabelType = Variable(0);
constexpr int64_t kIgnoreIndex = -100;  // PyTorch's

namespace forward {

enum Input : size_t { kScores, kLabels };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_cross_entropy_get_workspace_size(call.inputs[kScores], call.inputs[kLabels], call.outputs[0],
                                                  call.outputs[1], call.Integer(0), workspace_bytes, executor);
}

}  // namespace forward

namespace backward {

enum Input : size_t { kDrowLoss, kScores, kLabels, kLogSumExp };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_cross_entropy_grad_get_workspace_size(call.inputs[kDrowLoss], call.inputs[kScores],
                                                       call.inputs[kLabels], call.inputs[kLogSumExp], call.outputs[0],
                                                       call.Integer(0), workspace_bytes, executor);
}

size_t MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kScores};
  static int outputs[] = {0};
  *input_index = inputs;
  *output_index = outputs;
  return 1;
}

}  // namespace backward
}  // namespace

const OpDescription kCrossEntropy = {"CrossEntropy",
                                     {{kFloat, false}, {kLabelType, false}},
                                     {{kFloat, false, forward::kLabels}, {kFloat, false, forward::kLabels}},
                                     {{"ignore_index", kIgnoreIndex}},
                                     forward::Plan,
                                     nullptr,
                                     nullptr};

const OpDescription kCrossEntropyGrad = {"CrossEntropyGrad",
                                         {{kFloat, false}, {kFloat, false}, {kLabelType, false}, {kFloat, false}},
                                         {{kFloat, false, backward::kScores}},
                                         {{"ignore_index", kIgnoreIndex}},
                                         backward::Plan,
                                         backward::MayInplace,
                                         nullptr};

}  // namespace ort_ops
