// Linear and LinearGrad as ONNX Runtime sees them.
#include "ort_ops/linear.h"

#include <cstring>

#include "descriptions.h"

namespace ort_ops {
namespace {

constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);

// The number of outputs of a layer with this weight; 0 where it is no matrix, which phase one refuses.
int64_t Outputs(const OrtOpsTensor& w, const char* weight_layout) {
  return w.rank == 2 ? w.dims[std::strcmp(weight_layout, "out_in") == 0 ? 0 : 1] : 0;
}

namespace forward {

enum Input : size_t { kX, kW, kB };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_linear_get_workspace_size(call.inputs[kX], call.inputs[kW], call.inputs[kB], call.outputs[0],
                                           call.Text(0), workspace_bytes, executor);
}

std::vector<int64_t> OwnShape(const Call& call, size_t) {
  const OrtOpsTensor& x = *call.inputs[kX];
  std::vector<int64_t> dims(x.dims, x.dims + x.rank);
  if (!dims.empty()) dims.back() = Outputs(*call.inputs[kW], call.Text(0));
  return dims;
}

}  // namespace forward

namespace backward {

enum Input : size_t { kDy, kX, kW };

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  const auto& in = call.inputs;
  const auto& out = call.outputs;
  return ort_ops_linear_grad_get_workspace_size(in[kDy], in[kX], in[kW], out[0], out[1], out[2], call.Text(0),
                                                workspace_bytes, executor);
}

std::vector<int64_t> OwnShape(const Call& call, size_t) { return {Outputs(*call.inputs[kW], call.Text(0))}; }

}  // namespace backward
}  // namespace

const OpDescription kLinear = {"Linear",
                               {{kFloat, false}, {kFloat, false}, {kFloat, true}},
                               {{kFloat, false, kOwnShape}},
                               {{"weight_layout", "in_out"}},
                               forward::Plan,
                               nullptr,
                               forward::OwnShape};

const OpDescription kLinearGrad = {"LinearGrad",
                                   {{kFloat, false}, {kFloat, false}, {kFloat, false}},
                                   {{kFloat, true, backward::kX}, {kFloat, true, kOwnShape}, {kFloat, false, backward::kW}},
                                   {{"weight_layout", "in_out"}},
                                   backward::Plan,
                                   nullptr,
                                   backward::OwnShape};

}  // namespace ort_ops
