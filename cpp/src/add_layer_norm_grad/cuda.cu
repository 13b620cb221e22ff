// AddLayerNormGrad on CUDA: chooses the instantiation that the plan asks for and hands it its arguments.
#include <algorithm>

#include "add_layer_norm_grad/cuda_kernels.cuh"
#include "add_layer_norm_grad/cuda_plan.h"
#include "cuda_launch.cuh"

namespace ort_ops::add_layer_norm_grad {
namespace {

KernelTensors TensorsOf(const Problem& problem) {
  return {problem.dy,
          problem.x1,
          problem.x2,
          problem.rstd,
          problem.mean,
          problem.gamma,
          problem.dsum,
          problem.dx,
          problem.rows,
          problem.cols,
          1.0f / static_cast<float>(problem.cols),
          problem.gamma_type == ORT_OPS_FLOAT};
}

PartialSums PartialSumsOf(const Problem& problem, const CudaPlan& plan, void* workspace) {
  if (plan.sums_in_outputs) return {problem.dgamma, problem.dbeta, 0};
  float* const partials = static_cast<float*>(workspace);
  return {problem.dgamma == nullptr ? nullptr : partials,
          problem.dbeta == nullptr ? nullptr : partials + problem.cols, 2 * problem.cols};
}

template <class T>
OrtOpsStatus StartRowsInShared(const Problem& problem, const CudaPlan& plan, void* workspace,
                               cudaStream_t stream) {
  const RowsInSharedConfig& config = plan.rows_in_shared;
  const RowsInSharedArguments arguments = {TensorsOf(problem), PartialSumsOf(problem, plan, workspace),
                                           config.threads_per_row, config.stages, config.staged_tensors};
  const auto kernel = config.cols_per_thread == 8    ? RowsInShared<T, 8>
                      : config.cols_per_thread == 16 ? RowsInShared<T, 16>
                                                     : RowsInShared<T, 32>;
  if (const auto status = AllowSharedMemory(kernel, config.shared_bytes_limit)) return status;
  const Launch launch = {Grid(config.blocks), config.threads_per_row * config.rows_per_block,
                         config.shared_bytes, stream};
  return Start(kernel, "RowsInShared", launch, arguments);
}

template <class T, int kCount>
OrtOpsStatus StartTwoReads(const Problem& problem, const CudaPlan& plan, void* workspace,
                           cudaStream_t stream) {
  const TwoReadsConfig& config = plan.two_reads;
  float2* const row_sums = reinterpret_cast<float2*>(static_cast<char*>(workspace) + plan.row_sums_offset);
  const RowSumsArguments row_sums_arguments = {TensorsOf(problem), row_sums, config.threads_per_sum,
                                               config.splits, config.cols_per_split};
  const Launch row_sums_launch = {Grid(config.sum_blocks), config.threads_per_sum * config.sums_per_block,
                                  config.sum_shared_bytes, stream};
  if (const auto status = Start(RowSums<T, kCount>, "RowSums", row_sums_launch, row_sums_arguments))
    return status;
  const ColumnTilesArguments tiles_arguments = {TensorsOf(problem), PartialSumsOf(problem, plan, workspace),
                                                row_sums, config.splits, config.rows_per_part};
  const Launch tiles_launch = {Grid(config.tiles, plan.parts), config.tile_threads, config.tile_shared_bytes,
                               stream};
  return Start(ColumnTiles<T, kCount>, "ColumnTiles", tiles_launch, tiles_arguments);
}

template <class T>
OrtOpsStatus StartRows(const Problem& problem, const CudaPlan& plan, void* workspace, cudaStream_t stream) {
  if (plan.path == CudaPath::kRowsInShared) return StartRowsInShared<T>(problem, plan, workspace, stream);
  if (plan.two_reads.elements_per_access == 1) return StartTwoReads<T, 1>(problem, plan, workspace, stream);
  return StartTwoReads<T, Elements<T>::kPerVector>(problem, plan, workspace, stream);
}

OrtOpsStatus StartAddParts(const Problem& problem, const CudaPlan& plan, void* workspace,
                           cudaStream_t stream) {
  const AddPartsArguments arguments = {static_cast<const float*>(workspace), problem.dgamma, problem.dbeta,
                                       plan.parts, problem.cols};
  const int threads = kWarpThreads * static_cast<int>(std::min<int64_t>(plan.parts, kMaxPartRuns));
  const Launch launch = {Grid((problem.cols + kWarpThreads - 1) / kWarpThreads, 2), threads,
                         static_cast<size_t>(threads) * sizeof(float), stream};
  return Start(AddParts, "AddParts", launch, arguments);
}

OrtOpsStatus ZeroSums(const Problem& problem, cudaStream_t stream) {
  for (float* sums : {problem.dgamma, problem.dbeta}) {
    if (sums == nullptr) continue;
    const cudaError_t error =
        cudaMemsetAsync(sums, 0, static_cast<size_t>(problem.cols) * sizeof(float), stream);
    if (const auto status = CheckCuda(error, "zeroing dgamma and dbeta")) return status;
  }
  return ORT_OPS_SUCCESS;
}

}  // namespace

OrtOpsStatus PlanCuda(const Problem& problem, const CudaDevice& device, size_t* workspace_bytes) {
  CudaPlan plan;
  const OrtOpsStatus status = MakeCudaPlan(problem, device, &plan);
  *workspace_bytes = plan.workspace_bytes;
  return status;
}

OrtOpsStatus LaunchCuda(const Problem& problem, const CudaDevice& device, void* workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  CudaPlan plan;
  if (const auto status = MakeCudaPlan(problem, device, &plan)) return status;
  if (plan.path == CudaPath::kNoRows) return ZeroSums(problem, stream);
  const auto start_rows = problem.type == ORT_OPS_FLOAT     ? StartRows<float>
                          : problem.type == ORT_OPS_FLOAT16 ? StartRows<__half>
                                                            : StartRows<__nv_bfloat16>;
  if (const auto status = start_rows(problem, plan, workspace, stream)) return status;
  const bool wants_sums = problem.dgamma != nullptr || problem.dbeta != nullptr;
  return wants_sums && !plan.sums_in_outputs ? StartAddParts(problem, plan, workspace, stream)
                                             : ORT_OPS_SUCCESS;
}

}  // namespace ort_ops::add_layer_norm_grad
