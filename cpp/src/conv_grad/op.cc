// ConvGrad as ONNX Runtime sees it.
#include <algorithm>

#include "descriptions.h"
#include "last_error.h"
#include "ort_ops/conv_grad.h"

namespace ort_ops {
namespace {

enum Input : size_t { kDy, kX, kW };
enum Output : size_t { kDx, kDb, kDw };
enum Attribute : size_t { kStrides, kDilations, kPads, kGroup };

constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
constexpr size_t kMaxAxes = 3;

OrtOpsStatus CopyNumbers(const char* name, const std::vector<int64_t>& from, size_t count, const char* why, int64_t* to) {
  if (from.size() != count) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "%s must have %zu numbers, %s; got %zu", name, count, why, from.size());
  }
  std::copy(from.begin(), from.end(), to);
  return ORT_OPS_SUCCESS;
}

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  OrtOpsConvolution convolution = {};
  const std::vector<int64_t>& strides = call.Integers(kStrides);
  if (strides.empty() || strides.size() > kMaxAxes) {
    return Fail(ORT_OPS_INVALID_PARAMETER, "strides must have 1 to 3 numbers, one for each axis; got %zu",
                strides.size());
  }
  convolution.axes = static_cast<int32_t>(strides.size());
  convolution.groups = call.Integer(kGroup);
  std::copy(strides.begin(), strides.end(), convolution.strides);
  const size_t axes = strides.size();
  if (const auto status =
          CopyNumbers("dilations", call.Integers(kDilations), axes, "as many as strides", convolution.dilations)) {
    return status;
  }
  if (const auto status =
          CopyNumbers("pads", call.Integers(kPads), 2 * axes, "twice as many as strides", convolution.pads)) {
    return status;
  }
  const auto& in = call.inputs;
  const auto& out = call.outputs;
  return ort_ops_conv_grad_get_workspace_size(in[kDy], in[kX], in[kW], out[kDx], out[kDb], out[kDw], &convolution,
                                              workspace_bytes, executor);
}

// db [filters]. A w without axes, which Plan refuses, gives an empty one.
std::vector<int64_t> Shape(const Call& call, size_t) {
  const OrtOpsTensor& w = *call.inputs[kW];
  return {w.rank == 0 ? 0 : w.dims[0]};
}

using Integers = std::vector<int64_t>;

}  // namespace

const OpDescription kConvGrad = {"ConvGrad",
                                 {{kFloat, false}, {kFloat, false}, {kFloat, false}},
                                 {{kFloat, true, kX}, {kFloat, true, kOwnShape}, {kFloat, false, kW}},
                                 {{"strides", Integers{1, 1}},
                                  {"dilations", Integers{1, 1}},
                                  {"pads", Integers{0, 0, 0, 0}},
                                  {"group", int64_t{1}}},
                                 Plan,
                                 nullptr,
                                 Shape};

}  // namespace ort_ops
