"""Scores of labels that a model could only answer with: the trie of their tokens.

Free generation is cut off from every token that continues no label. At a node of the trie the model chooses
among the next tokens of the labels that are left, so

    log p(label) = sum over the nodes on its path of log softmax(logits of the node's children)[its child]

and a token that has no alternative costs nothing. The probabilities of all labels sum to 1. A label whose
tokens begin another label competes with it by the token that ends a label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Node(NamedTuple):
    """A place where labels part: the tokens that lead to it, and those that may follow, in rising order."""

    path: tuple[int, ...]
    children: tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """The nodes at which labels part, the root first, and each label's way through them.

    `nodes[0]` is always the root; where all labels share their first token it has one child and costs
    nothing. The others have two children or more and are sorted by length of path. `ways[i]` lists the
    (node, child) indices of label i.
    """

    nodes: tuple[Node, ...]
    ways: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def build(cls, label_ids: Sequence[Sequence[int]], end_id: int) -> Trie:
        """Build the trie of labels given by their tokens.

        Args:
            label_ids: tokens of each label, distinct and not empty.
            end_id: the token that ends a label where another label goes on.

        Raises:
            ValueError: two labels with the same tokens, an empty one, or one that contains `end_id`.
        """
        labels = [tuple(ids) for ids in label_ids]
        if len(set(labels)) < len(labels) or () in labels or any(end_id in ids for ids in labels):
            raise ValueError("labels must be distinct, not empty, and free of the token that ends them")
        following: dict[tuple[int, ...], set[int]] = {(): set()}
        for ids in labels:
            for i, token in enumerate((*ids, end_id)):
                following.setdefault(ids[:i], set()).add(token)
        parting = [path for path in following if len(following[path]) > 1 or not path]
        nodes = tuple(
            Node(path, tuple(sorted(following[path])))
            for path in sorted(parting, key=lambda path: (len(path), path))
        )
        index = {node.path: i for i, node in enumerate(nodes)}
        ways = tuple(
            tuple(
                (index[ids[:i]], nodes[index[ids[:i]]].children.index(token))
                for i, token in enumerate((*ids, end_id))
                if ids[:i] in index
            )
            for ids in labels
        )
        return cls(nodes, ways)

    def scores(self, child_logits: Mapping[int, Any] | Sequence[Any]) -> torch.Tensor:
        """Return log-probabilities [B, labels], or [labels] for logits without a batch dimension.

        Args:
            child_logits: for each node its logits [B, children] or [children], ordered as `Node.children`.
        """
        import torch

        steps = []
        for number, node in enumerate(self.nodes):
            logits = torch.as_tensor(child_logits[number])
            if logits.shape[-1] != len(node.children):
                raise ValueError(f"node {number} has {len(node.children)} children, not {logits.shape[-1]}")
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            steps.append(wide.log_softmax(-1))
        totals = [torch.stack([steps[n][..., c] for n, c in way]).sum(0) for way in self.ways]
        return torch.stack(totals, dim=-1)


def calibrated(scores: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return label scores [B, labels] less the bias [labels] of the labels, see `label_bias`."""
    return scores - bias


def label_bias(scores: torch.Tensor) -> torch.Tensor:
    """Return the mean [labels] of label scores [B, labels] over queries whose labels are not used.

    A model prefers some labels whatever the query; the mean over unlabelled queries, under the same method
    and context, measures that preference.
    """
    return scores.mean(0)
