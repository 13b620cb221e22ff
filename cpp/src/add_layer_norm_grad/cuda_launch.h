// The CUDA kernels on a stream, behind plain types.
#ifndef ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_LAUNCH_H_
#define ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_LAUNCH_H_

#include "add_layer_norm_grad/cuda_plan.h"
#include "add_layer_norm_grad/problem.h"

namespace ort_ops::add_layer_norm_grad {

// Enqueues the plan's kernels on `stream` (a cudaStream_t) and returns; no allocation, no synchronisation.
OrtOpsStatus LaunchCuda(const Problem& problem, const CudaPlan& plan, void* workspace, void* stream);

}  // namespace ort_ops::add_layer_norm_grad

#endif  // ORT_OPS_ADD_LAYER_NORM_GRAD_CUDA_LAUNCH_H_
