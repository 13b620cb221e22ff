/* CrossEntropy and CrossEntropyGrad: the cross entropy of scores and labels, one row at a time, and its backward pass.
 *
 *     log_sum_exp[i] = log(sum over c of exp(scores[i, c]))
 *     row_loss[i]    = log_sum_exp[i] - scores[i, labels[i]], or 0 where labels[i] is ignore_index
 *     dscores[i, c]  = drow_loss[i] * (exp(scores[i, c] - log_sum_exp[i]) - (1 if c is labels[i], else 0)), or 0 likewise
 *
 * How rows are weighed and added up to one loss is the caller's business.
 */
#ifndef ORT_OPS_CROSS_ENTROPY_H_
#define ORT_OPS_CROSS_ENTROPY_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. scores: float [..., classes], rank 1 to 8, at least one class; labels: int32 or int64 [...]; the results:
 * float, as labels. A label that is neither a class nor ignore_index makes the run fail, and on CUDA its row's results
 * NaN. Needs no workspace. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_cross_entropy_get_workspace_size(
    const OrtOpsTensor* scores, const OrtOpsTensor* labels, const OrtOpsTensor* row_loss,
    const OrtOpsTensor* log_sum_exp, int64_t ignore_index, size_t* workspace_bytes, OrtOpsExecutor** executor);

/* Phase one. drow_loss and log_sum_exp: float, as labels; dscores as scores, whose buffer it may share. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_cross_entropy_grad_get_workspace_size(
    const OrtOpsTensor* drow_loss, const OrtOpsTensor* scores, const OrtOpsTensor* labels,
    const OrtOpsTensor* log_sum_exp, const OrtOpsTensor* dscores, int64_t ignore_index, size_t* workspace_bytes,
    OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_CROSS_ENTROPY_H_ */
