"""Inference sessions whose inputs and outputs are OrtValues on one device, with the plugin registered.

On the CPU, 16-bit tensors are rounded as they are on a GPU (`passes.round_on_cpu`). On a GPU, operators of
the plugin that have no kernel there are replaced by their bodies.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
import onnx.inliner
import onnx_ir as ir
import onnxruntime as ort

import ort_ops
from ort_ops import operators, passes
from ort_ops.library import cuda_operators
from ort_ops.training.api.device import Device
from ort_ops.training.model_file import Model, existing_file, read_model

# Sessions take turns in training. Without this the threads of the one that has just run keep spinning on the
# cores that the next one needs.
_STOP_SPINNING = "session.force_spinning_stop"


class Session:
    """One model, ready to run on `device`.

    `options` get the plugin and the settings of `prepare_options`.
    """

    def __init__(self, model: Model, device: Device, options: ort.SessionOptions) -> None:
        prepare_options(options)
        model = _with_casts(model) if device.kind == "cpu" else without_cpu_operators(model)
        source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
        if not isinstance(source, bytes):
            source = str(existing_file(source))
        self._session = ort.InferenceSession(source, options, providers=device.providers())
        if self._session.get_providers()[0] != device.provider:
            raise RuntimeError(
                f"ONNX Runtime could not start its {device.provider} for device '{device}' (its log says "
                "why); check the driver and the CUDA libraries, or use device='cpu'."
            )
        self.inputs = {value.name: value for value in self._session.get_inputs()}
        self.outputs = {value.name: value for value in self._session.get_outputs()}
        self.metadata: dict[str, str] = self._session.get_modelmeta().custom_metadata_map
        self._binding = self._session.io_binding()
        self._bound_inputs: dict[str, ort.OrtValue] = {}
        self._bound_outputs: dict[str, ort.OrtValue | Device] = {}
        self._device = device

    def run(
        self, inputs: Mapping[str, ort.OrtValue], outputs: Mapping[str, ort.OrtValue | Device]
    ) -> dict[str, ort.OrtValue]:
        """Run with `inputs` and return `outputs`: each is written into the OrtValue that is given for it, or
        into new memory on the device that is given. One thread at a time.
        """
        self._bind(inputs, outputs)
        self._session.run_with_iobinding(self._binding)
        given = {name: target for name, target in outputs.items() if not isinstance(target, Device)}
        if len(given) == len(outputs):
            return given
        return dict(zip(outputs, self._binding.get_outputs(), strict=True)) | given

    def _bind(self, inputs: Mapping[str, ort.OrtValue], outputs: Mapping[str, ort.OrtValue | Device]) -> None:
        """Bind what differs from the last run: in training nearly all tensors stay the same from step to
        step, and each costs several microseconds to bind."""
        if inputs.keys() != self._bound_inputs.keys() or list(outputs) != list(self._bound_outputs):
            self._binding.clear_binding_inputs()
            self._binding.clear_binding_outputs()
            self._bound_inputs.clear()
            self._bound_outputs.clear()
        for name, value in inputs.items():
            # The runtime copies from another device when it binds, and would miss what was written since.
            is_copied = value.device_name() != self._device.kind
            if is_copied or self._bound_inputs.get(name) is not value:
                self._binding.bind_ortvalue_input(name, value)
                self._bound_inputs[name] = value
        for name, target in outputs.items():
            if isinstance(target, Device):
                # Again each time: the binding holds what the last run has made.
                self._binding.bind_output(name, target.kind, target.index)
            elif self._bound_outputs.get(name) is not target:
                self._binding.bind_ortvalue_output(name, target)
            self._bound_outputs[name] = target


def prepare_options(options: ort.SessionOptions) -> None:
    """Register the plugin on `options`, unless it is, and let sessions that take turns share the machine."""
    ort_ops.register(options)
    # The block that is laid out after the first run comes on top of what that run has left in the arena:
    # measured, a fifth more memory in training a transformer of 19 million parameters, and no less time.
    options.enable_mem_pattern = False
    try:
        options.get_session_config_entry(_STOP_SPINNING)
    except RuntimeError:  # not set yet; setting it a second time would make the runtime print a warning
        options.add_session_config_entry(_STOP_SPINNING, "1")


def without_cpu_operators(model: Model) -> Model:
    """The model with the bodies of the plugin's operators that have kernels for the CPU alone; itself if it
    has none of them. The runtime would take those kernels, and copy their tensors from the GPU and back.
    """
    functions = {
        (function.domain, function.name) for function in read_model(model, external_data=False).functions
    }
    cpu_only = sorted(
        key for key in functions if key[0] == operators.DOMAIN and key[1] not in cuda_operators()
    )
    if not cpu_only:
        return model
    return onnx.inliner.inline_selected_functions(read_model(model, external_data=True), cpu_only)


def _with_casts(model: Model) -> Model:
    """The model with what the CPU needs for 16-bit tensors; itself if it has none."""
    if not passes.has_16_bit_tensors(ir.from_proto(read_model(model, external_data=False))):
        return model
    with_casts = ir.from_proto(read_model(model, external_data=True))
    passes.round_on_cpu(with_casts)
    return ir.to_proto(with_casts)
