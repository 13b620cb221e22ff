// What an operator is to the runtime on every provider: its types, its shapes, its attributes, and its values as the C
// interface's tensors.
#include "custom_op.h"

#include <cstring>
#include <limits>
#include <utility>

#include "op_api.h"

namespace ort_ops {
namespace {

// An input or output of the node; `tensor.dims` point into `dims`, or for an output into those of the input that it is
// like.
struct Value {
  std::vector<int64_t> dims;
  OrtOpsTensor tensor;
};

OrtStatus* ReadValue(const OrtApi& api, OrtValue* ort_value, Value& value) {
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
  value.tensor.dims = value.dims.data();
  return api.GetTensorMutableData(ort_value, &value.tensor.data);
}

using Values = std::array<Value, kMaxSlots>;

OrtStatus* ReadInputs(const Kernel& kernel, const OrtKernelContext* context, Values& values, Call& call) {
  const OrtApi& api = kernel.api;
  size_t count = 0;
  if (OrtStatus* status = api.KernelContext_GetInputCount(context, &count)) return status;
  for (size_t i = 0; i < kernel.op.description.inputs.size() && i < count; ++i) {
    const OrtValue* ort_value = nullptr;
    if (OrtStatus* status = api.KernelContext_GetInput(context, i, &ort_value)) return status;
    if (ort_value == nullptr) continue;  // the node leaves it out
    if (OrtStatus* status = ReadValue(api, const_cast<OrtValue*>(ort_value), values[i])) return status;
    call.inputs[i] = &values[i].tensor;
  }
  return nullptr;
}

ONNXTensorElementDataType TypeOf(const Op& op, SlotType type) {
  return type.variable < 0 ? type.fixed : op.types[static_cast<size_t>(type.variable)];
}

// An output's shape and type are known before it is made: nothing of it need be asked back.
OrtStatus* AllocateOutputs(const Kernel& kernel, OrtKernelContext* context, Values& values, Call& call) {
  const OrtApi& api = kernel.api;
  const OpDescription& description = kernel.op.description;
  size_t count = 0;
  if (OrtStatus* status = api.KernelContext_GetOutputCount(context, &count)) return status;
  for (size_t i = 0; i < description.outputs.size() && i < count; ++i) {
    const OutputSlot& slot = description.outputs[i];
    OrtOpsTensor& tensor = values[i].tensor;
    if (slot.like == kOwnShape) {
      values[i].dims = description.own_shape(call, i);
      tensor.dims = values[i].dims.data();
      tensor.rank = static_cast<int32_t>(values[i].dims.size());
    } else {
      tensor = *call.inputs[static_cast<size_t>(slot.like)];
    }
    tensor.data_type = TypeOf(kernel.op, slot.type);
    OrtValue* ort_value = nullptr;
    if (OrtStatus* status =
            api.KernelContext_GetOutput(context, i, tensor.dims, static_cast<size_t>(tensor.rank), &ort_value)) {
      return status;
    }
    if (ort_value == nullptr) continue;  // the node leaves it out
    if (OrtStatus* status = api.GetTensorMutableData(ort_value, &tensor.data)) return status;
    call.outputs[i] = &tensor;
  }
  return nullptr;
}

OrtStatus* ComputeOrThrow(const Kernel& kernel, OrtKernelContext* context) {
  Values inputs;
  Values outputs;
  Call call = {{}, {}, kernel.attributes};
  if (OrtStatus* status = ReadInputs(kernel, context, inputs, call)) return status;
  if (OrtStatus* status = AllocateOutputs(kernel, context, outputs, call)) return status;
  return kernel.op.provider.run(kernel, context, call);
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

// Whether the call that returned this status succeeded; frees the status.
bool Succeeded(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return true;
  api.ReleaseStatus(status);
  return false;
}

bool Read(const OrtApi& api, const OrtKernelInfo* info, const char* name, float* number) {
  return Succeeded(api, api.KernelInfoGetAttribute_float(info, name, number));
}

bool Read(const OrtApi& api, const OrtKernelInfo* info, const char* name, int64_t* integer) {
  return Succeeded(api, api.KernelInfoGetAttribute_int64(info, name, integer));
}

bool Read(const OrtApi& api, const OrtKernelInfo* info, const char* name, std::string* text) {
  size_t size = 0;
  if (!Succeeded(api, api.KernelInfoGetAttribute_string(info, name, nullptr, &size))) return false;
  text->resize(size);
  if (!Succeeded(api, api.KernelInfoGetAttribute_string(info, name, text->data(), &size))) return false;
  text->resize(std::strlen(text->c_str()));  // the size counts the terminating zero
  return true;
}

bool Read(const OrtApi& api, const OrtKernelInfo* info, const char* name, std::vector<int64_t>* integers) {
  size_t count = 0;
  if (!Succeeded(api, api.KernelInfoGetAttributeArray_int64(info, name, nullptr, &count))) return false;
  integers->resize(count);
  return Succeeded(api, api.KernelInfoGetAttributeArray_int64(info, name, integers->data(), &count));
}

constexpr const char* kAttributeTypes[] = {"a float", "an integer", "a string", "a list of integers"};  // in the order of AttributeValue

// What the runtime reads as a list of integers from an attribute of another type.
bool IsEmptyList(const AttributeValue& value) {
  const auto* list = std::get_if<std::vector<int64_t>>(&value);
  return list != nullptr && list->empty();
}

// Leaves the default where the node lacks the attribute; one of another type is an error.
OrtStatus* ReadAttributes(Kernel& kernel, const OrtKernelInfo* info) {
  for (const AttributeDescription& attribute : kernel.op.description.attributes) {
    AttributeValue value = attribute.default_value;
    const auto read = [&](auto& into) { return Read(kernel.api, info, attribute.name, &into); };
    const bool has_read = std::visit(read, value);
    if (!has_read || IsEmptyList(value)) {
      for (AttributeValue other : {AttributeValue(0.0f), AttributeValue(int64_t{0}), AttributeValue(std::string()),
                                   AttributeValue(std::vector<int64_t>())}) {
        if (other.index() == value.index() || !std::visit(read, other)) continue;
        return NodeError(kernel, ORT_INVALID_GRAPH,
                         std::string("the attribute ") + attribute.name + " must be " + kAttributeTypes[value.index()] +
                             "; got " + kAttributeTypes[other.index()]);
      }
    }
    kernel.attributes.push_back(std::move(value));
  }
  return nullptr;
}

OrtStatus* MakeKernelOrThrow(const Op& op, const OrtApi& api, const OrtKernelInfo* info, void** made) {
  std::string node_name;
  if (OrtStatus* status = ReadNodeName(api, info, node_name)) return status;
  OrtAllocator* allocator = nullptr;
  if (OrtStatus* status = api.KernelInfoGetAllocator(info, OrtMemTypeDefault, &allocator)) return status;
  std::unique_ptr<OrtAllocator, ReleaseAllocator> owned(allocator, ReleaseAllocator{&api});
  std::unique_ptr<Kernel> kernel(new Kernel{api, op, std::move(node_name), {}, std::move(owned)});
  if (OrtStatus* status = ReadAttributes(*kernel, info)) return status;
  *made = kernel.release();
  return nullptr;
}

OrtStatus* ORT_API_CALL MakeKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                                   void** kernel) {
  try {
    return MakeKernelOrThrow(*static_cast<const Op*>(op), *api, info, kernel);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
}

// Gives an output the shape of the input that it is like, symbolic dims included. A type that varies comes from that
// input, not from the kernel: of all kernels of the name the runtime asks one.
OrtStatus* InferOutput(const Op& op, const OrtApi& api, OrtShapeInferContext* context, size_t index) {
  const OutputSlot& slot = op.description.outputs[index];
  const auto like = static_cast<size_t>(slot.like);
  OrtTensorTypeAndShapeInfo* model = nullptr;  // owned by the context
  if (OrtStatus* status = api.ShapeInferContext_GetInputTypeShape(context, like, &model)) return status;
  size_t rank = 0;
  if (OrtStatus* status = api.GetDimensionsCount(model, &rank)) return status;
  // No input that an output is like may be a scalar: this is how the runtime presents a shape that it does not know.
  if (rank == 0) return nullptr;
  std::vector<int64_t> dims(rank);
  if (OrtStatus* status = api.GetDimensions(model, dims.data(), rank)) return status;
  std::vector<const char*> names(rank);
  if (OrtStatus* status = api.GetSymbolicDimensions(model, names.data(), rank)) return status;
  for (size_t i = 0; i < rank; ++i) {
    if (dims[i] >= 0) continue;
    // The runtime takes an unknown dim without a name for the size -1, and folds the Shape of the output to it.
    if (names[i] == nullptr || *names[i] == 0) return nullptr;
    dims[i] = -1;
  }
  ONNXTensorElementDataType type = slot.type.fixed;
  if (slot.type.variable >= 0) {
    if (OrtStatus* status = api.GetTensorElementType(model, &type)) return status;
  }
  OrtTensorTypeAndShapeInfo* inferred = nullptr;
  if (OrtStatus* status = api.CreateTensorTypeAndShapeInfo(&inferred)) return status;
  const TypeInfoPtr owned(inferred);
  if (OrtStatus* status = api.SetTensorElementType(inferred, type)) return status;
  if (OrtStatus* status = api.SetDimensions(inferred, dims.data(), rank)) return status;
  if (OrtStatus* status = api.SetSymbolicDimensions(inferred, names.data(), rank)) return status;
  return api.ShapeInferContext_SetOutputTypeShape(context, index, inferred);
}

// The first output and those that every node has. The others are left alone: the interface does not tell how many
// outputs the node has, and the runtime (up to 1.23 at least) writes past the end of its list when told of one that the
// node lacks.
OrtStatus* ORT_API_CALL InferShapes(const OrtCustomOp* self, OrtShapeInferContext* context) {
  const Op& op = *static_cast<const Op*>(self);
  const OrtApi& api = *RegisteredApi();
  try {
    for (size_t i = 0; i < op.description.outputs.size(); ++i) {
      const OutputSlot& slot = op.description.outputs[i];
      if (slot.like == kOwnShape || (i != 0 && slot.optional)) continue;
      if (OrtStatus* status = InferOutput(op, api, context, i)) return status;
    }
    return nullptr;
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
}

const OpDescription& Description(const OrtCustomOp* self) { return static_cast<const Op*>(self)->description; }

OrtCustomOpInputOutputCharacteristic Characteristic(bool optional) {
  return optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
}

}  // namespace

OrtStatus* NodeError(const Kernel& kernel, OrtErrorCode code, const std::string& sentence) {
  const std::string text =
      std::string(kernel.op.description.name) + " (node '" + kernel.node_name + "'): " + sentence;
  return kernel.api.CreateStatus(code, text.c_str());
}

OrtStatus* ToOrtStatus(const Kernel& kernel, OrtOpsStatus status) {
  if (status == ORT_OPS_SUCCESS) return nullptr;
  const bool callers_fault = status == ORT_OPS_NULL_POINTER || status == ORT_OPS_INVALID_PARAMETER;
  return NodeError(kernel, callers_fault ? ORT_INVALID_ARGUMENT : ORT_RUNTIME_EXCEPTION, ort_ops_last_error());
}

OrtStatus* PlanCall(const Kernel& kernel, const Call& call, size_t* workspace_bytes, ExecutorPtr& executor) {
  OrtOpsExecutor* made = nullptr;
  const OrtOpsStatus status = kernel.op.description.plan(call, workspace_bytes, &made);
  executor.reset(made);
  return ToOrtStatus(kernel, status);
}

Op::Op(const OpDescription& its_description, const Provider& its_provider,
       std::vector<ONNXTensorElementDataType> its_types, bool infers_shapes)
    : OrtCustomOp{}, description(its_description), provider(its_provider), types(std::move(its_types)) {
  version = kOrtApiVersion;
  GetName = [](const OrtCustomOp* self) { return Description(self).name; };
  GetExecutionProviderType = [](const OrtCustomOp* self) { return static_cast<const Op*>(self)->provider.name; };
  GetInputTypeCount = [](const OrtCustomOp* self) { return Description(self).inputs.size(); };
  GetInputType = [](const OrtCustomOp* self, size_t index) {
    return TypeOf(*static_cast<const Op*>(self), Description(self).inputs[index].type);
  };
  GetInputCharacteristic = [](const OrtCustomOp* self, size_t index) {
    return Characteristic(Description(self).inputs[index].optional);
  };
  GetInputMemoryType = [](const OrtCustomOp*, size_t) { return OrtMemTypeDefault; };
  GetOutputTypeCount = [](const OrtCustomOp* self) { return Description(self).outputs.size(); };
  GetOutputType = [](const OrtCustomOp* self, size_t index) {
    return TypeOf(*static_cast<const Op*>(self), Description(self).outputs[index].type);
  };
  GetOutputCharacteristic = [](const OrtCustomOp* self, size_t index) {
    return Characteristic(Description(self).outputs[index].optional);
  };
  GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
  GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  GetStartVersion = [](const OrtCustomOp*) { return 1; };
  GetEndVersion = [](const OrtCustomOp*) { return std::numeric_limits<int>::max(); };
  GetMayInplace = description.may_inplace;
  if (GetMayInplace != nullptr) ReleaseMayInplace = [](int*, int*) {};  // the lists are static
  InferOutputShapeFn = infers_shapes ? InferShapes : nullptr;
  CreateKernelV2 = MakeKernel;
  KernelComputeV2 = Compute;
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

}  // namespace ort_ops
