"""Tasks of lm-eval over our adapter, against lm-eval's own HFLM on the same model, document by document.

The prompts, filters and metrics are those of tasks that lm-eval ships; only their rows are local ones, since
each would load its own from a hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import lm_eval.tasks
import pytest
import yaml
from lm_eval.models.huggingface import HFLM

from kvexp import tiny
from kvexp.budget import Budget
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.methods.baseline.full import Full
from kvexp.methods.baseline.truncate import Truncate
from kvexp.run import run
from kvexp.tasks.adapter import KVLM
from kvexp.tasks.lm_eval_task import LmEval
from kvexp.tasks.session import Session
from kvexp.tasks.stock import evaluate_stock

SHIPPED = Path(lm_eval.tasks.__file__).parent
LETTERS = ["A", "B", "C", "D"]
THINGS = ["ice", "a glowing coal", "moss on the north side of a tree", "tea", "salt", "an owl", "iron", "dew"]
SCIENCE = [
    {
        "id": str(i),
        "question": f"Which of these is most like {thing}?",
        "choices": {"text": [THINGS[i - 1], THINGS[i - 2], "none", f"{thing} itself"], "label": LETTERS},
        "answerKey": LETTERS[i % 4],
    }
    for i, thing in enumerate(THINGS)
]
SUMS = [
    {"question": f"{i} boxes of {i + 3} nails: how many?", "answer": f"{i}*{i + 3}. So\n#### {i * (i + 3)}"}
    for i in range(2, 9)
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three tasks: arc_easy and gsm8k over local rows, and one whose rows are missing."""
    folder = tmp_path_factory.mktemp("tasks")
    define(folder, "science", "arc/arc_easy.yaml", SCIENCE)
    define(
        folder, "sums", "gsm8k/gsm8k.yaml", SUMS, generation_kwargs={"until": ["Q:", "\n"], "max_gen_toks": 9}
    )
    define(folder, "gone", "arc/arc_easy.yaml", SCIENCE)
    (folder / "gone.jsonl").unlink()
    group = {"group": "both", "task": ["science", "sums"]}
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    return folder


