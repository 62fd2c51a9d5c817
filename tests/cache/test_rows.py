from __future__ import annotations

import torch

from kvexp.attention.function import Call, Padding
from kvexp.cache.dense import DenseLayer
from kvexp.cache.rows import KeptRows, RaggedRows, Rows, join

GENERATOR = torch.Generator().manual_seed(0)
LENGTHS = [[3, 5], [6, 1]]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def rows() -> Rows:
    """Two sequences, two heads, of 3, 5, 6 and 1 rows, padded on the left to 6."""
    mask = torch.stack([torch.stack([torch.arange(6) >= 6 - n for n in heads]) for heads in LENGTHS])
    slots = torch.arange(6, dtype=torch.int32).expand(2, 2, 6).contiguous()
    return Rows(normal(2, 2, 6, 4), normal(2, 2, 6, 3), slots, slots + 10, mask, {"mass": normal(2, 2, 6)})


def call() -> Call:
    query = normal(2, 6, 3, 4)
    return Call(torch.nn.Module(), query, query, query, 0.5, None, Padding(None), None, False)


def test_ragged_rows_give_the_states_of_masked_ones() -> None:
    held, asked, layer = rows(), call(), DenseLayer()
    a, s = KeptRows(held, 20, 0).state(asked, layer)
    ragged = RaggedRows(held, 20, 0)
    for ragged_a, ragged_s in (ragged.state(asked, layer), ragged.at_once(asked)):
        torch.testing.assert_close(ragged_a, a)
        torch.testing.assert_close(ragged_s, s)
    for b in range(2):  # and those of softmax over what is really there
        for h in range(6):
            n = LENGTHS[b][h // 3]
            key, value = held.keys[b, h // 3, 6 - n :], held.values[b, h // 3, 6 - n :]
            scores = asked.query[b, h] @ key.T * 0.5
            torch.testing.assert_close(a[b, h], scores.softmax(-1) @ value)
            torch.testing.assert_close(s[b, h], scores.logsumexp(-1))


def test_one_stored_context_serves_a_batch() -> None:
    held, asked, layer = rows().select(torch.tensor([0])), call(), DenseLayer()
    ragged = RaggedRows(held, 20, 0)
    assert ragged.batch == 1
    wanted = KeptRows(held, 20, 0).state(asked, layer)
    for found in (ragged.state(asked, layer), ragged.at_once(asked)):
        for state, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(state, other)


def test_unpacking_gives_the_rows_back() -> None:
    held = rows()
    back = RaggedRows(held, 20, 0).unpack()
    assert torch.equal(back.mask(), held.mask())
    for one, other in zip(back.tensors(), held.tensors(), strict=True):
        mask = held.mask() if one.dim() == 3 else held.mask()[..., None].expand_as(one)
        assert torch.equal(one[mask], other[mask])


def test_ragged_rows_hold_only_what_counts() -> None:
    ragged = RaggedRows(rows(), 20, 0)
    assert [t.shape[0] for t in ragged.tensors()] == [15] * 5  # 3 + 5 + 6 + 1 rows
    assert ragged.entries == 4  # 3 + 5 over two heads, and 6 + 1, rounded up
    chosen = ragged.select(torch.tensor([1, 1]))
    assert chosen.lengths == [[6, 1], [6, 1]]


def test_join_fills_tracks_and_masks() -> None:
    first = rows()
    second = Rows(normal(2, 2, 2, 4), normal(2, 2, 2, 3), first.slots[..., :2], first.positions[..., :2])
    both = join([first, second])
    assert both.keys.shape == (2, 2, 8, 4)
    assert both.mask()[..., 6:].all() and torch.equal(both.mask()[..., :6], first.mask())
    assert torch.equal(both.tracks["mass"][..., :6], first.tracks["mass"])
    assert not both.tracks["mass"][..., 6:].any()
