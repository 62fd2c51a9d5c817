"""A model of which two processes hold a part each answers as one that is whole; what cannot is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import helpers
import kvexp
from kvexp import cli, tiny
from kvexp.attention.sliced import require_sliceable, slices
from kvexp.compose import conf_dir
from kvexp.errors import UserError
from kvexp.measure.usage import cache_usage
from kvexp.methods.base import Method
from kvexp.run import run

ROOT = Path(__file__).parents[1]
BY_HEAD = {
    *("full", "no_context", "truncate", "streaming_llm", "knorm", "snapkv", "pyramidkv", "h2o", "rkv"),
}
HF = ["model=hf", "model.id=some/model", "model.tp_plan=auto", "method=full", "task=intents", "logger=none"]
LABELS = "task=intents task.context_tokens=300 task.n_labels=4 task.n_calibration=4 limit=6 fidelity=true"
ASKED = "task=passkey task.context_tokens=120 task.n=2 task.n_facts=2 temperature=1.0 samples=2"
CELLS = (f"{LABELS} method=snapkv budget=128", f"{ASKED} method=h2o budget=60")

PARTS = """
import json, sys
import torch
import kvexp
from kvexp import cli
from kvexp.crew.slices import Slices

folder, others, methods, cells = json.loads(sys.argv[1])
ids = torch.randint(5, 250, (120,), generator=torch.Generator().manual_seed(0)).tolist()

def answers(name, loaded):
    method = kvexp.method(name)
    with method.attach(loaded.model), torch.no_grad():
        cache = method.encode(loaded.model, ids, None, 64)
        return torch.cat([loaded.model(torch.tensor([[t]]), cache=cache).logits for t in (7, 8, 9, 60, 61)])

with Slices().joined() as crew:
    whole = kvexp.load("hf", id=folder)
    part = kvexp.load("hf", id=folder, tp_plan="auto")
    assert part.model.model.layers[0].self_attn.k_proj.weight.to_local().shape == (16, 48)
    gaps = {name: float((answers(name, whole) - answers(name, part)).abs().max()) for name in methods}
    for family in others:
        one, two = kvexp.load("hf", id=family), kvexp.load("hf", id=family, tp_plan="auto")
        gaps[family] = float((answers("full", one) - answers("full", two)).abs().max())
    first = crew.first
codes = [cli.main(words) for words in cells]
if first:
    print(json.dumps([gaps, codes]))
raise SystemExit(any(codes))
"""


@pytest.mark.torture
def test_two_processes_that_hold_a_model_answer_as_one(tmp_path: Path) -> None:
    """Logits of every method that works head by head, and whole cells: samples, rows, bytes and counters."""
    folders = {}
    for family in ("llama", "qwen3", "gemma3_text", "qwen3_moe"):
        folders[family] = str(tmp_path / family)
        tiny.build(family).save_pretrained(folders[family])
        tiny.tokenizer().save_pretrained(folders[family])
    llama = folders.pop("llama")
    words = [
        ["model=hf", f"model.id={llama}", "logger=none", "batch_size=2", *cell.split()] for cell in CELLS
    ]
    divided = [[*cell, "model.tp_plan=auto", f"output_dir={tmp_path / 'two'}"] for cell in words]
    asked = [llama, list(folders.values()), [*sorted(BY_HEAD), "tova"], divided]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "kernels"))
    done = subprocess.run(
        [*launcher, "--no-python", sys.executable, "-c", PARTS, json.dumps(asked)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    gaps, codes = json.loads(done.stdout.splitlines()[-1])
    assert codes == [0, 0]
    assert gaps.pop("tova") > 0.1  # a mean over all heads, of which a process sees half
    assert max(gaps.values()) < 1e-4, gaps
    for one, two in zip(words, divided, strict=True):
        [alone] = cli.settings_of([*one, f"output_dir={tmp_path / 'one'}"])
        [both] = cli.settings_of(two)
        run(alone)
        assert alone.cell == both.cell
        before, after = (
            [json.loads(row) for row in (cell.run_dir / "samples.jsonl").read_text().splitlines()]
            for cell in (alone, both)
        )
        for mine, theirs in zip(before, after, strict=True):
            scores = [one.pop("scores", None) for one in (mine, theirs)]
            assert mine == theirs
            assert scores[0] is None or scores[0] == pytest.approx(scores[1], abs=2e-4)
        records = [json.loads((cell.run_dir / "record.json").read_text()) for cell in (alone, both)]
        assert records[1]["provenance"]["processes"] == 2
        overhead = {"bytes_peak", "bytes_peak_prompt", "kv_token_equivalents"}  # positions, which both hold
        for name, value in records[0]["cache"].items():
            if name in overhead:
                assert value <= records[1]["cache"][name] < 1.02 * value
            else:
                assert value == records[1]["cache"][name], name
        assert not list(both.run_dir.glob("samples.*.jsonl"))


def test_which_methods_work_head_by_head() -> None:
    names = [path.stem for path in (conf_dir() / "method").glob("*.yaml")]
    assert {name for name in names if kvexp.method(name).by_head} == BY_HEAD


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun leaves the environment of one of two processes."""
    for name, value in (
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "localhost"),
    ):
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model.device_map=auto"], "model.device_map spreads a model over the devices of one process"),
        (["model=tiny-llama"], "divides safetensors weights of the hub or of a folder"),
        (["model=smollm2-135m"], "divides safetensors weights of the hub or of a folder"),
        (["model.id=some/model.gguf"], "divides safetensors weights of the hub or of a folder"),
        (["model.device=cpu"], "model.device=cpu is not possible with model.tp_plan=auto: leave it out"),
        (["model.compiled=true"], "model.compiled=true is not possible with model.tp_plan=auto"),
        (["model.tp_plan=rows"], "model.tp_plan=rows is not possible: model.tp_plan is one of auto or null"),
        (["method=asm"], "method=asm chooses by all heads together, or learns from them"),
        (["method=tova", "budget=64"], "method=tova chooses by all heads together"),
        (["task=continuation"], "task=continuation cannot run with model.tp_plan=auto"),
        (["-m", "budget=32,64", "method=knorm"], "a grid cannot run with model.tp_plan=auto"),
    ],
)
def test_what_cannot_be_divided_is_told_before_anything_loads(words: list[str], says: str) -> None:
    chosen = {word.split("=")[0]: word for word in (*HF, *words)}
    with pytest.raises(UserError) as caught:
        cli.settings_of(list(chosen.values()))
    assert says in str(caught.value)


