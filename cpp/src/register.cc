// The only list of kernels, and the two ways to hand them to ONNX Runtime: RegisterCustomOps, the entry that the runtime
// itself looks for, and ort_ops_custom_op, for a library that adds operators to a domain of its own.
#include "descriptions.h"
#include "op_api.h"
#include "ort_ops/ort_ops.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

namespace ort_ops {
namespace {

constexpr char kDomain[] = "ai.onnx.contrib";  // the domain that onnxruntime-extensions registers into

constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr auto kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr auto kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto kBFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;

std::atomic<const OrtApi*> registered_api{nullptr};
std::atomic<bool> infers_shapes{false};

// Before 1.24 the runtime reads through a null pointer when it infers shapes around an input that is absent in the middle.
bool InfersShapesAroundAbsentInputs(const OrtApiBase& api_base) {
  int major = 0;
  int minor = 0;
  if (std::sscanf(api_base.GetVersionString(), "%d.%d", &major, &minor) != 2) return false;
  return major > 1 || minor >= 24;
}

std::vector<Op> Table(bool infer) {
  return {
      {kAdamW, kCpuProvider, {}, infer},
      {kAddLayerNorm, kCpuProvider, {kFloat, kFloat}, infer},
      {kAddLayerNorm, kCpuProvider, {kFloat16, kFloat16}, infer},
      {kAddLayerNorm, kCpuProvider, {kFloat16, kFloat}, infer},
      {kAddLayerNorm, kCpuProvider, {kBFloat16, kBFloat16}, infer},
      {kAddLayerNorm, kCpuProvider, {kBFloat16, kFloat}, infer},
      {kAddLayerNormGrad, kCpuProvider, {kFloat, kFloat}, infer},
      {kAddLayerNormGrad, kCpuProvider, {kFloat16, kFloat16}, infer},
      {kAddLayerNormGrad, kCpuProvider, {kFloat16, kFloat}, infer},
      {kAddLayerNormGrad, kCpuProvider, {kBFloat16, kBFloat16}, infer},
      {kAddLayerNormGrad, kCpuProvider, {kBFloat16, kFloat}, infer},
      {kAttention, kCpuProvider, {}, infer},
      {kAttentionGrad, kCpuProvider, {}, infer},
      {kBatchNormGrad, kCpuProvider, {}, infer},
      {kConvGrad, kCpuProvider, {}, infer},
      {kCrossEntropy, kCpuProvider, {kInt32}, infer},
      {kCrossEntropy, kCpuProvider, {kInt64}, infer},
      {kCrossEntropyGrad, kCpuProvider, {kInt32}, infer},
      {kCrossEntropyGrad, kCpuProvider, {kInt64}, infer},
      {kEmbeddingGrad, kCpuProvider, {kInt32}, infer},
      {kEmbeddingGrad, kCpuProvider, {kInt64}, infer},
      {kGeluGrad, kCpuProvider, {kFloat}, infer},
      {kGeluGrad, kCpuProvider, {kFloat16}, infer},
      {kGeluGrad, kCpuProvider, {kBFloat16}, infer},
      {kLinear, kCpuProvider, {}, infer},
      {kLinearGrad, kCpuProvider, {}, infer},
      {kMaxPoolGrad, kCpuProvider, {}, infer},
      {kReluGrad, kCpuProvider, {kFloat}, infer},
      {kReluGrad, kCpuProvider, {kFloat16}, infer},
      {kReluGrad, kCpuProvider, {kBFloat16}, infer},
#ifdef ORT_OPS_WITH_CUDA
      {kAdamW, kCudaProvider, {}, infer},
      {kAddLayerNorm, kCudaProvider, {kFloat, kFloat}, infer},
      {kAddLayerNorm, kCudaProvider, {kFloat16, kFloat16}, infer},
      {kAddLayerNorm, kCudaProvider, {kFloat16, kFloat}, infer},
      {kAddLayerNorm, kCudaProvider, {kBFloat16, kBFloat16}, infer},
      {kAddLayerNorm, kCudaProvider, {kBFloat16, kFloat}, infer},
      {kAddLayerNormGrad, kCudaProvider, {kFloat, kFloat}, infer},
      {kAddLayerNormGrad, kCudaProvider, {kFloat16, kFloat16}, infer},
      {kAddLayerNormGrad, kCudaProvider, {kFloat16, kFloat}, infer},
      {kAddLayerNormGrad, kCudaProvider, {kBFloat16, kBFloat16}, infer},
      {kAddLayerNormGrad, kCudaProvider, {kBFloat16, kFloat}, infer},
      {kAttention, kCudaProvider, {}, infer},
      {kAttentionGrad, kCudaProvider, {}, infer},
      {kBatchNormGrad, kCudaProvider, {}, infer},
      {kCrossEntropy, kCudaProvider, {kInt32}, infer},
      {kCrossEntropy, kCudaProvider, {kInt64}, infer},
      {kCrossEntropyGrad, kCudaProvider, {kInt32}, infer},
      {kCrossEntropyGrad, kCudaProvider, {kInt64}, infer},
      {kEmbeddingGrad, kCudaProvider, {kInt32}, infer},
      {kEmbeddingGrad, kCudaProvider, {kInt64}, infer},
      {kGeluGrad, kCudaProvider, {kFloat}, infer},
      {kGeluGrad, kCudaProvider, {kFloat16}, infer},
      {kGeluGrad, kCudaProvider, {kBFloat16}, infer},
      {kMaxPoolGrad, kCudaProvider, {}, infer},
      {kReluGrad, kCudaProvider, {kFloat}, infer},
      {kReluGrad, kCudaProvider, {kFloat16}, infer},
      {kReluGrad, kCudaProvider, {kBFloat16}, infer},
#endif
  };
}

// Made at the first call, for the runtime that has registered by then.
const std::vector<Op>& CustomOps() {
  static const std::vector<Op> ops = Table(infers_shapes.load(std::memory_order_acquire));
  return ops;
}

// The names of the operators with kernels for CUDA, separated by commas.
std::string CudaOperators() {
  std::string names;
  std::string last;
  for (const Op& op : Table(false)) {
    if (std::strcmp(op.provider.name, "CUDAExecutionProvider") != 0 || last == op.description.name) continue;
    last = op.description.name;
    names += (names.empty() ? "" : ",") + last;
  }
  return names;
}

// Lives as long as the process: the runtime keeps pointers to it in every session.
OrtStatus* Domain(const OrtApi& api, OrtCustomOpDomain** domain) {
  static std::mutex mutex;
  static OrtCustomOpDomain* made = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (made == nullptr) {
    OrtCustomOpDomain* fresh = nullptr;
    if (OrtStatus* status = api.CreateCustomOpDomain(kDomain, &fresh)) return status;
    for (const Op& op : CustomOps()) {
      if (OrtStatus* status = api.CustomOpDomain_Add(fresh, &op)) {
        api.ReleaseCustomOpDomain(fresh);
        return status;
      }
    }
    made = fresh;
  }
  *domain = made;
  return nullptr;
}

}  // namespace

const OrtApi* RegisteredApi() { return registered_api.load(std::memory_order_acquire); }

}  // namespace ort_ops

