"""Small files from strangers: recipes, deploy.yaml, lists, changes, TIPC texts and run folders, images, logs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fuzzing import Target
from mutate import NUMBERS, TEXTS, mutate_bytes, mutate_text, mutate_tree
from PIL import Image

from mezzo.amp import load_lists
from mezzo.export import read_deployed
from mezzo.fetch import recorded
from mezzo.files import read_text
from mezzo.proof import Changes, read_changes
from mezzo.tipc import (
    MODES,
    RECORDS,
    RUN,
    Record,
    RunInfo,
    choose_profile,
    lint,
    make_plan,
    merge_reports,
    read_config,
)
from mezzo.vision.data import ImageList, ListDataset, read_image, read_label
from mezzo.vision.infer import compose_transforms, find_images, parse_reports
from mezzo.vision.recipes import RecipeError, load_recipe

ROOT = Path(__file__).parents[2]


def spoiled_text(rng: random.Random, tree: Any, *, as_json: bool = False) -> bytes:
    """Return data as YAML or JSON with values, lines or bytes changed, or a bomb in a place of a value."""
    kind = rng.randrange(6)
    made = mutate_tree(rng, tree) if kind <= 2 else tree
    text = json.dumps(made) if as_json else dumped(made)
    if kind == 3:
        text = mutate_text(rng, text)
    if kind == 4:
        bomb = rng.choice(
            ("[" * 5000, '"\\UFFFFFFFF"', "&a [*a, *a]", "!!python/name:os.system", "{? [a]: 1}", "<<: 3")
        )
        text = rng.choice((text + "\n", "")) + rng.choice(("", "zz: ")) + bomb + "\n"
    data = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, data) if kind == 5 else data


def dumped(tree: Any) -> str:
    """Return YAML; JSON where PyYAML cannot write it, which is YAML too."""
    try:
        return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
    except (ValueError, RecursionError, yaml.YAMLError):
        try:
            return json.dumps(tree)
        except ValueError:  # a number of too many digits
            return "a: 1" + "0" * 5000


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# Recipes


@functools.cache
def recipes() -> list[dict[str, Any]]:
    """Return the recipes of this repository, with their bases merged into them."""
    found = sorted((ROOT / "test_tipc" / "configs").rglob("*.yml"))
    trees: list[dict[str, Any]] = []
    for path in found:
        with contextlib.suppress(RecipeError):  # a base is not a recipe
            trees.append(load_recipe(path).resolved)
    return trees


def make_recipe(rng: random.Random, folder: Path) -> Path:
    tree = dict(rng.choice(recipes()))
    if rng.random() < 0.6:
        names = rng.sample(sorted(tree), len(tree) // 2)
        write(folder / "base.yml", spoiled_text(rng, {name: tree.pop(name) for name in names}))
        if rng.random() < 0.2:
            os.mkfifo(folder / "pipe.yml")
        tree["_base_"] = rng.choice(
            ("base.yml", "main.yml", ["base.yml"] * 3, "pipe.yml", "/dev/zero", rng.choice(TEXTS))
        )
    return write(folder / "main.yml", spoiled_text(rng, tree))


# deploy.yaml, lists, changes, records

DEPLOY = {
    "Deploy": {
        "model": "model.onnx",
        "transforms": [
            {"type": "ResizeShort", "size": 256},
            {"type": "CenterCrop", "size": 224},
            {"type": "Resize", "target_size": [512, 256]},
            {"type": "Padding", "target_size": [512, 256]},
            {"type": "Normalize", "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
        ],
        "input_shape": [-1, 3, -1, -1],
        "output_op": "argmax",
        "task": "segmentation",
        "model_name": "net",
        "num_classes": 2,
        "class_names": ["a", "b"],
        "variants": {"fp32": {"onnx": "model.onnx", "program": "model.pt2"}},
        "files": {"model.onnx": hashlib.sha256(b"x").hexdigest(), "model.pt2": "1" * 64},
        "made_by": {"mezzo": "0.1"},
    }
}
LISTS = {"custom_white_list": ["softmax", "elementwise_add"], "custom_black_list": ["linear"], "half_layers": ["a.*"]}
CHANGES = Changes(channels_last=True, pad_channels=(("stem", 4, 64), ("0", 8, 8)), custom_white_list=("softmax",))
FETCHED = {"url": "https://host/a.pt", "size": 5, "sha256": "0" * 64, "when": "2026-01-01T00:00:00+00:00", "etag": None}


def make_deploy(rng: random.Random, folder: Path) -> Path:
    tree = mutate_tree(rng, DEPLOY["Deploy"]) if rng.random() < 0.5 else DEPLOY["Deploy"]
    write(folder / "model.onnx", b"x")
    return write(folder / "deploy.yaml", spoiled_text(rng, {"Deploy": tree}))


def read_deploy(path: Path) -> None:
    model = read_deployed(path)
    compose_transforms(model)
    model.file("fp32", "onnx")


def make_lists(rng: random.Random, folder: Path) -> Path:
    as_json = rng.random() < 0.5
    return write(folder / ("lists.json" if as_json else "lists.yml"), spoiled_text(rng, LISTS, as_json=as_json))


def make_changes(rng: random.Random, folder: Path) -> Path:
    return write(folder / "changes.yaml", spoiled_text(rng, CHANGES.to_dict()))


def make_fetched(rng: random.Random, folder: Path) -> Path:
    return write(folder / "a.pt.json", spoiled_text(rng, FETCHED, as_json=True))


# TIPC


@functools.cache
def tipc_texts() -> list[str]:
    """Return the texts of this repository and of the recorded examples."""
    own = [path.read_text() for path in sorted((ROOT / "test_tipc" / "configs").rglob("*.txt"))]
    lines = (ROOT / "tests" / "tipc" / "examples.jsonl").read_text().splitlines()
    return own + [json.loads(line)["config"] for line in lines[::11]]


def make_tipc_text(rng: random.Random, folder: Path) -> Path:
    text = rng.choice(tipc_texts())
    for _ in range(rng.choice((1, 2, 5))):
        text = mutate_text(rng, text)
    if rng.random() < 0.3:
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice("|:=;$`'\"*[]{}&<>\\ ") * rng.choice((1, 2, 300)) + text[at:]
    data = text.encode("utf-8", "surrogatepass")
    return write(folder / "text.txt", mutate_bytes(rng, data) if rng.random() < 0.3 else data)


def read_tipc_text(path: Path) -> None:
    text = read_config(path)
    profile, _ = choose_profile(None, text, path.parent)
    for mode in MODES:
        plan = make_plan(text, mode, profile)
        lint(text, mode, profile, plan, path.parent)
        plan.from_json(plan.as_json())


LOG = f"""\
[TRAIN] epoch: 1, iter: 10/20, loss: 0.5, lr: 0.01
[EVAL] #Images: 4 mIoU: 0.5
{"-" * 22} Env info {"-" * 22}
 OS_version: Debian 12
{"-" * 23} Model info {"-" * 22}
 model_name: lite
 precision: fp16
{"-" * 23} Data info {"-" * 23}
 batch_size: 2
 data_num: 4
{"-" * 23} Perf info {"-" * 23}
 gpu_util: 10%
 total time spent(s): 0.1
 preprocess_time(ms): 4.0, inference_time(ms): 20.0, postprocess_time(ms): 1.0
{"-" * 22} Torch info {"-" * 22}
 inference_p50(ms): 19.5, inference_p95(ms): 24.25, inference_p99(ms): 25.0
