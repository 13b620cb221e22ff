/* ReluGrad: the backward pass of y = Relu(x), element by element: dx = 0 where y <= 0, else dy. */
#ifndef ORT_OPS_RELU_GRAD_H_
#define ORT_OPS_RELU_GRAD_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. dy: float, float16 or bfloat16, rank 1 to 8; y (or x, which gives the same) and dx as dy; dx may share the
 * buffer of dy or of y. Needs no workspace. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_relu_grad_get_workspace_size(const OrtOpsTensor* dy, const OrtOpsTensor* y,
                                                                 const OrtOpsTensor* dx, size_t* workspace_bytes,
                                                                 OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_RELU_GRAD_H_ */
