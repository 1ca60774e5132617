"""`mezzo models` and `mezzo convert`: networks, and their weights in other formats."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from mezzo.files import say
from mezzo.report import markdown_table


def models(
    name: Annotated[str, typer.Argument(help="A name, or a shell pattern such as 'pp_*'.")] = "*",
    summary: Annotated[bool, typer.Option("--summary", help="Layer by layer, for one network.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """List the networks: task, parameters, multiply-accumulates, input size, classes, heads."""
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
    source: Annotated[str, typer.Argument(help="A .pdparams, .safetensors, .pt or .pth file.")],
    target: Annotated[str, typer.Argument(help="Where to write; its ending says in which format.")],
) -> int:
    """Rewrite a weights file in another format, with the names and layouts that belong to it."""
    from mezzo.checkpoint import convert as rewrite  # torch takes seconds to import: not for --help

    say(f"{rewrite(source, target)} entries written to {target}")
    return 0
