// Sums and maxima over groups of threads, each in one fixed order and with no atomic operations; device code only. Written
// out instead of taken from CUB, because the host must be able to compile them (tests/cuda).
#ifndef ORT_OPS_CUDA_GROUP_CUH_
#define ORT_OPS_CUDA_GROUP_CUH_

#include <cuda_runtime.h>

#include "cuda_elements.cuh"

namespace ort_ops {

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
  __device__ float2 operator()(float2 a, float2 b) const { return make_float2(a.x + b.x, a.y + b.y); }
  __device__ float4 operator()(float4 a, float4 b) const {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
};

// Passes over NaN.
struct Largest {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

__device__ inline float FromLane(float value, int offset) { return __shfl_xor_sync(kAllLanes, value, offset); }
__device__ inline float2 FromLane(float2 value, int offset) {
  return make_float2(FromLane(value.x, offset), FromLane(value.y, offset));
}
__device__ inline float4 FromLane(float4 value, int offset) {
  return make_float4(FromLane(value.x, offset), FromLane(value.y, offset), FromLane(value.z, offset),
                     FromLane(value.w, offset));
}

// Combines the values of the `lanes` threads of the warp around this one, a power of two, and gives every one of them the
// result. All threads of the warp must call it together.
template <class Combine, class Value>
__device__ Value OverWarp(Value value, int lanes = kWarpThreads) {
  const Combine combine;
  for (int offset = lanes / 2; offset > 0; offset /= 2) value = combine(value, FromLane(value, offset));
  return value;
}

// Combines the values of the `group` threads around this one and gives every one of them the result. `group`
// divides the block: a power of two up to a warp, or whole warps. All threads of the block must call it
// together. `warp_values` holds one value for each warp; two calls in a row must not be given the same one, or
// the second would overwrite what is still being read.
template <class Combine, class Value>
__device__ Value OverGroup(Value value, int group, Value* warp_values) {
  value = OverWarp<Combine>(value, min(group, kWarpThreads));
  if (group <= kWarpThreads) return value;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread % kWarpThreads == 0) warp_values[thread / kWarpThreads] = value;
  __syncthreads();
  const int warps = group / kWarpThreads;
  const Value* first = warp_values + thread / group * warps;
  Value result = first[0];
  for (int warp = 1; warp < warps; ++warp) result = Combine()(result, first[warp]);
  return result;
}

}  // namespace ort_ops

#endif  // ORT_OPS_CUDA_GROUP_CUH_
