"""The side of kvpress, run as a file in kvpress's own environment: it knows nothing of ours."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NEVER = -1  # the id of no token: nothing ends a block

PRESSES = {
    "snapkv": ("SnapKVPress", {"window_size": 32, "kernel_size": 7}),
    "knorm": ("KnormPress", {}),
    "streaming_llm": ("StreamingLLMPress", {"n_sink": 4}),
}


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that `run` took, the process's own with one thread, and what it returned."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    result = run()
    return clock() - start, result


def theirs(folder: Path) -> None:
    """Answer each name of a method on the standard input with a block; needs kvpress and nothing of ours."""
    import kvpress as presses
    from kvpress.pipeline import KVPressTextGenerationPipeline as Pipeline
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    torch.set_num_threads(facts["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, facts["dtype"])).eval()
    model.generation_config.eos_token_id = NEVER
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "")
    pipeline: Any = SimpleNamespace(model=model, tokenizer=tokenizer)
    prompt, kept, caches = torch.tensor([facts["prompt"]]), facts["budget"], {}
    for line in sys.stdin:
        name, prefill = line.strip(), None
        with torch.no_grad():
            if name not in caches:
                press, arguments = PRESSES[name]
                ratio = 1 - (kept + 0.5) / (prompt.shape[1] - 1)
                caches[name] = cache = DynamicCache()
                with getattr(presses, press)(compression_ratio=ratio, **arguments)(model):
                    prefill, _ = timed(partial(model.model, input_ids=prompt[:, :-1], past_key_values=cache))
            cache = caches[name]
            lengths = [cache.get_seq_length(index) for index in range(len(cache))]
            assert set(lengths) == {kept}, lengths
            answer = partial(Pipeline.generate_answer, pipeline, prompt[:, -1:], cache)
            seconds, _ = timed(partial(answer, prompt.shape[1] - 1, facts["new"]))
            Pipeline._remove_answer_from_cache(pipeline, cache, lengths)
        print(json.dumps({"seconds": seconds, "prefill": prefill}), flush=True)


if __name__ == "__main__":
    theirs(Path(sys.argv[1]))
