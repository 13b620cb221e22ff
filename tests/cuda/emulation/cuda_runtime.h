// Stands in for CUDA's language and runtime, so that the host's compiler takes device code as it is: put this
// folder before any other on the include path and compile the .cu files as C++. For tests only.
//
// The threads of a block are fibers on one thread of the processor; the blocks of a grid run one after the
// other. A fiber runs until it waits for others (a barrier, a shuffle) or ends; the order in which fibers go
// on is a setting. What depends on that order is a race. Shared memory holds NaNs when a block starts; copies
// in flight land when they are waited for. Where a GPU would hang, trap or do anything at all, the launch
// fails and cudaGetErrorString says what was wrong.
#ifndef ORT_OPS_TESTS_CUDA_EMULATION_CUDA_RUNTIME_H_
#define ORT_OPS_TESTS_CUDA_EMULATION_CUDA_RUNTIME_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

// ---------------------------------------------------------------- types

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Each rounded to nearest by itself, as the host's compiler is told to do everywhere (emulated.py).
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline void __stcs(uint4* to, uint4 value) { *to = value; }

using std::max;
using std::min;

// ---------------------------------------------------------------- the runtime's functions

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaFuncAttributes {};
struct cudaDeviceProp {
  char name[256];
  int major;
  int minor;
};

using cudaStream_t = struct EmulatedStream*;
using cudaEvent_t = struct EmulatedEvent*;
using cudaGraph_t = struct EmulatedGraph*;
using cudaGraphExec_t = struct EmulatedGraphExec*;
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3, cudaMemcpyDefault = 4 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
constexpr unsigned cudaStreamNonBlocking = 1;

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);

// The device's memory is the host's, everything is done when its function returns, and no clock runs: enough
// to try the host code that calls these.
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1.0f;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) { return cudaSuccess; }
inline cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) { return cudaSuccess; }
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
  return cudaSuccess;
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
inline cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }

// ---------------------------------------------------------------- what a thread sees

extern dim3 threadIdx;
extern dim3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

void __syncthreads();
void __syncwarp(unsigned mask = 0xffffffffu);
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);
unsigned __ballot_sync(unsigned mask, int predicate);
void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes);
void __pipeline_commit();
void __pipeline_wait_prior(size_t groups);

// ---------------------------------------------------------------- the emulation's own

namespace cuda_emulation {

// Round by round, each thread once as far as it can, in one of three orders; or warp by warp in a random
// order, each as far as it can, so that one warp may be a whole barrier ahead of the others.
enum class Order { kForward, kReverse, kRandom, kWarpAhead };

// When a copy into shared memory reads and writes: as early as a device may, like one without asynchronous
// copies, or as late.
enum class CopyTime { kAtIssue, kAtWait };

struct Settings {
  int multiprocessors = 4;
  int shared_bytes_per_multiprocessor = 228 << 10;
  int shared_bytes_per_block = 227 << 10;
  Order order = Order::kForward;
  unsigned seed = 0;  // of the random orders
  CopyTime copy_time = CopyTime::kAtWait;
  int64_t last_blocks = INT64_MAX;  // of each grid only so many are run, the last ones
};

extern Settings settings;

// Forgets what was set on the device before.
void UseAnotherDevice();

// The launches since the last call, a line each: the kernel, its grid, block and bytes of shared memory.
const char* TakeLaunches();

// Names the array that kernels declare as `extern __shared__`, which a host's program must define.
struct SharedMemory {
  SharedMemory(void* memory, size_t bytes);
};

cudaError_t Launch(const void* kernel, const cudaLaunchConfig_t& config, const std::function<void()>& call);

}  // namespace cuda_emulation

template <class... TParameters, class... TArguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(TParameters...),
                               TArguments&&... arguments) {
  return cuda_emulation::Launch(reinterpret_cast<const void*>(kernel), *config,
                                [&] { kernel(arguments...); });
}

#endif  // ORT_OPS_TESTS_CUDA_EMULATION_CUDA_RUNTIME_H_
