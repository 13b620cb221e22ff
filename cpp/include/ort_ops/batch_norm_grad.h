/* BatchNormGrad: the backward pass of batch normalization with the batch's own statistics. For each channel, over the
 * batch and all axes behind the channels (n elements):
 *
 *     mean   = sum(x) / n
 *     rstd   = 1 / sqrt(sum((x - mean)^2) / n + epsilon)
 *     xhat   = (x - mean) * rstd
 *     dscale = sum(dy * xhat)
 *     dbias  = sum(dy)
 *     dx     = scale * rstd * (dy - dbias / n - xhat * dscale / n)
 */
#ifndef ORT_OPS_BATCH_NORM_GRAD_H_
#define ORT_OPS_BATCH_NORM_GRAD_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. All float. dy: [batch, channels, ...], rank 2 to 8; x and dx as dy, and dx may share the buffer of dy or of
 * x; scale, dscale and dbias: [channels]. Needs no workspace, but on CUDA up to 48 bytes for each
 * channel and 192 for each multiprocessor. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_batch_norm_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* scale, const OrtOpsTensor* dx,
    const OrtOpsTensor* dscale, const OrtOpsTensor* dbias, float epsilon, size_t* workspace_bytes,
    OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_BATCH_NORM_GRAD_H_ */
