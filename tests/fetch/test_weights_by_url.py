"""Weights by URL, from the server into a network; archives of weights, harmless and hostile."""

import bz2
import gzip
import lzma
import re
import stat
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import archives
from mezzo.checkpoint import (
    CheckpointError,
    WeightsError,
    convert,
    find_weights,
    load_pdparams,
    load_weights,
    read_pdparams,
    save_pdparams,
)
from mezzo.errors import RunError
from mezzo.fetch import FetchError, place_of
from mezzo.vision.models import create_model

PACKED = {".tar": bytes, ".tar.gz": gzip.compress, ".tgz": gzip.compress, ".tar.xz": lzma.compress}
PACKED |= {".tar.bz2": bz2.compress, ".TAR.GZ": gzip.compress}


tar_of = partial(archives.tar_of, kind="w")


def link(name, target):
    return archives.special(name, tarfile.SYMTYPE, target)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def weights(tmp_path):
    """The content of a file with the weights of `small()`."""

    def content(suffix=".pdparams"):
        save_pdparams(small(), tmp_path / "a.pdparams")
        convert(tmp_path / "a.pdparams", tmp_path / f"b{suffix}")
        return (tmp_path / f"b{suffix}").read_bytes()

    return content


def loads(path):
    model = small(seed=1)
    load_weights(model, path)
    expected = small().state_dict()
    return all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


# By URL


def test_archive_of_a_backbone_comes_by_url_into_the_network(server, tmp_path, capsys):
    torch.manual_seed(0)
    source = create_model("pp_liteseg_stdc1", num_classes=2).backbone
    save_pdparams(source, tmp_path / "a.pdparams")
    packed = tar_of({"PP_STDCNet1/model.pdparams": (tmp_path / "a.pdparams").read_bytes()})
    packed = gzip.compress(packed, 1)
    url = server.serve("/paddleseg/dygraph/PP_STDCNet1.tar.gz", packed, cuts=[len(packed) // 2])
    torch.manual_seed(1)
    target = create_model("pp_liteseg_stdc1", num_classes=2).get_submodule("backbone")
    path = find_weights(url, "model.backbone.pretrained")
    assert path == place_of(url)
    report = load_weights(target, path)
    assert not report.missing
    for name, value in target.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]), name
    assert sorted(file.name for file in path.parent.iterdir() if not file.name.startswith(".")) == [
        "PP_STDCNet1.tar.gz",
        "PP_STDCNet1.tar.gz.json",
    ]
    assert sum(server.sent) == len(packed)
    assert capsys.readouterr().err.splitlines()[0].startswith(f"fetching {url} (")


def test_url_that_went_through_a_path_has_its_slash_again(server, weights):
    url = server.serve("/a.pdparams", weights())
    assert "//" not in str(Path(url))
    assert loads(find_weights(Path(url)))


def test_local_url_is_found_without_a_copy(tmp_path, weights):
    (tmp_path / "w.pdparams").write_bytes(weights())
    assert find_weights((tmp_path / "w.pdparams").as_uri()) == tmp_path / "w.pdparams"


def test_url_that_fails_says_why_where_to_put_the_file_and_how_to_start_without(server, monkeypatch):
    url = server.url + "/a/b.pdparams"
    without = ", or start without: --opts model.backbone.pretrained=null"
    expected = (
        f"{url}: cannot be fetched: the server answered 404 Not Found; fetch the file by other means and put it at "
    )
    with pytest.raises(RunError, match=f"^{re.escape(f'{expected}{place_of(url)}{without}')}$"):
        find_weights(url, "model.backbone.pretrained")
    monkeypatch.setenv("MEZZO_OFFLINE", "1")
    with pytest.raises(RunError, match=re.escape(f"put it at {place_of(url)}{without}")):
        find_weights(url, "model.backbone.pretrained")
    with pytest.raises(FetchError, match=r"there is no such file$"):
        find_weights("file:///no/such.pdparams")


def test_other_schemes_are_refused():
    with pytest.raises(
        CheckpointError, match=r"s3://bucket/a\.pt: weights are fetched by http:, https: and file: only"
    ):
        find_weights("s3://bucket/a.pt")


