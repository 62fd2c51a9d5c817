"""The LightningModule of calibration: a forward for each batch, no gradients, nothing fitted.

More devices only means another trainer: Lightning shards the batches (`predict` neither repeats nor pads),
every rank writes its own shard, and rank 0 goes on with all of them in rank order.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset

from kvexp.calibration.store import finish, whole
from kvexp.errors import UserError
from kvexp.logs import rank
from kvexp.progress import track

SORT_WINDOW = 8  # batches whose items are sorted by length together, so that little is padded


class CalibrationModule(lightning.LightningModule):
    """Calls `step` with each batch; the language model stays outside, so that Lightning never moves it."""

    def __init__(self, step: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._step = (step,)

    def predict_step(self, batch: list[Any], batch_idx: int) -> None:
        """Run one batch."""
        self._step[0](batch)


class Batches(Dataset):
    """A list of ready batches, each one item for Lightning's sampler."""

    def __init__(self, batches: Sequence[list[Any]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> list[Any]:
        return self.batches[index]


class Bar(lightning.Callback):
    """Progress of `predict` with rate and time left."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.steps: Iterator[int] | None = None

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the bar on rank 0, over its own share of the batches."""
        if trainer.is_global_zero:
            batches = int(trainer.num_predict_batches[0])
            self.steps = iter(track(range(batches), self.what, batches, "batches"))

    def on_predict_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Advance it."""
        if self.steps is not None:
            next(self.steps, None)

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Close it."""
        if self.steps is not None:
            next(self.steps, None)
            self.steps = None


class Runner:
    """What a method's `prepare` is handed: the context, the traces, and a way to run over them."""

    def __init__(
        self,
        context: Any,
        traces: Sequence[Sequence[int]],
        folder: Path,
        make_trainer: Callable[..., lightning.Trainer],
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        self.context, self.traces, self.seed = context, traces, seed
        self._root, self.batch_size, self._make_trainer = folder, batch_size, make_trainer
        self.trainer: lightning.Trainer | None = None

    @property
    def folder(self) -> Path:
        """Where this rank writes samples."""
        return self._root / f"rank-{rank():03d}"

    @property
    def collected(self) -> bool:
        """Whether the samples of an earlier run with the same traces lie ready."""
        return whole(self._root)

    def run(self, step: Callable[[list[Any]], None], items: Sequence[Any], what: str) -> None:
        """Call `step` once for each batch of this rank's items, without gradients.

        Raises UserError when the trainer ran a part of them: what is learnt from it would pass for the whole.
        """
        seen = 0

        def counted(batch: list[Any]) -> None:
            nonlocal seen
            step(batch)
            seen += len(batch)

        with quiet_lightning():
            self.trainer = self._make_trainer(
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
                callbacks=[Bar(what)],
            )
            batches = planned(items, self.batch_size, self.trainer.world_size)
            loader = DataLoader(Batches(batches), batch_size=None, collate_fn=list)  # token ids as they are
            with torch.no_grad():
                self.trainer.predict(CalibrationModule(counted), loader, return_predictions=False)
        share = sum(map(len, batches[self.trainer.global_rank :: self.trainer.world_size]))
        if seen != share:
            raise UserError(
                f"the trainer ran {seen} traces where this process has {share}: leave out the trainer keys"
                " that choose a part of them, or that give every process all"
            )

    def shards(self) -> list[Path]:
        """Wait for all ranks, and return their folders in rank order; only rank 0 goes on from here."""
        if self.trainer is not None:
            self.trainer.strategy.barrier("kvexp-shards")
        if rank() > 0:
            raise SystemExit(0)
        return finish(self._root)

    def track(self, items: Iterable[Any], what: str, total: int | None = None) -> Iterator[Any]:
        """Iterate with a progress bar."""
        return track(items, what, total)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's advertisements, and its advice that is wrong for calibration, out of the log."""
    loggers = [
        logging.getLogger(name) for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in (".*does not have many workers.*", ".*predict returned None.*", ".*LeafSpec.*"):
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def planned(items: Sequence[Any], size: int, ranks: int = 1) -> list[list[Any]]:
    """Cut items into batches; inside windows of a few batches they are sorted by length (stable).

    Batches are smaller than `size` where that leaves a rank without one, which Lightning does not take.
    Raises UserError for fewer items than ranks.
    """
    if len(items) < ranks:
        raise UserError(
            f"{len(items)} traces cannot be shared by {ranks} processes, use trainer.devices=1 or more traces"
        )
    size = min(size, len(items) // ranks)
    window, batches = size * SORT_WINDOW, []
    for at in range(0, len(items), window):
        part = sorted(items[at : at + window], key=len)
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    return batches
