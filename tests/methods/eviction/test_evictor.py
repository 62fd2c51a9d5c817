"""When rows leave: each sequence of a batch by its own clock, whatever the others do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import helpers
from kvexp.methods.eviction.adakv import AdaKV
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.expected_attention import ExpectedAttention
from kvexp.methods.eviction.raas import RaaS
from kvexp.methods.eviction.rkv import RKV
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.tova import TOVA
from kvexp.methods.eviction.two_phase import TwoPhase
from kvexp.tasks.batch import QueryBatch

CONTEXTS = [helpers.Context((), (helpers.tokens(n, seed=n),)) for n in (45, 20, 31)]
QUERIES = [helpers.tokens(n, seed=70 + n) for n in (5, 9, 2)]
FED = [helpers.tokens(14, seed=n) for n in (1, 2, 3)]
Kept = list[list[list[list[int]]]]  # [token][layer][head]: positions


@torch.no_grad()
def kept(method: EvictionMethod, which: Sequence[int], budget: int) -> list[Kept]:
    """What each of the sequences `which` holds after each token that it is fed, encoded as one batch."""
    model = helpers.model("qwen3")
    cache: Any = method.encode(model, [CONTEXTS[i] for i in which], None, budget)
    found: list[Kept] = [[] for _ in which]
    with method.attach(model):
        batch = QueryBatch(model, cache, [QUERIES[i] for i in which])
        columns = batch.columns
        for step in range(len(FED[0])):
            token = torch.tensor([[FED[i][step]] for i in which])
            columns = torch.cat([columns, columns.new_ones(len(which), 1)], dim=1)
            batch._forward(batch.cache, token, batch._mask(columns), batch.next_position + step, 1)
            held = [_held(layer) for layer in batch.cache.layers]
            for b, steps in enumerate(found):
                steps.append([layer[b if len(layer) > 1 else 0] for layer in held])
    return found


def _held(layer: Any) -> list[list[list[int]]]:
    """The positions that each sequence and head holds; the layer's state stays as it is."""
    twin = layer.fork()
    twin.own()
    rows = twin.held()
    mask = rows.mask()
    return [
        [rows.positions[b, h][mask[b, h]].tolist() for h in range(mask.shape[1])] for b in range(len(mask))
    ]


@pytest.mark.parametrize("budget", [17, 33])
def test_layers_take_turns_by_the_clock_of_each_sequence(budget: int) -> None:
    """One sequence of a batch evicts first before another: both still spread it over the layers."""
    method = SnapKV(window=4, interval=6, smooth=True)
    together = kept(method, (0, 1, 2), budget)
    for i in range(3):
        assert together[i] == kept(method, (i,), budget)[0]


@pytest.mark.parametrize("second", [TOVA(), RKV(window=3, interval=4)], ids=lambda method: method.id)
def test_a_sequence_whose_turn_has_not_come_keeps_heads_of_unlike_length(second: EvictionMethod) -> None:
    """Heads of unlike length wait for a second method that gives each the same: the batch cuts none short."""
    method = TwoPhase(at_prefill=AdaKV(base=SnapKV(window=4)), at_decode=second)
    together = kept(method, (0, 1, 2), 17)
    lengths = {len(head) for layer in together[2][0] for head in layer}
    assert len(lengths) > 1
    for i in range(3):
        assert together[i] == kept(method, (i,), 17)[0]


@torch.no_grad()
@pytest.mark.parametrize(
    "method",
    [
        SnapKV(window=4, interval=3),
        RaaS(page=3, alpha=0.1),
        ExpectedAttention(sinks=2, future=20, interval=3),
    ],
    ids=lambda method: method.id,
)
def test_the_peak_in_bytes_is_of_all_that_was_held(method: EvictionMethod) -> None:
    """Notes and true positions of heads come when rows first leave, where rows may be as many as before."""
    model = helpers.model("qwen3")
    cache: Any = method.encode(model, helpers.context(), None, 17)
    fork, most = cache.fork(), 0
    with method.attach(model):
        for step in range(40):
            model(torch.tensor([[7 * step % 200]]), cache=fork, position_ids=torch.tensor([[45 + step]]))
            most = max(most, fork.nbytes())
    assert fork.evictor.usage()["bytes_peak"] == most
