# SPDX-License-Identifier: Apache-2.0
"""Turns the loose values of YAML files, papermill and notebook cells into declared types.

YAML 1.1 reads `3e-4` as text and `papermill -p flag false` passes the text "false", so a value is
converted by the type that its field declares, and anything that would lose information is refused.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


def nearest_names(name: str, valid: Iterable[str]) -> str:
    """Returns the end of an error message: the closest valid names, or all of them."""
    valid = sorted(valid)
    close = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(repr(other) for other in close)}?"
    return f"valid names: {', '.join(valid)}"


def _refuse(key: str, value: Any, want: str) -> typing.NoReturn:
    raise TypeError(f"{key}: expected {want}, got {value!r} ({type(value).__name__})")


def _to_bool(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in TRUE_WORDS + FALSE_WORDS:
        return value.strip().lower() in TRUE_WORDS
    _refuse(key, value, "a boolean (true or false)")


def _to_int(key: str, value: Any) -> int:
    if isinstance(value, bool):
        _refuse(key, value, "an integer")
    try:
        whole = int(float(value) if "e" in str(value).lower() else value)
    except (TypeError, ValueError, OverflowError):
        _refuse(key, value, "an integer")
    if whole != float(value):
        _refuse(key, value, "an integer")
    return whole


def _to_float(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        _refuse(key, value, "a number")
    try:
        number = float(value)
    except ValueError:
        _refuse(key, value, "a number")
    if number != number or number in (float("inf"), float("-inf")):
        _refuse(key, value, "a finite number")
    return number


def coerce(key: str, value: Any, kind: Any) -> Any:
    """Returns `value` as the declared type `kind`, or raises TypeError naming `key`.

    `kind` is a type as it stands in a dataclass annotation: bool, int, float, str, `X | None`,
    `tuple[X, ...]`, `dict[str, Any]` or `Literal[...]`. Literal raises ValueError for a value
    outside its list.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, str) and value.strip().lower() in ("none", "null")):
            return None
        return coerce(key, value, next(a for a in arguments if a is not types.NoneType))
    if origin is typing.Literal:
        text = str(value)
        if text not in arguments:
            hint = nearest_names(text, [str(a) for a in arguments])
            raise ValueError(f"{key}: {value!r} is not known; {hint}")
        return text
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, (list, tuple)):
            _refuse(key, value, "a list")
        return tuple(coerce(f"{key}[{i}]", item, arguments[0]) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            _refuse(key, value, "a mapping")
        return {coerce(f"{key} name", name, str): item for name, item in value.items()}
    if kind is Any:
        return value
    if kind is str:
        return value if isinstance(value, str) else _refuse(key, value, "text")
    converters = {bool: _to_bool, int: _to_int, float: _to_float}
    return converters[kind](key, value)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def accepts_none(config_class: type, name: str) -> bool:
    """Whether `name` is a field of the dataclass whose declared type includes None."""
    kind = typing.get_type_hints(config_class).get(name)
    return types.NoneType in typing.get_args(kind)


def coerce_fields(config_class: type, values: Mapping[str, Any], *, where: str = "") -> dict:
    """Returns `values` with every value as the dataclass `config_class` declares its field.

    `where` prefixes key names in messages. Raises ValueError for an unknown name (with the nearest
    valid ones) and TypeError for a value of the wrong kind.
    """
    names = [field.name for field in dataclasses.fields(config_class) if field.init]
    for name in values:
        if name not in names:
            raise ValueError(f"{where}{name}: no such parameter; {nearest_names(name, names)}")
    kinds = typing.get_type_hints(config_class)
    return {name: coerce(where + name, value, kinds[name]) for name, value in values.items()}


def build(config_class: type, values: Mapping[str, Any]) -> Any:
    """Builds the dataclass `config_class` from loosely typed `values`.

    Raises as `coerce_fields` does, and ValueError for a missing name; the class's own
    `__post_init__` refuses impossible combinations.
    """
    converted = coerce_fields(config_class, values)
    for field in dataclasses.fields(config_class):
        if field.name not in converted and _is_required(field):
            raise ValueError(f"{field.name}: missing; it has no default and must be given")
    return config_class(**converted)
