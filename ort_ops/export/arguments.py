"""The arguments of a module's call: taken apart into tensors with names, and put together again; which of
their axes may change size.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ort_ops.export.errors import ExportError

Example = torch.Tensor | Sequence[Any] | Mapping[str, Any]
"""A tensor, the positional arguments of a call, or its keyword arguments."""

DynamicShapes = Mapping[str, Mapping[int, Any]]
"""By input: the axes whose size may change, with their names."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call of a module's `forward`, and the tensors among them with their names."""

    names: list[str]
    tensors: list[torch.Tensor]
    positional: list[Any]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, example: Example, argument: str, skip: int = 0) -> Arguments:
        """Take `example` apart; the first `skip` arguments of `module.forward` come from elsewhere.

        Raises ExportError, which calls the example `argument`, for what is no tensor or does not fit.
        """
        if isinstance(example, torch.Tensor):
            example = (example,)
        keywords = dict(example) if isinstance(example, Mapping) else {}
        positional = [] if isinstance(example, Mapping) else example
        if not isinstance(positional, list | tuple):
            raise ExportError(
                f"{argument} must be a tensor, a tuple of arguments or a mapping of keyword arguments; it is "
                f"{type_of(example)}."
            )
        signature = inspect.signature(module.forward)
        try:
            signature.bind(*[None] * skip, *positional, **keywords)
        except TypeError as error:
            raise ExportError(
                f"{argument} does not fit {type(module).__name__}.forward{signature}: {error}."
            ) from error
        names = _positional_names(signature, skip, len(positional))
        named = [*zip(names, positional, strict=True), *keywords.items()]
        for name, value in named:
            _check_value(argument, name, value)
        tensors = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        return cls(list(tensors), list(tensors.values()), list(positional), keywords)

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments with `tensors` in the tensors' places."""
        rest = iter(tensors)

        def place(value: Any) -> Any:
            return next(rest) if isinstance(value, torch.Tensor) else value

        positional = [place(value) for value in self.positional]
        return positional, {name: place(value) for name, value in self.keywords.items()}


def _positional_names(signature: inspect.Signature, skip: int, count: int) -> list[str]:
    names: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names.extend(f"{parameter.name}_{index}" for index in range(skip + count - len(names)))
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return names[skip : skip + count]


def _check_value(argument: str, name: str, value: Any) -> None:
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        return
    is_array = type(value).__module__ == "numpy"
    hint = "torch.from_numpy makes it a tensor" if is_array else "give its tensors one by one"
    raise ExportError(
        f"{argument}: {name!r} must be a tensor (or None, a number or a string, which become part of the "
        f"graph); it is {type_of(value)}; {hint}."
    )


def type_of(value: Any) -> str:
    """How messages name the type of something unexpected."""
    return f"of type {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def dynamic_axes(
    names: Sequence[str], tensors: Sequence[torch.Tensor], wanted: DynamicShapes
) -> list[dict[int, Any]]:
    """For each input the axes whose size may change, with their names: those `wanted`, or the first as
    `batch`.

    Raises ExportError for inputs and axes that are not there, and for examples that do not show a size.
    """
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise ExportError(
            f"dynamic_shapes names {', '.join(map(repr, unknown))}, which is no input; the inputs are "
            f"{', '.join(map(repr, names))}."
        )
    sizes: dict[str, tuple[str, int]] = {}
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        axes = dict(wanted.get(name, {0: "batch"} if tensor.ndim else {}))
        for axis, label in axes.items():
            _check_axis(name, tensor, axis)
            if isinstance(label, str):
                first, size = sizes.setdefault(label, (name, tensor.shape[axis]))
                _check_size(name, tensor.shape[axis], label, first, size)
        found.append(axes)
    return found


def _check_axis(name: str, tensor: torch.Tensor, axis: int) -> None:
    if not 0 <= axis < tensor.ndim:
        raise ExportError(
            f"dynamic_shapes names axis {axis} of {name!r}, whose {tensor.ndim} axes are counted from 0."
        )
    if tensor.shape[axis] < 2:
        raise ExportError(
            f"axis {axis} of the example {name!r} has size {tensor.shape[axis]}, but PyTorch takes sizes 0 "
            "and 1 for constants; give an example with at least 2 there, or, if the axis never changes, "
            f"leave it out: dynamic_shapes={{{name!r}: {{}}}}."
        )


def _check_size(name: str, size: int, label: str, first_name: str, first_size: int) -> None:
    if size != first_size:
        raise ExportError(
            f"the axis {label!r} has size {first_size} in the example {first_name!r} and {size} in {name!r}, "
            "but one name stands for one size; give them different names in dynamic_shapes, or leave one out."
        )
