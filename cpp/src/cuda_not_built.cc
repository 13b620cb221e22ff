// The CUDA part of the C interface in a library that was built without CUDA.
#include "last_error.h"

namespace {

OrtOpsStatus NotBuilt() {
  return ort_ops::Fail(
      ORT_OPS_CUDA_NOT_BUILT,
      "this library was built without CUDA; build it where nvcc is on the PATH, or with ORT_OPS_CUDA=ON");
}

}  // namespace

extern "C" const char* ort_ops_cuda_architectures(void) { return ""; }

extern "C" OrtOpsStatus ort_ops_cuda_device(char*, size_t) { return NotBuilt(); }

extern "C" OrtOpsStatus ort_ops_plan_on_cuda(OrtOpsExecutor*, size_t*) { return NotBuilt(); }

extern "C" OrtOpsStatus ort_ops_run_on_cuda(void*, size_t, const OrtOpsExecutor*, void*) { return NotBuilt(); }
