"""The words of a command line, before Hydra reads them: flags, overrides, and what W&B agents add.

Hydra's grammar refuses some values that people and agents write, such as a path with `=` or an accent. A
value that cannot be read as it stands is put in quotes; one that starts with a quote or bracket is not.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NoReturn

from kvexp.errors import UserError, suggest

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_OVERRIDE = re.compile(r"(?P<key>[+~]{0,2}[\w./@-]+)=(?P<value>.*)", re.DOTALL)
_OWN_GRAMMAR = ("'", '"', "[", "{")
_SEE_HELP = "`python -m kvexp --help` shows what there is"


def clean(words: Sequence[str]) -> list[str]:
    """Return the words as Hydra reads them.

    `--key=value` loses its dashes, `_wandb...` is left out, `--info` alone means `--info=all`, and a value
    that needs quotes gets them.
    """
    flags = _flags()
    cleaned = []
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word.lstrip("-").startswith("_wandb"):
            continue
        if word in ("--info", "-i") and following not in _views():  # else an override would be its argument
            word = "--info=all"
        if word.startswith("--") and "=" in word and word.partition("=")[0] not in flags:
            word = word[2:]
        cleaned.append(_quoted(word) if not word.startswith("-") else word)
    return cleaned


def read(words: Sequence[str]) -> argparse.Namespace:
    """Return Hydra's flags and `overrides` of cleaned words; a wrong flag or combination is a UserError.

    `argv` of the result holds the same words, flags first, since Hydra stops reading overrides at a flag.
    With `--cfg`, `-m` is read and is not among them: Hydra takes one of the two.
    """
    parser = _parser()
    known, rest = parser.parse_known_intermixed_args(words)
    for word in rest:
        raise UserError(f"there is no option '{word}'{suggest(word, _flags()) or ':'} {_SEE_HELP}")
    modes = [known.run, known.multirun and not known.cfg, known.cfg, known.info, known.shell_completion]
    if sum(bool(mode) for mode in modes) > 1:
        raise UserError("only one of --run, --multirun, --cfg, --info and --shell-completion can be given")
    if known.resolve and not (known.cfg or known.help):
        raise UserError("--resolve needs --cfg job (or hydra, or all)")
    if known.config_dir is not None and not os.path.isdir(known.config_dir):
        raise UserError(f"--config-dir {known.config_dir} is not a folder")
    if known.config_path is not None and not os.path.isabs(known.config_path):
        raise UserError(
            "--config-path needs an absolute path; to add files of your own, use --config-dir FOLDER"
        )
    unwanted = {*known.overrides, *(("-m", "--multirun") if known.cfg else ())}
    known.flags = [word for word in words if word not in unwanted]
    return put(known, spread(known.overrides) if known.multirun else known.overrides)


def put(args: argparse.Namespace, overrides: Sequence[str]) -> argparse.Namespace:
    """Set the overrides of what `read` returned, and return it."""
    args.overrides = list(overrides)
    args.argv = [*args.flags, *overrides]
    return args


def spread(overrides: Sequence[str], chosen: Collection[str] = ()) -> list[str]:
    """Return the words of a grid with the knobs of a group that varies as a sweep over one value.

    Hydra composes a grid first without what varies: `method.interval=128` would then be a knob of the default
    method, whatever `method=snapkv,rkv` says. `chosen` are keys that something else varies, such as a preset.
    """
    parsed = parse(overrides)
    varied = {*chosen, *(item.key_or_group for item in parsed if item.is_sweep_override())}
    words = []
    for word, item in zip(overrides, parsed, strict=True):
        group, dot, _ = item.key_or_group.partition(".")
        key, _, value = word.partition("=")
        plain = dot and not item.is_sweep_override() and not item.is_delete()
        words.append(f"{key}=choice({value})" if plain and group in varied else word)
    return words


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the overrides as Hydra understands them; one that cannot be read is a UserError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed = []
    for written in overrides:
        try:
            parsed.append(parser.parse_override(written))
        except HydraException as error:
            raise UserError(_unreadable(written, str(error))) from error
        if not parsed[-1].key_or_group:
            raise UserError(f"'{written}' names no key: write key=value")
    return parsed


def _unreadable(written: str, reason: str) -> str:
    if "=" not in written:
        return f"'{written}' is neither an option nor key=value: {_SEE_HELP}"
    quoted = written.partition("=")[2][:1] in _OWN_GRAMMAR
    advice = "close every quote and bracket" if quoted else "put an unusual value in quotes, \"key='value'\""
    return f"cannot read {written!r} ({reason.splitlines()[0]}): {advice}"


def _quoted(word: str) -> str:
    """Return `word` with its value in quotes where Hydra cannot read it otherwise."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException

    found = _OVERRIDE.fullmatch(word)
    if not found or found["value"].startswith(_OWN_GRAMMAR) or "\n" in word:
        return word
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return f"{found['key']}={QuotedString(text=found['value'], quote=Quote.single).with_quotes()}"
    return word


@functools.cache
def _parser() -> argparse.ArgumentParser:
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise UserError(f"{message.rstrip('.')}: {_SEE_HELP}")

    parser = get_args_parser()
    parser.allow_abbrev = False
    setattr(parser, "error", refuse)  # noqa: B010 (a usage text and an exit are not wanted here)
    return parser


def _views() -> list[str]:
    (info,) = (action for action in _parser()._actions if "--info" in action.option_strings)
    return [str(choice) for choice in info.choices or ()]


def _flags() -> list[str]:
    return [option for action in _parser()._actions for option in action.option_strings]
