"""A prefix that is looked up and not attended to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from kvexp.attention.function import Call, Padding
from kvexp.cache.dense import DenseLayer
from kvexp.cache.virtual import Virtual

SEEN = 6  # tokens of the prefix


class _Echo:
    """A memory that answers each query with itself, and with its first number as log Z."""

    entries, steps = 5, False

    def __init__(self) -> None:
        self.table, self.asked, self.positions = torch.zeros(5, 3), [], []

    def key_queries(self, call: Call, positions: torch.Tensor) -> torch.Tensor:
        self.positions.append(positions)
        return call.query

    def find(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(query)
        return 2 * query, query[..., 0]

    def tensors(self) -> list[torch.Tensor]:
        return [self.table]


def layer_and_call(
    batch: int, length: int, columns: torch.Tensor | None = None
) -> tuple[DenseLayer, Call, _Echo, dict[str, int]]:
    """A virtual layer that was given `length` rows without weight, and the call that attends."""
    book, counters = _Echo(), {}
    layer = DenseLayer((Virtual(book, counters, SEEN),), SEEN)
    query = torch.randn(batch, 2, length, 4, generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(batch, 1, length, 4)
    key, value = layer.update(rows, rows, kwargs={})
    call = Call(nn.Identity(), query, key, value, 1.0, None, Padding(columns), None, False)
    return layer, call, book, counters


@pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 4), (3, 1), (2, 3)])
def test_each_token_gets_the_state_of_its_own_query(batch: int, length: int) -> None:
    layer, call, book, _ = layer_and_call(batch, length)
    a, s = layer.sources[0].state(call, layer)
    assert torch.equal(a, 2 * call.query) and torch.equal(s, call.query[..., 0])
    assert book.asked[0].shape == (batch * length, 2, 4)
    assert torch.equal(book.positions[0], layer.q_positions)


def test_the_state_is_merged_with_the_own_rows() -> None:
    layer, call, _, _ = layer_and_call(1, 1)
    output, lse = layer.attend(call)
    # One own row with score 0 and value 0: its mass is 1, that of the memory exp(log Z).
    mass = call.query[..., 0].exp()
    torch.testing.assert_close(output, 2 * call.query * (mass / (1 + mass))[..., None])
    torch.testing.assert_close(lse, (1 + mass).log())


def test_real_tokens_are_counted_and_pads_are_not() -> None:
    columns = torch.ones(2, SEEN + 4, dtype=torch.bool)
    columns[1, SEEN : SEEN + 3] = False
    layer, call, _, counters = layer_and_call(2, 4, columns)
    layer.attend(call)
    assert counters == {"looked_up": 5}
    row = torch.zeros(2, 1, 1, 4)
    layer.update(row, row, kwargs={})
    later = torch.cat([columns, columns.new_ones(2, 1)], 1)
    layer.sources[0].state(
        Call(nn.Identity(), call.query[:, :, :1], row, row, 1.0, None, Padding(later), None, False), layer
    )
    assert counters == {"looked_up": 7}


def test_it_holds_entries_and_no_rows() -> None:
    layer, _, book, counters = layer_and_call(1, 2)
    fork = layer.fork()
    assert (layer.entries(), layer.rows, layer.seen) == (5 + 2, 2, SEEN + 2)
    assert [type(source) for source in fork.sources] == [Virtual, type(fork.sources[1])]
    assert fork.sources[0].tensors() == [book.table]
    assert layer.nbytes() == 5 * 3 * 4 + 2 * 2 * 4 * 4
    assert counters == {}


def test_it_serves_any_batch() -> None:
    layer, _, _, _ = layer_and_call(1, 1)
    virtual = layer.sources[0]
    layer.batch_repeat_interleave(3)
    layer.reorder_cache(torch.tensor([2, 1, 1]))
    assert layer.sources == (virtual,)


def test_an_empty_memory_leaves_local_attention() -> None:
    layer, call, book, _ = layer_and_call(1, 2)
    book.find = lambda query: (torch.full_like(query, math.nan), torch.full(query.shape[:-1], -math.inf))  # type: ignore[method-assign]
    output, lse = layer.attend(call)
    assert torch.equal(output, torch.zeros_like(output))
    torch.testing.assert_close(lse[0], torch.tensor([0.0, math.log(2)]).expand(2, 2))


def test_pads_in_front_of_the_prefix_are_refused() -> None:
    columns = torch.ones(2, SEEN + 3, dtype=torch.bool)
    columns[1, 0] = False
    layer, call, _, _ = layer_and_call(2, 3, columns)
    with pytest.raises(RuntimeError, match="pads must stand between the context and the query"):
        layer.attend(call)
