"""Samples are the states of trace tokens over the prefix alone, whatever the batch; chunks as asked."""

from __future__ import annotations

import pytest
import torch

import helpers
from kvexp.errors import UserError
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.collect import encode_chunks, forward
from kvexp.prompt import Context
from kvexp.stats.states import StateAccumulator

TRACES = [helpers.tokens(n, seed=s) for s, n in enumerate((9, 4, 7))]


def observed(model, context, traces=TRACES, count=1, key="pre"):
    """By layer, q and (a, s) over the whole context of each trace run alone: lists of [T, H, ...]."""
    method = ASM(key=key)
    found: dict[int, list] = {}

    def watch(layer, call, before, local):
        q = call.query if key == "rope_actual" else call.query_pre
        sample = [x[0].transpose(0, 1) for x in (q, *before[0])]
        found.setdefault(call.layer_index, []).append(sample)

    caches = encode_chunks(method, model, context, count)
    with method.attach(model), torch.no_grad():
        for trace in traces:
            for cache in caches:
                fork = cache.fork()
                fork.observe(watch)
                forward(model, fork, [trace])
    return {
        layer: [torch.cat(parts) for parts in zip(*samples, strict=True)] for layer, samples in found.items()
    }


def stored(made, layer):
    """Everything that was collected of a layer."""
    [block] = made.samples.blocks(layer, 10**6)
    return block


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "glm4_moe_lite"])
def test_padding_adds_nothing_and_changes_nothing(prepared, family):
    made = prepared(TRACES, 8, family=family)
    alone = observed(made.model, made.context)
    assert list(made.samples.layers) == sorted(made.memory.layers)
    for layer in made.samples.layers:
        block, (q, a, s) = stored(made, layer), alone[layer]
        assert made.samples.count(layer) == sum(map(len, TRACES)) == made.memory.manifest["trace_tokens"]
        for name, expected in (("q", q), ("a", a), ("s", s)):
            torch.testing.assert_close(block[name], expected, rtol=0, atol=1e-4)


