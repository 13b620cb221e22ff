"""Where sessions run and tensors lie: the CPU or a CUDA device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True)
class Device:
    """`kind` is cpu or cuda; `index` counts the CUDA devices."""

    kind: str = "cpu"
    index: int = 0

    @classmethod
    def parse(cls, text: str) -> Device:
        """The device of `cpu`, `cuda` or `cuda:1`.

        Raises ValueError for other texts, RuntimeError when this ONNX Runtime has no support for the device.
        """
        match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", text)
        if match is None or (match[1] == "cpu" and int(match[2] or 0)):
            raise ValueError(f"device must be 'cpu', 'cuda' or 'cuda:' with a number; got '{text}'.")
        device = cls(match[1], int(match[2] or 0))
        if device.provider not in ort.get_available_providers():
            raise RuntimeError(
                f"device '{text}' needs the {device.provider} of ONNX Runtime, which this installation "
                f"lacks; it has {', '.join(ort.get_available_providers())}. Install ort-ops[cuda], or use "
                "device='cpu'."
            )
        return device

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @property
    def provider(self) -> str:
        return _PROVIDERS[self.kind]

    def providers(self) -> list[Any]:
        """The `providers` of a session: the device's own first, the CPU's for what it cannot run."""
        if self.kind == "cpu":
            return [self.provider]
        return [(self.provider, {"device_id": self.index}), _PROVIDERS["cpu"]]


HOST = Device()
