// The only list of kernels, and the two ways to hand them to ONNX Runtime: RegisterCustomOps, the entry that the runtime
// itself looks for, and ort_ops_custom_op, for a library that adds operators to a domain of its own.
#include "add_layer_norm_grad/op.h"
#include "op_api.h"
#include "ort_ops/ort_ops.h"

#include <atomic>
#include <mutex>

namespace ort_ops {
namespace {

constexpr char kDomain[] = "ai.onnx.contrib";  // the domain that onnxruntime-extensions registers into

constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr auto kFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr auto kBFloat16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;

const OrtCustomOp* const* CustomOps(size_t* count) {
  static const add_layer_norm_grad::CpuOp f32(kFloat, kFloat);
  static const add_layer_norm_grad::CpuOp f16(kFloat16, kFloat16);
  static const add_layer_norm_grad::CpuOp f16_float_gamma(kFloat16, kFloat);
  static const add_layer_norm_grad::CpuOp bf16(kBFloat16, kBFloat16);
  static const add_layer_norm_grad::CpuOp bf16_float_gamma(kBFloat16, kFloat);
  static const OrtCustomOp* const ops[] = {&f32, &f16, &f16_float_gamma, &bf16, &bf16_float_gamma};
  *count = sizeof(ops) / sizeof(ops[0]);
  return ops;
}

std::atomic<const OrtApi*> registered_api{nullptr};

// Lives as long as the process: the runtime keeps pointers to it in every session.
OrtStatus* Domain(const OrtApi& api, OrtCustomOpDomain** domain) {
  static std::mutex mutex;
  static OrtCustomOpDomain* made = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (made == nullptr) {
    OrtCustomOpDomain* fresh = nullptr;
    if (OrtStatus* status = api.CreateCustomOpDomain(kDomain, &fresh)) return status;
    size_t count = 0;
    const OrtCustomOp* const* ops = CustomOps(&count);
    for (size_t i = 0; i < count; ++i) {
      if (OrtStatus* status = api.CustomOpDomain_Add(fresh, ops[i])) {
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
  ort_ops::registered_api.store(api, std::memory_order_release);
  OrtCustomOpDomain* domain = nullptr;
  if (OrtStatus* status = ort_ops::Domain(*api, &domain)) return status;
  return api->AddCustomOpDomain(options, domain);
}

// The kernel number `index`, or null past the last. RegisterCustomOps must have been called once before a session uses it.
extern "C" ORT_OPS_EXPORT const OrtCustomOp* ort_ops_custom_op(size_t index) {
  size_t count = 0;
  const OrtCustomOp* const* ops = ort_ops::CustomOps(&count);
  return index < count ? ops[index] : nullptr;
}
