/* Attention and AttentionGrad: softmax attention over all heads at once, and its backward pass.
 *
 *     scores      = scale * query key^T + mask              [batch, heads, queries, keys]
 *     log_sum_exp = log(sum over keys of exp(scores))       [batch, heads, queries]
 *     y           = exp(scores - log_sum_exp) value
 *
 * With visibility "causal" query i sees keys 0 to i: the other scores are -inf, and are not computed. The scores are never
 * stored as a whole; the backward pass computes them again from log_sum_exp. All tensors are float.
 *
 * query is [batch, queries, heads, size], key and value are [batch, keys, heads, size]; or key and value are NULL and query
 * holds all three, [batch, tokens, 3, heads, size].
 */
#ifndef ORT_OPS_ATTENTION_H_
#define ORT_OPS_ATTENTION_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one of the forward pass. mask may be NULL; its shape must broadcast to that of the scores. y is
 * [batch, queries, heads, size]. visibility: "all" or "causal". */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_attention_get_workspace_size(
    const OrtOpsTensor* query, const OrtOpsTensor* key, const OrtOpsTensor* value, const OrtOpsTensor* mask,
    const OrtOpsTensor* y, const OrtOpsTensor* log_sum_exp, float scale, const char* visibility, size_t* workspace_bytes,
    OrtOpsExecutor** executor);

/* Phase one of the backward pass. dy is the gradient of y; dquery, dkey and dvalue have the shapes of query, key and value
 * and are NULL where those are. The mask has no gradient. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_attention_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* query, const OrtOpsTensor* key, const OrtOpsTensor* value,
    const OrtOpsTensor* mask, const OrtOpsTensor* y, const OrtOpsTensor* log_sum_exp, const OrtOpsTensor* dquery,
    const OrtOpsTensor* dkey, const OrtOpsTensor* dvalue, float scale, const char* visibility, size_t* workspace_bytes,
    OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_ATTENTION_H_ */
