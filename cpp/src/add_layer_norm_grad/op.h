// AddLayerNormGrad's slots, for its kernels of every provider.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_

#include "custom_op.h"

namespace ort_ops::add_layer_norm_grad {

enum Input : size_t { kDy, kX1, kX2, kRstd, kMean, kGamma, kDsum };
enum Output : size_t { kDx, kDgamma, kDbeta };

extern const Provider kCudaProvider;  // not in a library built without CUDA

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_OP_H_
