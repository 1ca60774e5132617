"""JSON from outside: what is wrong with it is one line, whatever it is."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.files import FileError, parse_json, read_json

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(TREES)
def test_what_json_wrote_comes_back(tree):
    assert parse_json(json.dumps(tree)) == tree


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[" * 200_000, "deep"),
        ("[" * 201 + "]" * 201, "deep"),
        ('{"a":' * 300 + "1" + "}" * 300, "deep"),
        ("1e400", "1e400"),
        ("-1e400", "-1e400"),
        ("1" + "0" * 400, "too large"),
        ("9" * 10_000, "too large"),
        ("NaN", "NaN"),
        ("[Infinity]", "Infinity"),
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff", "UTF-8"),
    ],
)
def test_what_is_wrong_is_a_value_error_of_one_line(text, word):
    with pytest.raises(ValueError, match=word) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)


def test_long_numbers_are_taken_where_they_are_asked_for():
    assert parse_json(str(2**4000), int_bits=4096) == 2**4000


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "a.json").write_text("[1,")
    with pytest.raises(FileError, match=r"a\.json: not JSON"):
        read_json(tmp_path / "a.json")


@given(st.text(alphabet='[]{}",:0123456789eE+-.truefalsn \\u', max_size=60) | st.text(max_size=60))
def test_any_text_is_json_or_a_value_error(text):
    with suppress(ValueError):
        json.dumps(parse_json(text))
