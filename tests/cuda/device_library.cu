// What device_check.py needs of the CUDA runtime, as plain C, in one shared library with the product's C
// interface. Every function returns 0, or else device_error tells what failed.
#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ort_ops/ort_ops.h"

namespace {

std::string last_error;

int Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return 0;
  last_error = std::string(what) + ": " + cudaGetErrorString(error);
  return 1;
}

// The median, over the samples, of the milliseconds that one of `repeats` calls takes.
template <class TCall>
int MedianMilliseconds(cudaStream_t stream, int repeats, int samples, float* milliseconds,
                       const TCall& call) {
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  if (Check(cudaEventCreate(&begin), "cudaEventCreate") || Check(cudaEventCreate(&end), "cudaEventCreate"))
    return 1;
  std::vector<float> times;
  for (int sample = 0; sample <= samples; ++sample) {
    if (Check(cudaEventRecord(begin, stream), "cudaEventRecord")) return 1;
    for (int i = 0; i < repeats; ++i) {
      if (call() != 0) return 1;
    }
    if (Check(cudaEventRecord(end, stream), "cudaEventRecord")) return 1;
    if (Check(cudaEventSynchronize(end), "cudaEventSynchronize")) return 1;
    float elapsed = 0.0f;
    if (Check(cudaEventElapsedTime(&elapsed, begin, end), "cudaEventElapsedTime")) return 1;
    if (sample != 0) times.push_back(elapsed / static_cast<float>(repeats));  // the first one warms up
  }
  std::nth_element(times.begin(), times.begin() + samples / 2, times.end());
  *milliseconds = times[static_cast<size_t>(samples) / 2];
  return Check(cudaEventDestroy(begin), "cudaEventDestroy") ||
         Check(cudaEventDestroy(end), "cudaEventDestroy");
}

struct Run {
  void* workspace;
  size_t workspace_bytes;
  const OrtOpsExecutor* executor;
};

int Enqueue(const Run& run, cudaStream_t stream) {
  const OrtOpsStatus status = ort_ops_run_on_cuda(run.workspace, run.workspace_bytes, run.executor, stream);
  if (status != ORT_OPS_SUCCESS) last_error = ort_ops_last_error();
  return status != ORT_OPS_SUCCESS;
}

int Capture(const Run& run, cudaStream_t stream, cudaGraphExec_t* replay) {
  cudaGraph_t graph = nullptr;
  if (Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture"))
    return 1;
  const int failed = Enqueue(run, stream);
  if (Check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture") || failed) return 1;
  if (Check(cudaGraphInstantiate(replay, graph, 0), "cudaGraphInstantiate")) return 1;
  return Check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

}  // namespace

extern "C" const char* device_error() { return last_error.c_str(); }

extern "C" int device_allocate(void** memory, size_t bytes) {
  return Check(cudaMalloc(memory, bytes), "cudaMalloc");
}

extern "C" int device_free(void* memory) { return Check(cudaFree(memory), "cudaFree"); }

extern "C" int device_copy(void* to, const void* from, size_t bytes) {
  return Check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

extern "C" int device_fill(void* memory, int value, size_t bytes) {
  return Check(cudaMemset(memory, value, bytes), "cudaMemset");
}

extern "C" int device_synchronize() { return Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

extern "C" int device_create_stream(void** stream) {
  return Check(cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking),
               "cudaStreamCreate");
}

extern "C" int device_time_copy(void* to, const void* from, size_t bytes, void* stream_handle, int repeats,
                                int samples, float* milliseconds) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  return MedianMilliseconds(stream, repeats, samples, milliseconds, [&] {
    return Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  });
}

extern "C" int device_time_operator(void* workspace, size_t workspace_bytes,
                                    const OrtOpsExecutor* executor, void* stream_handle,
                                    int repeats, int samples, float* milliseconds) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Run run = {workspace, workspace_bytes, executor};
  return MedianMilliseconds(stream, repeats, samples, milliseconds, [&] { return Enqueue(run, stream); });
}

extern "C" int device_time_graph(void* workspace, size_t workspace_bytes,
                                 const OrtOpsExecutor* executor, void* stream_handle,
                                 int repeats, int samples, float* milliseconds) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  cudaGraphExec_t replay = nullptr;
  if (Capture({workspace, workspace_bytes, executor}, stream, &replay)) return 1;
  const int failed = MedianMilliseconds(stream, repeats, samples, milliseconds, [&] {
    return Check(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
  });
  return Check(cudaGraphExecDestroy(replay), "cudaGraphExecDestroy") || failed;
}
