/* GeluGrad: the backward pass of y = Gelu(x), element by element.
 *
 *     approximate "none":  dx = dy * (Phi(x) + x * phi(x)), Phi and phi the standard normal distribution and its density
 *     approximate "tanh":  dx = dy * d/dx (0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))))
 *
 * Each result is rounded to the tensors' type once, from float.
 */
#ifndef ORT_OPS_GELU_GRAD_H_
#define ORT_OPS_GELU_GRAD_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. dy: float, float16 or bfloat16, rank 1 to 8; x and dx as dy; dx may share the buffer of dy or of x.
 * approximate: "none" or "tanh", as in ONNX's Gelu. Needs no workspace. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_gelu_grad_get_workspace_size(const OrtOpsTensor* dy, const OrtOpsTensor* x,
                                                                 const OrtOpsTensor* dx, const char* approximate,
                                                                 size_t* workspace_bytes, OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_GELU_GRAD_H_ */
