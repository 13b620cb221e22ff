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
  const auto& attributes = call.attributes;
  return ort_ops_adamw_get_workspace_size(
      in[kParameter], in[kGradient], in[kFirstMoment], in[kSecondMoment], in[kGradientWeight], in[kSquareWeight],
      in[kStepSize], in[kInverseRoot], in[kDecay], in[kUpdate], out[0], out[1], out[2], attributes[kForm].text.c_str(),
      attributes[kBeta1].number, attributes[kBeta2].number, attributes[kEpsilon].number, workspace_bytes, executor);
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
    {{"form", 0.0f, "pytorch"}, {"beta1", 0.9f, nullptr}, {"beta2", 0.999f, nullptr}, {"epsilon", 1e-8f, nullptr}},
    Plan,
    MayInplace,
    nullptr};

}  // namespace ort_ops
