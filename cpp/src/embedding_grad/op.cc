// EmbeddingGrad as ONNX Runtime sees it.
#include "ort_ops/embedding_grad.h"

#include "descriptions.h"

namespace ort_ops {
namespace {

enum Input : size_t { kDy, kIndices, kTable };

constexpr SlotType kFloat = Fixed(ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);

OrtOpsStatus Plan(const Call& call, size_t* workspace_bytes, OrtOpsExecutor** executor) {
  return ort_ops_embedding_grad_get_workspace_size(call.inputs[kDy], call.inputs[kIndices], call.inputs[kTable],
                                                   call.outputs[0], workspace_bytes, executor);
}

}  // namespace

const OpDescription kEmbeddingGrad = {"EmbeddingGrad",
                                      {{kFloat, false}, {Variable(0), false}, {kFloat, false}},
                                      {{kFloat, false, kTable}},
                                      {},
                                      Plan,
                                      nullptr,
                                      nullptr};

}  // namespace ort_ops
