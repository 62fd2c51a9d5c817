"""How much a row changes a hidden state: the norm of what it writes, and that of the state that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvexp.attention.attach import attention_modules


@contextmanager
def state_norms(model: Any) -> Iterator[dict[int, torch.Tensor]]:
    """Yield the L2 norms [B, T] of what entered each layer's attention in the latest forward, by layer."""
    norms: dict[int, torch.Tensor] = {}

    def note(module: Any, args: Any, keywords: dict[str, Any]) -> None:
        states = keywords["hidden_states"] if "hidden_states" in keywords else args[0]
        norms[int(module.layer_idx)] = _wide(states).norm(dim=-1)

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in attention_modules(model)]
    try:
        yield norms
    finally:
        for hook in hooks:
            hook.remove()


def written(module: Any, values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the L2 norm of each row's value behind the output projection, [B, Hq, S].

    `values` [B, Hk, S, Dv] are those of an attention `module` with `heads` query heads; each has its own part
    of the projection, whose bias belongs to no row.
    """
    projection = _wide(module.o_proj.weight).unflatten(1, (heads, -1))  # [hidden, Hq, Dv]
    group, values = heads // values.shape[1], _wide(values)
    norms = [(values[:, h // group] @ projection[:, h].T).norm(dim=-1) for h in range(heads)]
    return torch.stack(norms, dim=1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