"""


def make_run(rng: random.Random, folder: Path) -> Path:
    info = RunInfo(
        config="a.txt", mode="lite_train_lite_infer", profile="seg", model="lite", command_line=("mezzo",),
        start="2024-01-01T00:00:00+00:00", end="", result=0, machine={"cpu": "x"}, versions={"torch": "2"}, hashes={},
    )  # fmt: skip
    records = [
        Record(
            step=f"{kind}-1", kind=kind, model="lite", mode="lite_train_lite_infer", labels={"devices": "0", "batch": "1"},
            command="python a.py", status=status, log=f"{kind}.log", cwd=str(folder), seconds=1.5, code=0, start="2024",
            needs=("train-1",),
        )
        for kind, status in (("train", "passed"), ("infer", "failed"), ("export", "skipped"))
    ]  # fmt: skip
    certificate = {"checks": [{"name": "loss", "passed": True, "measured": 0.5, "limit": [1, 2], "text": "x"}]}
    texts = {
        RUN: [json.loads(info.text())],
        RECORDS: [json.loads(each.line()) for each in records],
        "certificate.json": [certificate],
    }
    chosen = rng.choice((*texts, RECORDS, RECORDS, "log"))
    for name, trees in texts.items():
        data = b""
        for tree in trees:
            data += (spoiled_text(rng, tree, as_json=True) if name == chosen else json.dumps(tree).encode()) + b"\n"
        write(folder / name, data)
    for name in ("train.log", "infer.log"):
        text = "\n".join(mutate_numbers(rng, LOG).split("\n")) if chosen == "log" else LOG
        write(folder / name, text.encode("utf-8", "surrogatepass"))
    return folder


def mutate_numbers(rng: random.Random, text: str) -> str:
    """Return a log with other numbers in it, or with its lines changed."""
    if rng.random() < 0.5:
        return mutate_text(rng, text)
    words = text.split(" ")
    for _ in range(rng.choice((1, 3))):
        places = [place for place, word in enumerate(words) if word[:1].isdigit()]
        words[rng.choice(places)] = rng.choice(
            ("1e999", "-1e999", "nan", "9" * 400, "1e308", "-0", "1e", ".", "9" * 5000)
        )
    return " ".join(words)


def read_run(path: Path) -> None:
    with tempfile.TemporaryDirectory() as out:
        merge_reports([path], out)


def make_log(rng: random.Random, folder: Path) -> Path:
    text = mutate_numbers(rng, LOG)
    data = text.encode("utf-8", "surrogatepass")
    return write(folder / "log.txt", mutate_bytes(rng, data) if rng.random() < 0.5 else data)


def read_log(path: Path) -> None:
    for report in parse_reports(read_text(path), warmup=1):
        json.dumps(report)


# Images, labels, lists of images

_KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("PNG", "RGB", {}), ("PNG", "L", {}), ("PNG", "P", {}), ("PNG", "I;16", {}), ("PNG", "1", {}), ("PNG", "RGBA", {}),
    ("JPEG", "RGB", {}), ("JPEG", "L", {"progressive": True}), ("JPEG", "CMYK", {}), ("BMP", "RGB", {}), ("BMP", "P", {}),
    ("BMP", "1", {}), ("WEBP", "RGB", {}), ("WEBP", "RGBA", {"lossless": True}), ("TIFF", "RGB", {}), ("TIFF", "L", {}),
    ("TIFF", "P", {"compression": "tiff_lzw"}), ("TIFF", "RGB", {"compression": "jpeg"}), ("TIFF", "F", {}),
    ("TIFF", "L", {"compression": "tiff_deflate"}), ("TIFF", "1", {"compression": "group4"}), ("GIF", "P", {}),
    ("GIF", "L", {"interlace": 1}), ("PPM", "RGB", {}), ("EPS", "L", {}), ("JPEG2000", "RGB", {}), ("ICO", "RGB", {}),
)  # fmt: skip


@functools.cache
def pictures() -> list[bytes]:
    """Return a small image of every kind."""
    rng = np.random.default_rng(0)
    pixels = Image.fromarray(rng.integers(0, 255, (24, 40, 3), dtype=np.uint8))
    made = []
    for kind, mode, options in _KINDS:
        file = io.BytesIO()
        image = pixels.convert("L").convert("I").convert("I;16") if mode == "I;16" else pixels.convert(mode)
        image.save(file, kind, **options)
        made.append(file.getvalue())
    return made


def make_picture(rng: random.Random, folder: Path) -> Path:
    data = rng.choice(pictures())
    kind = rng.randrange(5)
    if kind == 0:
        data = resized(rng, data)
    elif kind <= 3:
        for _ in range(rng.choice((1, 1, 3))):
            data = mutate_bytes(rng, data)
        data = with_checksums(data) if kind > 1 else data
    path = folder / "a.png"
    if rng.random() < 0.01:
        os.mkfifo(path)
        return path
    return write(path, data)


def resized(rng: random.Random, data: bytes) -> bytes:
    """Return an image with another number in place of its width or height, wherever it stands."""
    size, order = rng.choice((24, 40)), rng.choice("<>")
    new = rng.choice((0, 1, 255, 4096, 8192, 65535, 2**31 - 1, 2**32 - 1))
    for width in rng.sample(("I", "H"), 2):
        old = struct.pack(order + width, size)
        if old in data:
            value = struct.pack(order + width, new % (1 << 8 * len(old)))
            return with_checksums(data.replace(old, value, rng.choice((1, 2))))
    return data


def with_checksums(data: bytes) -> bytes:
    """Return a PNG whose chunks have right checksums; anything else as it is."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    out, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        length = min(int.from_bytes(data[at : at + 4], "big"), len(data) - at - 12)
        body = data[at + 4 : at + 8 + length]
        out += struct.pack(">I", length) + body + struct.pack(">I", zlib.crc32(body))
        at += 12 + length
    return bytes(out)


