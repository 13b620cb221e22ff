// The descriptions of all operators, each defined in its folder's op.cc.
#ifndef ORT_OPS_DESCRIPTIONS_H_
#define ORT_OPS_DESCRIPTIONS_H_

#include "custom_op.h"

namespace ort_ops {

// All tensors are float.
extern const OpDescription kAdamW;
// Variable(0): the type of the activations; Variable(1): that of gamma and beta.
extern const OpDescription kAddLayerNorm;
extern const OpDescription kAddLayerNormGrad;
// All tensors are float.
extern const OpDescription kAttention;
extern const OpDescription kAttentionGrad;
extern const OpDescription kBatchNormGrad;
extern const OpDescription kConvGrad;
// Variable(0): the type of the labels.
extern const OpDescription kCrossEntropy;
extern const OpDescription kCrossEntropyGrad;
// Variable(0): the type of the indices.
extern const OpDescription kEmbeddingGrad;
// Variable(0): the type of all tensors.
extern const OpDescription kGeluGrad;
extern const OpDescription kReluGrad;
// All tensors are float.
extern const OpDescription kLinear;
extern const OpDescription kLinearGrad;
extern const OpDescription kMaxPoolGrad;

}  // namespace ort_ops

#endif  // ORT_OPS_DESCRIPTIONS_H_
