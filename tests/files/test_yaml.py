"""YAML to trees: the same values as PyYAML's own loader, with lines, and nothing hostile gets through."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mezzo.files import MAX_DEPTH, SourceMark, YamlNode, parse_yaml


class Faults(list[str]):
    """Collects the faults of a text as lines."""

    def add(self, mark: SourceMark, text: str) -> None:
        self.append(f"{mark}: {text}")


def parsed(text: str) -> YamlNode | None:
    """Return the tree of a text that has no faults."""
    faults = Faults()
    tree = parse_yaml(text, "f.yml", faults)
    assert not faults
    return tree


def fault(text: str) -> str:
    """Return the faults of a text as lines."""
    faults = Faults()
    parse_yaml(text, "f.yml", faults)
    return "\n".join(faults)


def test_every_value_has_the_line_of_its_key() -> None:
    tree = parsed("a: 1\nb:\n  c:\n    - x\n    - {d: 2}\n")
    assert tree is not None
    assert tree.block["a"].mark.line == 1
    assert tree.block["b"].mark.line == 2
    inner = tree.block["b"].block["c"]
    assert (inner.mark.line, [item.mark.line for item in inner.items]) == (3, [4, 5])
    assert str(inner.items[1].block["d"].mark) == "f.yml:5"


# 5e-4 without quotes is a number here and text in YAML 1.1, which safe_dump writes.
TEXTS = st.text(max_size=8).filter(lambda text: re.fullmatch(r"[-+]?[0-9]+[eE][-+]?[0-9]+", text) is None)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**64) + 1, 2**64 - 1), st.floats(allow_nan=False), TEXTS)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(TREES)
def test_dumped_data_come_back(data: Any) -> None:
    tree = parsed(yaml.safe_dump(data))
    assert (None if tree is None else tree.plain()) == data


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-4", 5e-4),
        ("1E3", 1000.0),
        ("'5e-4'", "5e-4"),
        ("4.0e-5", 4e-5),
        ("2020-01-01", "2020-01-01"),
        ("!!str 5", "5"),
        ("{a: &x {b: 1}, c: {<<: *x, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("{a: &x {b: 1}, c: {b: 3, <<: *x}}", {"a": {"b": 1}, "c": {"b": 3}}),
        (
            "{a: &x {b: 1}, e: &y {b: 2, f: 0}, c: {<<: [*x, *y]}}",
            {"a": {"b": 1}, "e": {"b": 2, "f": 0}, "c": {"b": 1, "f": 0}},
        ),
    ],
)
def test_what_is_read_otherwise_than_by_the_letter_of_yaml(text: str, value: object) -> None:
    tree = parsed(text)
    assert tree is not None
    assert tree.plain() == value


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "f.yml:3: 'a' is written twice in one block, first in line 1"),
        ("a: [1\nb: 2", "f.yml:2: not YAML: expected ',' or ']', but got ':'"),
        ("a: 1\n\tb: 2", "f.yml:2: not YAML: found character '\\t' that cannot start any token"),
        ("a: *nothing", "f.yml:1: not YAML: found undefined alias 'nothing'"),
        ("a: 1\n---\nb: 2", "f.yml:2: not YAML: but found another document"),
        ("x: 1\na: \x07", "f.yml:2: not YAML: the character U+0007 is not allowed"),
        ("1: a", "f.yml:1: the key '1' is not text; keys must be names"),
        ("? [a, b]\n: c", "f.yml:1: the key (a list or block) is not text; keys must be names"),
        (
            "a: 1\nb: " + "9" * 5000,
            "f.yml:2: the number '99999999999999999999999999999999999999999999999999999999... is too large",
        ),
        (
            "a: 1" + "0" * 400,
            "f.yml:1: the number '10000000000000000000000000000000000000000000000000000000... is too large",
        ),
        ("a: !!int ''", "f.yml:1: '' cannot be read as int"),
        ("a: !!bool maybe", "f.yml:1: 'maybe' cannot be read as bool"),
        ("a: !!binary aGk=", "f.yml:1: 'aGk=': a value of kind binary is not used here"),
        ("a: !!python/name:os.system ''", "f.yml:1: '' cannot be read as python/name:os.system"),
        (
            "a: !!python/object/apply:os.system [ls]",
            "f.yml:1: the tag 'tag:yaml.org,2002:python/object/apply:os.system' is not used here",
        ),
        ("<<: 3", "f.yml:1: '<<' needs a block, or a list of blocks"),
        ('a: "\\UFFFFFFFF"', "f.yml: not YAML: a number or an escape in it is too large"),
        (BOMB, "f.yml:1: more than 20000 values once the aliases are written out"),
        ("a: &a {b: *a}", f"f.yml:1: nested more than {MAX_DEPTH} levels deep: an anchor contains itself"),
        ("a:\n  " + "[" * 5000 + "]" * 5000, f"f.yml:2: nested more than {MAX_DEPTH} levels deep"),
        ("- " * 5000 + "x", f"f.yml:1: nested more than {MAX_DEPTH} levels deep"),
    ],
)
def test_hostile_and_broken_text_is_one_line_with_its_place(text: str, message: str) -> None:
    assert fault(text).splitlines()[0] == message


@settings(max_examples=400, deadline=None)
@given(
    st.text(alphabet=st.sampled_from("ab1:-,?*&!|>'\"%@`[]{}#<~. \n\t\\x0eE+_="), max_size=40) | st.text(max_size=40)
)
def test_any_text_gives_a_tree_or_faults(text: str) -> None:
    faults = Faults()
    tree = parse_yaml(text, "f.yml", faults)
    if tree is not None:
        yaml.safe_dump(tree.plain())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: 1" + ":1" * 400_000, "too large"),  # a number in base 60, for which PyYAML takes quadratic time
        ("k: &a {" + ", ".join(f"k{i}: 1" for i in range(8000)) + "}\n<<: [*a" + ", {}" * 8000 + "]", ""),
        ("%TAG !a! b\n" * 60_000 + "--- 1", "directives"),
    ],
)
def test_what_takes_quadratic_time_is_refused_or_read_at_once(text: str, word: str) -> None:
    started = time.perf_counter()
    faults = Faults()
    parse_yaml(text, "f.yml", faults, max_values=200_000)
    assert time.perf_counter() - started < 20  # minutes before; seconds on a slow machine
    assert [word in line for line in faults] == ([True] if word else [])
