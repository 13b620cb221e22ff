/* EmbeddingGrad: the gradient of a table whose rows were looked up, y = table[indices].
 *
 *     dtable[r] = sum of dy[i] over all i with indices[i] == r, in the order of i; zeros where there is none
 */
#ifndef ORT_OPS_EMBEDDING_GRAD_H_
#define ORT_OPS_EMBEDDING_GRAD_H_

#include "ort_ops/ort_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Phase one. indices: int32 or int64, rank 0 to 7, of any shape; negative ones count from the table's end. table: float,
 * [rows, ...], rank 1 to 8; only its shape is read. dy: float, the shape of indices followed by that of a row. dtable
 * as table. Indices out of range make the run fail, with nothing written; on CUDA they are passed over. Needs no
 * workspace. */
ORT_OPS_EXPORT OrtOpsStatus ort_ops_embedding_grad_get_workspace_size(const OrtOpsTensor* dy,
                                                                      const OrtOpsTensor* indices,
                                                                      const OrtOpsTensor* table,
                                                                      const OrtOpsTensor* dtable,
                                                                      size_t* workspace_bytes,
                                                                      OrtOpsExecutor** executor);

#ifdef __cplusplus
}
#endif
#endif /* ORT_OPS_EMBEDDING_GRAD_H_ */
