/* Linear and LinearGrad: a linear layer, y = x * w' + b with w' = w or its transpose, and its backward pass.
 *
 *     dx = dy * w'^T
 *     db = the sum of dy's rows
 *     dw = x^T * dy, or dy^T * x where w' is w's transpose
 *
 * All axes of x and y but the last are rows.
 */
#ifndef ORT_OPS_LINEAR_H_
#define ORT_OPS_LINEAR_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. All tensors are float. x: [..., in], rank 2 to 8; w: [in, out] where weight_layout is in_out, [out, in] where it is
 * out_in; b: [out], or NULL for none; y: [..., out]. The workspace is at most 9 MiB. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_linear_get_workspace_size(const OrtOpsTensor* x, const OrtOpsTensor* w,
                                                              const OrtOpsTensor* b, const OrtOpsTensor* y,
                                                              const char* weight_layout, size_t* workspace_bytes,
                                                              OrtOpsExecutor** executor);

/* Phase one. dy as y; dx as x, db: [out], each NULL where it is not wanted; dw as w. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_linear_grad_get_workspace_size(
    const OrtOpsTensor* dy, const OrtOpsTensor* x, const OrtOpsTensor* w, const OrtOpsTensor* dx,
    const OrtOpsTensor* db, const OrtOpsTensor* dw, const char* weight_layout, size_t* workspace_bytes,
    OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_LINEAR_H_ */
