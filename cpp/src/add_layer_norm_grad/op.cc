// What the operator is to the runtime on every provider: its types, its shapes, and its values as the C
// interface's tensors.
#include "add_layer_norm_grad/op.h"

#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "op_api.h"
#include "ort_ops/add_layer_norm_grad.h"

namespace ort_ops::add_layer_norm_grad {
namespace {

enum Input : size_t { kDy, kX1, kX2, kRstd, kMean, kGamma, kDsum, kInputs };
enum Output : size_t { kDx, kDgamma, kDbeta, kOutputs };

// An input or output of the node; the `tensor.dims` of an input point into its `dims`, those of an output into
// an input's.
struct Value {
  std::vector<int64_t> dims;
  OrtOpsTensor tensor;
  const OrtOpsTensor* tensor_or_null = nullptr;
};

OrtStatus* ReadShape(const OrtApi& api, const OrtValue* ort_value, Value& value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  if (OrtStatus* status = api.GetTensorTypeAndShape(ort_value, &info)) return status;
  const TypeInfoPtr owned(info);
  size_t rank = 0;
  if (OrtStatus* status = api.GetDimensionsCount(info, &rank)) return status;
  value.dims.resize(rank);
  if (OrtStatus* status = api.GetDimensions(info, value.dims.data(), rank)) return status;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (OrtStatus* status = api.GetTensorElementType(info, &type)) return status;
  value.tensor.rank = static_cast<int32_t>(rank);
  value.tensor.data_type = static_cast<int32_t>(type);
  return nullptr;
}

// `ort_value` may be null: the node leaves that input out.
OrtStatus* ReadValue(const OrtApi& api, OrtValue* ort_value, Value& value) {
  if (ort_value == nullptr) return nullptr;
  if (OrtStatus* status = ReadShape(api, ort_value, value)) return status;
  if (OrtStatus* status = api.GetTensorMutableData(ort_value, &value.tensor.data)) return status;
  value.tensor.dims = value.dims.data();
  value.tensor_or_null = &value.tensor;
  return nullptr;
}

OrtStatus* ReadInputs(const OrtApi& api, const OrtKernelContext* context, Value (&inputs)[kInputs]) {
  size_t count = 0;
  if (OrtStatus* status = api.KernelContext_GetInputCount(context, &count)) return status;
  for (size_t i = 0; i < kInputs && i < count; ++i) {
    const OrtValue* ort_value = nullptr;
    if (OrtStatus* status = api.KernelContext_GetInput(context, i, &ort_value)) return status;
    if (OrtStatus* status = ReadValue(api, const_cast<OrtValue*>(ort_value), inputs[i])) return status;
  }
  return nullptr;
}

// An output has the shape of dy or of gamma, and dx has dy's type: nothing of it need be asked back.
OrtStatus* AllocateOutputs(const OrtApi& api, OrtKernelContext* context, const Value (&inputs)[kInputs],
                           Value (&outputs)[kOutputs]) {
  size_t count = 0;
  if (OrtStatus* status = api.KernelContext_GetOutputCount(context, &count)) return status;
  for (size_t i = 0; i < kOutputs && i < count; ++i) {
    const OrtOpsTensor& like = inputs[i == kDx ? kDy : kGamma].tensor;
    OrtValue* ort_value = nullptr;
    if (OrtStatus* status =
            api.KernelContext_GetOutput(context, i, like.dims, static_cast<size_t>(like.rank), &ort_value)) {
      return status;
    }
    if (ort_value == nullptr) continue;  // the node leaves it out
    OrtOpsTensor& tensor = outputs[i].tensor;
    tensor = like;
    if (i != kDx) tensor.data_type = ORT_OPS_FLOAT;
    if (OrtStatus* status = api.GetTensorMutableData(ort_value, &tensor.data)) return status;
    outputs[i].tensor_or_null = &tensor;
  }
  return nullptr;
}

OrtStatus* ComputeOrThrow(const Kernel& kernel, OrtKernelContext* context) {
  Value inputs[kInputs];
  if (OrtStatus* status = ReadInputs(kernel.api, context, inputs)) return status;
  Value outputs[kOutputs];
  if (OrtStatus* status = AllocateOutputs(kernel.api, context, inputs, outputs)) return status;
  const Tensors tensors = {inputs[kDy].tensor_or_null,      inputs[kX1].tensor_or_null,
                           inputs[kX2].tensor_or_null,      inputs[kRstd].tensor_or_null,
                           inputs[kMean].tensor_or_null,    inputs[kGamma].tensor_or_null,
                           inputs[kDsum].tensor_or_null,    outputs[kDx].tensor_or_null,
                           outputs[kDgamma].tensor_or_null, outputs[kDbeta].tensor_or_null};
  return kernel.provider.run(kernel, context, tensors);
}

OrtStatus* ORT_API_CALL Compute(void* self, OrtKernelContext* context) {
  const auto& kernel = *static_cast<const Kernel*>(self);
  try {
    return ComputeOrThrow(kernel, context);
  } catch (const std::exception& error) {
    return kernel.api.CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
}

OrtStatus* ReadNodeName(const OrtApi& api, const OrtKernelInfo* info, std::string& name) {
  size_t size = 0;
  if (OrtStatus* status = api.KernelInfo_GetNodeName(info, nullptr, &size)) return status;
  name.resize(size);
  if (OrtStatus* status = api.KernelInfo_GetNodeName(info, name.data(), &size)) return status;
  name.resize(std::strlen(name.c_str()));  // the size counts the terminating zero
  return nullptr;
}

OrtStatus* ORT_API_CALL MakeKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                                   void** kernel) {
  try {
    std::string node_name;
    if (OrtStatus* status = ReadNodeName(*api, info, node_name)) return status;
    OrtAllocator* allocator = nullptr;
    if (OrtStatus* status = api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator)) return status;
    std::unique_ptr<OrtAllocator, ReleaseAllocator> owned(allocator, ReleaseAllocator{api});
    *kernel = new Kernel{*api, static_cast<const Op*>(op)->provider, std::move(node_name), std::move(owned)};
    return nullptr;
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
}

// dx is as dy in type and shape, symbolic dims included. The type comes from dy, not from the kernel: of all
// kernels of the name the runtime asks one. dgamma and dbeta are left alone: the interface does not tell how
// many outputs the node has, and the runtime (up to 1.23 at least) writes past the end of its list when told
// of one that the node lacks.
OrtStatus* InferDx(const OrtApi& api, OrtShapeInferContext* context) {
  OrtTensorTypeAndShapeInfo* dy = nullptr;  // owned by the context
  if (OrtStatus* status = api.ShapeInferContext_GetInputTypeShape(context, kDy, &dy)) return status;
  size_t rank = 0;
  if (OrtStatus* status = api.GetDimensionsCount(dy, &rank)) return status;
  // dy may not be a scalar: this is how the runtime presents a shape that it does not know.
  if (rank == 0) return nullptr;
  std::vector<int64_t> dims(rank);
  if (OrtStatus* status = api.GetDimensions(dy, dims.data(), rank)) return status;
  std::vector<const char*> names(rank);
  if (OrtStatus* status = api.GetSymbolicDimensions(dy, names.data(), rank)) return status;
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] >= 0) continue;
    // The runtime takes an unknown dim without a name for the size -1, and folds Shape(dx) to it.
    if (names[i] == nullptr || *names[i] == 0) return nullptr;
    dims[i] = -1;
  }
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (OrtStatus* status = api.GetTensorElementType(dy, &type)) return status;
  OrtTensorTypeAndShapeInfo* dx = nullptr;
  if (OrtStatus* status = api.CreateTensorTypeAndShapeInfo(&dx)) return status;
  const TypeInfoPtr owned(dx);
  if (OrtStatus* status = api.SetTensorElementType(dx, type)) return status;
  if (OrtStatus* status = api.SetDimensions(dx, dims.data(), rank)) return status;
  if (OrtStatus* status = api.SetSymbolicDimensions(dx, names.data(), rank)) return status;
  return api.ShapeInferContext_SetOutputTypeShape(context, kDx, dx);
}

