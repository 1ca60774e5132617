"""The size in the header of a file, against Pillow."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mezzo.vision.data._headers import kind_of, read_header


@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    kind=st.sampled_from(["JPEG", "PNG"]),
    mode=st.sampled_from(["L", "RGB"]),
    progressive=st.booleans(),
    comment=st.binary(max_size=40),
)
def test_size_is_that_of_the_image(
    width: int, height: int, kind: str, mode: str, progressive: bool, comment: bytes
) -> None:
    file = io.BytesIO()
    options = {"progressive": progressive, "comment": comment} if kind == "JPEG" else {}
    Image.new(mode, (width, height)).save(file, kind, **options)
    assert read_header(file.getvalue()) == (width, height)
    assert kind_of(file.getvalue()) == kind


@given(st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(lambda rest: b"\xff\xd8\xff" + rest)))
def test_bytes_of_any_kind_do_no_harm(data: bytes) -> None:
    found = read_header(data)
    assert found is None or data.startswith(b"\xff\xd8")


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP", "TIFF"])
def test_other_kinds_are_left_to_pillow(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, kind)
    assert read_header(file.getvalue()) is None
    assert kind_of(file.getvalue()) == kind