def define(folder: Path, name: str, shipped: str, rows: list[dict[str, Any]], **more: Any) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {split: str(data) for split in ("train", "validation", "test")}
    task = {
        "include": str(SHIPPED / shipped),
        "task": name,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        **more,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def by_hflm(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """What lm-eval reports with its own model class and its default seeds."""
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(pretrained=tiny.build("llama"), tokenizer=tiny.tokenizer(), batch_size=2)
    options = {"bootstrap_iters": 0, **options}
    return lm_eval.simple_evaluate(model=model, tasks=[name], task_manager=manager, **options)


def by_us(folder: Path, name: str, limit: int | None = None, method: Any = None, **knobs: Any) -> Any:
    model, method = tiny.build("llama"), method or Full()
    loaded = SimpleNamespace(model=model, tokenizer=tiny.tokenizer())
    with method.attach(model):
        adapter = KVLM(Session(loaded, method, None, Budget(None)), batch_size=3)
        return evaluate_stock(LmEval(name=name, include_path=str(folder), **knobs), adapter, limit, seed=0)


def numbers(responses: Any) -> list[float]:
    return [float(value) for response in responses for value in response]


def assert_equal(samples: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Same documents, prompts and answers; numbers to 1e-4."""
    assert len(samples) == len(theirs)
    for ours, row in zip(samples, theirs, strict=True):
        assert ours["id"].split("/")[1:] == [str(row["doc_id"]), row["filter"]]
        assert ours["query"] == row["arguments"][0][0]
        assert ours["expected"] == str(row["target"])
        assert ours["scores"] == {metric: float(row[metric]) for metric in row["metrics"]}
        if isinstance(ours["answer"], str):
            assert [ours["answer"]] == row["filtered_resps"]
        else:
            assert numbers(ours["answer"]) == pytest.approx(numbers(row["filtered_resps"]), abs=1e-4)


@pytest.mark.parametrize("num_fewshot", [None, 2])
def test_a_choice_between_answers(tasks: Path, num_fewshot: int | None) -> None:
    metrics, samples, digest = by_us(tasks, "science", num_fewshot=num_fewshot)
    theirs = by_hflm(tasks, "science", num_fewshot=num_fewshot)
    assert_equal(samples, theirs["samples"]["science"])
    assert metrics["acc"]["value"] == theirs["results"]["science"]["acc,none"]
    assert metrics["acc_norm"]["value"] == theirs["results"]["science"]["acc_norm,none"]
    assert metrics["acc"]["n"] == 8 and metrics["acc"]["stderr"] > 0 and metrics["acc"]["higher_is_better"]
    assert samples[0]["prompt_tokens"] == len(samples[0]["query"].encode())
    assert len(digest) == 64
    if num_fewshot is None:
        assert by_us(tasks, "science", limit=3)[2] != digest


def test_an_answer_in_words_with_filters(tasks: Path) -> None:
    metrics, samples, _ = by_us(tasks, "sums", limit=4, num_fewshot=2)
    theirs = by_hflm(tasks, "sums", limit=4, num_fewshot=2)
    assert_equal(samples, theirs["samples"]["sums"])
    assert sorted(metrics) == ["exact_match_flexible-extract", "exact_match_strict-match"]
    assert metrics["exact_match_strict-match"]["n"] == 4


def test_a_group_names_its_tasks(tasks: Path) -> None:
    class Everything(lm_eval.tasks.TaskManager):
        def __init__(self, include_path: Any = None, include_defaults: bool = False) -> None:
            super().__init__(include_path=include_path, include_defaults=False)

    with (
        pytest.MonkeyPatch.context() as patch
    ):  # a group may name tasks that lm-eval ships: it scans them all
        patch.setattr(lm_eval.tasks, "TaskManager", Everything)
        metrics, samples, _ = by_us(tasks, "both", limit=2)
        assert {"science/acc", "science/acc_norm", "sums/exact_match_strict-match"} < set(metrics)
        assert len({sample["id"] for sample in samples}) == len(samples) == 2 + 2 * 2
        assert [sample["sample"] for sample in samples] == list(range(6))
        with pytest.raises(UserError, match=r"no task\.name=scienc, did you mean 'science'"):
            by_us(tasks, "scienc")


def test_rows_that_cannot_be_loaded_are_one_sentence(tasks: Path) -> None:
    with pytest.raises(UserError, match=r"cannot run task\.name=gone .*task\.include_path=FOLDER") as caught:
        by_us(tasks, "gone")
    assert "\n" not in str(caught.value)


def test_a_method_that_would_do_nothing_is_refused(tasks: Path) -> None:
    with pytest.raises(UserError, match="use method=full"):
        by_us(tasks, "science", method=Truncate())


def test_from_the_command_line(tasks: Path, tmp_path: Path) -> None:
    words = [
        "task=lm_eval",
        "task.name=science",
        f"task.include_path={tasks}",
        "model=tiny-llama",
        "method=full",
    ]
    (settings,) = settings_of([*words, "logger=none", f"output_dir={tmp_path}", "limit=5"])
    record = run(settings)
    theirs = by_hflm(tasks, "science", limit=5)
    lines = (settings.run_dir / "samples.jsonl").read_text().splitlines()
    assert_equal([json.loads(line) for line in lines], theirs["samples"]["science"])
    assert record["status"] == "complete" and record["choices"]["task"] == "lm_eval-science"
    assert record["metrics"]["acc"]["value"] == theirs["results"]["science"]["acc,none"]
    assert settings.run_dir.parent == tmp_path / "lm_eval-science/tiny-llama/full/bfull"

    (settings.run_dir / "record.json").unlink()  # killed between the last sample and the record
    again = run(settings)
    assert again["metrics"] == record["metrics"]
    assert (settings.run_dir / "samples.jsonl").read_text().splitlines() == lines
