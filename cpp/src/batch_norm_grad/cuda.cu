// BatchNormGrad on CUDA: one kernel sums over pieces of the channels, another one adds the pieces and writes the gradients.
//
// A piece is cut into segments that a block holds in registers. Each is summed in float about its own mean, and the
// sums are moved to the piece's, then to the channel's mean in double (Chan, Golub and LeVeque, 1979), as on the CPU:
// one pass over memory without the cancellation of sum(x^2) - sum(x)^2 / n.
#include "batch_norm_grad/problem.h"
#include "cuda_elements.cuh"
#include "cuda_group.cuh"
#include "cuda_launch.cuh"

namespace ort_ops::batch_norm_grad {

constexpr int kItems = 8;  // elements of a segment for each thread
constexpr int kSegment = kItems * kBlockThreads;
constexpr int kMaxPieces = 32;  // of a channel
constexpr int kWarps = kBlockThreads / kWarpThreads;

// Sums over elements, about a centre.
struct Sums {
  double count;
  double centre;
  double x;       // of x - centre
  double square;  // of (x - centre)^2
  double dy;
  double product;  // of dy * (x - centre)
};

struct Arguments {
  Problem problem;
  Sums* pieces;  // [channels][piece_count]
  int piece_count;
  int64_t segments;  // of a piece
};

// Adds the sums of another part, about the centre of `total`.
__device__ inline void Add(const Sums& part, Sums& total) {
  // About a centre far from all elements the sums would cancel as those about 0 do.
  if (total.count == 0) total.centre = part.centre;
  const double shift = part.centre - total.centre;
  total.count += part.count;
  total.x += part.x + part.count * shift;
  total.square += part.square + shift * (2 * part.x + part.count * shift);
  total.dy += part.dy;
  total.product += part.product + shift * part.dy;
}

// Where element `index` of a channel lies.
__device__ inline int64_t OffsetOf(const Problem& problem, int64_t channel, int64_t index) {
  int64_t instance = 0;
  if (problem.batch * problem.size <= 0xFFFFFFFF) {
    instance = static_cast<unsigned>(index) / static_cast<unsigned>(problem.size);  // several times as fast
  } else {
    instance = index / problem.size;
  }
  return (instance * problem.channels + channel) * problem.size + (index - instance * problem.size);
}

// Calls body(item, offset) for the thread's elements, kCount at a time, of the segment that begins at element `first`.
template <int kCount, class Body>
__device__ void ForEachOfSegment(const Problem& problem, int64_t channel, int64_t first, const Body& body) {
  const int64_t count = problem.batch * problem.size;
#pragma unroll
  for (int item = 0; item < kItems; item += kCount) {
    const int64_t index = first + item * kBlockThreads + static_cast<int64_t>(threadIdx.x) * kCount;
    if (index < count) body(item, OffsetOf(problem, channel, index));
  }
}

template <int kCount>
__device__ Sums SumsOfSegment(const Problem& problem, int64_t channel, int64_t first) {
  float* const warp_sums = reinterpret_cast<float*>(shared_memory);
  float4* const warp_rest = reinterpret_cast<float4*>(warp_sums + kWarps);
  const auto count = static_cast<float>(min(int64_t{kSegment}, problem.batch * problem.size - first));
  // Relative to an element: so a constant channel is centred exactly.
  const float origin = problem.x[OffsetOf(problem, channel, first)];
  float x[kItems];
  float dy[kItems] = {};
  for (int i = 0; i < kItems; ++i) x[i] = origin;
  float sum = 0.0f;
  ForEachOfSegment<kCount>(problem, channel, first, [&](int item, int64_t offset) {
    float x_i[kCount];
    float dy_i[kCount];
    Load(problem.x + offset, x_i);
    Load(problem.dy + offset, dy_i);
    for (int i = 0; i < kCount; ++i) {
      x[item + i] = x_i[i];
      dy[item + i] = dy_i[i];
    }
  });
  for (int i = 0; i < kItems; ++i) sum += x[i] - origin;
  const float centre = origin + OverGroup<Sum>(sum, kBlockThreads, warp_sums) / count;
  float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  ForEachOfSegment<kCount>(problem, channel, first, [&](int item, int64_t) {
    for (int i = item; i < item + kCount; ++i) {
      const float centred = x[i] - centre;
      sums.x += centred;
      sums.y += centred * centred;
      sums.z += dy[i];
      sums.w += dy[i] * centred;
    }
  });
  sums = OverGroup<Sum>(sums, kBlockThreads, warp_rest);
  return {count, centre, sums.x, sums.y, sums.z, sums.w};
}

template <int kCount>
__global__ void __launch_bounds__(kBlockThreads) SumPieces(const __grid_constant__ Arguments arguments) {
  const Problem& problem = arguments.problem;
  const int64_t count = problem.batch * problem.size;
  for (int64_t piece = blockIdx.x; piece < problem.channels * arguments.piece_count; piece += gridDim.x) {
    const int64_t channel = piece / arguments.piece_count;
    const int64_t first = piece % arguments.piece_count * arguments.segments * kSegment;
    const int64_t end = min(count, first + arguments.segments * kSegment);
    Sums total = {};
    for (int64_t segment = first; segment < end; segment += kSegment) {
      const Sums part = SumsOfSegment<kCount>(problem, channel, segment);
      if (threadIdx.x == 0) Add(part, total);
    }
    if (threadIdx.x == 0) arguments.pieces[piece] = total;
  }
}

// dx = (dy - mean of dy) * slope - (x - mean) * pull.
struct Line {
  float mean;  // and what a float leaves of it
  float mean_rest;
  float mean_dy;
  float slope;
  float pull;
};

// Writes dscale and dbias too.
__device__ inline Line LineOf(const Problem& problem, int64_t channel, const Sums& sums, bool writes) {
  if (sums.count == 0) {
    if (writes) problem.dscale[channel] = problem.dbias[channel] = 0.0f;
    return {};
  }
  const double shift = sums.x / sums.count;
  const double mean = sums.centre + shift;
  // Not max(), which would make 0 of NaN.
  double variance = sums.square / sums.count - shift * shift;
  if (variance < 0) variance = 0;
  const double rstd = 1 / sqrt(variance + static_cast<double>(problem.epsilon));
  const double along = sums.product - shift * sums.dy;
  const double slope = static_cast<double>(problem.scale[channel]) * rstd;
  if (writes) {
    problem.dscale[channel] = static_cast<float>(along * rstd);
    problem.dbias[channel] = static_cast<float>(sums.dy);
  }
  const auto rounded_mean = static_cast<float>(mean);
  return {rounded_mean, static_cast<float>(mean - static_cast<double>(rounded_mean)),
          static_cast<float>(sums.dy / sums.count), static_cast<float>(slope),
          static_cast<float>(slope * rstd * rstd * along / sums.count)};
}

template <int kCount>
__global__ void __launch_bounds__(kBlockThreads) WriteGradients(const __grid_constant__ Arguments arguments) {
  const Problem& problem = arguments.problem;
  const int64_t count = problem.batch * problem.size;
  Line& shared_line = *reinterpret_cast<Line*>(shared_memory);
  Sums* const pieces = reinterpret_cast<Sums*>(shared_memory + 2);  // behind the line
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t piece = blockIdx.x; piece < problem.channels * arguments.piece_count; piece += gridDim.x) {
    const int64_t channel = piece / arguments.piece_count;
    const int64_t number = piece % arguments.piece_count;
    if (thread < arguments.piece_count) pieces[thread] = arguments.pieces[channel * arguments.piece_count + thread];
    __syncthreads();
    if (thread == 0) {
      Sums total = {};
      for (int i = 0; i < arguments.piece_count; ++i) Add(pieces[i], total);
      shared_line = LineOf(problem, channel, total, number == 0);
    }
    __syncthreads();
    const Line line = shared_line;
    const int64_t first = number * arguments.segments * kSegment;
    const int64_t end = min(count, first + arguments.segments * kSegment);
    for (int64_t segment = first; segment < end; segment += kSegment) {
      ForEachOfSegment<kCount>(problem, channel, segment, [&](int, int64_t offset) {
        float x[kCount];
        float dy[kCount];
        Load(problem.x + offset, x);
        Load(problem.dy + offset, dy);
        for (int i = 0; i < kCount; ++i) {
          dy[i] = (dy[i] - line.mean_dy) * line.slope - (x[i] - line.mean - line.mean_rest) * line.pull;
        }
        Store(problem.dx + offset, dy);
      });
    }
  }
}

