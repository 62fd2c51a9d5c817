"""Full attention's distributions at known answers: what `fidelity=true` compares a cell with.

They depend on the model and on what is asked alone. The first cell of a grid computes them, the others find
them in the store.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance

from kvexp.budget import Budget
from kvexp.calibration.store import Store, fingerprint
from kvexp.evaluation.reference import FORMAT, Reference, gives_logits, output_states
from kvexp.methods.baseline.full import Full
from kvexp.prompt import Context
from kvexp.schema import Settings
from kvexp.tasks.session import Session

log = logging.getLogger(__name__)


def known_answers(settings: Settings, loaded: Any) -> KnownAnswers | None:
    """Return what a cell is compared with, if it is."""
    if not settings.fidelity:
        return None
    divided = settings.model.tp_plan is not None  # then processes compute a batch together, under no lock
    return KnownAnswers(loaded, None if divided else settings.store_dir)


class KnownAnswers:
    """Answers that are known, teacher-forced under full attention, a batch of queries at a time."""

    def __init__(self, loaded: Any, store_dir: Path | None) -> None:
        """Keep what is computed in `store_dir`; None: keep nothing."""
        self._loaded, self._store_dir = loaded, store_dir
        self.session = Session(loaded, Full(), None, Budget(None))
        self._kept: bool | None = None  # whether hidden states stand for the model's logits; not tried yet

    def distributions(
        self,
        on: Context | list[Context],
        queries: Sequence[Sequence[int]],
        rows: Sequence[int],
        answers: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Return for each query, on its row of `on`, the log-probabilities [n, V] at its n answer tokens."""
        with Full().attach(self._loaded.model):
            if self._store_dir is None or not self._keeps():
                return self.session.run(on, queries, rows).answer_distributions(answers)
            states = self._states(self._store_dir, on, queries, rows, answers)
        logits = states.logits(self._loaded.model, slice(None))[0]
        scores = logits if logits.dtype == torch.float64 else logits.float()
        return list(scores.log_softmax(-1).split([len(answer) for answer in answers]))

    def answer_distributions(
        self, instances: Sequence[Instance], answers: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Return the same for instances of the adapter that share a context."""
        queries = [instance.doc["query_ids"] for instance in instances]
        return self.distributions(instances[0].doc["context"], queries, [0] * len(queries), answers)

    def _keeps(self) -> bool:
        if self._kept is None:
            ids = torch.arange(4, device=self._loaded.model.get_input_embeddings().weight.device)[None]
            with torch.no_grad():
                self._kept = gives_logits(self._loaded.model, ids)
        return self._kept

    def _states(
        self,
        store_dir: Path,
        on: Context | list[Context],
        queries: Sequence[Sequence[int]],
        rows: Sequence[int],
        answers: Sequence[Sequence[int]],
    ) -> Reference:
        contexts = [on] if isinstance(on, Context) else on
        asked = [
            [contexts[row].key, list(query), list(answer)]
            for row, query, answer in zip(rows, queries, answers, strict=True)
        ]
        facts = {
            "model": self._loaded.sha256,
            "dtype": str(self._loaded.dtype),
            "answers": fingerprint({"asked": asked}),
            "format": FORMAT,
        }

        def build(work: Path) -> Reference:
            self.session.context(on)  # first, since the states of its forwards are not wanted
            with output_states(self._loaded.model) as found:
                self.session.run(on, queries, rows).answer_distributions(answers)
            states = torch.cat([found[0][:, -1:], *found[1:]], dim=1)  # [B, longest answer, d]
            ragged = [row[: len(answer)] for row, answer in zip(states, answers, strict=True)]
            return Reference(torch.cat(ragged)[None].cpu())

        return Store(store_dir).get("answers", facts, Reference.load, build, log.debug)[0]
