"""Reuse methods once more, slowly: one token, one head and one unit at a time, on tiny llama and qwen3.

Rotation is written out with the frequencies of the configuration, attention is a softmax over a list of
earlier positions, and nothing of `kvexp.methods.reuse` is used. Keys and values are [n, H, D] lists by layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import helpers
from kvexp.prompt import Context

Rows = dict[int, torch.Tensor]  # by position, [H, D]


class Reference:
    """A context on a model: `stale[l]` = (keys, values) [n, H, D] of all tokens as they are placed."""

    def __init__(self, family: str, context: Context, encoded: str = "behind_header") -> None:
        self.model, self.context = helpers.model(family), context
        config = self.model.config
        self.heads, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.layers = config.head_dim, config.num_hidden_layers
        theta = config.rope_parameters["rope_theta"]
        self.frequencies = [theta ** (-2 * f / self.dim) for f in range(self.dim // 2)]
        self.ids, self.units, at = list(context.ids), [], len(context.header)
        for part in context.chunks:
            self.units.append(list(range(at, at + len(part))))
            at += len(part)
        self.tokens = [i for unit in self.units for i in unit]
        self.fresh = self.run(list(context.ids), 0)
        self.stale = self._placed(encoded)

    def _placed(self, encoded: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        header = list(self.context.header)
        placed = [(k.clone(), v.clone()) for k, v in self.fresh]
        before = header if encoded == "behind_header" else []
        for unit in self.units:
            alone = self.run([*before, *(self.ids[i] for i in unit)], 0)
            for layer, (keys, values) in enumerate(alone):
                for j, i in enumerate(unit):
                    old = len(before) + j
                    placed[layer][0][i] = self.rotate(keys[old], i - old)
                    placed[layer][1][i] = values[old]
        return placed

    def rotate(self, x: torch.Tensor, position: float) -> torch.Tensor:
        """Turn [..., D] by a position: pairs are f and f + D/2."""
        half = self.dim // 2
        turned = x.clone().double()
        for f, frequency in enumerate(self.frequencies):
            c, s = math.cos(frequency * position), math.sin(frequency * position)
            a, b = x[..., f].double(), x[..., f + half].double()
            turned[..., f], turned[..., f + half] = a * c - b * s, b * c + a * s
        return turned.to(x.dtype)

    def run(self, ids: Sequence[int], first: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of every layer of an ordinary forward."""
        hidden, found = self.embed(ids), []
        positions = list(range(first, first + len(ids)))
        for layer in range(self.layers):
            q, k, v = self.project(layer, hidden, positions)
            found.append((k, v))
            hidden = self.attended(layer, hidden, q, k, v, positions, positions)
        return found

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self.model.model.embed_tokens(torch.tensor(list(ids)))

    def project(self, layer: int, hidden: torch.Tensor, positions: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Rotated queries [n, Hq, D], rotated keys and values [n, H, D] of hidden states [n, d]."""
        module = self.model.model.layers[layer]
        x, attention = module.input_layernorm(hidden), module.self_attn
        q = attention.q_proj(x).view(len(x), self.heads, self.dim)
        k = attention.k_proj(x).view(len(x), self.kv, self.dim)
        v = attention.v_proj(x).view(len(x), self.kv, self.dim)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        q = torch.stack([self.rotate(row, p) for row, p in zip(q, positions, strict=True)])
        k = torch.stack([self.rotate(row, p) for row, p in zip(k, positions, strict=True)])
        return q, k, v

    def weights(self, q: torch.Tensor, keys: torch.Tensor, head: int, seen: Sequence[int]) -> torch.Tensor:
        """Softmax weights of one query [Hq, D] in one head over the rows `seen`."""
        kv = head // (self.heads // self.kv)
        scores = torch.stack([q[head] @ keys[j, kv] for j in seen]) / self.dim**0.5
        return scores.softmax(0)

    def attended(
        self,
        layer: int,
        hidden: torch.Tensor,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: Sequence[int],
        places: Sequence[int],
    ) -> torch.Tensor:
        """Hidden states after a layer: the row at position p sees the rows of `keys` at `places` up to p."""
        module, outputs = self.model.model.layers[layer], []
        for row, position in enumerate(positions):
            seen = [j for j, place in enumerate(places) if place <= position]
            heads = []
            for head in range(self.heads):
                weights = self.weights(q[row], keys, head, seen)
                kv = head // (self.heads // self.kv)
                heads.append(sum(w * values[j, kv] for w, j in zip(weights, seen, strict=True)))
            outputs.append(torch.cat(heads))
        hidden = hidden + module.self_attn.o_proj(torch.stack(outputs))
        return hidden + module.mlp(module.post_attention_layernorm(hidden))

    def copy(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(k.clone(), v.clone()) for k, v in self.stale]

    def pass_on(
        self,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
        rows: Sequence[int],
        hidden: torch.Tensor,
        layer: int,
        correct: Callable[[int, Sequence[int], torch.Tensor, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Take rows through a layer: write their fresh keys and values, or let `correct` do it; attend."""
        q, k, v = self.project(layer, hidden, rows)
        if correct is None:
            cache[layer][0][list(rows)], cache[layer][1][list(rows)] = k, v
        else:
            correct(layer, rows, k, v)
        return self.attended(layer, hidden, q, *cache[layer], rows, range(len(self.ids)))

    def deviations(self, check: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Distances of keys and of values [n, H] at the check layer, and the hidden states before it."""
        hidden, cache = self.embed([self.ids[i] for i in self.tokens]), self.copy()
        for layer in range(check):
            hidden = self.pass_on(cache, self.tokens, hidden, layer)
        _, k, v = self.project(check, hidden, self.tokens)
        found = []
        for new, old in zip((k, v), self.stale[check], strict=True):
            distances = torch.zeros(len(self.ids), self.kv)
            distances[self.tokens] = (new - old[self.tokens]).norm(dim=-1)
            found.append(distances)
        return found[0], found[1], hidden

    def best(self, scores: Sequence[float] | torch.Tensor, among: Sequence[int], count: int) -> list[int]:
        """The `count` tokens with the best scores, ties to the lower position, in order."""
        return sorted(sorted(among, key=lambda i: (-float(scores[i]), i))[:count])

    def relevance(self, query: Sequence[int]) -> list[float]:
        """What a question reads of each token of the context, on the placed rows."""
        n, total = len(self.ids), [0.0] * len(self.ids)
        positions = list(range(n, n + len(query)))
        hidden = self.embed(query)
        for layer in range(self.layers):
            q, k, v = self.project(layer, hidden, positions)
            keys, values = (torch.cat([a, b]) for a, b in zip(self.stale[layer], (k, v), strict=True))
            for row in q:
                for head in range(self.heads):
                    for i, weight in enumerate(self.weights(row, keys, head, range(n)).tolist()):
                        total[i] += weight / (len(query) * self.heads * self.layers)
            hidden = self.attended(layer, hidden, q, keys, values, positions, range(n + len(query)))
        return total


def rows_of(cache: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, H, D] of a layer of a cache of one context."""
    held = cache.layers[layer]
    return held.keys[0].transpose(0, 1), held.values[0].transpose(0, 1)


def assert_same(cache: Any, expected: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Every layer of a cache holds these rows."""
    for layer, (keys, values) in enumerate(expected):
        ours = rows_of(cache, layer)
        torch.testing.assert_close(
            ours[0], keys, atol=2e-5, rtol=1e-4, msg=lambda m, at=layer: f"keys {at}: {m}"
        )
        torch.testing.assert_close(
            ours[1], values, atol=2e-5, rtol=1e-4, msg=lambda m, at=layer: f"values {at}: {m}"
        )
