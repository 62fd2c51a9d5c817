"""What attention to everything says about a text, computed once and kept for all cells: final hidden states.

Hidden states are a hundredth of the logits that they give, and give them again exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvexp.calibration.store import Store, fingerprint
from kvexp.errors import UserError
from kvexp.methods import artefact
from kvexp.methods.baseline.full import Full
from kvexp.progress import track

log = logging.getLogger(__name__)
FORMAT = 2
CHUNK = 512  # tokens whose logits stand in memory at once


@dataclass
class Reference:
    """hidden [n, T, d]: the final hidden states of n texts behind their first tokens."""

    hidden: torch.Tensor
    manifest: dict[str, Any] = field(default_factory=dict)

    def logits(self, model: Any, part: slice) -> torch.Tensor:
        """Return the logits [n, t, V] of the tokens after those in `part`."""
        return logits_of(model, self.hidden[:, part].to(model.device))

    def save(self, folder: Path) -> None:
        """Write the states and their manifest into `folder`, each whole or not at all."""
        artefact.write(folder, {"hidden": self.hidden}, self.manifest, "reference")

    @classmethod
    def load(cls, folder: Path, facts: dict[str, Any]) -> Reference:
        """Read what `save` wrote; UserError when it is damaged or of something else."""
        tensors, manifest = artefact.read(folder, facts, "reference")
        return cls(tensors["hidden"], manifest)


def reference(
    loaded: Any, texts: Sequence[Sequence[int]], skip: int, store_dir: Path, batch_size: int
) -> Reference:
    """Return the states of equally long `texts` behind their first `skip` tokens, from the store or anew."""
    facts = {
        "model": loaded.sha256,
        "dtype": str(loaded.dtype),
        "texts": fingerprint({"ids": [list(text) for text in texts]}),
        "skip": skip,
        "format": FORMAT,
    }

    def build(work: Path) -> Reference:
        parts = [
            _states(loaded.model, texts[at : at + batch_size], skip)
            for at in track(range(0, len(texts), batch_size), "full attention", unit="batches")
        ]
        return Reference(torch.cat(parts).cpu())

    found, _, _ = Store(store_dir).get("reference", facts, Reference.load, build, log.debug)
    return found


@torch.no_grad()
def _states(model: Any, texts: Sequence[Sequence[int]], skip: int) -> torch.Tensor:
    """Run full attention over texts in chunks; return final hidden states behind the first `skip` tokens."""
    method = Full()
    ids = torch.tensor([list(text) for text in texts], device=model.device)
    found = []
    with method.attach(model):
        cache = method.encode(model, [])
        for at in range(0, ids.shape[1], CHUNK):
            part = ids[:, at : at + CHUNK]
            positions = torch.arange(at, at + part.shape[1], device=ids.device)[None]
            found.append(model.base_model(part, cache=cache, position_ids=positions).last_hidden_state)
        if not gives_logits(model, ids[:, :4]):
            raise UserError(
                "this model's logits are not those of its output embedding: task=continuation cannot serve it"
            )
    return torch.cat(found, dim=1)[:, skip:]


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the model's logits [..., V] from its final hidden states, where these are."""
    logits = model.get_output_embeddings()(hidden).to(hidden.device)
    scale = getattr(model, "logit_scale", None)
    return logits if scale is None else logits * scale


def gives_logits(model: Any, ids: torch.Tensor) -> bool:
    """Whether a model's logits are those of its output embedding, as tried on `ids` [n, t].

    Not those of a model that bounds its logits, say. Needs full attention to be attached.
    """
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    with output_states(model) as states:
        theirs = model(ids, cache=Full().encode(model, []), position_ids=positions).logits.float()
    gap = (logits_of(model, states[0]).to(theirs) - theirs).abs().max()
    return bool(gap <= 0.05 * theirs.abs().max())  # other shapes round otherwise in bfloat16


@contextmanager
def output_states(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the final hidden states [n, t, d] of each forward inside the block, where logits are made."""
    found: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: found.append(args[0]))
    try:
        yield found
    finally:
        hook.remove()
