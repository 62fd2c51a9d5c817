"""What methods over a base learn lies in one place, whoever asked first."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import lightning
import pytest

import helpers
import kvexp
from kvexp.budget import Budget
from kvexp.calibration.prepare import prepare
from kvexp.errors import UserError
from kvexp.methods.eviction.adakv import AdaKV
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.h2o import H2O
from kvexp.methods.eviction.over_base import OverBase
from kvexp.methods.eviction.rkv import RKV
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.methods.eviction.two_phase import TwoPhase
from kvexp.methods.eviction.vatp import VATP
from kvexp.prompt import Context

BASE = TriAttention(mode="per_layer_perhead")
OVER = [AdaKV(base=BASE), TwoPhase(at_decode=BASE), TwoPhase(at_prefill=BASE, at_decode=RKV())]
trainer = functools.partial(lightning.Trainer, accelerator="cpu", devices=1)


def test_statistics_are_measured_once_for_all(tmp_path: Path) -> None:
    loaded = kvexp.load("tiny-llama")
    segments = [helpers.tokens(n, seed=n) for n in (20, 12)]

    def learnt(method: EvictionMethod) -> tuple[Path, bool]:
        arguments = (Context((), ()), segments, Budget(64), 0, tmp_path, 2, trainer)
        return prepare(method, loaded, *arguments)[1:]

    folder, built = learnt(BASE)
    assert built
    for method in (*OVER, replace(BASE, norm="variance")):
        assert learnt(method) == (folder, False)
    more = replace(BASE, budgets="reconstruction")
    other, built = learnt(more)
    assert built and other != folder
    assert learnt(AdaKV(base=more)) == (other, False)


def test_what_a_method_says_of_itself_is_said_by_its_base() -> None:
    for method in OVER:
        assert method.needs_calibration and method.learns_from == "text"
        assert method.memory_id == "query_statistics"
    assert not AdaKV().needs_calibration and not VATP().needs_calibration
    assert VATP().observes and AdaKV(base=H2O()).observes and not AdaKV().observes
    assert VATP(base=SnapKV(window=7)).window_size == 7


@pytest.mark.parametrize("kind", [AdaKV, VATP])
def test_protection_that_the_base_contradicts_is_refused_at_once(kind: type[OverBase]) -> None:
    with pytest.raises(UserError, match="recent=3 has no effect beside recent_percent=50"):
        kind(base=H2O(), recent=3)
    with pytest.raises(UserError, match=r"smooth=true of method\.base has no effect: write method\.smooth"):
        kind(base=SnapKV(smooth=True))
