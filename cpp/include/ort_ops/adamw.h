/* AdamW: one update of one parameter by AdamW (Loshchilov & Hutter 2019, algorithm 2), in one pass over memory.
 *
 * With p the parameter, g its gradient, m and v the moments, in this order of operations, each rounded to float:
 *     m' = m * beta1 + g * gradient_weight
 *     v' = v * beta2 + (g * g) * square_weight
 *     form "pytorch":       p' = p * decay - m' / (sqrt(v') * inverse_root + epsilon) * step_size
 *     form "hugging_face":  p' = (p - m' / (sqrt(v') * inverse_root + epsilon) * step_size) * decay
 *
 * The scalars are the same for all parameters of a model, so the caller computes them once: gradient_weight =
 * (1 - beta1) * s and square_weight = (1 - beta2) * s^2, where s scales the gradient (clipping, loss scaling);
 * step_size = learning_rate / (1 - beta1^t), inverse_root = 1 / sqrt(1 - beta2^t), decay = 1 - learning_rate *
 * weight_decay.
 */
#ifndef ORT_OPS_ADAMW_H_
#define ORT_OPS_ADAMW_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. All tensors are float. parameter: rank 0 to 8; gradient, first_moment, second_moment and the three
 * results as parameter; each result may share the buffer of the tensor that it replaces. Scalars have one element;
 * inverse_root and decay may be NULL (1). update: bool, one element, or NULL (true); where it holds false the results
 * are the old values, to the bit. Needs no workspace. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_adamw_get_workspace_size(
    const OrtOpsTensor* parameter, const OrtOpsTensor* gradient, const OrtOpsTensor* first_moment,
    const OrtOpsTensor* second_moment, const OrtOpsTensor* gradient_weight, const OrtOpsTensor* square_weight,
    const OrtOpsTensor* step_size, const OrtOpsTensor* inverse_root, const OrtOpsTensor* decay,
    const OrtOpsTensor* update, const OrtOpsTensor* parameter_updated, const OrtOpsTensor* first_moment_updated,
    const OrtOpsTensor* second_moment_updated, const char* form, float beta1, float beta2, float epsilon,
    size_t* workspace_bytes, OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_ADAMW_H_ */
