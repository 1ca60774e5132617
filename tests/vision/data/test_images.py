"""Files into arrays: what Pillow reads is the reference; bad files are one line that names them."""

import io
import os
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import noise, smooth, write
from PIL import Image

from mezzo.vision.data import DataError, decode_image, read_image, read_label
from mezzo.vision.data._headers import kind_of, read_header
from mezzo.vision.data._images import MAX_PIXELS


@pytest.mark.parametrize("ending", ["png", "bmp"])
def test_lossless_files_are_read_as_rgb(tmp_path: Path, ending: str) -> None:
    pixels = noise()
    image = read_image(write(tmp_path / f"a.{ending}", pixels))
    assert image.dtype == np.uint8
    assert (image == pixels).all()


@pytest.mark.parametrize("ending", ["jpg", "webp"])
def test_lossy_files_are_read_as_pillow_reads_them(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"a.{ending}", smooth())
    expected = np.array(Image.open(path).convert("RGB")).astype(int)
    assert np.abs(read_image(path) - expected).max() <= 4  # two decoders of colour at half resolution


def test_grey_becomes_three_equal_channels(tmp_path: Path) -> None:
    grey = noise()[..., 0]
    assert (read_image(write(tmp_path / "a.png", grey)) == grey[..., None]).all()


def test_palette_image_becomes_its_colours(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", noise(), "P")
    assert (read_image(path) == np.array(Image.open(path).convert("RGB"))).all()


def test_alpha_is_left_out(tmp_path: Path) -> None:
    rgba = np.dstack([noise(), noise()[..., 0]])
    assert (read_image(write(tmp_path / "a.png", rgba)) == rgba[..., :3]).all()


def test_16_bits_become_8(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(1 << 16, size=(20, 30), dtype=np.uint16)
    image = read_image(write(tmp_path / "a.png", deep))
    assert image.dtype == np.uint8
    assert np.abs(image[..., 0] - deep / 257).max() <= 1


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG that says it is large and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rest = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + rest


@pytest.mark.parametrize("reader", [read_image, read_label])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "the file is empty"),
        (b"plain text, no image", "not an image file"),
        (
            png_of_size(8200, 8200),
            f"8200 x 8200 pixels are more than the {MAX_PIXELS} that are read; cut it into tiles",
        ),
        (png_of_size(60000, 60000), f"60000 x 60000 pixels are more than the {MAX_PIXELS} that are read"),
    ],
)
def test_bad_file_is_one_line_that_names_it(tmp_path, reader, content, message) -> None:
    path = tmp_path / "bad.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"bad.png: {message}") as caught:
        reader(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["jpg", "png"])
@pytest.mark.parametrize("part", [0.5, 0.9, 0.99])
def test_image_that_ends_early_is_refused(tmp_path: Path, ending: str, part: float) -> None:
    data = write(tmp_path / f"a.{ending}", noise()).read_bytes()
    with pytest.raises(DataError, match=f"short.{ending}: the image is cut off; copy or download the file again"):
        decode_image(data[: int(len(data) * part)], f"short.{ending}")


def test_jpeg_with_bytes_behind_its_end_is_read(tmp_path: Path) -> None:
    data = write(tmp_path / "a.jpg", noise()).read_bytes()
    assert (decode_image(data + b"\0" * 100, "a.jpg") == decode_image(data, "a.jpg")).all()


