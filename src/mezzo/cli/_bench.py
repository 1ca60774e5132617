"""`mezzo bench`: stock torch beside mezzo, in one run."""

import json
from typing import Annotated

import typer

from mezzo.cli._show import progress_bar, table

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
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
        return 0
    settings, machine = result.settings, result.machine
    title = (
        f"SimpleNet, size {settings.size}, batch size {settings.batch_size}; {settings.steps} steps a recipe; "
        f"a copy reaches {result.copy_bytes_per_s / 1e9:.0f} GB/s"
    )
    versions = f"torch {machine.torch_version}, driver {machine.driver_version}"
    typer.echo("\n\n".join([title, table(result.table()), f"{table(machine.table())}\n{versions}"]))
    return 0
