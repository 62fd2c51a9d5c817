"""What TriAttention does with the tensors of a layer: scores, their z-scores, and what is mixed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvexp.cache.rows import over_heads
from kvexp.methods.eviction import trig
from kvexp.methods.eviction.adapt import adapted, packed, unpacked
from kvexp.methods.eviction.normalise import attention_per_query, z_scores
from kvexp.methods.eviction.selection import over_group
from kvexp.stats.moments import Moments
from kvexp_kernels.trig_score import trig_score

if TYPE_CHECKING:
    from kvexp.methods.eviction.triattention import TriAttention
    from kvexp.methods.eviction.view import View

CENTRES, ATTENDED = "centres", "attended"
SMALLEST = 1e-12  # norm of a value whose logarithm is taken


def z_score(method: TriAttention, view: View) -> torch.Tensor:
    """Return the scores of all rows as z-scores over those that may leave, [B, Hq, S]."""
    scores = score(method, view)
    may_leave = _may_leave(method, view)
    return z_scores(scores, None if may_leave is None else over_heads(may_leave, scores.shape[1]))


def score(method: TriAttention, view: View) -> torch.Tensor:
    """Return how large a logit each row can expect (no 1/sqrt(D)), with what its spread adds, [B, Hq, S]."""
    moments, bands = moments_of(method, view), view.memory.bands[view.layer.index]
    if method.trig and method.form == "dot":
        added = None if method.norm == "none" else trig.spread(moments, bands, method.norm, view.scale)
        total = trig_score(view.keys, _centre(method, view, moments), added)
    else:
        total = _in_parts(method, view, moments)
    if method.value_norm:
        sizes = torch.linalg.vector_norm(view.values.to(total.dtype), dim=-1)
        total = total + over_heads(sizes.clamp(min=SMALLEST).log() / view.scale, total.shape[1])
    return total


def _in_parts(method: TriAttention, view: View, moments: Moments) -> torch.Tensor:
    """The same by cosines, or without the trigonometric part."""
    bands = view.memory.bands[view.layer.index]
    keys = view.keys if view.keys.dtype == torch.float64 else view.keys.float()
    total = keys.new_zeros(keys.shape[0], moments.mean.shape[-2], keys.shape[2])
    if method.trig:
        ahead = trig.offsets(method.offsets, method.max_offset)
        at = view.positions, moments, bands, ahead, view.next_position, method.aggregate
        total = total + trig.cosines(keys, *at).to(keys.device, keys.dtype)
    if method.norm != "none":
        total = total + trig.norms(keys, moments, bands, method.norm, view.scale)
    return total


def _centre(method: TriAttention, view: View, moments: Moments) -> torch.Tensor:
    """Return the vectors [B, Hq, D] float64 that keys are scored by."""
    bands = view.memory.bands[view.layer.index]
    gains = trig.gain(bands, trig.offsets(method.offsets, method.max_offset), method.gain == "smooth")
    return trig.centre(moments, bands, gains, view.next_position)


def moments_of(method: TriAttention, view: View) -> Moments:
    """Return the moments that a layer is scored with: the measured ones, or where they have moved to."""
    moved = view.recall(CENTRES) if method.ema else None
    if moved is None:
        return view.memory.layers[view.layer.index]
    return unpacked(moved, view.memory.bands[view.layer.index])


def observe(method: TriAttention, view: View) -> None:
    """Take note of a forward: of its attention (`mix=accumulated`), of its queries while decoding (`ema`)."""
    if method.observes:
        received = over_group(view.attention_sums(), view.heads, "mean")
        view.note(ATTENDED, view.track(ATTENDED) + received)
    if method.follows and view.evictor.phase != "prefill":
        layer, call = view.layer, view.call
        real = call.padding.at(layer.q_slots)
        if real is None:
            real = torch.ones(call.query.shape[0], call.query.shape[2], dtype=torch.bool)
        real = real.to(call.query.device)
        bands = view.memory.bands[layer.index]
        before = moments_of(method, view)
        moved = adapted(before, call.query, layer.q_positions, real, bands, method.ema)
        view.remember(CENTRES, packed(moved))


def mixed(method: TriAttention, scores: torch.Tensor, view: View) -> torch.Tensor:
    """Return scores [B, H, S] together with the z-score of attention that `mix` asks for."""
    if method.mix == "none":
        return scores
    if method.mix == "accumulated":
        seen_by = (view.next_position[:, None, None] - view.positions).clamp(min=1)
        attended = view.track(ATTENDED) / seen_by
    else:
        attended = over_group(_window_attention(view), view.heads, "mean")
    attended = z_scores(attended, _may_leave(method, view)).to(scores.dtype)
    return torch.maximum(scores, attended) if method.mix_by == "max" else (scores + attended) / 2


def _window_attention(view: View) -> torch.Tensor:
    """Return the mean attention that each row got from the queries of the window that could see it."""
    logits = view.window_logits()
    visible = logits.isfinite() & view.window.real[:, None, :, None]
    return attention_per_query(view.softmax(logits), visible)


def _may_leave(method: TriAttention, view: View) -> torch.Tensor | None:
    """Rows that count and are not always kept, [B, H, S]; None: all."""
    always, valid = method.always(view), view.valid
    if always is None:
        return valid
    return ~always if valid is None else ~always & valid
