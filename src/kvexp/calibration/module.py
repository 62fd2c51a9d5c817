"""The LightningModule of calibration: a forward for each batch, no gradients, nothing fitted.

Several ranks share the parts of the plan; each part is a folder of its own, in the order of the plan.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from safetensors.torch import load, save
from torch.utils.data import DataLoader, Dataset

from kvexp.calibration.meeting import Meeting
from kvexp.calibration.parts import Parts
from kvexp.crew.crew import ALONE, Crew
from kvexp.errors import UserError
from kvexp.files import write_atomic
from kvexp.logs import quiet_lightning
from kvexp.methods.base import Part
from kvexp.progress import track
from kvexp.stats.shares import WHOLE, Shares

PARTS = 32  # of a calibration, at most: what a kill loses of each rank's work
SORT_WINDOW = 8  # batches whose items are sorted by length together, so that little is padded


class CalibrationModule(lightning.LightningModule):
    """Calls `step` with each item; the language model stays outside, so that Lightning never moves it."""

    def __init__(self, step: Callable[[Any], None]) -> None:
        super().__init__()
        self._step = (step,)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        """Run one batch."""
        self._step[0](batch)


class Batches(Dataset):
    """A list of ready batches, each one item for Lightning."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
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
    """What a method's `prepare` is handed: the context, the traces, and ways to work on them.

    The traces are cut into batches, and these into a few parts, by the traces alone. A part that is whole
    stays, whatever happens; whoever comes next goes on with the others, on any number of ranks, and what is
    learnt is the same to the bit where the arithmetic of a forward pass is, up to as many ranks as layers.
    """

    def __init__(
        self,
        context: Any,
        traces: Sequence[Sequence[int]],
        folder: Path,
        make_trainer: Callable[..., lightning.Trainer],
        batch_size: int = 32,
        seed: int = 0,
        work: Path | None = None,
        crew: Crew = ALONE,
    ) -> None:
        """Parts go to `folder`, what `spread` computes to `work` (default: a folder in it)."""
        self.context, self.traces, self.seed = context, traces, seed
        self._parts, self._work = Parts(folder), work or folder / "work"
        self.batch_size, self._make_trainer, self._crew = batch_size, make_trainer, crew

    def collect(self, start: Callable[[Path], Part], items: Sequence[Any], what: str) -> list[Path]:
        """Give every item to a part, and return the folders of the parts in order.

        Raises UserError when the trainer ran some of the items only: what is learnt from them would pass for
        the whole.
        """
        batches = planned(items, self.batch_size)
        runs = segments(len(batches))
        left = self._crew.broadcast(self._parts.left(items, batches, runs) if self._crew.first else None)
        if left:
            mine = [(number, runs[number]) for number in left[self._crew.rank :: self._crew.world]]
            self._run(start, batches, mine, what)
            self._crew.barrier()
        return [self._parts.path(number) for number in range(len(runs))]

    def _run(
        self,
        start: Callable[[Path], Part],
        batches: Sequence[list[Any]],
        mine: Sequence[tuple[int, range]],
        what: str,
    ) -> None:
        filler = Filler(start, self._parts, {run[-1]: number for number, run in mine})
        places = [place for _, run in mine for place in run]
        with quiet_lightning():
            trainer = self._make_trainer(
                logger=False,
                enable_checkpointing=False,
                enable_model_summary=False,
                enable_progress_bar=False,
                use_distributed_sampler=False,
                callbacks=[Bar(what), OwnSignals()],
            )
            idle: list[Any] = [(-1, [])]  # Lightning wants a batch on every rank
            loader = DataLoader(
                Batches([(place, batches[place]) for place in places] or idle),
                batch_size=None,
                collate_fn=lambda item: item,  # token ids as they are
            )
            with torch.no_grad(), interruptible():
                trainer.predict(CalibrationModule(filler), loader, return_predictions=False)
        if filler.seen != len(places):
            raise UserError(
                f"the trainer ran {filler.seen} batches where this process has {len(places)}: leave out the"
                " trainer keys that choose a part of them"
            )

    def spread(
        self, keys: Sequence[int], build: Callable[[int, Shares], dict[str, torch.Tensor]], what: str
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Return `build(key, shares)` of every key; each rank computes some, and all read them.

        Where there are more ranks than keys, all compute every one, each on its share of the samples. What is
        there of an earlier start is not computed again.
        """
        files = {key: self._work / f"{key:04d}.safetensors" for key in keys}
        left = [key for key in keys if not files[key].exists()] if self._crew.first else None
        left, shares = self._crew.broadcast(left), WHOLE
        if len(keys) < self._crew.world:
            mine, shares = left, Meeting(self._work / "shares", self._crew)
        else:
            mine = left[self._crew.rank :: self._crew.world]
        for key in track(mine, what, unit="layers"):
            tensors = {name: x.contiguous().cpu() for name, x in build(key, shares).items()}
            if shares.number == 0:
                write_atomic(files[key], save(tensors))
        self._crew.barrier()
        found = {key: load(path.read_bytes()) for key, path in files.items()}
        self._crew.barrier()
        return found


@contextmanager
def interruptible() -> Iterator[None]:
    """Let KeyboardInterrupt through, which Lightning turns into an exit with SIGINT ignored."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            if main:
                signal.signal(signal.SIGINT, before)
            raise end.__context__ from None
        raise


class Filler:
    """Gives batches, in order, to one part after the other; `last` tells which batch ends which part."""

    def __init__(self, start: Callable[[Path], Part], parts: Parts, last: dict[int, int]) -> None:
        self._start, self._parts, self._last = start, parts, last
        self._open: tuple[Path, Part] | None = None
        self.seen = 0

    def __call__(self, item: tuple[int, list[Any]]) -> None:
        """Take in one batch with its place in the plan; a place below 0 is no batch."""
        place, batch = item
        if place < 0:
            return
        if self._open is None:
            folder = self._parts.begun()
            self._open = folder, self._start(folder)
        folder, part = self._open
        part(batch)
        self.seen += 1
        if place in self._last:
            part.close()
            self._parts.done(self._last[place], folder)
            self._open = None


class OwnSignals(lightning.Callback):
    """Keeps Lightning from swallowing SIGTERM: what this process does at a signal is decided elsewhere."""

    def __init__(self) -> None:
        self._terminate = signal.getsignal(signal.SIGTERM)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Put back the handler that was there before."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminate)


def planned(items: Sequence[Any], size: int) -> list[list[Any]]:
    """Cut items into batches; inside windows of a few batches they are sorted by length (stable)."""
    window, batches = size * SORT_WINDOW, []
    for at in range(0, len(items), window):
        part = sorted(items[at : at + window], key=len)
        batches += [part[i : i + size] for i in range(0, len(part), size)]
    return batches


def segments(batches: int) -> list[range]:
    """Return which batches make up each part: runs of equal length, the last one shorter, PARTS at most."""
    size = -(-batches // PARTS) or 1
    return [range(at, min(at + size, batches)) for at in range(0, batches, size)]
