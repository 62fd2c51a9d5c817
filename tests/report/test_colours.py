"""Looks of methods: fixed, apart from each other, and visible on both grounds."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest

from kvexp.compose import conf_dir
from kvexp.report.colours import DARK, LIGHT, MARKERS, SHAPES, look, palette, shapes

METHODS = [path.stem for path in (conf_dir() / "method").glob("*.yaml")]
STYLE = (Path(__file__).parents[2] / "src/kvexp/report/page/style.css").read_text(encoding="utf-8")


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def rows(*labels: str) -> list[dict[str, str]]:
    return [{"label": label, "method": label.split()[0]} for label in labels]


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


def test_every_colour_stands_out_from_every_ground() -> None:
    grounds = [re.findall(rf"--{name}: (#\w{{6}})", STYLE) for name in ("paper", "panel")]
    for light, dark in palette([*METHODS, "full", "a method of mine"]).values():
        for on_light, on_dark in grounds:
            assert contrast(light, on_light) >= 3 and contrast(dark, on_dark) >= 3, (light, dark)


def test_no_two_methods_look_alike_and_each_looks_the_same_in_every_company() -> None:
    assert len({look(name) for name in METHODS}) == len(METHODS) > 30
    assert len({*LIGHT, *DARK}) == len(LIGHT) + len(DARK)
    company = list(METHODS)
    for seed in range(20):
        random.Random(seed).shuffle(company)
        some = company[: 2 + seed]
        assert shapes(rows(*some)) == {name: SHAPES[look(name)[1]] for name in some}
        assert palette(some) == {name: look(name)[0] for name in some}


def test_a_method_that_is_not_known_keeps_its_look_and_takes_no_other() -> None:
    known = {look(name) for name in METHODS}
    for number in range(200):
        assert look(f"mine{number}") == look(f"mine{number}") and look(f"mine{number}") not in known
    twins = next(
        (a, b)
        for a, b in itertools.combinations((f"mine{number}" for number in range(200)), 2)
        if look(a) == look(b)
    )
    assert len(set(shapes(rows(*twins)).values())) == 2


def test_variants_of_a_method_take_marks_that_are_free() -> None:
    assert shapes(rows("asm a", "asm b", "tova", "asm c")) == {
        "asm a": "circle",
        "asm b": "diamond",
        "tova": "square",
        "asm c": "triangle-up",
    }
    ten = shapes(rows(*(f"asm {number}" for number in range(11))))
    assert len(set(ten.values())) == len(SHAPES) == len(MARKERS) == 10 and ten["asm 10"] == "circle"
