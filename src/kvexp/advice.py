"""What Hydra and OmegaConf complain about, said in one sentence that tells what to type instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_type_hints

from kvexp import check
from kvexp.errors import UserError, suggest
from kvexp.specs import OWN_TRAINER_KEYS

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf.errors import OmegaConfBaseException

Options = Callable[[str], Sequence[str]]
"""The choices of a group; none when there is no such group."""

PARTS = {"notes": "task.notes"}
"""Folders whose choices are parts of other choices, and the key that takes them."""
_OPTIONAL_GROUPS = ("cluster", "experiment", "sweep", "debug")
MANY = 40  # choices that a sentence names one by one
_PLUGINS = {"submitit": "slurm", "optuna": "optuna"}


def check_choice(group: str, override: Override, options: Sequence[str]) -> None:
    """Raise UserError unless every value of a group's override is the name of one of its files."""
    if isinstance(override.value(), list):
        raise UserError(
            f"{override.input_line} names a list: {group} takes one choice, or several of a grid with -m"
        )
    for choice in _values(override):
        if choice is None and group in _OPTIONAL_GROUPS:
            continue
        if choice not in options:
            raise UserError(no_choice(group, "" if choice is None else str(choice), options))


def check_part(override: Override) -> None:
    """Raise UserError for the choice of a part where it has no effect, and for a knob of it on its own."""
    key, _, written = str(override.input_line).partition("=")
    key = key.lstrip("+~")
    for group, taken in PARTS.items():
        if key == group:
            raise UserError(
                f"{group} is part of a task: write {taken}={written or 'NAME'}, with a task that has it, such"
                " as locomo"
            )
        for start in (f"{group}.", f"{taken}."):
            if key.startswith(start):
                knob = f"{key.removeprefix(start)}: {written}"
                raise UserError(f'{key} cannot be set alone: write "{taken}={{name: NAME, {knob}}}"')


def no_choice(group: str, choice: str, options: Sequence[str]) -> str:
    """Return the sentence about a choice that a group does not have."""
    extra = [extra for start, extra in _PLUGINS.items() if choice.startswith(start) and choice not in options]
    if extra:
        return f"{group}={choice} needs a plugin that is not installed: pip install 'kvexp[{extra[0]}]'"
    inside = sorted(name for name in options if name.startswith(f"{choice.rstrip('/')}/")) if choice else []
    if inside:
        return f"{group}={choice} names a folder: write {group}={inside[0]}. It holds {', '.join(inside)}"
    said = (
        f"there is no {group} '{choice}'{suggest(choice, options)}" if choice else f"{group}= names nothing:"
    )
    shown = ", ".join(_shown(choice, options))
    return f"{said.rstrip('?:,')}{'?' if said.endswith('?') else '.'} Choices: {shown}"


def _shown(choice: str, options: Sequence[str]) -> list[str]:
    """Options to name: those in the folder that was meant; of more than MANY, folders as `folder/...`."""
    folder = f"{choice.rpartition('/')[0]}/"
    shown = [name for name in options if name.startswith(folder)] or list(options)
    if len(shown) > MANY:
        shown = [f"{name.partition('/')[0]}/..." if "/" in name else name for name in shown]
    return sorted(set(shown))


@contextmanager
def given(options: Options = lambda group: ()) -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise inside the block into a UserError."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(translate(error, options)) from error


def translate(error: BaseException, options: Options) -> str:
    """Return one sentence for an exception of Hydra or OmegaConf."""
    from hydra.errors import MissingConfigException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
    from yaml import MarkedYAMLError

    for link in _chain(error):
        if isinstance(link, UserError):
            return str(link)
        if isinstance(link, MarkedYAMLError) and link.problem_mark is not None:
            place = f"{link.problem_mark.name}, line {link.problem_mark.line + 1}"
            return f"{place}, is not YAML: {link.problem or link.context}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return no_choice(group, choice, error.options)
    for link in _chain(error):
        if isinstance(link, ConfigAttributeError | ConfigKeyError) and link.full_key:
            return _unknown_key(link, options)
        if isinstance(link, ValidationError) and link.full_key:
            return _wrong_value(link, _first_line(error))
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return f"{link.full_key}: {_first_line(link)}"
    return _first_line(error)


def _unknown_key(error: OmegaConfBaseException, options: Options) -> str:
    from omegaconf import DictConfig

    full_key, parent = str(error.full_key), error.parent_node
    prefix, _, key = full_key.rpartition(".")
    if not isinstance(parent, DictConfig) or parent.get(key, None) is not None:
        return f"{full_key}: {_first_line(error)}"
    known = [str(name) for name in parent if not str(name).startswith("_")]
    if prefix == "trainer" and key in OWN_TRAINER_KEYS:
        return f"{full_key} is of several processes: choose trainer=ddp beside it"
    if prefix == "trainer":
        return (
            f"there is no '{full_key}' yet{suggest(key, known) or '.'} To give lightning.Trainer another"
            f" argument, write +{full_key}=..."
        )
    if not prefix:
        known = [name for name in known if name != "hydra"]
        known += [group for group in _OPTIONAL_GROUPS if options(group)]
    owner = f"the chosen {prefix}" if prefix else "the configuration"
    return check.unknown(full_key, key, known, owner)


def _wrong_value(error: Any, outer: str) -> str:
    from kvexp.schema import Config

    key = str(error.full_key)
    start = "Error merging override "
    written = outer.removeprefix(start) if outer.startswith(start) else key
    wanted = get_type_hints(Config).get(key)
    if wanted is None:
        reason = _first_line(error)
        return f"{written} is not possible: {reason[0].lower()}{reason[1:]}"
    return f"{written} is not possible: {key} is {check.describe(wanted)}"


def _values(override: Override) -> Iterator[Any]:
    from hydra.core.override_parser.types import ChoiceSweep, QuotedString

    given_value = override.value()
    if isinstance(given_value, ChoiceSweep):
        items: list[Any] = list(given_value.list)
    elif override.is_sweep_override():
        items = []
    else:
        items = [given_value]
    for item in items:
        yield item.text if isinstance(item, QuotedString) else item


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    """Return the first line that says something: Hydra's own may only announce the next."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith("composing config:"):
        return f"{lines[0].partition(':')[0]}: {lines[1]}"
    return lines[0] if lines else type(error).__name__
