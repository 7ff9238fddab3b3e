"""Values from outside, checked against type hints: recipes, task options, policy parameters, JSON."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from unmask.errors import UserError, did_you_mean, prefixed, require

T = TypeVar("T")

_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "a table",
}


def build(cls: type[T], values: Any, where: str = "") -> T:
    """The dataclass `cls` from a table; `where` is the table's name in messages, also of what `cls` itself refuses."""
    checked = check_fields(cls, values, where)
    with prefixed(where) if where else nullcontext():
        return cls(**checked)


def check_fields(cls: type[Any], values: Any, where: str = "") -> dict[str, Any]:
    """The values of a table that has all required fields of the dataclass `cls`, no unknown one, of the right types."""
    prefix = f"{where}: " if where else ""
    if not isinstance(values, Mapping):
        raise UserError(f"{where or 'it'} must be a table, got {_shown(values)}")
    hints = _hints(cls)  # type: ignore[arg-type]  # mypy takes a class for unhashable
    known = {field.name: field for field in fields(cls)}
    for key in values:
        if key not in known:
            nearest = did_you_mean(str(key), known)
            raise UserError(f"{prefix}unknown key {key!r}; {nearest}known keys are {', '.join(known)}")
    for name, field in known.items():
        optional = field.default is not MISSING or field.default_factory is not MISSING
        require(optional or name in values, f"{prefix}{name!r} is missing")
    return {key: convert(hints[key], value, f"{where}.{key}" if where else key) for key, value in values.items()}


def convert(hint: Any, value: Any, where: str) -> Any:
    """The value as its type hint declares it; lists become tuples and whole numbers floats where that is meant.

    Types are exact: True is an int to Python, and never meant as one.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):  # X | None, or of several dataclasses the first that has all the keys
        others = [argument for argument in arguments if argument is not types.NoneType]
        known = (other for other in others[1:] if isinstance(value, Mapping) and value.keys() <= _hints(other).keys())
        return None if value is None else convert(next(known, others[0]), value, where)
    if is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if value not in arguments:
            nearest = f"; {did_you_mean(str(value), arguments)}".rstrip("; ")
            raise UserError(f"{where} must be {' or '.join(arguments)}, got {value!r}{nearest}")
        return value
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(convert(arguments[0], item, where) for item in value)
    if origin is dict and isinstance(value, Mapping):
        return {key: convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{where} must fit in 64 bits, got {str(value)[:40]}")
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        kind = _KINDS.get(origin or hint, f"of type {getattr(hint, '__name__', hint)}")
        raise UserError(f"{where} must be {kind}, got {_shown(value)}")
    if hint is float and not math.isfinite(value):
        raise UserError(f"{where} must be finite, got {value}")
    return value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _shown(value: Any) -> str:
    return "a table" if isinstance(value, Mapping) else repr(value)