def test_damaged_image_is_refused(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.png", noise()).read_bytes())
    data[5000] ^= 0xFF
    with pytest.raises(DataError, match=r"a.png: OpenCV cannot decode the image; it is damaged or of an unknown kind"):
        decode_image(bytes(data), "a.png")


def test_refusal_of_opencv_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        error = cv2.error("OpenCV(5.0.0) several\nlines")
        error.err = "size.width <= limit"
        raise error

    data = write(tmp_path / "a.png", noise()).read_bytes()
    monkeypatch.setattr(cv2, "imdecode", refuse)
    with pytest.raises(DataError, match=r"^a.png: OpenCV cannot decode the image \(size.width <= limit\)$"):
        decode_image(data, "a.png")


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder, not a file"):
        read_image(tmp_path)


def test_name_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(DataError, match=r"cannot be read: .*embedded null"):
        read_image("a\0b.png")


def test_label_of_a_palette_image_is_its_indices(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(19, size=(20, 30), dtype=np.uint8)
    image = Image.fromarray(ids)
    image.putpalette(list(np.random.default_rng(1).integers(256, size=768)))
    image.save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as written:
        assert written.mode == "P"
    assert (read_label(tmp_path / "a.png") == ids).all()


def test_grey_label_is_its_values_and_can_be_written_to(tmp_path: Path) -> None:
    ids = np.arange(256, dtype=np.uint8).reshape(16, 16)
    label = read_label(write(tmp_path / "a.png", ids))
    assert (label == ids).all()
    label[0, 0] = 7


@pytest.mark.parametrize("mode", ["RGB", "LA", "1", "I;16"])
def test_label_of_another_kind_is_refused(tmp_path: Path, mode: str) -> None:
    path = write(tmp_path / "a.png", noise()[..., 0] if mode != "I;16" else noise()[..., 0].astype(np.uint16))
    if mode != "I;16":
        Image.open(path).convert(mode).save(path)
    with pytest.raises(DataError, match=rf"a.png: a label has one channel of 8 bits .* this file has mode {mode}"):
        read_label(path)


def test_damaged_label_is_refused(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path / "a.png", noise()[..., 0]).read_bytes())
    data[len(data) // 2 :] = b"\0" * (len(data) - len(data) // 2)
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(DataError, match=r"a.png: the label cannot be decoded \("):
        read_label(tmp_path / "a.png")


def encoded(kind: str, mode: str = "RGB", size: tuple[int, int] = (20, 30), **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PPM", "JPEG2000", "ICO", "PCX", "SGI", "TGA", "GIF"])
def test_formats_that_no_data_set_uses_are_not_decoded(kind: str) -> None:
    with pytest.raises(DataError, match=r"a\.png: not an image file .*JPEG, PNG, BMP, WEBP, TIFF"):
        decode_image(encoded(kind), "a.png")


def test_tiff_images_and_gif_labels_are_read(tmp_path: Path) -> None:
    assert decode_image(encoded("TIFF"), "a.tif").shape == (30, 20, 3)
    (tmp_path / "a.gif").write_bytes(encoded("GIF", "P"))
    assert read_label(tmp_path / "a.gif").shape == (30, 20)


@pytest.mark.parametrize("reader", [read_image, read_label])
def test_postscript_named_png_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable[[Path], object]
) -> None:
    started: list[object] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    monkeypatch.setattr("subprocess.check_call", lambda *words, **options: started.append(words))
    (tmp_path / "a.png").write_bytes(encoded("EPS", "L"))
    with pytest.raises(DataError, match=r"a\.png: not an image file \(allowed: JPEG, PNG"):
        reader(tmp_path / "a.png")
    assert not started


@pytest.mark.parametrize("reader", [read_image, read_label])
def test_a_pipe_or_device_in_place_of_an_image_is_refused_at_once(
    tmp_path: Path, reader: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png: is a named pipe, not a file"):
        reader(tmp_path / "a.png")
    with pytest.raises(DataError, match="/dev/zero: is a device"):
        reader(Path("/dev/zero"))


@pytest.mark.parametrize("reader", [read_image, read_label])
def test_a_jpeg_of_thousands_of_scans_is_not_decoded(tmp_path: Path, reader: Callable[[Path], object]) -> None:
    data = encoded("JPEG", "L", progressive=True)
    scans = data[data.rfind(b"\xff\xda") : -2] * 2000  # 1.2 s for 4 megapixels
    (tmp_path / "a.jpg").write_bytes(data[:-2] + scans + data[-2:])
    with pytest.raises(DataError, match="more than 100 scans"):
        reader(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes(data)
    reader(tmp_path / "a.jpg")


def test_a_damaged_tiff_is_one_line_without_warnings() -> None:
    data = bytearray(encoded("TIFF"))
    place = struct.unpack_from("<I", data, 4)[0] + 2  # of the first tag: 2 bytes of name, 2 of type, 4 of count
    struct.pack_into("<I", data, place + 4, 2**31)
    with pytest.raises(DataError, match="damaged"):
        decode_image(bytes(data), "a.tif")


def test_names_of_colour_profiles_do_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """Libpng prints the name of a damaged profile as it is."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    profile = b"a\x1b]0;title\x07\x1b[31mred\0\0" + zlib.compress(bytes(range(250)) * 20)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 10, 10, 8, 0, 0, 0, 0))
    data += 2 * chunk(b"iCCP", profile) + chunk(b"IDAT", zlib.compress(bytes(110))) + chunk(b"IEND", b"")
    assert decode_image(data, "x.png").shape == (10, 10, 3)
    assert "".join(capfd.readouterr()) == ""


def test_a_damaged_image_prints_nothing_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    good = cv2.imencode(".png", np.zeros((40, 40, 3), np.uint8))[1].tobytes()
    with suppress(DataError):
        decode_image(good.replace(b"IDAT", b"IDAU", 1), "x.png")
    assert "ERROR" not in capfd.readouterr().err


def test_an_image_of_too_many_pixels_is_not_called_damaged() -> None:
    bitmap = (
        b"BM" + struct.pack("<IHHI", 1000, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 30000, -30000, 1, 24, *[0] * 6)
    )
    with pytest.raises(DataError, match="cut it into tiles"):
        decode_image(bitmap, "x.bmp")


# The size in the header of a file, against Pillow


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
