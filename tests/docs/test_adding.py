"""The method of docs/adding.md is what it says: two files that work."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml

from evict import PROMPTS, Event, Reference, by_hand, hold, top, watched
from kvexp.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "adding.md"


def block(language: str) -> str:
    [text] = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return text


@pytest.fixture(scope="module")
def method() -> Any:
    module = ModuleType("vnorm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "vnorm", module)  # dataclasses look up names there
        exec(compile(block("python"), "vnorm.py", "exec"), module.__dict__)
    return module.__dict__["Vnorm"]


def test_its_file_of_knobs_agrees_with_it(method: Any) -> None:
    node = yaml.safe_load(block("yaml"))
    assert node.pop("_target_") == "kvexp.methods.eviction.vnorm.Vnorm"
    assert node == {field.name: field.default for field in dataclasses.fields(method)}
    assert method.id == "vnorm"


def test_it_keeps_what_it_says(method: Any) -> None:
    def kept(events: list[Event]) -> list[list[list[int]]]:
        last = [event for event in events if event.forward == events[-1].forward]
        heads = [zip(event.values, event.positions, strict=True) for event in last]
        return [[top(v.float().abs().sum(-1), where, 12) for v, where in one] for one in heads]

    reference: Reference = kept
    for sequence in watched(method(interval=4, p=1.0), "llama", PROMPTS, 12, 10):
        assert hold(sequence, reference) >= 2


def test_by_hand(method: Any) -> None:
    values = torch.tensor([[[3.0, 0.0], [2.0, 2.0], [1.0, 0.0]]])  # 2-norms 3, 2.83, 1; 1-norms 3, 4, 1
    assert by_hand(method(), [(values, values, values)], 1) == [[0]]
    assert by_hand(method(p=1.0), [(values, values, values)], 1) == [[1]]
    with pytest.raises(UserError, match=r"method\.p=0\.5 gives no norm"):
        method(p=0.5)
