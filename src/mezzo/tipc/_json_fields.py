"""Make dataclasses of what JSON holds: the types of the fields are checked, and errors name the field."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from mezzo.files import parse_json, short_repr

T = TypeVar("T")
Rule = tuple[Callable[[Any], bool], str]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_null(value: Any) -> bool:
    return value is None or isinstance(value, str)


_RULES: dict[Any, Rule] = {
    str: (_is_text, "a text"),
    str | None: (_is_text_or_null, "a text or null"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    bool | None: (lambda value: value is None or isinstance(value, bool), "true, false or null"),
    int | None: (lambda value: value is None or type(value) is int, "a whole number"),
    float: (lambda value: type(value) in (int, float), "a number"),
    float | None: (lambda value: value is None or type(value) in (int, float), "a number or null"),
    tuple[str, ...]: (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of texts"),
    Mapping[str, str]: (
        lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
        "an object of texts",
    ),
    Mapping[str, str | None]: (
        lambda value: isinstance(value, dict) and all(map(_is_text_or_null, value.values())),
        "an object of texts",
    ),
}


def parse_fields(kind: type[T], text: str | bytes, what: str) -> T:
    """Read a dataclass from JSON text; see `make_from_fields`."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {str(error).removeprefix('not JSON: ')}") from None
    return make_from_fields(kind, values, what)


def make_from_fields(kind: type[T], values: Any, what: str, *, allow_unknown: bool = True) -> T:
    """Make a dataclass of the values that JSON holds.

    Args:
        kind: The dataclass. The types of its fields must be known here, or be tuples of dataclasses.
        values: What JSON holds.
        what: What it is, for messages.
        allow_unknown: Ignore other names, which a newer mezzo may have written.

    Raises:
        ValueError: A name is missing or unknown, or a value has another type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"a {what} is an object, not {short_repr(values)}")
    types = get_type_hints(kind)
    unknown = [name for name in values if name not in types]
    if unknown and not allow_unknown:
        raise ValueError(f"a {what} has no {', '.join(unknown)[:200]}")
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"a {what} needs {', '.join(missing)}")
    known = {name: value for name, value in values.items() if name in types}
    return kind(**{name: _checked(types[name], name, value, allow_unknown) for name, value in known.items()})


def _checked(kind: Any, name: str, value: Any, allow_unknown: bool) -> Any:
    """Return a value as the field has it; raises ValueError if it has another type."""
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} {short_repr(value)} is not one of {', '.join(get_args(kind))}")
        return value
    if kind in _RULES:
        is_right, expected = _RULES[kind]
        if not is_right(value):
            raise ValueError(f"'{name}' is {short_repr(value)}, not {expected}")
        return tuple(value) if get_origin(kind) is tuple else value
    if not isinstance(value, list):
        raise ValueError(f"'{name}' is {short_repr(value)}, not a list")
    part = get_args(kind)[0]
    return tuple(make_from_fields(part, each, "step", allow_unknown=allow_unknown) for each in value)
