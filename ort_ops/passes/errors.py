"""The exception of the passes."""

from __future__ import annotations


class PassError(ValueError):
    """A pass cannot handle a model; the message says what, where, and what to do about it."""
