"""`mezzo models` and `mezzo convert`: networks, and their weights in other formats."""

import json
from dataclasses import asdict
from typing import Annotated

from mezzo._options import Option
from mezzo.cli._common import Json, model_names
from mezzo.files import say
from mezzo.report import markdown_table


def models(
    name: Annotated[
        str, Option("A name, or a shell pattern such as 'pp_*'.", suggest=model_names, is_argument=True)
    ] = "*",
    summary: Annotated[bool, Option("Layer by layer, for one network.")] = False,
    as_json: Json = False,
) -> int:
    """List the networks.

    Columns: task, parameters, multiply-accumulates, input size, classes, heads.
    """
    from mezzo.vision.models import (  # torch takes seconds to import: not for --help
        describe,
        list_models,
        model_info,
        summarize,
    )

    if summary:
        layers = summarize(name)
        if as_json:
            say(json.dumps([asdict(row) for row in layers], indent=2))
            return 0
        rows = [["layer", "kind", "output", "parameters", "MMACs"]]
        for row in layers:
            shape = "x".join(map(str, row.output)) or "-"
            rows.append([row.path, row.kind, shape, f"{row.parameters:,}", f"{row.macs / 1e6:.2f}"])
        say(markdown_table(rows))
        return 0
    names = list_models(name) or [model_info(name).name]
    found = [describe(each) for each in names]
    if as_json:
        say(json.dumps(found, indent=2))
        return 0
    rows = [["name", "task", "parameters", "GMACs", "input", "classes", "heads"]]
    for one in found:
        size = "x".join(map(str, one["input_size"]))
        figures = [
            f"{one['parameters']:,}",
            f"{one['macs'] / 1e9:.4f}",
            size,
            str(one["num_classes"]),
            str(one["heads"]),
        ]
        rows.append([one["name"], one["task"], *figures])
    say(markdown_table(rows))
    return 0


def convert(
    source: Annotated[str, Option("A .pdparams, .safetensors, .pt or .pth file.", is_argument=True)],
    target: Annotated[str, Option("File to write; its suffix is the format.", is_argument=True)],
) -> int:
    """Convert weights to another format.

    Names and layouts of the tensors become those of the format.
    """
    from mezzo.checkpoint import convert as rewrite  # torch takes seconds to import: not for --help

    say(f"{rewrite(source, target)} entries written to {target}")
    return 0