int64_t SegmentsOf(const Problem& problem) { return CeilDiv(problem.batch * problem.size, kSegment); }

int PieceCount(const Problem& problem, const CudaDevice& device) {
  if (problem.channels == 0) return 0;
  const int64_t wanted = CeilDiv(int64_t{4} * device.multiprocessors, problem.channels);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(SegmentsOf(problem), 1, kMaxPieces)));
}

OrtOpsStatus PlanCuda(const Problem& problem, const CudaDevice& device, size_t* workspace_bytes) {
  *workspace_bytes = static_cast<size_t>(problem.channels * PieceCount(problem, device)) * sizeof(Sums);
  return ORT_OPS_SUCCESS;
}

template <int kCount>
OrtOpsStatus StartBoth(const Arguments& arguments, Launch launch) {
  launch.shared_bytes = kWarps * (sizeof(float) + sizeof(float4));
  if (const auto status = Start(SumPieces<kCount>, "SumPieces", launch, arguments)) return status;
  launch.shared_bytes = 2 * sizeof(Vector) + static_cast<size_t>(arguments.piece_count) * sizeof(Sums);
  return Start(WriteGradients<kCount>, "WriteGradients", launch, arguments);
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream) {
  if (problem.channels == 0) return ORT_OPS_SUCCESS;
  const int pieces = PieceCount(problem, device);
  const Arguments arguments = {problem, static_cast<Sums*>(workspace), pieces, CeilDiv(SegmentsOf(problem), pieces)};
  const Launch launch = {GridFor(device, problem.channels * pieces), kBlockThreads, 0, static_cast<cudaStream_t>(stream)};
  uintptr_t bits = static_cast<uintptr_t>(problem.size) * sizeof(float);
  for (const float* tensor : {problem.dy, problem.x, static_cast<const float*>(problem.dx)}) {
    bits |= reinterpret_cast<uintptr_t>(tensor);
  }
  return bits % sizeof(Vector) == 0 ? StartBoth<4>(arguments, launch) : StartBoth<1>(arguments, launch);
}

}  // namespace ort_ops::batch_norm_grad
