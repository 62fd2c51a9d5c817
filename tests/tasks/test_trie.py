"""The label trie against every label scored by brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvexp.tasks.trie import Trie, calibrated, label_bias

END = 0
LABELS = st.sets(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple), min_size=1, max_size=12).map(
    sorted
)


def model(path, batch=3):
    """Logits [batch, 5] of the next token after `path`: any function of the path will do."""
    seed = int("".join(map(str, (7, *path))))
    return torch.tensor(np.random.default_rng(seed).normal(size=(batch, 5)) * 3)


def logits_of(trie):
    return {i: model(node.path)[:, list(node.children)] for i, node in enumerate(trie.nodes)}


def by_hand(labels):
    """Probability [batch, labels] of each label when every token that continues no label is forbidden."""
    table = []
    for label in labels:
        total = torch.ones(3, dtype=torch.float64)
        for i, token in enumerate((*label, END)):
            allowed = sorted(
                {(*other, END)[i] for other in labels if (*other, END)[:i] == label[:i] and len(other) >= i}
            )
            chances = model(label[:i])[:, allowed].softmax(-1)
            total = total * chances[:, allowed.index(token)]
        table.append(total)
    return torch.stack(table, -1)


@settings(deadline=None, max_examples=25)
@given(LABELS)
def test_scores_are_the_constrained_distribution(labels):
    trie = Trie.build(labels, END)
    scores = trie.scores(logits_of(trie))
    assert torch.allclose(scores.exp(), by_hand(labels))
    assert torch.allclose(scores.exp().sum(-1), torch.ones(3, dtype=torch.float64))


@settings(deadline=None, max_examples=25)
@given(LABELS)
def test_nodes_are_the_places_where_labels_part(labels):
    trie = Trie.build(labels, END)
    assert trie.nodes[0].path == ()
    assert [len(node.path) for node in trie.nodes] == sorted(len(node.path) for node in trie.nodes)
    assert all(len(node.children) > 1 for node in trie.nodes[1:])
    assert all(list(node.children) == sorted(set(node.children)) for node in trie.nodes)
    paths = [node.path for node in trie.nodes]
    for a, b in itertools.combinations(labels, 2):
        common = next(i for i, (x, y) in enumerate(zip((*a, END), (*b, END), strict=False)) if x != y)
        assert a[:common] in paths


def test_by_hand():
    # 5 and 6 part at the root; after 5 the labels part again; 6 8 has no alternative at its second token
    trie = Trie.build([(5, 1), (5, 2), (6, 8)], END)
    assert [tuple(node) for node in trie.nodes] == [((), (5, 6)), ((5,), (1, 2))]
    scores = trie.scores([torch.tensor([0.0, 0.0]), torch.tensor([0.0, np.log(3)])])
    assert scores.exp().tolist() == pytest.approx([0.5 * 0.25, 0.5 * 0.75, 0.5])


def test_one_token_labels_need_the_root_alone():
    trie = Trie.build([(9,), (3,), (4,)], END)
    assert [tuple(node) for node in trie.nodes] == [((), (3, 4, 9))]
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert torch.equal(trie.scores([logits]), logits.log_softmax(-1)[:, [2, 0, 1]])


def test_a_label_that_begins_another_competes_by_the_end():
    trie = Trie.build([(5,), (5, 6)], END)
    assert [tuple(node) for node in trie.nodes] == [((), (5,)), ((5,), (END, 6))]
    scores = trie.scores([torch.tensor([[123.0]]), torch.tensor([[0.0, np.log(4)]])])
    assert scores.exp().flatten().tolist() == pytest.approx([0.2, 0.8])


def test_a_batch_is_its_rows():
    trie = Trie.build([(1, 2), (1, 3), (2,)], END)
    whole = trie.scores(logits_of(trie))
    for row in range(3):
        alone = trie.scores({i: logits[row] for i, logits in logits_of(trie).items()})
        assert alone.shape == (3,)
        assert torch.equal(alone, whole[row])


def test_short_floats_are_widened():
    trie = Trie.build([(1,), (2,)], END)
    assert trie.scores([torch.zeros(1, 2, dtype=torch.bfloat16)]).dtype == torch.float32
    assert trie.scores([torch.zeros(1, 2, dtype=torch.float64)]).dtype == torch.float64
    assert trie.scores([np.zeros((1, 2))]).dtype == torch.float64


@pytest.mark.parametrize("labels", [[(1,), (1,)], [(1,), ()], [(1, END)]])
def test_impossible_labels_are_refused(labels):
    with pytest.raises(ValueError, match="distinct, not empty"):
        Trie.build(labels, END)


def test_logits_of_the_wrong_width_are_refused():
    with pytest.raises(ValueError, match="node 0 has 2 children, not 3"):
        Trie.build([(1,), (2,)], END).scores([torch.zeros(1, 3)])


def test_calibration_takes_a_preference_away():
    # the second label is preferred by 2 nats whatever the query; less that, the third query alone favours it
    queries = torch.tensor([[0.0, 2.0], [1.0, 1.5], [0.0, 4.0]])
    bias = label_bias(torch.tensor([[0.0, 2.0], [0.5, 2.5], [-0.5, 1.5]]))
    assert bias.tolist() == [0.0, 2.0]
    assert calibrated(queries, bias).tolist() == [[0.0, 0.0], [1.0, -0.5], [0.0, 2.0]]
    assert calibrated(queries, label_bias(queries)).mean(0).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
