"""Commands made from dataclasses: each field with an `Option` becomes an option of the command line.

tyro, cyclopts and jsonargparse also build commands from dataclasses, but none of them (1.0, 5.4 and 4.53) accepts
both `--benchmark` and `--benchmark True`, and of `--opts a=1 b=2` or `--save-dir` beside `--save_dir` each refuses
another. All of these are documented command lines, so this module hands typer, which mezzo depends on anyway, a
signature made from the fields.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from mezzo._options import REQUIRED, Described, Subset, check_value, describe, options_of

_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def read_switch(text: object) -> bool:
    """Return the value of a switch; typer also passes its default."""
    word = str(text).lower()
    if word not in _WORDS:
        raise typer.BadParameter(f"{text!r}: must be True or False")
    return _WORDS[word]


def spell_out(words: Sequence[str], switches: Iterable[str], lists: Iterable[str]) -> list[str]:
    """Return a command line in which every switch has a value and every value of a list its option.

    >>> spell_out(["--benchmark", "--device", "cpu", "--use_trt", "False"], ["--benchmark", "--use-trt"], [])
    ['--benchmark', 'True', '--device', 'cpu', '--use_trt', 'False']
    >>> spell_out(["--opts", "a=1", "b=2", "--iters", "3"], [], ["--opts"])
    ['--opts', 'a=1', '--opts', 'b=2', '--iters', '3']
    """
    spelled: list[str] = []
    current, has_value = "", False  # the list whose values follow, and whether it has one
    for place, word in enumerate(words):
        name = word.partition("=")[0].replace("_", "-")
        if word.startswith("-"):
            current, has_value = name if name in lists else "", "=" in word
        elif current and has_value:
            spelled.append(current)
        has_value = has_value or not word.startswith("-")
        spelled.append(word)
        following = words[place + 1].lower() if place + 1 < len(words) else ""
        if word.replace("_", "-") in switches and following not in _WORDS:
            spelled.append("True")
    return spelled


class OptionsCommand(TyperCommand):
    """A command that accepts `-` and `_` in names, switches with or without a value, and lists of values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["context_settings"] = {"token_normalize_func": lambda token: token.replace("_", "-")}
        super().__init__(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line."""
        settings: Mapping[str, Described] = vars(self.callback).get("settings", {})
        names = {"switch": list[str](), "list": list[str](), "": list[str]()}
        for each in settings.values():
            names["switch" if _is_switch(each) else "list" if _is_list(each) else ""] += each.spellings
        return super().parse_args(ctx, spell_out(args, names["switch"], names["list"]))


def add_command(app: typer.Typer, function: Callable[..., int], name: str | None = None) -> None:
    """Add a command to an app.

    Args:
        app: The command that this one belongs to.
        function: Its parameters are dataclasses, whose options the command then has, or are annotated with `Option`.
        name: Of the command; None: that of the function.
    """
    app.command(name, cls=OptionsCommand)(_flatten(function))


def _flatten(function: Callable[..., int]) -> Callable[..., int]:
    """Return a function with one parameter for each option; it puts the dataclasses together and calls `function`."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, tuple[Any, list[Described]]] = {}
    settings: dict[str, Described] = {}
    own_names: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        cls, *extra = get_args(hints[name]) if hasattr(hints[name], "__metadata__") else (hints[name],)
        if dataclasses.is_dataclass(cls):
            part = next((each for each in extra if isinstance(each, Subset)), Subset())
            chosen = [each for each in options_of(cls) if not part.names or each.name in part.names]
            groups[name] = cls, chosen
            defaults = part.defaults
            settings |= {e.name: dataclasses.replace(e, default=defaults.get(e.name, e.default)) for e in chosen}
        else:
            default = REQUIRED if parameter.default is parameter.empty else parameter.default
            described = describe(name, hints[name], default)
            assert described is not None, f"{function.__name__}: {name} has no Option"
            settings[name] = described
            own_names.append(name)

    def call(**values: Any) -> int:
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        taken = {name: cls(**{e.name: values[e.name] for e in chosen}) for name, (cls, chosen) in groups.items()}
        own = {name: values[name] for name in own_names}
        for name, value in own.items():
            check_value(settings[name], value, settings[name].spellings[0])
        return function(**own, **taken)

    vars(call).update(
        settings=settings, __signature__=inspect.Signature([_parameter(each) for each in settings.values()])
    )
    call.__name__, call.__doc__, call.__annotations__ = function.__name__, function.__doc__, {}
    return call


def _parameter(setting: Described) -> inspect.Parameter:
    option = setting.option
    more: dict[str, Any] = {"help": setting.help, "show_default": False}
    if _is_switch(setting):
        more |= {"parser": read_switch, "metavar": "[BOOL]"}
    elif option.parse is not None:
        more |= {"parser": _parser(option.parse), "metavar": option.metavar or "TEXT"}
    elif option.metavar is not None:
        more["metavar"] = option.metavar
    if option.choices or option.suggest is not None:
        more["autocompletion"] = lambda incomplete: [word for word in option.words() if word.startswith(incomplete)]
    info = typer.Argument(**more) if option.is_argument else typer.Option(*setting.spellings, **more)
    default = inspect.Parameter.empty if setting.default is REQUIRED else setting.default
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(setting.name, kind, default=default, annotation=Annotated[_typer_type(setting), info])


def _parser(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a parser that lets defaults pass: typer parses them too."""
    return lambda value: parse(value) if isinstance(value, str) else value


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, without None."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return tuple(each for each in get_args(annotation) if each is not type(None)) if is_union else (annotation,)


def _is_switch(setting: Described) -> bool:
    return _members(setting.type) == (bool,)


def _is_list(setting: Described) -> bool:
    (first, *_) = _members(setting.type)
    return get_args(first)[1:] == (...,) and setting.option.parse is None and not setting.option.is_argument


def _typer_type(setting: Described) -> Any:
    """Return the type that typer converts to: the first of a union that it knows, a text for what has a parser."""
    members = _members(setting.type)
    if _is_switch(setting) or setting.option.parse is not None or str in members:
        own: Any = str
    elif get_args(members[0])[1:] == (...,):
        own = list[get_args(members[0])[0]]  # type: ignore[misc]
    else:
        own = members[0] if members[0] in (int, float, Path) or get_origin(members[0]) is tuple else str
    return own if setting.default is REQUIRED else own | None
