"""Values held against the annotations of a dataclass: a wrong knob is one sentence now and no crash later.

The annotations understood are those that a knob may have: int, float, bool, str, Literal, `X | None`, tuple,
list, dict, another dataclass and Any. Ranges are not checked here; a dataclass checks its own in
`__post_init__`.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvexp.errors import UserError, suggest

_PLAIN = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}


def fields(cls: type, values: Mapping[str, Any], group: str, owner: str) -> dict[str, Any]:
    """Return `values` as the fields of dataclass `cls` want them.

    Args:
        cls: the dataclass whose annotations count.
        values: key to plain value; keys that are left out keep their defaults.
        group: the prefix on a command line, "method" for `method.layout` (empty: top level).
        owner: what the keys belong to, for the sentence ("method asm").

    Raises:
        UserError: a key that `cls` does not have, a value of the wrong type, or a missing value.
    """
    known = {field.name: field for field in dataclasses.fields(cls) if field.init}
    prefix = f"{group}." if group else ""
    for key in values:
        if key not in known:
            raise UserError(unknown(f"{prefix}{key}", key, known, owner))
    hints = get_type_hints(cls)
    for name, field in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UserError(f"{owner} needs {prefix}{name}=...: {describe(hints[name])}")
    return {name: value(values[name], hints[name], f"{prefix}{name}") for name in known if name in values}


def unknown(shown: str, key: str, known: Mapping[str, Any] | list[str], owner: str) -> str:
    """Return the sentence about a key that does not exist."""
    names = sorted(known)
    listed = f"{owner} has {', '.join(names)}" if names else f"{owner} has no knobs"
    return f"there is no '{shown}'{suggest(key, names) or '.'} {listed[0].upper()}{listed[1:]}"


def value(given: Any, annotation: Any, key: str) -> Any:
    """Return `given` in the type that `annotation` wants; a UserError names `key` and what is wanted."""
    try:
        return _convert(given, annotation)
    except _MismatchError:
        choices = [str(choice) for choice in _choices(annotation)]
        raise UserError(
            f"{key}={show(given)} is not possible{suggest(str(given), choices) or ':'}"
            f" {key} is {describe(annotation)}"
        ) from None


def describe(annotation: Any) -> str:
    """Say in words what values an annotation takes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if annotation is None or annotation is type(None):
        return "null"
    if origin is Literal:
        return "one of " + ", ".join(show(choice) for choice in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in arguments)
    if origin in (tuple, list):
        return f"a list [a,b] of which each is {describe(arguments[0])}" if arguments else "a list [a,b]"
    if dataclasses.is_dataclass(annotation):
        return f"a choice of kind {annotation.__name__}"  # type: ignore[union-attr]
    return (
        "anything" if annotation is Any else "a mapping {key: value}" if origin is dict else str(annotation)
    )


def show(given: Any) -> str:
    """Show a plain value as it is written on a command line."""
    if given is None:
        return "null"
    if isinstance(given, bool):
        return str(given).lower()
    if dataclasses.is_dataclass(given):
        return str(getattr(given, "id", type(given).__name__))
    if isinstance(given, list | tuple):
        return "[" + ",".join(show(item) for item in given) + "]"
    return str(given)


class _MismatchError(Exception):
    pass


def _choices(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in _choices(part)]
    return []


def _convert(given: Any, annotation: Any) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return given
    if origin is Literal:
        return _literal(given, arguments)
    if origin in (Union, types.UnionType):
        return _first_that_fits(given, arguments)
    if annotation in _PLAIN:
        return _scalar(given, annotation)
    if annotation is None or annotation is type(None):
        return _expect(given is None, given)
    if origin in (tuple, list) or annotation in (tuple, list):
        return _sequence(given, origin or annotation, arguments)
    if dataclasses.is_dataclass(annotation):
        return _expect(isinstance(given, annotation), given)  # type: ignore[arg-type]
    if origin is dict or annotation is dict:
        return _expect(isinstance(given, Mapping), given)
    raise TypeError(f"a knob cannot be annotated with {annotation}: see kvexp.check for what it may be")


def _scalar(given: Any, wanted: type) -> Any:
    is_flag = isinstance(given, bool)
    if wanted is bool:
        return _expect(is_flag, given)
    if wanted is str:  # digits alone arrive as an integer, such as the revision of a model
        return str(_expect(isinstance(given, str | int) and not is_flag, given))
    numbers = (int,) if wanted is int else (int, float)
    _expect(isinstance(given, numbers) and not is_flag and math.isfinite(given), given)
    return wanted(given)


def _literal(given: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(choice) is type(given) and choice == given:
            return choice
    raise _MismatchError


def _first_that_fits(given: Any, parts: tuple[Any, ...]) -> Any:
    if given is None and type(None) in parts:
        return None
    for part in parts:
        try:
            return _convert(given, part)
        except _MismatchError:
            continue
    raise _MismatchError


def _sequence(given: Any, wanted: type, arguments: tuple[Any, ...]) -> Any:
    items = list(_expect(isinstance(given, list | tuple), given))
    if not arguments:
        return wanted(items)
    if wanted is list or arguments[-1] is Ellipsis:
        return wanted(_convert(item, arguments[0]) for item in items)
    _expect(len(items) == len(arguments), given)
    return wanted(_convert(item, part) for item, part in zip(items, arguments, strict=True))


def _expect(fits: bool, given: Any) -> Any:
    if not fits:
        raise _MismatchError
    return given
