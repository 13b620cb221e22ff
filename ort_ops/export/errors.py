"""The exception of exports from PyTorch."""

from __future__ import annotations


class ExportError(ValueError):
    """A module cannot be exported; the message says what stands in the way, where, and what to do about
    it."""