def test_states_of_the_first_layer_by_hand(prepared):
    """log Z and a of every query over every prefix row, from the model's own projections and rotary table."""
    made = prepared(TRACES[:1], 8, layout="pooled", key="rope_actual")
    model, ids = made.model, [*made.context.ids, *TRACES[0]]
    layer, config, prefix = model.model.layers[0], model.config, len(made.context)
    hidden = layer.input_layernorm(model.model.embed_tokens(torch.tensor([ids])))
    q, k, v = (
        project(hidden).view(1, len(ids), -1, config.head_dim).transpose(1, 2)
        for project in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    )
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(hidden, torch.arange(len(ids))[None]))
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = (x[:, :, :prefix].repeat_interleave(group, 1) for x in (k, v))
    scores = q[:, :, prefix:] @ k.transpose(2, 3) * config.head_dim**-0.5
    block = stored(made, 0)
    torch.testing.assert_close(block["q"], q[0, :, prefix:].transpose(0, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(block["s"], scores.logsumexp(-1)[0].T, rtol=0, atol=1e-5)
    torch.testing.assert_close(block["a"], (scores.softmax(-1) @ v)[0].transpose(0, 1), rtol=0, atol=1e-5)


def parts_of(context: Context) -> list[Context]:
    """The two parts of three demonstrations each that chunks=2 makes of a context of six."""
    return [Context(context.header, context.chunks[:3]), Context(context.header, context.chunks[3:])]


def test_mean_pools_the_samples_of_all_chunks(prepared):
    made = prepared(TRACES, 1, layout="pooled", chunks=2)
    alone = [observed(made.model, part) for part in parts_of(made.context)]
    assert made.memory.manifest["trace_tokens"] == 2 * sum(map(len, TRACES))
    for layer, memory in made.memory.layers.items():
        a, s = (torch.cat([part[layer][i] for part in alone]) for i in (1, 2))  # [2 n, 6, ...]
        assert memory.count.tolist() == [[3 * len(s)]] * 2
        for book in range(2):  # three heads share the one entry
            heads = slice(3 * book, 3 * book + 3)
            z = s[:, heads].flatten().double()
            expected = (z.softmax(0)[:, None] * a[:, heads].flatten(0, 1)).sum(0)
            assert memory.log_z[book].item() == pytest.approx(float(z.exp().mean().log()), abs=1e-4)
            torch.testing.assert_close(memory.a[book, 0, 0], expected.float(), rtol=0, atol=1e-4)


def test_sum_adds_the_masses_of_the_chunks(prepared):
    """Of the same token: log Z is the log-sum-exp over chunks, a is weighted by mass, q is the mean."""
    made = prepared(TRACES, None, chunks=2, chunk_merge="sum")
    alone = [observed(made.model, part) for part in parts_of(made.context)]
    assert made.memory.manifest["trace_tokens"] == sum(map(len, TRACES))
    for layer in made.memory.layers:
        block, (one, two) = stored(made, layer), (part[layer] for part in alone)
        s = torch.stack([one[2], two[2]])
        a = (s.softmax(0)[..., None] * torch.stack([one[1], two[1]])).sum(0)
        torch.testing.assert_close(block["s"], s.logsumexp(0), rtol=0, atol=1e-4)
        torch.testing.assert_close(block["a"], a, rtol=0, atol=1e-4)
        torch.testing.assert_close(block["q"], (one[0] + two[0]) / 2, rtol=0, atol=1e-4)
    first = observed(made.model, made.context)[0][0]
    torch.testing.assert_close(stored(made, 0)["q"], first, rtol=0, atol=1e-5)  # the same in layer 0


def test_chunks_of_unequal_length_end_at_one_position(prepared):
    """So that keys at actual positions mean the same in every chunk, and at inference."""
    ids = helpers.tokens(40, seed=3)
    context = Context(ids[:2], (ids[2:7], ids[7:20], ids[20:40]))
    made = prepared(TRACES, None, context=context, chunks=3, key="rope_actual", layout="pooled")
    assert made.cache().seen == 2 + 20
    block, pair = stored(made, 0), len(TRACES[0]) + len(TRACES[1])  # run together, over chunk after chunk
    alone = [
        observed(made.model, Context(ids[:2], (chunk,)), key="rope_actual")[0] for chunk in context.chunks
    ]
    for at, (_, a, s) in enumerate(alone):
        rows = slice(at * pair, (at + 1) * pair)
        torch.testing.assert_close(block["q"][rows], alone[-1][0][:pair], rtol=0, atol=1e-4)
        torch.testing.assert_close(block["a"][rows], a[:pair], rtol=0, atol=1e-4)  # RoPE is relative
        torch.testing.assert_close(block["s"][rows], s[:pair], rtol=0, atol=1e-4)


def test_more_chunks_than_demonstrations_and_empty_contexts_are_refused(prepared):
    with pytest.raises(UserError, match=r"method\.chunks=7 is more than the 6 demonstrations"):
        prepared(TRACES, 8, chunks=7)
    with pytest.raises(UserError, match="an empty context leaves nothing to remember"):
        prepared(TRACES, 8, context=Context((), ()))


def test_nothing_is_held_between_batches(prepared, monkeypatch):
    """Every state is on disk when its layer is done, or, where chunks are summed, its batch."""
    from kvexp.methods.memory import prepare

    seen = []

    class Watched(prepare.Collector):
        def __call__(self, traces):
            super().__call__(traces)
            seen.append(dict(self.found))

    monkeypatch.setattr(prepare, "Collector", Watched)
    for merge in ("mean", "sum"):
        prepared(TRACES, 4, chunks=2, chunk_merge=merge)
    assert seen == [{}] * 4


def test_accumulating_by_hand_is_what_k_equals_one_stores(prepared):
    made = prepared(TRACES, 1, layout="shared", aggregate="mean")
    for layer, memory in made.memory.layers.items():
        block = stored(made, layer)
        acc = StateAccumulator(1, 6, 16, rule="mean")
        acc.add(torch.zeros(len(block["s"]), dtype=torch.long), block["s"], block["a"])
        torch.testing.assert_close(memory.a[0], acc.finish().a, rtol=0, atol=1e-5)
        torch.testing.assert_close(memory.log_z[0], block["s"].mean(0)[None], rtol=0, atol=1e-5)
        assert memory.grouping.codebooks == 1
