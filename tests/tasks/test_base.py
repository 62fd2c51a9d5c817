"""Every task's YAML agrees with its dataclass, and no task imports torch before it loads."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvexp.errors import UserError
from kvexp.prompt import Context
from kvexp.tasks.base import Task, TaskSet

CONF = Path(__file__).parents[2] / "conf" / "task"
FILES = {path.stem: path for path in sorted(CONF.glob("*.yaml")) if "_target_" in path.read_text()}


def dataclass_of(path):
    module, name = yaml.safe_load(path.read_text())["_target_"].rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def as_written(field):
    """The default of a knob as a file writes it; a part of a task is named."""
    if field.default is dataclasses.MISSING:
        return field.default_factory().id
    return list(field.default) if isinstance(field.default, tuple) else field.default


def test_the_tasks():
    assert set(FILES) >= {"intents", "banking77", "clinc150", "trec", "lm_eval"}
    assert set(FILES) >= {"locomo", "ama_bench", "state_change"}


@pytest.mark.parametrize("name", FILES)
def test_yaml_and_dataclass_agree(name):
    knobs, task = yaml.safe_load(FILES[name].read_text()), dataclass_of(FILES[name])
    del knobs["_target_"]
    assert knobs == {field.name: as_written(field) for field in dataclasses.fields(task)}
    assert issubclass(task, Task) and task.id == name
    assert FILES[name].read_text().startswith("# ")


def test_tasks_are_configured_without_torch():
    modules = sorted(
        yaml.safe_load(path.read_text())["_target_"].rsplit(".", 1)[0] for path in FILES.values()
    )
    heavy = {"torch", "transformers", "datasets", "lm_eval", "sympy", "math_verify", "networkx"}
    code = f"import sys, {', '.join(modules)}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_set_without_traces_says_so():
    loaded = TaskSet(Context((), ()), [], ("a",), ((1,),), ((1, 2),), 2, [], "", ("\n",), 2)
    with pytest.raises(UserError, match="this task has no traces"):
        loaded.traces(1, "none", 0)


def test_what_a_task_may_be_asked():
    asked = dataclass_of(FILES["intents"])().check_asked, dataclass_of(FILES["locomo"])().check_asked
    for check in asked:
        check("test", None)
        for split, limit, told in (("tset", 1, "split=tset is none of"), ("test", 0, "limit=0 is too small")):
            with pytest.raises(UserError, match=told):
                check(split, limit)
    asked[0]("validation", 1)
    with pytest.raises(UserError, match="task=locomo has no split=validation: leave split out"):
        asked[1]("validation", 1)