def make_image_list(rng: random.Random, folder: Path) -> Path:
    for name in ("a.png", "b.png"):
        write(folder / name, pictures()[1])
    os.mkfifo(folder / "pipe.png")
    names = (
        "a.png",
        "b.png",
        "a.png",
        "pipe.png",
        "/dev/zero",
        ".",
        "0",
        "1",
        *rng.sample(TEXTS, 3),
        *map(str, NUMBERS[:5]),
    )
    lines = [rng.choice((" ", "  ", ",", "\t")).join(rng.choices(names, k=rng.choice((1, 2, 2, 3)))) for _ in range(4)]
    good = ["a.png b.png", "b.png a.png"] if rng.random() < 0.5 else ["a.png 0", "b.png 1"]
    text = "\n".join(good if rng.random() < 0.3 else rng.sample([*good, *lines], 3))
    data = text.encode("utf-8", "surrogatepass")
    return write(folder / "list.txt", mutate_bytes(rng, data) if rng.random() < 0.3 else data)


def read_image_list(path: Path) -> None:
    paths = find_images(path)
    assert all(each.is_file() for each in paths)
    if path.read_bytes().find(b".png 0") >= 0:
        ImageList(path.parent, path).read(0)
    else:
        ListDataset(str(path.parent), 256 - 1, train_path=str(path)).read(0)


TARGETS = [
    Target("recipe", make_recipe, load_recipe, seconds=10),
    Target("deploy", make_deploy, read_deploy),
    Target("amp-lists", make_lists, load_lists),
    Target("changes", make_changes, read_changes),
    Target("fetched", make_fetched, lambda path: recorded(path.with_suffix(""))),
    Target("tipc-text", make_tipc_text, read_tipc_text, seconds=10),
    Target("tipc-run", make_run, read_run, seconds=10),
    Target("report-log", make_log, read_log),
    Target("image", make_picture, read_image, seconds=10),
    Target("label", make_picture, read_label, seconds=10),
    Target("image-list", make_image_list, read_image_list),
]
