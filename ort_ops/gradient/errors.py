"""The one exception that building a gradient model raises for anything the caller can mend."""

from __future__ import annotations


class GradientError(ValueError):
    """A gradient model cannot be built; the message says which name or node, why, and what to do about it."""
