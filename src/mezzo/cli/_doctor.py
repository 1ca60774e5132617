"""`mezzo doctor`: find why a training step is slow, and what to change."""

import json
from pathlib import Path
from typing import Annotated

from mezzo._options import Option
from mezzo.cli._common import Device, Dtype, Fp8, Json, model_names
from mezzo.cli._show import progress_bar
from mezzo.files import say


def doctor(
    model: Annotated[
        str,
        Option("FILE:FACTORY, or a name of `mezzo models`.", metavar="MODEL", suggest=model_names, is_argument=True),
    ],
    level: Annotated[str, Option("O1, O2 or O3.", choices=("O1", "O2", "O3"))] = "O1",
    dtype: Dtype = "float16",
    fp8: Fp8 = None,
    batch_size: Annotated[
        int | None, Option("Batch size, if the factory takes one or MODEL is a name.", default_text="16")
    ] = None,
    image_size: Annotated[int, Option("Side of the images, for a name of `mezzo models`.")] = 224,
    steps: Annotated[int, Option("Timed steps of each setup.")] = 10,
    device: Device = None,
    loader: Annotated[str | None, Option("Data loader to time as well.", metavar="FILE:FACTORY")] = None,
    optimizer: Annotated[
        str, Option("Of the predicted memory.", choices=("sgd", "momentum", "adam", "adamw"))
    ] = "adamw",
    memory: Annotated[
        float | None, Option("Only predict whether a step fits in so much memory.", metavar="GIB")
    ] = None,
    measure: Annotated[bool, Option("Also measure the gain of each change.")] = False,
    apply: Annotated[Path | None, Option("File for the safe changes; measures them.", metavar="FILE")] = None,
    page: Annotated[Path | None, Option("Also write an HTML page.", metavar="FILE")] = None,
    as_json: Json = False,
) -> int:
    """Find out why a training step is not faster.

    A step is measured in float32 and in AMP. Advice follows about shapes, layout, leaks (operators that return
    float32), launches and data, and the predicted memory. With --memory nothing is measured: the exit code is 1 if a
    step at the level does not fit.
    """
    from mezzo.bench import examine_model, predict_model  # torch takes seconds to import: not for --version and --help

    if memory is not None:
        unused = {"--apply": apply, "--page": page, "--loader": loader, "--measure": measure or None}
        if given := [name for name, value in unused.items() if value is not None]:
            raise ValueError(f"{given[0]} with --memory: it needs measured steps; leave one of them out")
        predicted = predict_model(
            model, batch_size=batch_size, image_size=image_size, device=device, level=level, dtype=dtype, fp8=fp8,
            optimizer=optimizer, memory_gib=memory,
        )  # fmt: skip
        say(json.dumps(predicted.to_dict(), indent=2) if as_json else str(predicted))
        return int(not predicted.level_fits)
    for name, path in (("--apply", apply), ("--page", page)):
        if path is not None and path.is_dir():
            raise ValueError(f"{name} {path}: is a folder; give the name of a file")
    with progress_bar() as report:
        found = examine_model(
            model, batch_size=batch_size, image_size=image_size, device=device, loader=loader, level=level, dtype=dtype,
            fp8=fp8, steps=steps, optimizer=optimizer, measure_gains=measure or apply is not None, progress=report,
        )  # fmt: skip
    say(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if apply is not None:
        found.changes.write(apply)
        advice = "holds no changes" if found.changes.are_none else "apply_changes(model, file) makes them"
        say(f"{apply}: {advice}", err=True)
    if page is not None:
        from mezzo.proof import write_advice_page

        write_advice_page(found, page)
    return 0
