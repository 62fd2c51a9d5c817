"""Where the layers of a model compute: one device, or several where its loader has spread them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvexp.attention.attach import attention_modules


def layer_devices(model: Any) -> list[torch.device]:
    """Return the device of each layer's attention; of an offloaded layer, that on which it computes."""
    return [compute_device(module) for module in attention_modules(model)]


def compute_device(module: nn.Module) -> torch.device:
    """Return the device on which a module computes, wherever its weights lie."""
    for part in module.modules():
        hook = getattr(part, "_hf_hook", None)  # accelerate's
        execution = getattr(hook, "execution_device", None)
        if execution is not None:
            return torch.device("cuda", execution) if isinstance(execution, int) else torch.device(execution)
    return next(module.parameters()).device


def first_matrix(module: nn.Module) -> torch.Tensor | None:
    """Return the first two-dimensional parameter in a module, read back where it was offloaded."""
    from accelerate.utils import align_module_device

    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.dim() == 2:
                with align_module_device(part):
                    return getattr(part, name).detach()
    return None
