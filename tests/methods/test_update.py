"""A chunk added to a memory leaves what accumulating old and new samples under the same assignments gives."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import helpers
from kvexp.errors import UserError
from kvexp.methods.memory.states import StateMemory
from kvexp.prompt import Context
from kvexp.stats.samples import SampleStore

TRACES = [helpers.tokens(7, seed=s) for s in range(6)]
OTHERS = [helpers.tokens(7, seed=20 + s) for s in range(5)]
IDS = helpers.tokens(40, seed=1)
FIRST, SECOND = Context(IDS[:2], (IDS[2:20],)), Context(IDS[:2], (IDS[20:36],))
WHOLE = Context(IDS[:2], (IDS[2:20], IDS[20:36]))


def updated(made, folder, traces=OTHERS, chunk=SECOND) -> tuple[StateMemory, SampleStore]:
    """The memory with one more chunk, and the new samples."""
    calibration = helpers.Calibration(chunk, traces, folder)
    memory = made.method.update(made.model, made.memory, calibration, WHOLE)
    return memory, SampleStore.merge(calibration.parts())


def everything(store, layer, grouping):
    """All samples of a layer by codebook: keys [C, n, hD], a, s."""
    [block] = store.blocks(layer, 10**6)
    return grouping.split(block["q"]).flatten(-2), grouping.split(block["a"]), grouping.split(block["s"])


@pytest.mark.parametrize("final", ["l2", "cosine"])
def test_new_samples_go_where_the_final_pass_would_have_put_them(prepared, tmp_path, final):
    made = prepared(TRACES, 9, context=FIRST, layout="pooled", final=final)
    memory, fresh = updated(made, tmp_path / "new")
    for layer, old in made.memory.layers.items():
        keys, *_ = everything(fresh, layer, old.grouping)
        centroids = old.keys * old.norm[..., None]
        for book in range(2):
            nearest = torch.cdist(keys[book], centroids[book]).argmin(1)
            if final == "cosine":
                nearest = (keys[book] @ old.keys[book].T).argmax(1)
            expected = old.count[book] + torch.bincount(nearest, minlength=9)
            assert torch.equal(memory.layers[layer].count[book], expected)


@pytest.mark.parametrize("aggregate", ["eq5", "mean"])
@pytest.mark.parametrize("layout", ["pooled", "shared"])
def test_pooling_equals_accumulating_all_samples(prepared, tmp_path, layout, aggregate):
    made = prepared(TRACES, 9, context=FIRST, layout=layout, aggregate=aggregate, final="cosine")
    before = {layer: dict(memory.tensors) for layer, memory in made.memory.layers.items()}
    memory, fresh = updated(made, tmp_path / "new")
    for layer, after in memory.layers.items():
        grouping, keys = after.grouping, before[layer]["keys"]
        old, new = (everything(store, layer, grouping) for store in (made.samples, fresh))
        q, a, s = (torch.cat([x, y], dim=1) for x, y in zip(old, new, strict=True))
        for book in range(grouping.codebooks):
            index, start = (q[book] @ keys[book].T).argmax(1), old[0].shape[1]
            for entry in range(9):
                members = index == entry
                assert after.count[book, entry] == members.sum()
                centroid = keys[book, entry] * before[layer]["norm"][book, entry]
                total = centroid * before[layer]["count"][book, entry] + q[book, start:][members[start:]].sum(
                    0
                )
                expected_q = F.normalize(total, dim=0)
                torch.testing.assert_close(after.keys[book, entry], expected_q, rtol=0, atol=1e-5)
                sample_a, sample_s = a[book, members].double(), s[book, members].double()
                expected_s, expected_a = sample_s.mean(0), sample_a.mean(0)
                if aggregate == "eq5":
                    expected_s = sample_s.exp().mean(0).log()
                    expected_a = (sample_s.softmax(0)[..., None] * sample_a).sum(0)
                torch.testing.assert_close(after.log_z[book, entry], expected_s.float(), rtol=0, atol=1e-4)
                torch.testing.assert_close(after.a[book, entry], expected_a.float(), rtol=0, atol=1e-4)


def test_summing_adds_the_new_mass_to_the_old(prepared, tmp_path):
    """The same traces, each token its own entry: exact in layer 0, whose queries do not see the context."""
    made = prepared(TRACES, None, context=FIRST, layout="shared", key="rope_actual", chunk_merge="sum")
    old = made.memory.layers[0]
    memory, fresh = updated(made, tmp_path / "new", traces=TRACES)
    new, grouping = memory.layers[0], old.grouping
    keys, a, s = everything(fresh, 0, grouping)
    index = (keys[0] @ old.keys[0].T).argmax(1)
    assert sorted(index.tolist()) == list(range(42)), "each new sample finds its own entry"
    one, two = old.log_z[0][index], s[0]
    torch.testing.assert_close(new.log_z[0][index], torch.logaddexp(one, two), rtol=0, atol=1e-5)
    share = torch.sigmoid(two - one)[..., None]
    expected = old.a[0][index] * (1 - share) + a[0] * share
    torch.testing.assert_close(new.a[0][index], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(new.keys, old.keys, rtol=0, atol=1e-5)
    assert new.count.tolist() == [[2] * 42]


def test_an_entry_without_new_samples_stays(prepared, tmp_path):
    made = prepared(TRACES, None, context=FIRST, layout="pooled")
    memory, _ = updated(made, tmp_path / "new", traces=[OTHERS[0][:1]])
    for layer, after in memory.layers.items():
        before = made.memory.layers[layer]
        assert int(after.count.sum() - before.count.sum()) == 6
        still = after.count == before.count
        assert int((~still).sum()) <= 6
        for name in ("a", "log_z", "norm"):
            torch.testing.assert_close(
                after.tensors[name][still], before.tensors[name][still], rtol=0, atol=1e-5
            )


def test_the_updated_memory_serves_the_whole_context(prepared, tmp_path):
    made = prepared(TRACES, 8, context=FIRST, family="gemma3_text")
    memory, _ = updated(made, tmp_path / "new")
    assert memory.manifest["context"] == WHOLE.key and memory.seen == 20
    assert memory.manifest["trace_tokens"] == 7 * (6 + 5)
    with pytest.raises(UserError, match="built for context="):
        made.method.encode(made.model, FIRST, memory)
    cache = made.method.encode(made.model, WHOLE, memory)
    assert made.logits(OTHERS[:2], cache).isfinite().all()
    # Sliding layers now stand on the end of the new chunk, which ends where the first one did.
    fresh = prepared(TRACES, 8, context=SECOND, family="gemma3_text").memory
    for index, rows in memory.rows.items():
        assert rows["positions"][0, -1] == 19
        torch.testing.assert_close(
            rows["values"][:, :, -7:], fresh.rows[index]["values"][:, :, -7:], rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("knobs", [{"entries": "int8"}, {"residual": True}, {"slope": True}])
def test_what_cannot_be_added_to_is_refused(prepared, tmp_path, knobs):
    made = prepared(TRACES, 8, context=FIRST, **knobs)
    with pytest.raises(UserError, match="cannot be updated: build it again"):
        updated(made, tmp_path / "new")


def test_a_longer_chunk_is_refused_where_positions_matter(prepared, tmp_path):
    longer = Context(IDS[:2], (IDS[2:36],))
    made = prepared(TRACES, 8, context=FIRST, key="rope_actual")
    with pytest.raises(UserError, match="chunk of 36 tokens is longer than the 20"):
        updated(made, tmp_path / "new", chunk=longer)
    made = prepared(TRACES, 8, context=FIRST)
    assert updated(made, tmp_path / "other", chunk=longer)[0].seen == 36


def test_another_methods_memory_is_refused(prepared, tmp_path):
    made = prepared(TRACES, 8, context=FIRST)
    made.method = type(made.method)(samples="float32", aggregate="mean")
    with pytest.raises(UserError, match=r"method\.aggregate='eq5', not 'mean'"):
        updated(made, tmp_path / "new")