# Archives


@pytest.mark.parametrize("suffix", [".pdparams", ".safetensors", ".pt", ".pth"])
@pytest.mark.parametrize("archive", [*PACKED, ".zip"])
def test_weights_of_every_format_load_from_every_archive(tmp_path, weights, suffix, archive):
    files = {"net/readme.md": b"x", f"net/any{suffix}": weights(suffix)}
    path = tmp_path / f"net{archive}"
    path.write_bytes(archives.zip_of(files) if archive == ".zip" else PACKED[archive](tar_of(files)))
    before = sorted(tmp_path.rglob("*"))
    assert loads(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_archive_is_converted_and_read_as_arrays(tmp_path, weights):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(tar_of({"net/model.pdparams": weights()})))
    assert convert(path, tmp_path / "b.pt") == 6
    assert loads(tmp_path / "b.pt")
    np.testing.assert_array_equal(read_pdparams(path)["0.weight"], small()[0].weight.detach().numpy().T)
    load_pdparams(small(), path)
    with pytest.raises(WeightsError, match=r"unknown format '\.gz'"):
        convert(path, tmp_path / "c.tar.gz")


def test_arrays_are_read_only_from_pdparams(tmp_path, weights):
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({"b.pt": weights(".pt")}))
    with pytest.raises(WeightsError, match=r"a\.tar: 'b\.pt': not a \.pdparams file"):
        read_pdparams(path)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a.pdparams", "n/model.pdparams", "z.pt"], "n/model.pdparams"),
        (["model.safetensors", "model.pdparams"], "model.pdparams"),
        (["model.safetensors", "student.pdparams"], "model.safetensors"),
        (["__MACOSX/._model.pdparams", "model.pdparams"], "model.pdparams"),
        (["PKU/model.pdparams"], "PKU/model.pdparams"),
        (["BZhang/model.pdparams"], "BZhang/model.pdparams"),
        (["../../model.pdparams"], "../../model.pdparams"),  # its name is not used for a path
    ],
)
def test_one_of_several_is_chosen_by_its_name(tmp_path, weights, names, chosen):
    files = {name: weights(Path(name).suffix) if name == chosen else b"rubbish" for name in names}
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    assert loads(tmp_path / "a.tar")


MODEL = "model.pdparams"


def encrypted_zip():
    data = bytearray(archives.zip_of({MODEL: b"x"}))
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


def pax_bomb():
    """A tar file whose first header announces gigabytes of attributes, which are read before any entry."""
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 5 << 30
    return gzip.compress(info.tobuf(tarfile.USTAR_FORMAT) + bytes(1 << 20))


def many_headers():
    """A tar file of long names for a file that never comes: its bytes are in no entry."""
    info = tarfile.TarInfo("long")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 20
    return gzip.compress((info.tobuf(tarfile.GNU_FORMAT) + b"n" * (1 << 20)) * 330, 1)


def sparse_bomb():
    """A tar file with a file of zeros that takes no room in it."""
    info = tarfile.TarInfo(MODEL)
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o\0" % (7 << 30)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return gzip.compress(bytes(block) + bytes(1024))


def negative_size():
    info = tarfile.TarInfo(MODEL)
    info.size = -512
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def changed(data, place, other=b"!"):
    """Return bytes with one replaced, as a bad disk does."""
    return data[:place] + other + data[place + 1 :]


