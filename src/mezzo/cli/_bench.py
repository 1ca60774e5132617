"""`mezzo bench`: stock torch beside mezzo, in one run."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mezzo.cli._show import progress_bar
from mezzo.errors import require
from mezzo.files import say
from mezzo.report import markdown_table

app = typer.Typer(add_completion=False, rich_markup_mode=None, help="Measure stock torch beside mezzo, in one run.")


@app.callback()
def _bench() -> None:
    """Measure stock torch beside mezzo, in one run."""


@app.command()
def step(
    size: Annotated[int | None, typer.Option(help="Width of SimpleNet [8192; 256 on a CPU].")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in its batch [2048; 64 on a CPU].")] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each recipe, after three for warm-up.")] = 20,
    model: Annotated[list[str] | None, typer.Option(help="SimpleNet or SmallNet; may be repeated [both].")] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="SGD, 'SGD momentum' or AdamW; may be repeated [all].")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu, gpu:i [the GPU if there is one].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Time whole training steps: torch.autocast with GradScaler, foreach and fused, against mezzo O1 and O2."""
    from mezzo.bench import bench_step  # torch takes seconds to import: not for --version and --help

    with progress_bar() as report:
        result = bench_step(
            size=size,
            batch_size=batch_size,
            steps=steps,
            models=None if model is None else tuple(model),
            optimizers=None if optimizer is None else tuple(optimizer),
            device=device,
            progress=report,
        )
    settings = result.settings
    title = (
        f"SimpleNet, size {settings.size}, batch size {settings.batch_size}; {settings.steps} steps a recipe; "
        f"a copy reaches {result.copy_bytes_per_s / 1e9:.0f} GB/s"
    )
    return _print(result, title, as_json)


@app.command()
def static(
    size: Annotated[int | None, typer.Option(help="Width of SimpleNet [8192; 256 on a CPU].")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in its batch [2048; 64 on a CPU].")] = None,
    image_size: Annotated[int, typer.Option(help="Height and width of MobileNet's images.")] = 224,
    images: Annotated[int, typer.Option(help="Images in its batch.")] = 256,
    steps: Annotated[int, typer.Option(help="Timed steps of each recipe.")] = 20,
    model: Annotated[
        list[str] | None,
        typer.Option(help="SimpleNet or mobilenet_v3_small; may be repeated [both; a CPU: the first]."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, gpu, gpu:i [the GPU if there is one].")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Time graph mode (FP32, O1, O2, with compact masters, with guard) beside torch.compile with torch.autocast."""
    from mezzo.bench import bench_static  # torch takes seconds to import: not for --version and --help

    with progress_bar() as report:
        result = bench_static(
            size=size,
            batch_size=batch_size,
            image_size=image_size,
            images=images,
            steps=steps,
            models=None if model is None else tuple(model),
            device=device,
            progress=report,
        )
    settings = result.settings
    title = (
        f"SimpleNet {settings.size}, batch {settings.batch_size}; images {settings.image_size}, batch {settings.images}"
    )
    return _print(result, title, as_json)


def _print(result: Any, title: str, as_json: bool) -> int:
    """Print a benchmark as JSON alone, or as its table and that of the machine."""
    if as_json:
        say(json.dumps(result.to_dict(), indent=2))
        return 0
    machine = result.machine
    versions = f"torch {machine.torch_version}, driver {machine.driver_version}"
    say("\n\n".join([title, markdown_table(result.table()), f"{markdown_table(machine.table())}\n{versions}"]))
    return 0


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text}: must be whole numbers with commas between them") from error


@app.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
def infer(
    model: Annotated[Path, typer.Argument(help="Folder of an export, or its deploy.yaml.")],
    size: Annotated[tuple[int, int], typer.Option(help="Height and width of the images.")] = (224, 224),
    engines: Annotated[str | None, typer.Option(help="With commas [all that need no compilation].")] = None,
    precisions: Annotated[str | None, typer.Option(help="With commas [all that were exported].")] = None,
    threads: Annotated[str, typer.Option(help="With commas.")] = "1,2",
    batches: Annotated[str, typer.Option(help="With commas.")] = "1",
    device: Annotated[str, typer.Option(help="cpu, gpu or gpu:N.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Of each case, in turns.")] = 5,
    runs: Annotated[int, typer.Option(help="Timed runs a round.")] = 30,
    plot: Annotated[Path | None, typer.Option(help="Draw the result into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> int:
    """Time an exported model on all engines, precisions, threads and batches, in one run."""
    require("cv2", "PIL", *(["matplotlib"] if plot is not None else []), extra="vision")
    from mezzo.bench.inference import bench_infer
    from mezzo.export import read_deployed

    with progress_bar() as report:
        result = bench_infer(
            read_deployed(model),
            size=size,
            engines=engines.split(",") if engines else None,
            precisions=precisions.split(",") if precisions else None,
            threads=_numbers(threads, "--threads"),
            batches=_numbers(batches, "--batches"),
            device=device,
            rounds=rounds,
            runs=runs,
            progress=report,
        )
    if plot is not None:
        result.plot(plot)
    if as_json:
        say(json.dumps(result.to_dict(), indent=2))
        return 0
    title = f"{result.model}, {size[0]}x{size[1]}, {result.device}; median of {rounds} rounds of {runs} runs"
    say(f"{title}\n\n{markdown_table(result.table())}")
    return 0
