"""YAML and JSON through the readers that all packages share, and the lines of a tensor checker."""

from __future__ import annotations

import json
import random
from pathlib import Path

import yaml
from fuzzing import Target
from mutate import LEAVES, mutate_bytes, mutate_text, mutate_tree

from mezzo.amp import debugging
from mezzo.files import read_json, read_yaml

_SEED = {"a": {"b": [1, 2.5, "text", None, True], "c": "x"}, "d": [[{"e": 1}], "2020-01-01"], "lr": 5e-4}
_ALPHABET = "ab1:-,?*&!|>'\"%@`[]{}#<~. \n\t\\x0eE+_="


def make_yaml(rng: random.Random, folder: Path) -> Path:
    kind = rng.randrange(6)
    if kind == 0:
        text = "".join(rng.choice(_ALPHABET) for _ in range(rng.randrange(200)))
    elif kind == 1:
        text = _bomb(rng)
    elif kind == 2:
        text = rng.choice("[{?-!&*:") * rng.choice((10, 1000, 100_000))
    else:
        text = mutate_text(rng, yaml.safe_dump(_SEED, sort_keys=False))
    path = folder / "a.yaml"
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(mutate_bytes(rng, data) if kind == 5 else data)
    return path


def _bomb(rng: random.Random) -> str:
    """Return anchors that name anchors: as lists, as blocks, or merged by `<<`."""
    wide, deep = rng.randrange(2, 12), rng.randrange(2, 40)
    start, join = rng.choice((("[x]", "[{}]"), ("{k: 1}", "{{<<: [{}]}}"), ("{k: 1}", "{{a: {}}}")))
    lines = [f"a0: &a0 {start}"]
    for level in range(1, deep):
        names = ", ".join([f"*a{level - 1}"] * (1 if "a:" in join else wide))
        lines.append(f"a{level}: &a{level} {join.format(names)}")
    return "\n".join(lines)


def make_json(rng: random.Random, folder: Path) -> Path:
    kind = rng.randrange(4)
    if kind == 0:
        data = rng.choice(("[", '{"a":', "[[", '"\\u')).encode() * rng.choice((5, 500, 200_000))
    elif kind == 1:
        data = mutate_bytes(rng, json.dumps(_SEED).encode())
    else:
        tree = mutate_tree(rng, _SEED) if kind == 2 else rng.choice(LEAVES)
        data = json.dumps(tree).encode()
    path = folder / "a.json"
    path.write_bytes(data)
    return path


_LINES = (
    "[PRECISION] in [device=cpu, op=exp, tensor=a.b@GRAD, dtype=fp16], numel=4, num_nan=0, num_inf=0, num_zero=1, "
    "max=1.0e+00, min=-2.0e-01, mean=nan\n"
) * 3


def make_dump(rng: random.Random, folder: Path) -> Path:
    kind = rng.randrange(4)
    if kind == 0:
        text = _LINES.replace("4", "9" * rng.choice((1, 18, 19, 10_000)))
    elif kind == 1:
        text = "[PRECISION] in [device=, op=, tensor=" + rng.choice((", dtype=", "]", "a,")) * rng.choice((5, 5_000))
    else:
        text = mutate_text(rng, _LINES)
    data = text.encode("utf-8", "surrogatepass")
    path = folder / "worker_cpu.0.log"
    path.write_bytes(mutate_bytes(rng, data) if kind == 3 else data)
    return path


def read_dump(path: Path) -> None:
    debugging.compare_accuracy(path.parent, path.parent, path.parent / "rows.csv")


TARGETS = [
    Target("dump", make_dump, read_dump),
    Target("yaml", make_yaml, read_yaml),
    Target("json", make_json, read_json),
]
