// The CUDA device of the calling thread: its sizes, from which launches are planned, and the runtime's errors
// as statuses.
#ifndef ORT_OPS_CUDA_DEVICE_H_
#define ORT_OPS_CUDA_DEVICE_H_

#include "ort_ops/ort_ops.h"

namespace ort_ops {

struct CudaDevice {
  int multiprocessors;
  int shared_bytes_per_multiprocessor;
  int shared_bytes_per_block;  // the most that a kernel may ask for
};

// Asks the calling thread's current device.
OrtOpsStatus DescribeCudaDevice(CudaDevice* device);

}  // namespace ort_ops

#endif  // ORT_OPS_CUDA_DEVICE_H_
