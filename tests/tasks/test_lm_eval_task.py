"""The knobs of lm-eval tasks."""

from __future__ import annotations

import pytest

from kvexp.errors import UserError
from kvexp.tasks.lm_eval_task import LmEval


def test_it_needs_a_name():
    with pytest.raises(UserError, match=r"add task\.name=arc_easy"):
        LmEval()


def test_it_has_no_context_of_its_own():
    task = LmEval(name="arc_easy")
    assert (task.id, task.kind, task.shared_context, task.name) == ("lm_eval", "lm_eval", False, "arc_easy")
    with pytest.raises(UserError, match=r"task\.name=arc_easy has no shared context: use method=full"):
        task.load(None, seed=0)


def test_fewshot_is_not_negative():
    with pytest.raises(UserError, match=r"task\.num_fewshot=-1"):
        LmEval(name="arc_easy", num_fewshot=-1)
