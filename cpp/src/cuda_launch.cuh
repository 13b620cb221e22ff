// How every operator starts its CUDA kernels. Plain calls of the runtime, no <<<>>>, so that each one's status is checked
// where it is made, and the host's compiler understands them too (tests/cuda).
#ifndef ORT_OPS_CUDA_LAUNCH_CUH_
#define ORT_OPS_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda_device.h"
#include "cuda_status.h"
#include "rounding.h"

namespace ort_ops {

struct Launch {
  dim3 grid;
  int threads;
  size_t shared_bytes;
  cudaStream_t stream;
};

// `name`: the kernel's, for the sentence where the launch fails.
template <class TArguments>
OrtOpsStatus Start(void (*kernel)(TArguments), const char* name, const Launch& launch, const TArguments& arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  return CheckCuda(cudaLaunchKernelEx(&config, kernel, arguments), name);
}

// Lets a kernel have all the shared memory of a block. The limit belongs to the kernel, not to the launch: were each launch
// to set its own size, another thread's would be refused in between.
template <class TArguments>
OrtOpsStatus AllowSharedMemory(void (*kernel)(TArguments), int shared_bytes_per_block) {
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           shared_bytes_per_block);
  return CheckCuda(error, "asking for shared memory");
}

inline dim3 Grid(int64_t x, int64_t y = 1) { return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y)); }

constexpr int kBlockThreads = 256;

// At most as many blocks of kBlockThreads as the device holds at a time.
inline dim3 GridFor(const CudaDevice& device, int64_t blocks) {
  return Grid(std::clamp<int64_t>(blocks, 1, int64_t{device.multiprocessors} * 8));
}

// What a block may have of shared memory without asking for more.
constexpr int64_t kSharedBytesUnasked = 48 << 10;

// How rows are shared out: each to a group of threads, several rows to a block where they are short.
struct RowGroups {
  int threads_per_row;
  int rows_per_block;

  int Threads() const { return threads_per_row * rows_per_block; }
};

// Of shared memory, for two floats of each of a block's warps (OverGroup).
constexpr int kSumVectors = 2 * kBlockThreads / 32 / 4;

// For rows of so many pieces, at least one of which each thread takes.
inline RowGroups GroupsFor(int64_t pieces) {
  int threads = 1;
  while (threads < std::min<int64_t>(pieces, 32)) threads *= 2;
  if (pieces > 32) threads = static_cast<int>(std::min<int64_t>(CeilDiv(pieces, 32) * 32, kBlockThreads));
  return {threads, std::max(1, kBlockThreads / 2 / threads)};
}

// For kernels that go through all elements (ForEachPieceOfGrid).
template <class TArguments>
OrtOpsStatus StartForElements(void (*kernel)(TArguments), const char* name, const CudaDevice& device, int64_t count,
                              int per_vector, void* stream, const TArguments& arguments) {
  if (count == 0) return ORT_OPS_SUCCESS;
  const Launch launch = {GridFor(device, CeilDiv(count, int64_t{kBlockThreads} * per_vector)), kBlockThreads, 0,
                         static_cast<cudaStream_t>(stream)};
  return Start(kernel, name, launch, arguments);
}

}  // namespace ort_ops

#endif  // ORT_OPS_CUDA_LAUNCH_CUH_
