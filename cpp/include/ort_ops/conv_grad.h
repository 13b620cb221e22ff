/* ConvGrad: the backward pass of a convolution over one to three axes. With o the output's positions, k the elements of
 * the kernel, and both of them vectors of one number per axis:
 *
 *     y[n, f, o]  = b[f] + sum over c, k of w[f, c, k] * x[n, c, o * strides + k * dilations - pads]
 *     dx[n, c, i] = sum over f and all o, k with i = o * strides + k * dilations - pads of w[f, c, k] * dy[n, f, o]
 *     dw[f, c, k] = sum over n, o of dy[n, f, o] * x[n, c, o * strides + k * dilations - pads]
 *     db[f]       = sum over n, o of dy[n, f, o]
 *
 * where x is 0 outside. With groups, the channels of x and of y are each cut into that many parts, and a part of y sees
 * the part of x of the same number. An infinity or a NaN in x or w may turn into NaN in more elements of dw or dx than
 * those that see it, of the same channel of x. */
#ifndef ORT_OPS_CONV_GRAD_H_
#define ORT_OPS_CONV_GRAD_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct OrtOpsConvolution {
  int32_t axes; /* 1 to 3; as many numbers of each array are read, twice as many of pads */
  int64_t strides[3];
  int64_t dilations[3];
  int64_t pads[6]; /* before each axis, then behind each */
  int64_t groups;
} OrtOpsConvolution;

/* Phase one. All float. dy: [batch, filters, positions...]; x: [batch, channels, size...]; w: [filters, channels / groups,
 * kernel...]; dx (may be null) as x, db (may be null) [filters], dw as w, none sharing a buffer with another tensor.
 *
 * The workspace has at most 16 parts of about 200 KB, more only where what one position sees of one channel is larger,
 * and 4 MB of partial sums. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_conv_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* w, const OrtOpsTensor* dx,
    const OrtOpsTensor* db, const OrtOpsTensor* dw, const OrtOpsConvolution* convolution, size_t* workspace_bytes,
    OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_CONV_GRAD_H_ */
