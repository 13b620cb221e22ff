// ScaledDotProductAttention and its gradient as ONNX Runtime sees them.
#include "descriptions.h"
#include "ort_ops/attention.h"

namespace ort_ops {
namespace {

constexpr auto kFloatType = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);

namespace forward {

enum Input : size_t { kQuery, kKey, kValue, kMask };
enum Output : size_t { kY, kLogSumExp };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_attention_get_workspace_size(call.inputs[kQuery], call.inputs[kKey], call.inputs[kValue],
                                              call.inputs[kMask], call.outputs[kY], call.outputs[kLogSumExp],
                                              call.Number(0), call.Text(1),
                                              workspace_bytes, executor);
}

// y [batch, queries, heads, size], log_sum_exp [batch, heads, queries]. A query of another rank, which Plan refuses, gives
// empty ones.
std::vector<int64_t> Shape(const Call& call, size_t output) {
  const OrtOpsTensor& query = *call.inputs[kQuery];
  if (query.rank != 4 && query.rank != 5) return std::vector<int64_t>(output == kY ? 4 : 3, 0);
  const int64_t* dims = query.dims;
  const int64_t heads = dims[query.rank - 2];
  if (output == kLogSumExp) return {dims[0], heads, dims[1]};
  return {dims[0], dims[1], heads, dims[query.rank - 1]};
}

}  // namespace forward

namespace backward {

enum Input : size_t { kDy, kQuery, kKey, kValue, kMask, kY, kLogSumExp };
enum Output : size_t { kDquery, kDkey, kDvalue };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_attention_grad_get_workspace_size(
      call.inputs[kDy], call.inputs[kQuery], call.inputs[kKey], call.inputs[kValue], call.inputs[kMask],
      call.inputs[kY], call.inputs[kLogSumExp], call.outputs[kDquery], call.outputs[kDkey], call.outputs[kDvalue],
      call.Number(0), call.Text(1), workspace_bytes, executor);
}

// dkey and dvalue: as key and value, which are absent where query holds all three.
std::vector<int64_t> Shape(const Call& call, size_t output) {
  const OrtOpsTensor* model = call.inputs[output == kDkey ? kKey : kValue];
  if (model == nullptr) return {0};
  return std::vector<int64_t>(model->dims, model->dims + model->rank);
}

}  // namespace backward
}  // namespace

const OpDescription kAttention = {
    "ScaledDotProductAttention",
    {{kFloatType, false}, {kFloatType, true}, {kFloatType, true}, {kFloatType, true}},
    {{kFloatType, false, kOwnShape}, {kFloatType, false, kOwnShape}},
    {{"scale", 1.0f}, {"visibility", "all"}},
    forward::Plan,
    nullptr,
    forward::Shape};

const OpDescription kAttentionGrad = {
    "ScaledDotProductAttentionGrad",
    {{kFloatType, false},
     {kFloatType, false},
     {kFloatType, true},
     {kFloatType, true},
     {kFloatType, true},
     {kFloatType, false},
     {kFloatType, false}},
    {{kFloatType, false, backward::kQuery}, {kFloatType, true, kOwnShape}, {kFloatType, true, kOwnShape}},
    {{"scale", 1.0f}, {"visibility", "all"}},
    backward::Plan,
    nullptr,
    backward::Shape};

}  // namespace ort_ops