OrtStatus* ORT_API_CALL InferShapes(const OrtCustomOp*, OrtShapeInferContext* context) {
  const OrtApi& api = *RegisteredApi();
  try {
    return InferDx(api, context);
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
}

ONNXTensorElementDataType ORT_API_CALL InputType(const OrtCustomOp* self, size_t index) {
  const auto& op = *static_cast<const Op*>(self);
  if (index == kRstd || index == kMean) return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  return index == kGamma ? op.gamma_type : op.type;
}

ONNXTensorElementDataType ORT_API_CALL OutputType(const OrtCustomOp* self, size_t index) {
  return index == kDx ? static_cast<const Op*>(self)->type : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

OrtCustomOpInputOutputCharacteristic ORT_API_CALL InputCharacteristic(const OrtCustomOp*, size_t index) {
  return index == kX2 || index == kDsum ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
}

// dx may take over the buffer of dsum or of dy: an element of dx is written after the last read of the same
// element.
size_t ORT_API_CALL MayInplace(int** input_index, int** output_index) {
  static int inputs[] = {kDsum, kDy};
  static int outputs[] = {kDx, kDx};
  *input_index = inputs;
  *output_index = outputs;
  return 2;
}

}  // namespace

OrtStatus* NodeError(const Kernel& kernel, OrtErrorCode code, const char* sentence) {
  const std::string text = "AddLayerNormGrad (node '" + kernel.node_name + "'): " + sentence;
  return kernel.api.CreateStatus(code, text.c_str());
}

OrtStatus* ToOrtStatus(const Kernel& kernel, OrtOpsStatus status) {
  if (status == ORT_OPS_SUCCESS) return nullptr;
  const bool callers_fault = status == ORT_OPS_NULL_POINTER || status == ORT_OPS_INVALID_PARAMETER;
  return NodeError(kernel, callers_fault ? ORT_INVALID_ARGUMENT : ORT_RUNTIME_EXCEPTION,
                   ort_ops_last_error());
}

Op::Op(const Provider& its_provider, ONNXTensorElementDataType element_type,
       ONNXTensorElementDataType gamma_element_type, bool infers_shapes)
    : OrtCustomOp{}, provider(its_provider), type(element_type), gamma_type(gamma_element_type) {
  version = kOrtApiVersion;
  GetName = [](const OrtCustomOp*) { return "AddLayerNormGrad"; };
  GetExecutionProviderType = [](const OrtCustomOp* self) {
    return static_cast<const Op*>(self)->provider.name;
  };
  GetInputTypeCount = [](const OrtCustomOp*) -> size_t { return kInputs; };
  GetInputType = InputType;
  GetInputCharacteristic = InputCharacteristic;
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  GetOutputTypeCount = [](const OrtCustomOp*) -> size_t { return kOutputs; };
  GetOutputType = OutputType;
  GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return INPUT_OUTPUT_OPTIONAL; };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return std::numeric_limits<int>::max(); };
  GetMayInplace = MayInplace;
  ReleaseMayInplace = [](int*, int*) {};  // the lists are static
  InferOutputShapeFn = infers_shapes ? InferShapes : nullptr;
  CreateKernelV2 = MakeKernel;
  KernelComputeV2 = Compute;
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

}  // namespace ort_ops::add_layer_norm_grad
