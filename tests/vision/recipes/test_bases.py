"""Files that are based on others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.files import SourceMark, mark_all
from mezzo.vision.recipes._errors import FaultLog, RecipeError
from mezzo.vision.recipes._source import MAX_BYTES, merge, read_tree


def read(folder: Path, **files: str) -> Any:
    """Write files and return the plain data of the one called `main`."""
    for name, text in files.items():
        (folder / f"{name}.yml").write_text(text, encoding="utf-8")
    faults = FaultLog()
    tree = read_tree(folder / "main.yml", faults)
    faults.raise_if_any()
    return tree.plain()


def fault(folder: Path, **files: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(folder, **files)
    return str(caught.value).replace(f"{folder}/", "")


def test_blocks_are_merged_and_lists_replaced(tmp_path: Path) -> None:
    base = "a: {x: 1, y: {z: 2, w: [1, 2]}}\nb: 5\n"
    main = "_base_: base.yml\na: {y: {w: [3]}}\nc: 6\n"
    assert read(tmp_path, base=base, main=main) == {"a": {"x": 1, "y": {"z": 2, "w": [3]}}, "b": 5, "c": 6}


def test_a_block_that_is_not_inherited_replaces_that_of_the_base(tmp_path: Path) -> None:
    base = "a: {type: X, x: 1}\nb: {c: {d: 1, e: 2}}"
    main = "_base_: base.yml\na: {type: Y, _inherited_: False}\nb: {c: {_inherited_: False, f: 3}}"
    assert read(tmp_path, base=base, main=main) == {"a": {"type": "Y"}, "b": {"c": {"f": 3}}}


def test_a_grandchild_merges_into_what_its_parent_replaced(tmp_path: Path) -> None:
    files = {
        "old": "a: {x: 1}",
        "mid": "_base_: old.yml\na: {y: 2, _inherited_: False}",
        "main": "_base_: mid.yml\na: {z: 3}",
    }
    assert read(tmp_path, **files) == {"a": {"y": 2, "z": 3}}


def test_later_bases_win_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.yml").write_text("_base_: two.yml\na: 1")
    (tmp_path / "deep" / "two.yml").write_text("a: 2\nb: 2")
    assert read(tmp_path, three="b: 3", main="_base_: [deep/one.yml, three.yml]\nc: 4") == {"a": 1, "b": 3, "c": 4}


PLAIN = st.recursive(
    st.integers() | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
BLOCKS = st.dictionaries(st.sampled_from("abcd"), PLAIN, max_size=4)


def merged(base: Any, over: Any) -> Any:
    """Merge plain dicts by the rule, written once more."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {k: merged(base[k], over[k]) if k in base and k in over else over.get(k, base.get(k)) for k in base | over}


@given(BLOCKS, BLOCKS)
def test_merging_follows_the_rule(base: Any, over: Any) -> None:
    result = merge(mark_all(base, SourceMark("f.yml")), mark_all(over, SourceMark("f.yml"))).plain()
    assert result == merged(base, over)
    assert merge(mark_all(result, SourceMark("f.yml")), mark_all(over, SourceMark("f.yml"))).plain() == result


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"main": "a: 1\n_base_: gone.yml"}, "main.yml:2: _base_: gone.yml: no such file"),
        ({"main": "_base_: ."}, "main.yml:1: _base_: TMP: is a folder, not a file; give a regular file"),
        ({"main": "_base_: main.yml"}, "main.yml:1: _base_ goes in a circle: main.yml -> main.yml"),
        (
            {"main": "_base_: x.yml", "x": "\n_base_: y.yml", "y": "_base_: x.yml"},
            "y.yml:1: _base_ goes in a circle: x.yml -> y.yml -> x.yml",
        ),
        ({"main": "_base_: 3"}, "main.yml:1: _base_: 3: must be the name of a file, or a list of names"),
        ({"main": "_base_: []"}, "main.yml:1: _base_: []: must be the name of a file, or a list of names"),
        ({"main": '_base_: "a\\0b"'}, "main.yml:1: _base_: 'a\\x00b': must be the name of a file, or a list of names"),
        (
            {"main": f"_base_: [{', '.join(['x.yml'] * 40)}]", "x": "a: 1"},
            "main.yml:1: _base_ leads to more than 32 files",
        ),
        ({"main": "a: {_inherited_: maybe}"}, "main.yml:1: _inherited_: 'maybe': must be True or False"),
        ({"main": ""}, "main.yml: the file is empty"),
        ({"main": "- 1"}, "main.yml:1: a configuration is a block of settings (key: value), this is not one"),
        (
            {"main": "_base_: x.yml", "x": "a: ["},
            "x.yml:1: not YAML: expected the node content, but found '<stream end>'",
        ),
    ],
)
def test_what_is_wrong_with_bases_is_said_where_they_are_named(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    assert fault(tmp_path, **files).replace(str(tmp_path), "TMP") == message


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "main.yml"
    for data, message in [
        (b"a: 1\nb: \xff", "main.yml:2: not UTF-8 text"),
        (b"#" * (MAX_BYTES + 1), f"main.yml: larger than {MAX_BYTES} bytes, the limit for such a file"),
    ]:
        path.write_bytes(data)
        faults = FaultLog()
        read_tree(path, faults)
        with pytest.raises(RecipeError) as caught:
            faults.raise_if_any()
        assert str(caught.value).endswith(message)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert fault(tmp_path) == "main.yml: no such file"


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read(tmp_path, main="\ufeffa: 1") == {"a": 1}


def test_pipes_devices_and_links_in_a_circle_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yml")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for base, message in (("pipe.yml", "is a named pipe"), ("/dev/zero", "is a device"), ("a", "symbolic links")):
        assert message in fault(tmp_path, main=f"_base_: {base}")
