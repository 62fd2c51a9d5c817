"""The registered attention and mask functions, with a layer whose answer is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import helpers
from kvexp.attention.attach import attached, attention_modules
from kvexp.attention.function import Call, Padding, attention, mask
from kvexp.cache.dense import DenseLayer
from kvexp.cache.kv_cache import empty_cache


class _Told:
    """A layer that answers with a fixed state, and keeps the call."""

    def __init__(self, output: torch.Tensor, lse: torch.Tensor | None) -> None:
        self.answer, self.calls, self.order = (output, lse), [], []

    def attend(self, call: Call) -> Any:
        self.calls.append(call)
        self.order.append("attend")
        return self.answer

    def after(self, call: Call) -> None:
        self.order.append("after")
        assert call is self.calls[-1]


def rows(*numbers: float) -> torch.Tensor:
    """One head's rows of width 1."""
    return torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1)


def test_output_is_handed_back_by_token() -> None:
    output = torch.arange(12.0).view(1, 2, 3, 2)  # [B, Hq, T, Dv]
    layer = _Told(output, None)
    query = torch.zeros(1, 2, 3, 4)
    given, weights = attention(nn.Identity(), query, query, query, Padding(None), scaling=0.25, kvexp=layer)
    assert weights is None
    assert given.shape == (1, 3, 2, 2) and given.is_contiguous()
    assert torch.equal(given[0, 1, 0], output[0, 0, 1])
    assert layer.order == ["attend", "after"]
    call = layer.calls[0]
    assert (call.scale, call.window, call.query_pre, call.needs_lse) == (0.25, None, None, False)


def test_the_scale_defaults_to_the_width_of_a_query() -> None:
    layer, query = _Told(torch.zeros(1, 1, 1, 1), None), torch.zeros(1, 1, 1, 16)
    attention(nn.Identity(), query, query, query, Padding(None), kvexp=layer)
    assert layer.calls[0].scale == 0.25


def test_a_sink_takes_its_share_of_the_mass() -> None:
    # The rows hold a mass of 3 and the sinks one of 1 and 3: 3/4 and 1/2 of the output are left.
    layer = _Told(torch.full((1, 2, 1, 2), 8.0), torch.full((1, 2, 1), math.log(3)))
    query = torch.zeros(1, 2, 1, 4)
    sinks = torch.tensor([0.0, math.log(3)])
    given, _ = attention(nn.Identity(), query, query, query, Padding(None), kvexp=layer, s_aux=sinks)
    torch.testing.assert_close(given, torch.tensor([[[[6.0, 6.0], [4.0, 4.0]]]]))
    assert layer.calls[0].needs_lse


def test_a_sink_counts_once_over_shared_and_own_rows() -> None:
    # Masses: 1 and 2 in the shared rows, 3 in the own one, 2 in the sink; together 8.
    layer = DenseLayer()
    layer.update(rows(math.log(1), math.log(2)), rows(8, 16), kwargs={})
    fork = layer.fork()
    keywords: dict[str, Any] = {}
    key, value = fork.update(rows(math.log(3)), rows(24), kwargs=keywords)
    sink = torch.tensor([math.log(2)])
    given, _ = attention(
        nn.Identity(), rows(1), key, value, Padding(None), scaling=1.0, s_aux=sink, **keywords
    )
    assert given.item() == pytest.approx((1 * 8 + 2 * 16 + 3 * 24) / 8)


def test_a_sink_alone_leaves_nothing() -> None:
    layer = _Told(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf))
    query = torch.zeros(1, 1, 1, 4)
    given, _ = attention(nn.Identity(), query, query, query, Padding(None), kvexp=layer, s_aux=torch.zeros(1))
    assert torch.equal(given, torch.zeros(1, 1, 1, 2))


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"kvexp": None}, "no kvexp cache"),
        ({"softcap": 50.0}, "soft-capped"),
        ({"attention_mask": torch.zeros(1, 1, 1, 1)}, "2-D attention_mask"),
        ({"attention_mask": None}, "2-D attention_mask"),
    ],
)
def test_calls_that_would_be_wrong_are_refused(keywords: dict[str, Any], sentence: str) -> None:
    layer, x = _Told(torch.zeros(1, 1, 1, 1), None), torch.zeros(1, 1, 1, 4)
    known = {"attention_mask": Padding(None), "kvexp": layer}
    with pytest.raises(RuntimeError, match=sentence):
        attention(nn.Identity(), x, x, x, **(known | keywords))
    assert not layer.calls


