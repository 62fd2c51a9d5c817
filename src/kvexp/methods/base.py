"""What every method is: a frozen dataclass whose fields are its knobs, with three verbs that have defaults.

`prepare` learns something from calibration, `encode` turns a context into a cache, `attach` switches the
model over. `full` overrides none of them. A method's module imports torch only inside its verbs, so that its
knobs are checked before anything heavy loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from kvexp.prompt import Context

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kvexp.budget import Budget
    from kvexp.cache.kv_cache import KVCache
    from kvexp.stats.shares import Shares


class Memory(Protocol):
    """What `prepare` leaves behind and `encode` uses; saved as safetensors and a manifest."""

    manifest: dict[str, Any]

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        ...


class Part(Protocol):
    """What is collected of a few batches, in a folder of its own."""

    def __call__(self, batch: list[Any]) -> None:
        """Take in one batch."""
        ...

    def close(self) -> None:
        """Write what is not written yet."""
        ...


class Calibration(Protocol):
    """What `prepare` is given: the text to learn from, and ways to work on it, with others where there are.

    Every process of a run calls the same verbs in the same order, and has the same answers.
    """

    context: Context
    traces: Sequence[Sequence[int]]  # token ids of each trace, as they follow the context
    seed: int

    def collect(self, start: Callable[[Path], Part], items: Sequence[Any], what: str) -> list[Path]:
        """Give every item, in batches and without gradients, to a part; return the parts' folders in order.

        `start(folder)` makes the part that writes there. Which items are in a part depends on the items
        alone; parts that an earlier run completed are not run again.
        """
        ...

    def spread(
        self, keys: Sequence[int], build: Callable[[int, Shares], dict[str, torch.Tensor]], what: str
    ) -> dict[int, dict[str, torch.Tensor]]:
        """Return `build(key, shares)` of every key, each computed once or by an earlier run.

        By one process, whose share is the whole; where there are more processes than keys, by all together,
        each on its share.
        """
        ...

    def track(self, items: Iterable[Any], what: str, total: int | None = None) -> Iterable[Any]:
        """Iterate with a progress bar that shows rate and time left."""
        ...


@dataclass(frozen=True)
class Method:
    """Base of all methods; as it stands it is attention to the whole context."""

    id: ClassVar[str]  # the name of the method and of its YAML file
    family: ClassVar[str]
    paper: ClassVar[str] = ""
    needs_shared_context: ClassVar[bool] = False  # serves only tasks with one context for all queries
    memory_id: ClassVar[str] = ""  # names its memories in the store; "": the method's own name
    needs_calibration: ClassVar[bool] = False
    learns_from: ClassVar[Literal["traces", "text"]] = "traces"  # of the task, or of a corpus
    needs_full_layer: ClassVar[bool] = False  # needs a layer that attends to the whole context
    exact: ClassVar[bool] = True  # whether it equals full attention when the budget holds everything
    needs_query: ClassVar[bool] = False  # `encode` takes what will be asked, `query`, and works for it alone
    needs_units: ClassVar[bool] = False  # serves only tasks whose contexts are made of several units of text
    endless: ClassVar[bool] = (
        False  # may read more than the model was made for: no distance grows with the text
    )
    uses_budget: ClassVar[bool] = True  # else every budget is the same cell, `full`
    expects: ClassVar[
        tuple[str, ...]
    ] = ()  # counters that must be above zero when the context exceeds the budget
    by_head: ClassVar[bool] = False  # whether what it does in a KV head depends on that head's rows alone
    taps: ClassVar[bool] = False  # whether its layers read pre-RoPE queries

    def memory_class(self) -> Any:
        """Return the class of the memory that `prepare` builds: `FORMAT`, `load(folder, facts)`."""
        raise NotImplementedError(f"{self.id} learns nothing")

    def memory_facts(self, budget: Budget, seed: int) -> dict[str, Any]:
        """Return what decides, beside model and calibration, what a memory holds: its fingerprint."""
        return {"budget": str(budget), "seed": seed}

    def opened(self, model: Any, folder: Path | None = None, sha256: str | None = None) -> Any:
        """Return what contexts share though nothing is learnt (a store, in `folder` where it has files)."""
        return None

    def sample_knobs(self) -> dict[str, Any]:
        """Return the knobs that decide what is collected on disk; memories that share them share it."""
        return {}

    def tokenized(self, tokenizer: Any) -> Method:
        """Return the method with texts among its knobs turned into token ids, where it has any."""
        return self

    def prepare(self, model: Any, calibration: Calibration, budget: Budget) -> Any:
        """Learn from calibration; return a Memory, or None when there is nothing to learn."""
        return None

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
    ) -> KVCache:
        """Return a cache that stands for `context`; once per context, queries then `fork` it.

        Several contexts are encoded as one batch, padded on the left.
        `budget` is a Budget, or is written as on the command line. What the cache has seen is
        `method.select(context, budget)`: `generate` wants these ids before the query's, not all of `context`,
        since it skips as many of its input ids as the cache has seen.
        """
        from kvexp.budget import Budget
        from kvexp.cache.kv_cache import empty_cache, prefill

        contexts = several(context)
        budget = None if budget is None else Budget.parse(budget, max(map(len, contexts)))
        with self.attach(model, memory):
            return prefill(model, [self.select(one, budget) for one in contexts], empty_cache(model))

    def check_budget(self, budget: Budget) -> None:
        """Raise UserError where the method can do nothing with so few rows; called before anything loads."""

    def select(self, context: Context | Sequence[int], budget: Budget | int | str | None) -> Sequence[int]:
        """Return the token ids that are really encoded (text-level methods choose some)."""
        return context.ids if isinstance(context, Context) else context

    @contextmanager
    def attach(self, model: Any, memory: Any = None) -> Iterator[None]:
        """Switch `model` to this method inside a `with` block."""
        from kvexp.attention.attach import attached

        with attached(model, tap=self.taps):
            yield


def several(context: Context | Sequence[int] | Sequence[Context]) -> list[Context | Sequence[int]]:
    """Return a list of contexts: of one, or of several."""
    if isinstance(context, Context) or not context or not isinstance(context[0], Context):
        return [context]  # type: ignore[list-item]
    return list(context)  # type: ignore[arg-type]
