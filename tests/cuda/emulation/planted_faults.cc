// Small kernels, right and wrong ones, for the tests of the emulation itself.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <string>

extern __shared__ uint4 shared_memory[];

constexpr int kThreads = 96;
constexpr unsigned kAllLanes = 0xffffffffu;

namespace {

float* Shared() { return reinterpret_cast<float*>(shared_memory); }
int Thread() { return static_cast<int>(threadIdx.x); }
int Other() { return (Thread() + 40) % kThreads; }

// Right: everyone reads what another thread wrote.
__global__ void Exchange(const float* in, float* out) {
  Shared()[Thread()] = in[Thread()];
  __syncthreads();
  out[Thread()] = Shared()[Other()];
}

__global__ void MissingBarrier(const float* in, float* out) {
  Shared()[Thread()] = in[Thread()];
  out[Thread()] = Shared()[Other()];
}

// The second write may come before another thread's read: only a second barrier would forbid it.
__global__ void MissingSecondBarrier(const float* in, float* out) {
  Shared()[Thread()] = in[Thread()];
  __syncthreads();
  out[Thread()] = Shared()[Other()];
  Shared()[Thread()] = -1.0f;
}

__global__ void LastWriterWins(const float* in, float* out) {
  Shared()[0] = in[Thread()];
  __syncthreads();
  out[Thread()] = Shared()[0];
}

__global__ void DivergentBarrier(const float* in, float* out) {
  if (Thread() < 64) __syncthreads();
  out[Thread()] = in[Thread()];
}

__global__ void BarrierAgainstShuffle(const float* in, float* out) {
  out[Thread()] = in[Thread()];
  if (Thread() < 32) {
    __syncthreads();
  } else {
    out[Thread()] += __shfl_xor_sync(kAllLanes, in[Thread()], 1);
    __syncthreads();
    __syncthreads();
  }
}

__global__ void Uninitialised(const float*, float* out) { out[Thread()] = Shared()[Thread()]; }

__global__ void StrayWrite(const float* in, float* out) {
  Shared()[Thread() + 1] = in[Thread()];
  __syncthreads();
  out[Thread()] = Shared()[1];
}

// Right: three times the sum of the warps' first values. A shuffle lets a warp pass on its own; a second
// buffer keeps it from writing what others still read.
void SumWarps(const float* in, float* out, int buffers) {
  out[Thread()] = 0.0f;
  for (int i = 0; i < 3; ++i) {
    const float first = (i + 1) * __shfl_xor_sync(kAllLanes, in[Thread() / 32 * 32], 0);
    float* const sums = Shared() + i % buffers * 3;
    if (Thread() % 32 == 0) sums[Thread() / 32] = first;
    __syncthreads();
    out[Thread()] += (sums[0] + sums[1] + sums[2]) / (i + 1);
  }
}

__global__ void WarpSums(const float* in, float* out) { SumWarps(in, out, 2); }

__global__ void WarpSumsWithoutASecondBuffer(const float* in, float* out) { SumWarps(in, out, 1); }

// Right: sums of pairs, then of groups of four, eight lanes apart.
__global__ void Shuffle(const float* in, float* out) {
  float value = in[Thread()];
  value += __shfl_xor_sync(kAllLanes, value, 1);
  value += __shfl_xor_sync(kAllLanes, value, 8);
  out[Thread()] = value;
}

// Right: how many of the lanes up to this one have an odd value.
__global__ void Ballot(const float* in, float* out) {
  const unsigned odd = __ballot_sync(kAllLanes, static_cast<int>(in[Thread()]) % 2);
  out[Thread()] = static_cast<float>(__popc(odd & (0xffffffffu >> (31 - Thread() % 32))));
}

__global__ void BallotAgainstShuffle(const float* in, float* out) {
  out[Thread()] = Thread() % 2 == 0 ? __shfl_xor_sync(kAllLanes, in[Thread()], 1)
                                    : static_cast<float>(__ballot_sync(kAllLanes, 1));
}

__global__ void ShuffleOfHalfAWarp(const float* in, float* out) {
  out[Thread()] = Thread() % 32 < 16 ? __shfl_xor_sync(0xffffu, in[Thread()], 1) : 0.0f;
}

__global__ void ShuffleOutsideItsMask(const float* in, float* out) {
  out[Thread()] = __shfl_xor_sync(0xffffu, in[Thread()], 1);
}

__global__ void ShuffleFromALaneOutside(const float* in, float* out) {
  out[Thread()] = Thread() % 32 < 16 ? __shfl_xor_sync(0xffffu, in[Thread()], 16) : 0.0f;
}

__global__ void ShuffleWithoutALane(const float* in, float* out) {
  out[Thread()] = Thread() == 5 ? 0.0f : __shfl_xor_sync(kAllLanes, in[Thread()], 1);
}

// Right: two groups of copies, of which the first is waited for before the second.
__global__ void AsyncCopy(const float* in, float* out) {
  __pipeline_memcpy_async(Shared() + Thread(), in + Thread(), sizeof(float));
  __pipeline_commit();
  __pipeline_memcpy_async(Shared() + kThreads + Thread(), in + Thread(), sizeof(float));
  __pipeline_commit();
  __pipeline_wait_prior(1);
  out[Thread()] = Shared()[Thread()];
  __pipeline_wait_prior(0);
  out[Thread()] += Shared()[kThreads + Thread()];
}

__global__ void AsyncCopyTooEarly(const float* in, float* out) {
  __pipeline_memcpy_async(Shared() + Thread(), in + Thread(), sizeof(float));
  __pipeline_commit();
  __pipeline_wait_prior(1);
  out[Thread()] = Shared()[Thread()];
  __pipeline_wait_prior(0);
}

__global__ void AsyncCopyForgotten(const float* in, float* out) {
  __pipeline_memcpy_async(Shared() + Thread(), in + Thread(), sizeof(float));
  __pipeline_commit();
  out[Thread()] = in[Thread()];
}

__global__ void MisalignedCopy(const float* in, float* out) {
  __pipeline_memcpy_async(Shared() + 4 * (Thread() % 8) + 1, in, 16);
  out[Thread()] = in[Thread()];
}

using Kernel = void (*)(const float*, float*);

const std::map<std::string, Kernel> kernels = {{"Exchange", Exchange},
                                               {"MissingBarrier", MissingBarrier},
                                               {"MissingSecondBarrier", MissingSecondBarrier},
                                               {"LastWriterWins", LastWriterWins},
                                               {"DivergentBarrier", DivergentBarrier},
                                               {"BarrierAgainstShuffle", BarrierAgainstShuffle},
                                               {"Uninitialised", Uninitialised},
                                               {"StrayWrite", StrayWrite},
                                               {"Shuffle", Shuffle},
                                               {"Ballot", Ballot},
                                               {"BallotAgainstShuffle", BallotAgainstShuffle},
                                               {"WarpSums", WarpSums},
                                               {"WarpSumsWithoutASecondBuffer", WarpSumsWithoutASecondBuffer},
                                               {"ShuffleOfHalfAWarp", ShuffleOfHalfAWarp},
                                               {"ShuffleOutsideItsMask", ShuffleOutsideItsMask},
                                               {"ShuffleFromALaneOutside", ShuffleFromALaneOutside},
                                               {"ShuffleWithoutALane", ShuffleWithoutALane},
                                               {"AsyncCopy", AsyncCopy},
                                               {"AsyncCopyTooEarly", AsyncCopyTooEarly},
                                               {"AsyncCopyForgotten", AsyncCopyForgotten},
                                               {"MisalignedCopy", MisalignedCopy}};

}  // namespace

