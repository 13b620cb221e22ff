// The CUDA runtime's errors as this library's.
#ifndef ORT_OPS_CUDA_STATUS_H_
#define ORT_OPS_CUDA_STATUS_H_

#include <cuda_runtime.h>

#include "last_error.h"

namespace ort_ops {

// `what` was done, e.g. "finding the current device".
inline OrtOpsStatus CheckCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ORT_OPS_SUCCESS;
  return Fail(ORT_OPS_CUDA_FAILED, "%s failed: %s (%s)", what, cudaGetErrorString(error),
              cudaGetErrorName(error));
}

}  // namespace ort_ops

#endif  // ORT_OPS_CUDA_STATUS_H_
