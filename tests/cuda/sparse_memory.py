"""Tensors larger than the machine's memory, of which only a few elements are ever touched."""

from __future__ import annotations

import ctypes

import numpy as np


class SparseMemory:
    """Address space without memory behind it until it is written."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = {name: -(-size // 4096) * 4096 + 4096 for name, size in sizes.items()}
        self.exact = sizes
        self._libc = ctypes.CDLL(None)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.addresses: dict[str, int] = {}

    def __enter__(self) -> SparseMemory:
        private_anonymous_noreserve = 0x02 | 0x20 | 0x4000
        for name, size in self.sizes.items():
            address = self._libc.mmap(None, size, 3, private_anonymous_noreserve, -1, 0)
            assert address not in (None, ctypes.c_void_p(-1).value)
            self.addresses[name] = address
        return self

    def __exit__(self, *_: object) -> None:
        for name, address in self.addresses.items():
            self._libc.munmap(address, self.sizes[name])

    def write_end(self, name: str, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        ctypes.memmove(
            self.addresses[name] + self.exact[name] - array.nbytes, array.ctypes.data, array.nbytes
        )

    def read_end(self, name: str, count: int) -> np.ndarray:
        end = self.addresses[name] + self.exact[name]
        return np.frombuffer(ctypes.string_at(end - count, count), np.uint8)