uint4 shared_memory[(64 << 10) / sizeof(uint4)];

namespace {

const cuda_emulation::SharedMemory named(shared_memory, sizeof(shared_memory));

}  // namespace

// Runs a kernel on one block of 96 threads; "" or what was wrong.
extern "C" const char* emulation_run(const char* name, const float* in, float* out, size_t shared_bytes,
                                     int order, unsigned seed, int copies_at_wait) {
  cuda_emulation::settings.order = static_cast<cuda_emulation::Order>(order);
  cuda_emulation::settings.seed = seed;
  cuda_emulation::settings.copy_time =
      copies_at_wait != 0 ? cuda_emulation::CopyTime::kAtWait : cuda_emulation::CopyTime::kAtIssue;
  cudaLaunchConfig_t config = {dim3(1), dim3(kThreads), shared_bytes, nullptr};
  const cudaError_t error = cudaLaunchKernelEx(&config, kernels.at(name), in, out);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

// float -> 16 bits -> float.
extern "C" void emulation_round(int bfloat16, size_t count, const float* in, float* out) {
  for (size_t i = 0; i < count; ++i) {
    out[i] =
        bfloat16 != 0 ? __bfloat162float(__float2bfloat16_rn(in[i])) : __half2float(__float2half_rn(in[i]));
  }
}
