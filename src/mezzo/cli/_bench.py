"""`mezzo bench`: stock torch beside mezzo, in one run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mezzo._options import Option, split_commas
from mezzo.cli._bench_llm import llm
from mezzo.cli._bench_static import static
from mezzo.cli._common import Device, Json, SimpleNetBatch, SimpleNetSize, Steps
from mezzo.cli._generate import add_command
from mezzo.cli._show import print_bench, progress_bar
from mezzo.errors import require
from mezzo.files import say
from mezzo.report import markdown_table

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Measure stock torch beside mezzo, in one run."""


def step(
    size: SimpleNetSize = None,
    batch_size: SimpleNetBatch = None,
    steps: Steps = 20,
    model: Annotated[
        tuple[str, ...], Option("SimpleNet, SmallNet.", suggest=lambda: ("SimpleNet", "SmallNet"), default_text="both")
    ] = (),
    optimizer: Annotated[tuple[str, ...], Option("SGD, 'SGD momentum', AdamW.", default_text="all")] = (),
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Time whole training steps, eager.

    torch.autocast with GradScaler, foreach and fused, beside mezzo at O1 and O2.
    """
    from mezzo.bench import bench_step  # torch takes seconds to import: not for --version and --help

    with progress_bar() as report:
        result = bench_step(
            size=size,
            batch_size=batch_size,
            steps=steps,
            models=model or None,
            optimizers=optimizer or None,
            device=device,
            progress=report,
        )
    settings = result.settings
    title = (
        f"SimpleNet, size {settings.size}, batch size {settings.batch_size}; {settings.steps} steps a recipe; "
        f"a copy reaches {result.copy_bytes_per_s / 1e9:.0f} GB/s"
    )
    print_bench(result, title, as_json)
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list with commas."""
    try:
        return tuple(map(int, split_commas(text)))
    except ValueError as error:
        raise typer.BadParameter(f"{text}: must be whole numbers with commas between them") from error


def infer(
    model: Annotated[Path, Option("Folder of an export, or its deploy.yaml.", is_argument=True)],
    size: Annotated[tuple[int, int], Option("Height and width of the images.")] = (224, 224),
    engines: Annotated[
        tuple[str, ...], Option("With commas.", parse=split_commas, default_text="all that need no compilation")
    ] = (),
    precisions: Annotated[
        tuple[str, ...], Option("With commas.", parse=split_commas, default_text="all that were exported")
    ] = (),
    threads: Annotated[tuple[int, ...], Option("CPU threads, with commas.", parse=_numbers, metavar="N,...")] = (1, 2),
    batches: Annotated[tuple[int, ...], Option("Batch sizes, with commas.", parse=_numbers, metavar="N,...")] = (1,),
    device: Annotated[str, Option("cpu, gpu or gpu:N.")] = "cpu",
    rounds: Annotated[int, Option("Rounds over all cases.")] = 5,
    runs: Annotated[int, Option("Timed runs per round.")] = 30,
    plot: Annotated[Path | None, Option("PNG file to draw the result into.")] = None,
    as_json: Json = False,
) -> int:
    """Time an exported model on all engines.

    Each combination of engine, precision, threads and batch size is a case.
    """
    require("cv2", "PIL", *(["matplotlib"] if plot is not None else []), extra="vision")
    from mezzo.bench.inference import bench_infer
    from mezzo.export import read_deployed

    with progress_bar() as report:
        result = bench_infer(
            read_deployed(model),
            size=size,
            engines=engines or None,
            precisions=precisions or None,
            threads=threads,
            batches=batches,
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


for _command in (step, static, llm, infer):
    add_command(app, _command)