RANDOM = np.random.default_rng(0).bytes(100_000)
REFUSED = {
    "link": (
        "a.tar",
        lambda: tar_of({}, link(MODEL, "/etc/passwd")),
        "no weights file.*'model.pdparams' .is a link",
    ),
    "link in zip": (
        "a.zip",
        lambda: archives.zip_of({MODEL: b"/etc/x"}, **{MODEL: stat.S_IFLNK | 0o777}),
        "no weights file.*link",
    ),
    "none": (
        "a.tgz",
        lambda: gzip.compress(tar_of({"a.txt": b"", "b.md": b""})),
        r"no weights file .*'a.txt', 'b.md'",
    ),
    "empty": ("a.tar", lambda: tar_of({}), "no weights file.*no files"),
    "many others": ("a.zip", lambda: archives.zip_of({f"{n}.txt": b"" for n in range(20)}), "'7.txt' and 12 more"),
    "two": (
        "a.zip",
        lambda: archives.zip_of({"a.pt": b"", "b.pth": b""}),
        "several weights files: 'a.pt', 'b.pth'; unpack",
    ),
    "two models": (
        "a.tar",
        lambda: tar_of({f"a/{MODEL}": b"", f"b/{MODEL}": b""}),
        "several weights files: 'a/",
    ),
    "empty file": ("a.tar", lambda: tar_of({MODEL: b""}), "'model.pdparams': is empty"),
    "empty archive": ("a.tar.gz", lambda: b"", "neither a tar file"),
    "no archive": ("a.zip", lambda: b"rubbish", "neither a tar file"),
    "truncated": (
        "a.tar.gz",
        lambda: gzip.compress(tar_of({MODEL: RANDOM}))[:50_000],
        "damaged or encrypted: Compressed file",
    ),
    "truncated early": ("a.tar.gz", lambda: gzip.compress(tar_of({MODEL: RANDOM}))[:20], "damaged or encrypted"),
    "truncated tar": ("a.tar", lambda: tar_of({MODEL: RANDOM})[:50_000], "damaged or encrypted: unexpected end"),
    "truncated xz": ("a.tar.xz", lambda: lzma.compress(tar_of({MODEL: RANDOM}))[:50_000], "damaged or encrypted"),
    "truncated bz2": ("a.tar.bz2", lambda: bz2.compress(tar_of({MODEL: RANDOM}))[:50_000], "damaged or encrypted"),
    "truncated zip": (
        "a.zip",
        lambda: archives.zip_of({MODEL: RANDOM})[:50_000],
        "damaged or encrypted: File is not a zip file",
    ),
    "another byte": (
        "a.tar.gz",
        lambda: changed(gzip.compress(tar_of({MODEL: bytes(5000), "b": RANDOM}), 0), 2000),
        "damaged or encrypted: CRC check failed",
    ),
    "another header": ("a.tar", lambda: changed(tar_of({"a": b"", MODEL: b"x"}), 520), "a header cannot be read"),
    "encrypted": ("a.zip", encrypted_zip, "damaged or encrypted: .*encrypted"),
    "pax bomb": ("a.tar.gz", pax_bomb, "damaged: a header of 5368709120 bytes"),
    "many headers": ("a.tar.gz", many_headers, "damaged|unpacks to more than"),
    "sparse bomb": ("a.tar.gz", sparse_bomb, "unpacks to more than 268435456 bytes"),
    "negative size": ("a.tar", negative_size, "damaged or encrypted: .*negative size"),
    "too many": ("a.tar", lambda: tar_of({str(n): b"" for n in range(10_001)}), "unpacks to more than 10000 files"),
}


@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
def test_archive_that_cannot_be_used_is_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content())
    for use in (lambda path: load_weights(small(), path), lambda path: convert(path, tmp_path / "out.pt")):
        with pytest.raises(WeightsError, match=message) as error:
            use(tmp_path / name)
        assert str(error.value).startswith(f"{tmp_path / name}: ")
        assert "\n" not in str(error.value)
        assert error.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch, kind):
    """Zeros that would fill 300 MiB, a thousand times the archive."""
    zeros = 300 << 20
    path = tmp_path / ("a.zip" if kind == "zip" else "a.tar.gz")
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr(MODEL, bytes(zeros))
    else:
        info = tarfile.TarInfo(MODEL)
        info.size = zeros
        path.write_bytes(gzip.compress(info.tobuf() + bytes(1 << 20)))
    monkeypatch.setattr("zipfile.ZipExtFile.read", lambda *args: pytest.fail("it was unpacked"))
    with pytest.raises(
        WeightsError, match="unpacks to more than 268435456 bytes; unpack it yourself and give the file"
    ):
        load_weights(small(), path)


def test_missing_archive_is_one_line(tmp_path):
    with pytest.raises(WeightsError, match=r"none\.tar\.gz: cannot be unpacked: No such file"):
        load_weights(small(), tmp_path / "none.tar.gz")
