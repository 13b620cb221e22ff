// AdamW as ONNX Runtime sees it.
#include "ort_ops/adamw.h"

#include "descriptions.h"

namespace ort_ops {
namespace {

enum Input : size_t {
  kParameter,
  kGradient,
  kFirstMoment,
  kSecondMoment,
  kGradientWeight,
  kSquareWeight,
  kStepSize,
  kInverseRoot,
  kDecay,
  kUpdate
};
enum Attribute : size_t { kForm, kBeta1, kBeta2, kEpsilon };

constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
constexpr SlotType kBool = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL);

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  const auto& in = call.inputs;
  const auto& out = call.outputs;
  return ort_ops_adamw_get_workspace_size(
      in[kParameter], in[kGradient], in[kFirstMoment], in[kSecondMoment], in[kGradientWeight], in[kSquareWeight],
      in[kStepSize], in[kInverseRoot], in[kDecay], in[kUpdate], out[0], out[1], out[2], call.Text(kForm),
      call.Number(kBeta1), call.Number(kBeta2), call.Number(kEpsilon), workspace_bytes, executor);
}

size_t MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kParameter, kFirstMoment, kSecondMoment};
  static int outputs[] = {0, 1, 2};
  *input_index = inputs;
  *output_index = outputs;
  return 3;
}

}  // namespace

const OpDescription kAdamW = {
    "AdamW",
    {{kFloat, false},
     {kFloat, false},
     {kFloat, false},
     {kFloat, false},
     {kFloat, false},
     {kFloat, false},
     {kFloat, false},
     {kFloat, true},
     {kFloat, true},
     {kBool, true}},
    {{kFloat, false, kParameter}, {kFloat, false, kFirstMoment}, {kFloat, false, kSecondMoment}},
    {{"form", "pytorch"}, {"beta1", 0.9f}, {"beta2", 0.999f}, {"epsilon", 1e-8f}},
    Plan,
    MayInplace,
    nullptr};

}  // namespace ort_ops