def test_a_model_refuses_a_mask_that_it_cannot_honour() -> None:
    model, ids = helpers.model("llama"), torch.tensor([helpers.tokens(4)])
    with attached(model):
        for mask_4d in (torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 4, 4, dtype=torch.bool)):
            with pytest.raises(RuntimeError, match="2-D attention_mask"):
                model(ids, cache=empty_cache(model), attention_mask=mask_4d)


def test_a_model_refuses_to_run_without_a_cache_of_ours() -> None:
    model, ids = helpers.model("llama"), torch.tensor([helpers.tokens(4)])
    with attached(model):
        for keywords in ({}, {"use_cache": False}):
            with pytest.raises(RuntimeError, match="no kvexp cache"):
                model(ids, **keywords)
        with pytest.raises(RuntimeError, match="with use_cache=False: leave use_cache on"):
            model.generate(ids, cache=empty_cache(model), use_cache=False, max_new_tokens=2)


def test_the_mask_function_keeps_the_columns() -> None:
    given = mask(attention_mask=torch.tensor([[0, 1, 1]]), batch_size=1, q_length=3)
    assert torch.equal(given.columns, torch.tensor([[False, True, True]]))
    assert mask().columns is None
    with pytest.raises(RuntimeError, match="2-D attention_mask"):
        mask(attention_mask=torch.ones(1, 1, 3, 3))


def test_padding_is_looked_up_by_slot() -> None:
    columns = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 1]]).bool()
    padding = Padding(columns)
    assert torch.equal(padding.at(torch.tensor([4, 2, 0])), columns[:, [4, 2, 0]])
    assert [padding.pads(*span) for span in ((0, 5), (0, 2), (2, 3), (3, 4), (2, 4), (4, 5), (3, 3))] == [
        3, 0, 1, 2, 3, 0, 0,
    ]  # fmt: skip
    assert Padding(None).at(torch.tensor([0])) is None
    assert Padding(None).pads(0, 10) == 0


def test_pads_are_read_from_the_device_once() -> None:
    class Counted(torch.Tensor):
        moves = 0

        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.moves += getattr(function, "__name__", "") == "cpu"
            return super().__torch_function__(function, types, args, kwargs or {})

    padding = Padding(torch.tensor([[True, False]]).as_subclass(Counted))
    assert [padding.pads(0, end) for end in (1, 2, 1, 2)] == [0, 1, 0, 1]
    assert Counted.moves == 1


@pytest.mark.parametrize("family", helpers.FAMILIES)
def test_the_tapped_query_reaches_the_layer(family: str) -> None:
    model, ids = helpers.model(family), torch.tensor([helpers.tokens(5)])
    calls: list[Call] = []

    def keep(layer: DenseLayer, call: Call, before: Any, local: Any) -> None:
        calls.append(call)

    for tap in (True, False):
        with attached(model, tap=tap):
            cache = empty_cache(model)
            model(ids, cache=cache)
            cache = cache.fork()
            cache.observe(keep)
            model(ids, cache=cache)
    full = [layer.window for layer in cache.layers].count(None)
    assert len(calls) == 2 * full
    for call in calls[:full]:
        assert call.query_pre is not None and call.query_pre.shape == call.query.shape
        assert call.module is attention_modules(model)[call.layer_index]
    assert all(call.query_pre is None for call in calls[full:])


def test_attaching_nests_and_is_undone_after_an_error() -> None:
    model = helpers.model("llama")
    before = model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attached(model), attached(model, tap=True):
        assert model.config._attn_implementation == "kvexp"
        raise ZeroDivisionError
    assert model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_the_tapped_module_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = helpers.model("llama")
    before = model.config._attn_implementation
    monkeypatch.setattr("kvexp.attention.families.Family.site", lambda family, config: "nowhere")
    with pytest.raises(AttributeError, match="nowhere"), attached(model, tap=True):
        raise AssertionError("never attached")
    assert model.config._attn_implementation == before
