"""Final answers: where they stand in a text, which mean the same, and what can be no answer at all."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest

from kvexp.tasks import math_symbolic
from kvexp.tasks.math_answers import extract_answer, same_answer, same_integer
from kvexp.tasks.math_text import clean, number

DATA = os.environ.get("KVEXP_DATA_DIR")

SAME = [  # answer, expected
    ("0.5", r"\frac{1}{2}"),
    (r"\dfrac{14}{3}", r"\frac{14}{3}"),
    (r"\tfrac{14}3", r"\frac{14}{3}"),
    ("5/9", r"\frac 59"),
    ("4/3", r"\frac43"),
    (r"\frac{1}{3}", r"\frac{2}{6}"),
    ("0.33333", r"\frac13"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{9}{5}", r"1\frac{4}{5}"),
    ("1 4/5", r"1\frac{4}{5}"),
    ("137.5", r"137 \frac{1}{2}"),
    ("0.35625", ".35625"),
    ("18.9", r"\$18.90"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("f(2) = 1 + 4 = 5", "5"),
    ("y=2x+3", "y = 2x + 3"),
    ("3 + 2x", "y = 2x + 3"),
    ("-5x+7y-11z-4=0", "5x - 7y + 11z + 4 = 0"),
    ("145", r"145^\circ"),
    ("145°", r"145^{\circ}"),
    ("145 degrees", r"145^\circ"),
    ("864", r"864 \mbox{ inches}^2"),
    ("864 square inches", r"864 \mbox{ inches}^2"),
    ("5.4 cents", r"5.4 \text{ cents}"),
    ("5cm", "5"),
    (r"7\pi \text{ square units}", r"7\pi"),
    (r"50\%", "50"),
    ("50", r"50\%"),
    ("10080", r"10,\!080"),
    ("10{,}080", r"10,\!080"),
    ("11,111,111,100", r"11,\! 111,\! 111,\! 100"),
    (r"\$32,348", r"\$32,\!348"),
    (r"\sqrt{20}", r"2\sqrt{5}"),
    ("2√5", r"2\sqrt{5}"),
    (r"\frac{1}{\sqrt3}", r"\frac{\sqrt{3}}{3}"),
    ("7.2801", r"\sqrt{53}"),
    ("6366.2", r"\frac{20000}{\pi}"),
    ("3.1416", r"\pi"),
    (r"6.72 \times 10^{-5}", ".0000672"),
    ("6.72e-5", ".0000672"),
    (r"2^3", "8"),
    ("-5i + 6", "6 - 5i"),
    (r"\frac{1}{\tan x}", r"\cot x"),
    ("ab + 2a + 5b + 10", "(a+5)(b+2)"),
    ("(6, 31, -1)", "(6,31,-1)"),
    (r"\left(\tfrac32, -13.0\right)", r"\left( \frac{3}{2}, -13 \right)"),
    ("(-∞, 0]", r"(-\infty, 0]"),
    (r"(-\sqrt3,\sqrt3)", r"(-\sqrt{3}, \sqrt{3})"),
    ("[-2,7]", r"x \in [-2,7]"),
    (r"-2 \le x \le 7", r"x \in [-2,7]"),
    (r"(0,9)\cup(9,36)", r"(0,9) \cup (9,36)"),
    (r"\{-2, 1\}", "1,-2"),
    ("-2 and 1", "1,-2"),
    (r"x = 1 \text{ or } x = -2", "1,-2"),
    ("7, 5, and 3", "3, 5, 7"),
    (r"1-\sqrt{19}, 1+\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\begin{bmatrix} 0.2 \\ -3.6 \end{bmatrix}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    (r"\begin{pmatrix}1&2\\\sqrt4&4\end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 2 & 4 \end{bmatrix}"),
    ("52", "52_8"),
    ("52_{8}", "52_8"),
    ("C", r"\text{(C)}"),
    ("Evelyn", r"\text{Evelyn}"),
    (r"\text{ EVEN }", r"\text{even}"),
    (r"\text{9}", "9"),
]

DIFFERENT = [
    ("0.333", r"\frac13"),
    ("333/1000", r"\frac13"),
    ("13536", "13535"),
    ("13535.4", "13535"),
    ("0.5", r"50\%"),
    ("5000", r"50\%"),
    ("50", "0.5"),
    ("0.0000668", ".0000672"),
    (r"6.68 \times 10^{-5}", ".0000672"),
    ("7.27", r"\sqrt{53}"),
    ("8", r"8\pi"),
    (r"2\sqrt{3}", r"2\sqrt{5}"),
    (r"3\sqrt{13}", r"13\sqrt{3}"),
    ("y=5", "x=5"),
    ("2x+3=0", "0"),
    ("5m", "5"),
    ("3 million", "3"),
    ("5i", "5"),
    ("-5", "5"),
    ("9", "9x^2"),
    ("15y - 80", "15x - 80"),
    (r"\cot y", r"\cot x"),
    ("[2,4]", "(2,4)"),
    ("(1,2)", "(1,2]"),
    ("(31,6,-1)", "(6,31,-1)"),
    ("(0,9)", r"(0,9) \cup (9,36)"),
    ("(3,5,7)", "3, 5, 7"),
    ("1", "1,-2"),
    ("1,-2,3", "1,-2"),
    (r"\{1,3\}", r"\{1,2\}"),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("52_9", "52_8"),
    ("42", "52_8"),
    ("(B)", r"\text{(C)}"),
    ("odd", r"\text{even}"),
    ("sleepill", r"\text{ellipses}"),
    ("three", "3"),
    ("", "5"),
    ("x=", "5"),
    ("(,)", "(1,2)"),
    (r"\frac{1}{0}", "5"),
    (r"\frac{", "5"),
    ("a" * 5000, "5"),
    ("9" * 5000, "5"),
]


@pytest.mark.parametrize(("answer", "expected"), SAME)
def test_same(answer, expected):
    assert same_answer(answer, expected)


@pytest.mark.parametrize(("answer", "expected"), DIFFERENT)
def test_different(answer, expected):
    assert not same_answer(answer, expected)


def test_plain_answers_need_no_algebra(monkeypatch):
    def unwanted(*_):
        raise AssertionError

    monkeypatch.setattr("kvexp.tasks.math_answers.symbolically_equal", unwanted)
    assert same_answer("0.5", r"\frac12") and not same_answer("0.6", r"\frac12")
    assert same_answer("(1, 2]", r"\left(1, \tfrac42\right]")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-3", Fraction(-3)),
        ("+.5", Fraction(1, 2)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{-3}{4}", Fraction(3, 4)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        (r"2.5 \cdot 10^3", Fraction(2500)),
        ("1,23", None),
        ("3/0", None),
        ("2x", None),
        ("1" * 101, None),
    ],
)
def test_values(text, value):
    found = number(clean(text))
    assert (None if found is None else found.value) == value


def test_what_cannot_end_is_not_equal_and_what_follows_is_answered():
    start = time.monotonic()
    assert not math_symbolic.symbolically_equal("9^{9^{9^9}}", "x+1", seconds=1.0)
    assert time.monotonic() - start < 30
    assert math_symbolic.symbolically_equal("1+x", "x+1")


def test_equality_is_found_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(same_answer("b+a", "a+b")))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_checker_that_does_not_start_is_no_wrong_answer(monkeypatch):
    monkeypatch.setattr(math_symbolic, "_running", None)
    monkeypatch.setattr(math_symbolic, "__file__", os.devnull)
    with pytest.raises(RuntimeError, match="does not start"):
        same_answer("b+a", "a+b")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1} but then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, \{2\} \right\}} done", r"\left\{ 1, \{2\} \right\}"),
        (r"\boxed{x^{2^{3}}} and \boxed{unfinished", "x^{2^{3}}"),
        (r"\boxed{7} as asked, inside \boxed{}", "7"),
        (r"\boxed {3} or \fbox{4}", "4"),
        (r"The final answer is $\frac{3}{4}$. I hope that it is 1.", r"\frac{3}{4}"),
        ("Final answer: 12 apples. Or 13.", "12 apples"),
        ("**Final Answer**\n\n42\n", "42"),
        ("**Final answer:** (1, 2)", "(1, 2)"),
        ("First the final answer is 3. No: the final answer is 4.", "4"),
        ("1 + 1 = 2, so 1,234.5 in all", "1,234.5"),
        ("it is -3.", "-3"),
        ("from 2 to 10-7", "7"),
        ("nothing", None),
        ("", None),
    ],
)
def test_extraction(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "expected", "same"),
    [
        ("204", "204", True),
        ("025", "25", True),
        ("25", "025", True),
        ("73.0", "73", True),
        ("$540^\\circ$", "540", True),
        (r"\textbf{(113)}", "113", True),
        ("m+n = 116", "116", True),
        (r"33 \text{ square units}", "33", True),
        ("0", "000", True),
        ("2.04", "204", False),
        ("20400", "204", False),
        ("-204", "204", False),
        ("204.5", "204", False),
        ("1000", "1000", False),
        (r"\frac{408}{2}", "204", False),
        ("two", "2", False),
        ("", "0", False),
    ],
)
def test_integers(answer, expected, same):
    assert same_integer(answer, expected) is same


@pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")
def test_published_solutions_have_their_answers_and_no_others():
    with gzip.open(Path(DATA) / "math500" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    for row in rows:
        assert same_answer(extract_answer(row["solution"]), row["answer"]), row["id"]
    answers = [row["answer"] for row in rows if number(clean(row["answer"])) is not None]
    for one, other in itertools.pairwise(answers):
        assert same_answer(one, other) == (number(clean(one)).value == number(clean(other)).value)


@pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_equality_agrees_with_math_verify_on_published_answers(step):
    """On every `step`-th answer: against itself, against the one before it, and with its number changed."""
    from math_verify import parse, verify

    with gzip.open(Path(DATA) / "math500" / "test.jsonl.gz", "rt", encoding="utf-8") as lines:
        answers = [json.loads(line)["answer"] for line in lines][::step]
    read = [parse(f"${answer}$", parsing_timeout=None) for answer in answers]
    for i, answer in enumerate(answers):
        for j in (i, i - 1):
            theirs = verify(read[j], read[i], timeout_seconds=None)
            assert same_answer(answers[j], answer) == theirs, (answer, answers[j])
        assert same_answer(answer, answer)
        value = number(clean(answer))
        if value is not None:
            other = str(value.value + 1)
            assert not same_answer(other, answer)
            assert not verify(read[i], parse(f"${other}$", parsing_timeout=None), timeout_seconds=None)
