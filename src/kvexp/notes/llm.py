"""Which language model takes the steps of a memory that need one: none, the model under test, or an endpoint.

The model under test is known while a task is loaded for it: `with under_test(loaded): task.load(...)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp.errors import UserError
from kvexp.notes.endpoint import answers_folder, configured, kept
from kvexp.notes.units import Ask
from kvexp.prompt import bos_ids, encode

SELF = "self"
_loaded: ContextVar[Any] = ContextVar("loaded", default=None)


@contextmanager
def under_test(loaded: Any) -> Iterator[None]:
    """Make a loaded model the one that `llm=self` means; before a method is attached to it."""
    token = _loaded.set(loaded)
    try:
        yield
    finally:
        _loaded.reset(token)


def named(llm: str | None, knob: str) -> Ask | None:
    """Return the language model that a knob names: None, "self", or the name of a model at the endpoint.

    Raises UserError where there is no model under test or no endpoint.
    """
    if llm is None:
        return None
    if llm != SELF:
        return configured(llm, knob)
    if _loaded.get() is None:
        raise UserError(
            f"{knob}={SELF} is the model under test, and none is loaded here: name a model at an endpoint, or"
            f" set {knob}=null to work offline"
        )
    return Local(_loaded.get(), answers_folder())


@dataclass(frozen=True)
class Local:
    """A loaded model; called with a prompt, it returns its greedy answer of `max_tokens` tokens at most.

    The prompt is the user's turn of the model's chat template where it has one. Answers are kept in `folder`
    (None: nowhere) for the weights, the dtype and the prompt.
    """

    loaded: Any
    folder: Path | None = None
    max_tokens: int = 256

    def __call__(self, prompt: str) -> str:
        """Return the answer to a prompt."""
        key = [self.loaded.sha256, str(self.loaded.dtype), self.max_tokens, prompt]
        return kept(self.folder, json.dumps(key).encode(), lambda: self._decoded(prompt))

    def _decoded(self, prompt: str) -> str:
        import torch

        tokenizer, model = self.loaded.tokenizer, self.loaded.model
        given = torch.tensor([self._ids(prompt)], device=self.loaded.device)
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=self.max_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id
            if tokenizer.pad_token_id is not None
            else tokenizer.eos_token_id,
        )
        return str(tokenizer.decode(made[0, given.shape[1] :], skip_special_tokens=True)).strip()

    def _ids(self, prompt: str) -> list[int]:
        tokenizer = self.loaded.tokenizer
        if not tokenizer.chat_template:
            return [*bos_ids(tokenizer), *encode(tokenizer, f"{prompt}\n")]
        turns = [{"role": "user", "content": prompt}]
        rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return [*encode(tokenizer, rendered)]
