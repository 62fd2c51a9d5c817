"""Switch a model to the kvexp attention function for a while, with taps for pre-RoPE queries if wanted.

A tap is two hooks on each attention module: one on the last submodule before rotation (the table in
`kvexp.attention.families`), which keeps its output, and one before the module itself, which puts a reader of
that output into the keywords that the attention function receives. Nothing is stored in the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvexp.attention import families
from kvexp.attention.function import NAME, register


class Tap:
    """Holds the latest output of one module's query projection."""

    def __init__(self, family: families.Family, config: Any) -> None:
        self.family, self.config = family, config
        self.output: torch.Tensor | None = None

    def keep(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        """Forward hook on the tapped submodule."""
        self.output = output

    def offer(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook on the attention module: hand the reader to the attention function."""
        kwargs["kvexp_tap"] = self.read
        return args, kwargs

    def read(self) -> torch.Tensor:
        """Return q_pre [B, Hq, T, D] and let go of it."""
        if self.output is None:
            raise RuntimeError("the pre-RoPE query was not tapped: the model skipped its query projection")
        output, self.output = self.output, None
        return self.family.query_heads(output, self.config)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the self-attention modules of the decoder, in layer order."""
    found = {
        int(module.layer_idx): module
        for name, module in model.named_modules()
        if name.endswith("self_attn") and hasattr(module, "layer_idx")
    }
    return [found[index] for index in sorted(found)]


def _refuse_misuse(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook on the model: `generate` feeds what a cache has not seen, and must be able to."""
    if kwargs.get("use_cache") is False and kwargs.get("cache") is not None:
        raise RuntimeError("a kvexp cache was passed with use_cache=False: leave use_cache on")
    ids, seen = kwargs.get("input_ids", args[0] if args else None), getattr(kwargs.get("cache"), "seen", None)
    if ids is None or seen is None:
        return
    length, mask, positions = ids.shape[1], kwargs.get("attention_mask"), kwargs.get("position_ids")
    wrong = length == 0
    if mask is not None and mask.dim() == 2:
        wrong = wrong or mask.shape[1] != seen + length
    elif mask is None and positions is not None and length > 1:  # not at each step: it waits for the device
        wrong = wrong or int(positions.max()) < seen + length - 1
    if wrong:
        raise RuntimeError(
            f"this cache has seen {seen} tokens, and these ids do not go on from there: "
            "pass the whole text, context and query, and a fork of the cache for each use"
        )


@contextmanager
def attached(model: Any, tap: bool = False) -> Iterator[None]:
    """Run `model` with the kvexp attention function; on exit it is as it was. May be nested."""
    config = model.config.get_text_config()
    family = families.of(config)
    register()
    before = model.config._attn_implementation
    handles = [model.register_forward_pre_hook(_refuse_misuse, with_kwargs=True)]
    try:
        model.set_attn_implementation(NAME)
        for module in attention_modules(model) if tap else ():
            reader = Tap(family, config)
            handles.append(module.get_submodule(family.site(config)).register_forward_hook(reader.keep))
            handles.append(module.register_forward_pre_hook(reader.offer, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        model.set_attn_implementation(before)
