"""A model of which several processes hold a part each: tensor parallelism, as transformers offers it.

Each process holds some of the heads of every layer, with the rows of their KV heads, and all take part in
every forward pass; what a layer gives out is the same on all of them.
"""

from __future__ import annotations

import os
from typing import Any

from kvexp.errors import UserError
from kvexp.specs import NOT_STARTED

PROJECTIONS = ("k_proj", "v_proj")


def world() -> int:
    """Return how many processes the launcher says it has started."""
    found = os.environ.get("WORLD_SIZE", "")
    return int(found) if found.isdigit() else 1


def slices(model: Any) -> int:
    """Return among how many processes the KV heads of a model are divided."""
    return getattr(model, "tp_size", None) or 1


def require_processes(gguf: str | None) -> None:
    """Raise UserError without processes to divide a model among, or for weights in a file `gguf`."""
    if world() < 2:
        raise UserError(NOT_STARTED)
    if gguf:
        raise UserError(f"model.tp_plan=auto divides safetensors weights, not {gguf}: leave tp_plan out")


def require_sliceable(config: Any, parts: int) -> None:
    """Raise UserError unless each of `parts` processes gets as many KV heads of this model as the others.

    Where transformers leaves keys whole, each process would hold the cache of all heads.
    """
    plan = getattr(config, "base_model_tp_plan", None) or {}
    styles = {rule.rpartition(".")[2]: style for rule, style in plan.items()}
    if any(styles.get(name) != "colwise" for name in PROJECTIONS):
        raise UserError(
            f"model.tp_plan=auto: transformers does not divide the KV heads of a '{config.model_type}' model:"
            " use model.device_map=auto"
        )
    heads = config.num_key_value_heads
    if heads % parts:
        possible = [str(n) for n in range(2, heads + 1) if not heads % n]
        raise UserError(
            f"model.tp_plan=auto: {heads} KV heads cannot be divided among {parts} processes:"
            + (f" start {' or '.join(possible)}" if possible else " use model.device_map=auto")
        )
