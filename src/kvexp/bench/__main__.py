"""The command `python -m kvexp.bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from kvexp.ended import FAILED, ended, say
from kvexp.errors import UserError, suggest
from kvexp.failures import disk_error

PARTS = {
    "attention": "a step of ASM's attention by lookup, beside full attention over the prefix it stands for",
    "decode": "tokens a second, beside transformers' generate, and kvpress with --against kvpress",
    "memory": "rows and bytes held behind a prompt and behind its answer",
    "prefill": "prefill with reused units, beside full recompute",
    "quantised": "tokens a second with rows in few bits, beside rows in full",
    "scoring": "what TriAttention's scores and prunes cost",
}
HELP = ("-h", "--help", "help")
NAME = "kvexp.bench"
ADVICE = "make room there, or choose another output_dir and store_dir"


def words_of(arguments: Sequence[str]) -> list[str]:
    """Return the words after the part; `--key value` is `key=value`."""
    words, rest = [], iter(arguments)
    for word in rest:
        if word.startswith("--") and word not in HELP:
            key, _, value = word[2:].partition("=")
            word = f"{key}={value or next(rest, '')}"
            if word.endswith("="):
                raise UserError(f"--{key} has no value: write {key}=VALUE behind the part")
        words.append(word)
    return words


def _quiet() -> None:
    """Without what transformers says of blocks that no token ends, and without its progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def main(arguments: Sequence[str]) -> int:
    """Run a part, or say what there is; an error is one sentence."""
    try:
        return ended(lambda: _run(arguments), ADVICE, NAME)
    except Exception as error:
        full = disk_error(error)
        if full is None:
            raise
        return say(f"a file cannot be written ({os.strerror(full)}): {ADVICE}", FAILED, NAME)


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in HELP:
        lines = [f"    {part:10} {text}" for part, text in PARTS.items()]
        print("python -m kvexp.bench PART [key=value ...]; PART --help says more", *lines, sep="\n")
        return 0
    part = arguments[0]
    if part not in PARTS:
        near = suggest(part, PARTS) or "."
        raise UserError(f"there is no part '{part}'{near} Parts: {', '.join(PARTS)}")
    words = words_of(arguments[1:])
    module = import_module(f"kvexp.bench.{part}")
    if set(words) & set(HELP):
        print(module.__doc__)
        return 0
    _quiet()
    return int(module.main(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
