#include <cstdio>

#include "cuda_device.h"
#include "cuda_status.h"

namespace ort_ops {
namespace {

// Stands for all kernels of this library: they are compiled for the same architectures.
__global__ void Probe() {}

}  // namespace

OrtOpsStatus DescribeCudaDevice(CudaDevice* device) {
  int ordinal = 0;
  if (const auto status = CheckCuda(cudaGetDevice(&ordinal), "finding the current CUDA device"))
    return status;
  const struct {
    cudaDeviceAttr attribute;
    int* value;
  } wanted[] = {{cudaDevAttrMultiProcessorCount, &device->multiprocessors},
                {cudaDevAttrMaxSharedMemoryPerMultiprocessor, &device->shared_bytes_per_multiprocessor},
                {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->shared_bytes_per_block}};
  for (const auto& [attribute, value] : wanted) {
    const cudaError_t error = cudaDeviceGetAttribute(value, attribute, ordinal);
    if (const auto status = CheckCuda(error, "asking the CUDA device for its sizes")) return status;
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace ort_ops

extern "C" const char* ort_ops_cuda_architectures(void) { return ORT_OPS_CUDA_ARCHITECTURES; }

extern "C" OrtOpsStatus ort_ops_cuda_device(char* description, size_t description_bytes) {
  using ort_ops::CheckCuda;
  if (description == nullptr)
    return ort_ops::Fail(ORT_OPS_NULL_POINTER, "description is required; got a null pointer");
  int ordinal = 0;
  cudaDeviceProp properties = {};
  cudaFuncAttributes attributes = {};
  if (const auto status = CheckCuda(cudaGetDevice(&ordinal), "finding the current CUDA device"))
    return status;
  if (const auto status =
          CheckCuda(cudaGetDeviceProperties(&properties, ordinal), "describing the CUDA device"))
    return status;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(ort_ops::Probe));
  if (const auto status = CheckCuda(error, "loading a kernel of this library")) return status;
  std::snprintf(description, description_bytes, "%s, compute capability %d.%d", properties.name,
                properties.major, properties.minor);
  return ORT_OPS_SUCCESS;
}
