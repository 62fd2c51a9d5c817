"""Loading a model: from the embedded file, a hub, a local folder, or built at random.

`check` looks at what was asked for without importing torch. `load` reads the configuration first, so that a
model that cannot be served is refused before its weights are fetched.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvexp import checksum, converted, embedded, tiny
from kvexp.attention import families, sliced
from kvexp.errors import UserError, suggest

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CHOICES = {
    "source": ("embedded", "hub", "tiny"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention": ("auto", "reference", "flash", "flex"),
}
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
_PROBE = "Utterance: caf\u00e9,  it's 3.50 !\nLabel: red\n\nx = {'a': [1, 22]}\n"


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode without gradients, with what identifies it.

    sha256: of the weights (of the embedded model: of the file they come from).
    context_limit: tokens that the model was made for, None if it does not say.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    sha256: str
    context_limit: int | None
    dtype: torch.dtype
    device: torch.device


def check(spec: Any) -> None:
    """Raise UserError if a model group (the keys of conf/model/*.yaml) asks for what cannot be.

    Imports no torch.
    """
    for key, choices in CHOICES.items():
        _require_choice(key, str(getattr(spec, key, choices[0])), choices)
    if spec.source == "tiny":
        _require_choice("family", str(getattr(spec, "family", None)), tiny.FAMILIES)
    device, chunk = str(getattr(spec, "device", "auto")), getattr(spec, "prefill_chunk", None)
    if not _DEVICE.fullmatch(device):
        raise UserError(f"model.device={device}: choose one of auto, cpu, mps, cuda, cuda:0, cuda:1, ...")
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise UserError(f"model.prefill_chunk={chunk}: give a number of tokens above 0, or null")
    if spec.source == "hub" and not getattr(spec, "id", None):
        raise UserError("this model needs model.id: a model on the hub, a folder, or a .gguf file")


def load(spec: Any, *, needs_full_layer: bool = False) -> LoadedModel:
    """Return the model that a model group describes (an object with the keys of conf/model/*.yaml).

    `needs_full_layer` refuses, before weights load, a model whose layers all have a sliding window.
    Raises UserError where the model, its configuration or its tokenizer cannot be used.
    """
    check(spec)
    device = pick_device(str(getattr(spec, "device", "auto")))
    if spec.source == "tiny":
        return _tiny(spec, device, needs_full_layer)
    if spec.source == "embedded":
        where, gguf, revision = str(converted.folder()), None, None
    else:
        (where, gguf), revision = locate(str(spec.id)), getattr(spec, "revision", None)
    divided = getattr(spec, "tp_plan", None) is not None
    if divided:
        sliced.require_processes(gguf)
    with _explained(spec, where):
        config = _config(where, gguf, revision)
        families.of(config)
        if needs_full_layer:
            families.require_full_layer(config)
        if divided:
            sliced.require_sliceable(config.get_text_config(), sliced.world())
        tokenizer = _tokenizer(where, gguf, revision)
        _require_exact(tokenizer, spec.name)
        model = _weights(spec, where, gguf, revision, device)
    if spec.source == "embedded":
        sha256 = embedded.SMOLLM2.member_sha256
    else:
        sha256 = checksum.of_weights(where, gguf, revision)
    return _loaded(spec, model, tokenizer, sha256)


_latest: dict[Any, LoadedModel] = {}  # at most one entry


def load_once(spec: Any, *, needs_full_layer: bool = False) -> LoadedModel:
    """Return `load(spec)`, or the model of the latest call when it was the same: a grid loads its model
    once."""
    if spec not in _latest:
        _latest.clear()  # frees the old weights before the new ones come
        _latest[spec] = load(spec, needs_full_layer=needs_full_layer)
    elif needs_full_layer:
        families.require_full_layer(_latest[spec].model.config.get_text_config())
    return _latest[spec]


def pick_device(name: str) -> torch.device:
    """Return the device of this process: `auto` is CUDA where there is one, else the CPU.

    With several processes on a machine, each takes the CUDA device of its local rank.
    """
    import torch

    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("model.device=mps, but torch sees no such device: use model.device=cpu")
    if name in ("cpu", "mps") or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu" if name == "auto" else name)
    count = torch.cuda.device_count()
    rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    index = int(name.partition(":")[2] or rank % max(count, 1))
    if index >= count:
        raise UserError(f"model.device={name}, but torch sees {count} CUDA devices: use model.device=cpu")
    return torch.device("cuda", index)


def _require_choice(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"model.{key}={value}{suggest(value, choices)}: choose one of {', '.join(choices)}")


def _tiny(spec: Any, device: torch.device, needs_full_layer: bool) -> LoadedModel:
    model: Any = tiny.build(spec.family)
    if needs_full_layer:
        families.require_full_layer(model.config)
    model = model.to(device=device, dtype=load_dtype(spec, device, "float32"))
    return _loaded(spec, model, tiny.tokenizer(), checksum.of_tensors(model.state_dict(), spec.family))


def _loaded(spec: Any, model: Any, tokenizer: Any, sha256: str) -> LoadedModel:
    weight = model.get_input_embeddings().weight
    if weight.device.type == "meta":
        raise UserError(
            f"{spec.name} does not fit: model.device_map={spec.device_map} leaves its embedding on disk or in"
            " main memory; take more or larger devices, or model.dtype=bfloat16"
        )
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=tokenizer,
        name=spec.name,
        sha256=sha256,
        context_limit=getattr(model.config, "max_position_embeddings", None),
        dtype=weight.dtype,
        device=weight.device,
    )


def locate(name: str) -> tuple[str, str | None]:
    """Split what `model.id` names into a hub id or a folder, and a GGUF file in it (None: safetensors).

    Raises UserError for a path at which nothing lies.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), path.name
    if name.endswith(".gguf") and name.count("/") == 2:
        return name.rpartition("/")[0], path.name
    if path.is_dir():
        files = [file.name for file in path.glob("*.gguf")]
        alone = len(files) == 1 and not any(path.glob("*.safetensors"))
        return str(path), files[0] if alone else None
    if name.startswith(("/", "./", "../", "~")):
        raise UserError(f"model.id={name}: there is no such folder or file")
    return name, None


def _config(where: str, gguf: str | None, revision: str | None) -> PretrainedConfig:
    from transformers import AutoConfig

    options = {"gguf_file": gguf} if gguf else {}
    return AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=False, **options)


def _tokenizer(where: str, gguf: str | None, revision: str | None) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the generic class where it can: a class that a file names may split otherwise.

    (A Llama class applied to a GPT-2 vocabulary turns every space into the unknown token, silently.)
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    if gguf:
        return PreTrainedTokenizerFast.from_pretrained(where, gguf_file=gguf, **options)
    try:
        cached_file(where, "tokenizer.json", revision=revision)
    except OSError:
        return AutoTokenizer.from_pretrained(where, **options)
    return PreTrainedTokenizerFast.from_pretrained(where, **options)


def _require_exact(tokenizer: Any, name: str) -> None:
    """Raise UserError unless the tokenizer gives back the text that it encodes."""
    back = tokenizer.decode(tokenizer.encode(_PROBE, add_special_tokens=False))
    if back != _PROBE:
        raise UserError(
            f"the tokenizer of {name} does not give back the text it encodes ({_PROBE!r} became {back!r}), "
            "so nothing measured with it could be trusted: use another model"
        )


def _weights(spec: Any, where: str, gguf: str | None, revision: str | None, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    options |= {"gguf_file": gguf} if gguf else {"use_safetensors": True}
    options["dtype"] = load_dtype(spec, device, "auto")
    device_map, tp_plan = getattr(spec, "device_map", None), getattr(spec, "tp_plan", None)
    if device_map is not None:
        options["device_map"] = device_map
    if tp_plan is not None:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_plan=tp_plan)
    with _quiet(spec.source == "embedded"):
        model: Any = AutoModelForCausalLM.from_pretrained(where, **options)
    return model if device_map is not None or tp_plan is not None else model.to(device)


def load_dtype(spec: Any, device: torch.device, checkpoint: str) -> Any:
    """Return the dtype to load with; `auto` is float32 on a CPU and `checkpoint` elsewhere."""
    import torch

    asked = getattr(spec, "dtype", "auto")
    if asked == "auto":
        asked = "float32" if device.type == "cpu" else checkpoint
    return asked if asked == "auto" else getattr(torch, asked)


@contextmanager
def _quiet(silent: bool) -> Iterator[None]:
    """Without transformers' progress bars, for what takes no time."""
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    if silent:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if silent and was_shown:
            logging.enable_progress_bar()


@contextmanager
def _explained(spec: Any, where: str) -> Iterator[None]:
    """Turn what transformers says about a model that it cannot load into one line of advice."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().split("\n")[0].strip() or type(error).__name__
        raise UserError(
            f"cannot load {spec.name} from '{where}' ({first}): check model.id and model.revision, or give a "
            "local folder with safetensors weights as model.id; model=smollm2-135m needs no hub"
        ) from error
