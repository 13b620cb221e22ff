"""The elementary blocks: each adds one operator, an input or a constant."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import onnx

from ort_ops.training.onnxblock import _graph_utils, model_accessor


class Block(ABC):
    """Base of all blocks. A subclass defines `build`, which adds to `self.base` and returns names of values.

    Attributes:
        base: the model that is being built, an onnx.ModelProto; set when the block is called.
    """

    base: onnx.ModelProto

    def __init__(self, temp_file_name: str = "temp.onnx") -> None:
        """`temp_file_name` is accepted for programs that pass it; blocks write no files."""
        super().__init__()

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add to `self.base`, given names of its values; returns the names of the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build within the model of the surrounding `with onnxblock.base(...)`. Returns what `build` does."""
        accessor = model_accessor.current()
        self.base = accessor.model
        with accessor.building():
            return self.build(*args, **kwargs)


class _Node(Block):
    """One node of a standard operator, from names of its inputs to the name of its output."""

    def __init__(self, op_type: str, **attributes: Any) -> None:
        super().__init__()
        self._op_type = op_type
        self._attributes = attributes

    def build(self, *input_names: str) -> str:
        return _graph_utils.add_node(self._op_type, input_names, **self._attributes)


class Add(_Node):
    """a + b."""

    def __init__(self) -> None:
        super().__init__("Add")


class Sub(_Node):
    """a - b."""

    def __init__(self) -> None:
        super().__init__("Sub")


class Mul(_Node):
    """a * b."""

    def __init__(self) -> None:
        super().__init__("Mul")


class Div(_Node):
    """a / b."""

    def __init__(self) -> None:
        super().__init__("Div")


class ReduceMean(_Node):
    """The mean of all elements."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceMean", keepdims=int(keepdims))


class ReduceSum(_Node):
    """The sum of all elements."""

    def __init__(self, keepdims: bool = True) -> None:
        super().__init__("ReduceSum", keepdims=int(keepdims))


class Sigmoid(_Node):
    """1 / (1 + exp(-x))."""

    def __init__(self) -> None:
        super().__init__("Sigmoid")


class Log(_Node):
    """The natural logarithm."""

    def __init__(self) -> None:
        super().__init__("Log")


class Neg(_Node):
    """-x."""

    def __init__(self) -> None:
        super().__init__("Neg")


class Abs(_Node):
    """|x|."""

    def __init__(self) -> None:
        super().__init__("Abs")


class SequenceConstruct(_Node):
    """A sequence of tensors."""

    def __init__(self) -> None:
        super().__init__("SequenceConstruct")


class Cast(_Node):
    """The tensor in another element type, one of onnx.TensorProto's."""

    def __init__(self, to: int) -> None:
        super().__init__("Cast", to=int(to))


class Pow(Block):
    """x to a constant power."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        exponent = _graph_utils.add_constant("pow_exponent", self._exponent)
        return _graph_utils.add_node("Pow", [pow_input_name, exponent])


class Clip(Block):
    """x limited to the range from `clip_min` to `clip_max`; None is no limit."""

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._limits = {"clip_min": clip_min, "clip_max": clip_max}

    def build(self, clip_input_name: str) -> str:
        names = ["" if limit is None else self._scalar(token, limit) for token, limit in self._limits.items()]
        return _graph_utils.add_node("Clip", [clip_input_name, *names])

    def _scalar(self, token: str, limit: float) -> str:
        """Clip wants its limits without dimensions."""
        name = _graph_utils.add_constant(token, limit)
        del self.base.graph.initializer[-1].dims[:]
        return name


class Constant(Block):
    """A float32 constant of shape [1]."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        return _graph_utils.add_constant("initializer", self._value)


class ReduceAllL2(Block):
    """The L2 norm of several tensors together, of shape [1]."""

    def build(self, *reduce_node_input_names: str) -> str:
        squares = [
            _graph_utils.add_node("ReduceSumSquare", [name], keepdims=0) for name in reduce_node_input_names
        ]
        norm = _graph_utils.add_node("Sqrt", [_graph_utils.add_node("Sum", squares)])
        shape = _graph_utils.generate_graph_name("shape")
        self.base.graph.initializer.append(onnx.helper.make_tensor(shape, onnx.TensorProto.INT64, [1], [1]))
        return _graph_utils.add_node("Reshape", [norm, shape])


class PassThrough(Block):
    """Returns the names that it is given, as a tuple."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        return input_names


class InputLike(Block):
    """A new graph input of the type and shape of the value `like`."""

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        kind = _graph_utils.value_info(self.base, self._like).type
        return _graph_utils.new_input(
            self.base, input_name or _graph_utils.generate_graph_name("input"), kind
        )


class LabelEncoder(Block):
    """ai.onnx.ml's LabelEncoder: `values_*[i]` in the place of `keys_*[i]`, the default in that of others."""

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: list[float] | None = None,
        keys_int64s: list[int] | None = None,
        keys_strings: list[str] | None = None,
        values_floats: list[float] | None = None,
        values_int64s: list[int] | None = None,
        values_strings: list[str] | None = None,
    ) -> None:
        super().__init__()
        given = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            "keys_floats": keys_floats,
            "keys_int64s": keys_int64s,
            "keys_strings": keys_strings,
            "values_floats": values_floats,
            "values_int64s": values_int64s,
            "values_strings": values_strings,
        }
        self._attributes = {name: value for name, value in given.items() if value is not None}

    def build(self, label_encoder_input_name: str) -> str:
        _graph_utils.import_domain(self.base, "ai.onnx.ml", 2)
        return _graph_utils.add_node(
            "LabelEncoder", [label_encoder_input_name], domain="ai.onnx.ml", **self._attributes
        )


class Linear(Block):
    """alpha * x @ weight + beta * bias with new float32 parameters: weight [in_features, out_features] and,
    if wanted, bias [out_features], drawn from the normal distribution by NumPy's global generator."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._shapes: dict[str, tuple[int, ...]] = {"linear.weight": (in_features, out_features)}
        if bias:
            self._shapes["linear.bias"] = (out_features,)
        self._factors: dict[str, Any] = {"alpha": alpha, "beta": beta}

    def build(self, linear_input_name: str) -> str:
        names = [self._parameter(token, shape) for token, shape in self._shapes.items()]
        return _graph_utils.add_node("Gemm", [linear_input_name, *names], **self._factors)

    def _parameter(self, token: str, shape: tuple[int, ...]) -> str:
        name = _graph_utils.generate_graph_name(token)
        values = np.random.randn(*shape).astype(np.float32)
        self.base.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
        return name
