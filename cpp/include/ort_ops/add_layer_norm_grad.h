/* AddLayerNormGrad: the backward pass of y = LayerNorm(x1 + x2), fused with the Add and with the residual gradient.
 *
 * With rows = product of the leading dims, cols = number of elements of gamma, T = the type of dy:
 *     x      = round_T(x1 + x2)
 *     xhat   = (x - mean) * rstd
 *     g      = dy * gamma
 *     dx     = round_T(rstd * (g - (sum_cols(g) + xhat * sum_cols(g * xhat)) / cols) + dsum)
 *     dgamma = sum_rows(dy * xhat)
 *     dbeta  = sum_rows(dy)
 */
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one: checks all tensors, writes the bytes of workspace that a run needs and a new executor.
 *
 * dy, x1 [..., *norm] of type T (float, float16 or bfloat16), rank 1 to 8; x2 as dy or NULL (then x = x1);
 * rstd, mean float [..., 1 x rank(norm)] or [...]; gamma [*norm] of type T or float; dsum as dy or NULL;
 * outputs, each NULL where not wanted: dx as dy (may share the buffer of dy, x1, x2 or dsum), dgamma and dbeta float, as gamma.
 * rows may be 0; cols may not.
 *
 * The workspace is a function of the shape and the type alone: at most 8 * cols bytes (two float rows, padded to 64
 * elements) for each of up to max(64, rows / 256) blocks of rows, and never more than the larger of 4 MiB and 2 % of dy's bytes.
 */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_add_layer_norm_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* rstd,
    const OrtOpsTensor* mean, const OrtOpsTensor* gamma, const OrtOpsTensor* dsum, const OrtOpsTensor* dx,
    const OrtOpsTensor* dgamma, const OrtOpsTensor* dbeta, size_t* workspace_bytes,
    OrtOpsExecutor** executor);

/* On CUDA: phase one and ort_ops_plan_on_cuda in one call, ort_ops_run_on_cuda and ort_ops_destroy_executor, by the names that
 * they had when this was the only operator there.
 *
 * The workspace has 8 * cols bytes for each block that works on rows, which are at most 32 on a multiprocessor.
 * Where rows are read twice (more than 16384 columns, no whole number of aligned 16-byte pieces, or far fewer
 * rows than multiprocessors), it has up to 8 * rows + 32 * multiprocessors bytes more.
 */
typedef OrtOpsExecutor OrtOpsAddLayerNormGradCudaExecutor;
ORT_OPS_EXPORT OrtOpsStatus ort_ops_add_layer_norm_grad_cuda_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* rstd,
    const OrtOpsTensor* mean, const OrtOpsTensor* gamma, const OrtOpsTensor* dsum, const OrtOpsTensor* dx,
    const OrtOpsTensor* dgamma, const OrtOpsTensor* dbeta, size_t* workspace_bytes,
    OrtOpsAddLayerNormGradCudaExecutor** executor);
ORT_OPS_EXPORT OrtOpsStatus
ort_ops_add_layer_norm_grad_cuda(void* workspace, size_t workspace_bytes,
                                 const OrtOpsAddLayerNormGradCudaExecutor* executor, void* stream);
ORT_OPS_EXPORT void ort_ops_add_layer_norm_grad_cuda_destroy(OrtOpsAddLayerNormGradCudaExecutor* executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_ADD_LAYER_NORM_GRAD_H_ */