def test_a_divided_model_is_the_same_cell() -> None:
    whole = [word for word in HF if "tp_plan" not in word]
    assert cli.settings_of(HF)[0].cell == cli.settings_of(whole)[0].cell


def test_processes_that_nobody_started_are_not_waited_for(tmp_path: Path) -> None:
    [settings] = cli.settings_of([*HF, f"output_dir={tmp_path}"])
    with pytest.raises(UserError, match=r"torchrun starts them: write torchrun --nproc-per-node=2 -m kvexp"):
        run(settings)
    assert not settings.run_dir.exists()


@pytest.mark.usefixtures("started")
def test_a_trainer_that_gives_each_process_the_whole_is_refused(tmp_path: Path) -> None:
    ddp = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2"]
    [settings] = cli.settings_of([*HF, *ddp, f"output_dir={tmp_path}"])
    with pytest.raises(UserError, match=r"trainer\.devices=2 gives each of them the whole: take trainer=gpu"):
        run(settings)


@pytest.mark.usefixtures("started")
def test_a_folder_with_a_file_that_is_not_divided(tmp_path: Path) -> None:
    tiny.build("llama").config.save_pretrained(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=r"divides safetensors weights, not model\.gguf"):
        kvexp.load("hf", id=str(tmp_path), tp_plan="auto")


def test_a_model_is_not_divided_among_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="torchrun starts them"):
        kvexp.load("hf", id=str(tmp_path), tp_plan="auto")


def test_models_whose_heads_cannot_be_divided() -> None:
    llama = helpers.model("llama").config  # 2 KV heads
    require_sliceable(llama, 2)
    with pytest.raises(UserError, match=r"2 KV heads cannot be divided among 3 processes: start 2$"):
        require_sliceable(llama, 3)
    for family in ("phi3", "gpt_oss", "deepseek_v3", "glm4_moe_lite"):
        with pytest.raises(UserError, match=f"does not divide the KV heads of a '{family}' model"):
            require_sliceable(helpers.model(family).config, 2)


def test_a_record_tells_what_all_processes_hold() -> None:
    """Rows are for each KV head, bytes and rows that left are of all heads; a token's row is of all heads."""
    model = helpers.model("llama")
    assert slices(model) == 1
    cache = Method().encode(model, helpers.tokens(20))
    cache.counters["evicted"] = 7
    alone = cache_usage(model, cache, 20, 64)
    stand_in = SimpleNamespace(config=model.config, dtype=torch.float32, tp_size=2)
    both = cache_usage(stand_in, cache, 20, 64)
    assert (
        alone["bytes_peak"] == 20 * 3 * 2 * 2 * 16 * 4
    )  # tokens, layers, keys and values, heads, dims, bytes
    assert both["bytes_peak"] == 2 * alone["bytes_peak"] and both["evicted"] == 14
    assert both["bytes_full"] == alone["bytes_full"] and both["entries_peak"] == alone["entries_peak"] == 20
    assert both["kv_token_equivalents"] == 2 * alone["kv_token_equivalents"]