// For C, C++, C# and Java: OrtApi::RegisterCustomOpsLibrary_V2 and its likes call this by name.
extern "C" ORT_OPS_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                    const OrtApiBase* api_base) {
  const OrtApi* api = api_base->GetApi(ort_ops::kOrtApiVersion);
  if (api == nullptr) {
    return api_base->GetApi(1)->CreateStatus(ORT_NOT_IMPLEMENTED, "ort_ops needs ONNX Runtime 1.18 or newer");
  }
  ort_ops::infers_shapes.store(ort_ops::InfersShapesAroundAbsentInputs(*api_base), std::memory_order_release);
  ort_ops::registered_api.store(api, std::memory_order_release);
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = ort_ops::Domain(*api, &domain)) return status;
  return api->AddCustomOpDomain(options, domain);
}

// The kernel number `index`, or null past the last, or before RegisterCustomOps has been called once.
extern "C" ORT_OPS_EXPORT const OrtCustomOp* ort_ops_custom_op(size_t index) {
  if (ort_ops::RegisteredApi() == nullptr) return nullptr;
  const std::vector<ort_ops::Op>& ops = ort_ops::CustomOps();
  return index < ops.size() ? &ops[index] : nullptr;
}

extern "C" const char* ort_ops_cuda_operators(void) {
  static const std::string names = ort_ops::CudaOperators();
  return names.c_str();
}
