"""Who takes a call, how scans are cut, and that every operation reaches its kernel with what it was given."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from kvexp_kernels import (
    dequant_attend,
    gather_compact,
    lookup,
    lookup_merge,
    merge_states,
    ragged_attend,
    rerotate,
    shift_correct,
    trig_score,
)
from kvexp_kernels.backend import fused, parts_for, power, rows_of_a_tile
from kvexp_kernels.quantise import quantise


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Elsewhere:
    """Looks like a tensor on a GPU."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> None:
        self.dtype, self.requires_grad = dtype, requires_grad


def test_plain_torch_takes_what_no_kernel_can(monkeypatch):
    monkeypatch.setattr("kvexp_kernels.backend._triton_found", lambda: True)
    assert fused(Elsewhere(), None, Elsewhere(torch.bfloat16))
    assert not fused(Elsewhere(), numbers(2))
    assert not fused(Elsewhere(), Elsewhere(torch.float64))
    assert not fused(Elsewhere(requires_grad=True))
    with torch.no_grad():
        assert fused(Elsewhere(requires_grad=True))
    monkeypatch.setattr("kvexp_kernels.backend._triton_found", lambda: False)
    assert not fused(Elsewhere())


def test_powers():
    assert [power(n) for n in (0, 16, 17, 128, 129)] == [16, 16, 32, 128, 256]
    assert [power(n, 1) for n in (0, 1, 2, 3)] == [1, 1, 2, 4]


def test_parts():
    cpu = torch.device("cpu")
    assert parts_for(100_000, 8, 64, cpu) == 33  # two for each of 132 processors
    assert parts_for(1000, 1, 64, cpu) == 3 and parts_for(100, 1, 64, cpu) == 1
    assert parts_for(0, 0, 64, cpu) == 1 and parts_for(100_000, 10_000, 64, cpu) == 1


def test_widths_of_attention():
    sizes = [rows_of_a_tile(n, torch.bfloat16) for n in (64, 128, 192, 256, 257)]
    assert sizes == [64, 64, 32, 32, 0]
    assert [rows_of_a_tile(n, torch.float32) for n in (64, 128, 129)] == [64, 32, 0]


def calls() -> dict[str, Any]:
    """Each public function with arguments: `(package, function, arguments)`."""
    x, keys = numbers(2, 3, 8), torch.nn.functional.normalize(numbers(2, 40, 8, seed=1), dim=-1)
    cells = lookup.Cells.stack([lookup.TwoLevelIndex.build(one, 4) for one in keys])
    entries = lookup_merge.Entries(keys, numbers(2, 40, 1, 8), numbers(2, 40, 1))
    local = numbers(2, 3, 1, 8, seed=2), numbers(2, 3, 1)
    rows, angle = numbers(1, 2, 9, 8), numbers(9, 4)
    turn = rerotate.Turn(angle.cos(), angle.sin())
    shift = shift_correct.Shift(numbers(3, 2, 8), torch.randint(-1, 3, (1, 9)), None, turn)
    packed = quantise(rows, 4, 4, -2), quantise(rows, 4, 4, -1)
    edges = torch.tensor([[0, 4]]), torch.tensor([[4, 5]])
    spread = trig_score.Spread(numbers(1, 4, 4), 4)
    return {
        "lookup_flat": (lookup, (x, keys)),
        "lookup_two_level": (lookup, (x, cells, 2)),
        "merge_states": (merge_states, (*local, *(t * 2 for t in local))),
        "merge_many": (merge_states, (torch.stack([local[0]] * 3), torch.stack([local[1]] * 3))),
        "lookup_merge": (lookup_merge, (x, entries, *local)),
        "trig_score": (trig_score, (rows, numbers(1, 4, 8), spread)),
        "gather_compact": (gather_compact, ([rows.clone()], torch.tensor([[[0, 4, 8], [1, 2, 3]]]))),
        "rerotate": (rerotate, (rows, turn)),
        "shift_correct": (shift_correct, (rows, shift, turn)),
        "dequant_attend": (dequant_attend, (numbers(1, 4, 1, 8), *packed, 0.3)),
        "ragged_attend": (ragged_attend, (numbers(1, 4, 1, 8), rows[0, 0], rows[0, 1], *edges, 0.3)),
    }


@pytest.mark.parametrize("name", list(calls()))
def test_every_operation_reaches_its_kernel(device, monkeypatch, name):
    if device != "cpu":
        pytest.skip("tensors of these calls are on the CPU")
    package, arguments = calls()[name]
    plain = getattr(package, name)(*arguments)
    twin = import_module(f"{package.__name__}.triton" + ("_cells" if name == "lookup_two_level" else ""))
    reached: list[str] = []
    kernel = getattr(twin, name)
    monkeypatch.setattr(package, "fused", lambda *tensors: True)
    monkeypatch.setattr(twin, name, lambda *args: (reached.append(name), kernel(*args))[1])
    torch.testing.assert_close(getattr(package, name)(*arguments), plain, atol=1e-5, rtol=1e-5)
    assert reached == [name]


def test_rows_that_kernels_do_not_take_go_through_plain_torch(monkeypatch):
    for package in (dequant_attend, ragged_attend):
        monkeypatch.setattr(package, "fused", lambda *tensors: True)
    wide = numbers(1, 1, 5, 130)
    packed = quantise(wide, 4, 4, -2), quantise(wide, 4, 4, -1)
    a, _ = dequant_attend.dequant_attend(wide[:, :, :1], *packed, 0.1)
    assert a.shape == (1, 1, 1, 130)
    edges = torch.tensor([[0]]), torch.tensor([[5]])
    a, _ = ragged_attend.ragged_attend(wide[:, :, :1], wide[0, 0], wide[0, 0], *edges, 0.1)
    want = torch.nn.functional.scaled_dot_product_attention(wide[:, :, :1], wide, wide, scale=0.1)
    torch.testing.assert_close(a, want)
