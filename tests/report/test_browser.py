"""The page in headless Chromium: no console error, no network, and everything a reader does with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import browser
from kvexp.report import page
from kvexp.report.collect import collect
from kvexp.report.colours import SHAPES
from kvexp.report.details import detail
from kvexp.report.groups import groups
from kvexp.report.items import Items
from kvexp.report.page_data import page_data

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        browser.programs() is None,
        reason="NO BROWSER: chromium and chromedriver are needed (Debian: chromium, chromium-driver)",
    ),
]
EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'>"
DRAWN = "return document.querySelectorAll('.figure svg').length >= 2"


@pytest.fixture(scope="module")
def library():
    pytest.importorskip("vl_convert")
    return page.plot_library()


def written(folder: Path, library: str) -> Path:
    found, items = collect([folder / "runs"]), Items()
    data, records = page_data(found, groups(found.records), items, [str(folder / "runs")])
    path = folder / "index.html"
    path.write_text(page.render(data, [detail(r, items, path) for r in records], library))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory, library, make_record, make_samples, store):
    """Two methods at two budgets, full, a failed and a partial run, and samples that try to be markup."""
    folder = tmp_path_factory.mktemp("small")
    for method, budget, right in (
        ("full", "full", [1, 1, 1, 0, 1]),
        ("snapkv", 256, [1, 0, 0, 0, 1]),
        ("snapkv", 512, [1, 1, 0, 0, 1]),
        ("tova", 256, [0, 0, 0, 0, 1]),
        ("tova", 512, [0, 1, 0, 0, 1]),
    ):
        rows = make_samples(right)
        rows[0] |= {"query": EVIL, "answer": EVIL}
        record = make_record(method, budget, accuracy=sum(right) / 5, n=5)
        record["fidelity"] = {
            "by_position": {"kl": [0.1, 0.2, 0.3]},
            "by_layer": {"relative_error": [0.1, 0.2]},
        }
        record["timing"] |= {"step_p50_s": 0.1, "step_p99_s": 0.2, "step_max_s": 0.4}
        store(folder / f"runs/{method}{budget}", record, rows)
        if method in ("snapkv", "full"):
            pruned = [2] if method == "snapkv" else []
            steps = {"samples": ["0"], "steps": 4, "step_ms": [9.0, 2.0, 8.0, 2.0], "pruned": pruned}
            (folder / f"runs/{method}{budget}/latency.json").write_text(json.dumps({"batches": [steps]}))
    store(folder / "runs/bad", make_record("tova", 1024, error=EVIL), [])
    (folder / "runs/half").mkdir()
    (folder / "runs/half/config.yaml").write_text("seed: 0\n")
    return written(folder, library)


@pytest.fixture(scope="module")
def large(tmp_path_factory, library, make_record, make_samples, store):
    """A thousand cells."""
    folder = tmp_path_factory.mktemp("large")
    rows = make_samples([1, 0] * 12)
    for task in range(10):
        for number in range(100):
            record = make_record(
                f"m{number % 20}", 64 * (1 + number // 20), accuracy=number / 100, task=f"t{task}"
            )
            record["cell"] = f"{task}-{number}"
            store(folder / f"runs/{task}/{number}", record, rows)
    yield written(folder, library)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def chromium():
    with browser.opened() as opened:
        yield opened


@pytest.fixture
def window(chromium):
    """The browser as a desktop in light colours; what is on the console at the end fails the test."""
    chromium.size(1280, 900)
    chromium.prefer("light")
    chromium.errors()
    yield chromium
    assert chromium.errors() == []


def test_it_opens_from_disk_and_draws(window, small):
    window.open(small)
    window.wait(DRAWN)
    assert window.text("h1") == "intents"
    assert "0 of 4 rows better" in window.text("#view-compare")
    window.run("window.scrollTo(0, document.body.scrollHeight)")
    window.wait("return document.querySelectorAll('.figure svg').length === 8")
    titles = window.texts(".figure h3")
    assert titles == [
        "Accuracy by budget",
        "Quality and memory",
        "Quality and latency",
        "Difference to full, on the same items",
        "Latency of a step",
        "Latency of each step",
        "KL from full, by position",
        "Relative error, by layer",
    ]
    assert window.run("return performance.getEntriesByType('resource').length") == 0


def test_steps_at_which_no_rows_left_are_drawn_without_marks(window, small):
    window.open(small)
    window.wait(DRAWN)
    assert "Marks: rows left at this step." in window.text("#view-compare")
    window.click("[data-label='snapkv']")
    window.wait("return !document.querySelector('#view-compare').innerText.includes('Marks: rows')")
    window.run("window.scrollTo(0, document.body.scrollHeight)")
    window.wait("return [...document.querySelectorAll('.figure')].every((one) => one.querySelector('svg'))")
    assert "Latency of each step" in window.texts(".figure h3")


def test_a_method_is_hidden_in_the_figures_and_comes_back(window, small):
    window.open(small)
    window.wait(DRAWN)
    window.click("[data-label='tova']")
    window.wait(DRAWN)
    assert window.run("return document.querySelector('[data-label=tova]').ariaPressed") == "false"
    colour = window.run("return colour('tova')")
    marks = "return document.querySelectorAll(`.plot svg [fill='${arguments[0]}']`).length"
    assert window.run(marks, colour) == 0
    window.click("[data-label='tova']")
    window.wait(DRAWN)
    assert window.run(marks, colour) > 0


def test_cells_filter_and_sort(window, small):
    window.open(small, "#cells")
    assert window.text("#count") == "6 cells"
    window.type("#search", "snapkv 512")
    assert window.text("#count") == "1 of 6 cells"
    assert window.texts("#view-cells tbody td:first-child") == ["snapkv5120"]
    window.run("document.querySelector('#search').value = ''")
    window.run(
        "const s = document.querySelector('#filter-status'); s.value = 'complete';"
        "s.dispatchEvent(new Event('input'))"
    )
    assert window.text("#count") == "5 of 6 cells"
    heads = [head.split("\n")[0].rstrip("\xa0↕") for head in window.texts("#view-cells th")]
    assert heads == ["cell", "method", "budget", "status", "score", "value", "items", "MiB", "ms / token"]
    assert window.text("#view-cells .facts") == "all: task intents · model tiny · seed 0"
    head = "#view-cells th:nth-child(6)"
    window.click(f"{head} button")
    assert window.run("return document.querySelector(arguments[0]).ariaSort", head) == "descending"
    first = window.texts("#view-cells tbody td:first-child")
    window.click(f"{head} button")
    assert window.texts("#view-cells tbody td:first-child")[0] == first[-1] == "tova2560"
    assert first[0] == "fullfull0"


def test_a_cell_shows_its_samples_as_text(window, small):
    window.open(small, "#cells")
    window.click("[data-cell='snapkv2560']")
    assert window.run("return document.querySelector('#cell').open")
    assert window.text("#cell-title") == "snapkv, 256"
    shown = window.texts(".sample")
    assert len(shown) == 5 and EVIL in shown[0] and "Expected" in shown[0]
    assert window.run("return window.pwned") is None
    assert window.run("return document.querySelectorAll('img').length") == 0
    assert window.run("return document.querySelector('.files a').getAttribute('href')").startswith("runs/")
    assert "cpu" in window.text("#cell .pairs")


def test_the_keyboard_is_enough(window, small):
    window.open(small)
    window.press("/")
    window.wait("return document.activeElement.id === 'search'")
    window.type("#search", "snapkv")
    active = "return document.activeElement.dataset.cell ?? ''"
    for _ in range(60):
        window.press("tab")
        if window.run(active):
            break
    assert window.run(active) == "snapkv2560"
    window.press("enter")
    assert window.text("#cell-title") == "snapkv, 256"
    window.press("right")
    assert window.text("#cell-title") == "snapkv, 512"
    window.press("left")
    assert window.text("#cell-title") == "snapkv, 256"
    window.press("escape")
    assert not window.run("return document.querySelector('#cell').open")
    assert window.run(active) == "snapkv2560"


def test_runs_that_failed_or_never_ended_are_listed(window, small):
    window.open(small, "#runs")
    assert "5 complete, 1 failed, 1 partial" in window.text("#view-runs")
    assert EVIL in window.text("#view-runs") and window.run("return window.pwned") is None


def test_dark_follows_the_system_and_a_choice_stays(window, small):
    background = "return getComputedStyle(document.body).backgroundColor"
    window.open(small)
    assert window.run(background) == "rgb(255, 255, 255)"
    window.prefer("dark")
    window.wait("return document.documentElement.dataset.theme === 'dark'")
    assert window.run(background) == "rgb(20, 23, 27)"
    window.click("#theme")
    assert (window.text("#theme"), window.run(background)) == ("Theme: light", "rgb(255, 255, 255)")
    window.open(small)
    assert window.run(background) == "rgb(255, 255, 255)"
    window.click("#theme")
    window.click("#theme")
    assert window.text("#theme") == "Theme: auto"


def test_no_table_is_wider_than_a_desktop(window, small):
    """The first group, opened details and all, and the table of cells."""
    wider = "return [...document.querySelectorAll('.scroll')].map(s => s.scrollWidth - s.clientWidth)"
    for view, tables in (("", 2), ("#cells", 3), ("#runs", 4)):
        window.run("location.hash = arguments[0]", view) if view else window.open(small)
        window.wait("return document.readyState === 'complete'")
        assert window.run(wider) == [0] * tables


def test_marks_beside_text_are_those_of_the_figures(window, small):
    """Also the two that Vega does not draw by a name."""
    window.open(small)
    window.wait(DRAWN)
    names = window.run("return [...Object.keys(SHAPES), ...Object.keys(OWN_SHAPES)]")
    assert sorted(names) == sorted(SHAPES)
    window.run("DATA.groups[0].shapes.tova = 'star'; navigate()")
    window.wait(DRAWN)
    assert window.run("return document.querySelector('[data-label=tova] path').getAttribute('transform')")
    drawn = "[...document.querySelectorAll('.plot .mark-symbol path')].map(p => p.getAttribute('d'))"
    star = window.wait(f"return {drawn}.find(d => d.split('L').length > 5)")
    assert star.count("L") == 9


@pytest.mark.parametrize("view", ["", "#cells", "#runs", "#notes", "#cell/snapkv2560"])
def test_a_phone_scrolls_in_one_direction(view, window, small):
    window.size(390, 844)
    window.open(small, view)
    window.wait("return document.readyState === 'complete'")
    wider = "const d = document.documentElement; return d.scrollWidth - d.clientWidth"
    assert window.run(wider) == 0
    if not view:
        window.wait(DRAWN)
        assert window.run(wider) == 0
        assert window.run("return getComputedStyle(document.querySelector('.pick')).display") == "block"


def test_a_thousand_cells_open_at_once(window, large):
    window.open(large, "#cells")
    window.wait("return document.querySelector('#count')?.innerText === '1,000 cells'")
    [timing] = window.run("return performance.getEntriesByType('navigation').map(n => n.toJSON())")
    assert timing["duration"] < 5000, "milliseconds from the start to the end of loading"
    rows = "return document.querySelectorAll('#view-cells tbody tr').length"
    made = window.run(rows)
    assert made <= 180, "rows are made as they are scrolled to"
    window.run("window.scrollTo(0, document.body.scrollHeight)")
    window.wait(f"{rows} > {made}")
    window.type("#search", "t7 m3")
    assert window.text("#count") == "5 of 1,000 cells"
