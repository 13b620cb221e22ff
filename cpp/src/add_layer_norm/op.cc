// AddLayerNorm as ONNX Runtime sees it.
#include <algorithm>

#include "descriptions.h"
#include "ort_ops/add_layer_norm.h"

namespace ort_ops {
namespace {

enum Input : size_t { kX1, kX2, kGamma, kBeta };
enum Output : size_t { kY, kMean, kRstd, kX };

constexpr SlotType kData = Variable(0);
constexpr SlotType kParameter = Variable(1);
constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  const auto& in = call.inputs;
  const auto& out = call.outputs;
  return ort_ops_add_layer_norm_get_workspace_size(in[kX1], in[kX2], in[kGamma], in[kBeta], out[kY], out[kMean],
                                                   out[kRstd], out[kX], call.Number(0), workspace_bytes, executor);
}

// y may take over an addend's buffer: an element is written after the last read of the same element.
size_t MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kX1, kX2};
  static int outputs[] = {kY, kY};
  *input_index = inputs;
  *output_index = outputs;
  return 2;
}

// mean and rstd: 1 for each axis that is normalised.
std::vector<int64_t> StatisticShape(const Call& call, size_t) {
  const OrtOpsTensor& x1 = *call.inputs[kX1];
  std::vector<int64_t> dims(x1.dims, x1.dims + x1.rank);
  const auto norm_rank = std::min(dims.size(), static_cast<size_t>(call.inputs[kGamma]->rank));
  std::fill(dims.end() - static_cast<std::ptrdiff_t>(norm_rank), dims.end(), 1);
  return dims;
}

}  // namespace

const OpDescription kAddLayerNorm = {
    "AddLayerNorm",
    {{kData, false}, {kData, true}, {kParameter, false}, {kParameter, true}},
    {{kData, false, kX1}, {kFloat, true, kOwnShape}, {kFloat, true, kOwnShape}, {kData, true, kX1}},
    {{"epsilon", 1e-5f}},
    Plan,
    MayInplace,
    StatisticShape};

}  // namespace ort_ops
