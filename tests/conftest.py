"""Without a GPU, Triton interprets its kernels on CPU tensors; it has to know before anything imports it."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
