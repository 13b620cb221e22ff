"""How PyTorch behaves in these tests."""

from __future__ import annotations

import logging

import torch

# The models are so small that more threads would only wait for each other.
torch.set_num_threads(1)

# pytest listens to every logger, and PyTorch's exporter would tell it each of its steps.
logging.getLogger("torch.__trace").propagate = False
