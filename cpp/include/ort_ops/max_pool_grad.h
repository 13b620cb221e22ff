/* MaxPoolGrad: the backward pass of a two-dimensional max pooling without dilations. Each window's dy is added to the
 * place of its maximum: of equal ones the first by rows, of NaN, which count as the largest, the last. */
#ifndef ORT_OPS_MAX_POOL_GRAD_H_
#define ORT_OPS_MAX_POOL_GRAD_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The windows; sizes are of height and width. */
typedef struct OrtOpsPoolWindow {
  int64_t kernel[2];
  int64_t strides[2];
  int64_t pads[4]; /* top, left, bottom, right */
  int32_t ceil_mode; /* 1: a last window that is not whole counts */
} OrtOpsPoolWindow;

/* Phase one. All float. x: [batch, channels, height, width]; dx as x, sharing no buffer; dy: [batch, channels, windows in
 * height, windows in width]. Needs no workspace, but on CUDA 4 bytes for each window. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_max_pool_grad_get_workspace_size(const OrtOpsTensor* dy, const OrtOpsTensor* x,
                                                                     const OrtOpsTensor* dx,
                                                                     const OrtOpsPoolWindow* window,
                                                                     size_t* workspace_bytes,
                                                                     OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_MAX_POOL_GRAD_H_ */
