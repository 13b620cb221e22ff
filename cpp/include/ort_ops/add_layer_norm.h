/* AddLayerNorm: y = LayerNorm(x1 + x2), with the sum and the statistics that the backward pass needs.
 *
 * With rows = product of the leading dims, cols = number of elements of gamma, T = the type of x1:
 *     x    = round_T(x1 + x2)
 *     mean = sum_cols(x) / cols
 *     rstd = 1 / sqrt(sum_cols((x - mean)^2) / cols + epsilon)
 *     y    = round_T((x - mean) * rstd * gamma + beta)
 */
#ifndef ORT_OPS_ADD_LAYER_NORM_H_
#define ORT_OPS_ADD_LAYER_NORM_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. x1: T (float, float16 or bfloat16) [..., *norm], rank 1 to 8; x2 as x1 or NULL (then x = x1); gamma [*norm]
 * of type T or float, with at least one element; beta as gamma or NULL (0). y as x1, whose buffer or x2's it may share;
 * each NULL where not wanted: mean and rstd, float [..., 1 x rank(norm)], and x, as x1. Needs no workspace. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_add_layer_norm_get_workspace_size(
    const OrtOpsTensor* x1, const OrtOpsTensor* x2, const OrtOpsTensor* gamma, const OrtOpsTensor* beta,
    const OrtOpsTensor* y, const OrtOpsTensor* mean, const OrtOpsTensor* rstd, const OrtOpsTensor* x, float epsilon,
    size_t* workspace_bytes, OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_ADD_LAYER_NORM_H_ */
