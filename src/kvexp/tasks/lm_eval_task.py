"""lm_eval: any task that lm-eval knows, run and scored by lm-eval itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.tasks.base import Task, TaskSet, at_least


@dataclass(frozen=True)
class LmEval(Task):
    """The knobs of an lm-eval task.

    `name`: the task as lm-eval calls it. `include_path`: a folder with further task files.
    `num_fewshot`: its demonstrations (null: what the task says).
    `apply_chat_template`: put prompts in the model's chat format.
    """

    id: ClassVar[str] = "lm_eval"
    kind: ClassVar[str] = "lm_eval"
    shared_context: ClassVar[bool] = False

    name: str | None = None
    include_path: str | None = None
    num_fewshot: int | None = None
    apply_chat_template: bool = False

    def __post_init__(self) -> None:
        if not self.name:
            raise UserError("task=lm_eval needs the name of a task: add task.name=arc_easy, or another one")
        at_least("task.num_fewshot", self.num_fewshot, 0)

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> TaskSet:
        """Raise UserError: lm-eval makes the prompts, and they share no context."""
        raise UserError(f"task.name={self.name} has no shared context: use method=full")
