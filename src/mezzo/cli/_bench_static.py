"""`mezzo bench static`: training steps of any network, stock torch beside mezzo."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from mezzo._options import Option, split_commas
from mezzo.cli._common import Device, Json, SimpleNetSize, Steps
from mezzo.cli._show import print_bench, progress_bar
from mezzo.dtypes import HALF_SPELLINGS
from mezzo.files import say

if TYPE_CHECKING:
    from mezzo.bench import NotRun, StaticResult


def _names() -> Iterable[str]:
    from mezzo.bench import network_names

    return network_names()


def recipe_words() -> Iterable[str]:
    """Return the words of `--recipes`."""
    from mezzo.bench import recipe_choices

    return recipe_choices()


AtOnce = Annotated[
    int,
    Option("Build N recipes at the same time, each in its own process; then measure one by one.", metavar="N"),
]
SlowestKernels = Annotated[
    int,
    Option("On a GPU, also show the N slowest kernels of each recipe, and the time by kind of work.", metavar="N"),
]


def show_result(found: "StaticResult | NotRun", kernels: int) -> None:
    """Print a result as soon as it is there, with its slowest kernels."""
    lines = found.slowest_kernels(kernels)
    say("\n".join([str(found), *lines]), err=True)


def _height_and_width(text: str) -> tuple[int, int]:
    """Return the size that 224 or 512x1024 names."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise typer.BadParameter(f"{text}: must be a side, as 224, or height and width, as 512x1024")
    return int(sides[0]), int(sides[-1])


def static(
    model: Annotated[
        tuple[str, ...],
        Option(
            "SimpleNet, a name of `mezzo models`, timm:NAME, or transformers:gpt2, bert, llama or llama-1b.",
            suggest=_names,
            default_text="SimpleNet; on a GPU also mobilenet_v3_small",
        ),
    ] = (),
    recipes: Annotated[
        tuple[str, ...],
        Option(
            "Which ways to train: stock-eager, stock-compile, stock-reduce-overhead, mezzo-eager, mezzo-graph, each "
            "also with -contiguous or -channels-last.",
            suggest=recipe_words,
            default_text="all",
        ),
    ] = (),
    size: SimpleNetSize = None,
    batch_size: Annotated[
        int | None, Option("Batch size.", default_text="that of the network's recipe; SimpleNet 2048, 64 on a CPU")
    ] = None,
    images: Annotated[int | None, Option("Batch size of image networks only.", default_text="--batch-size")] = None,
    image_size: Annotated[
        tuple[int, int] | None,
        Option(
            "Side of the images, or height and width as 512x1024.",
            parse=_height_and_width,
            metavar="SIZE",
            default_text="that of the network's recipe",
        ),
    ] = None,
    steps: Steps = 20,
    check_steps: Annotated[int, Option("Steps of the training whose final loss is shown.")] = 50,
    dtype: Annotated[
        str | None,
        Option(
            "float16 or bfloat16.",
            choices=tuple(HALF_SPELLINGS),
            default_text="bfloat16 for timm and transformers, otherwise float16",
        ),
    ] = None,
    fuse: Annotated[bool, Option("Prepare mezzo's networks with fuse=True.")] = False,
    isolate: Annotated[bool, Option("Each recipe in a process of its own.")] = False,
    budget: Annotated[
        float | None, Option("Longest first step; what takes longer is killed. Implies --isolate.", metavar="SECONDS")
    ] = None,
    warm_caches: Annotated[
        int, Option("First build all recipes in N processes, so that the compilers' caches are warm.", metavar="N")
    ] = 0,
    at_once: AtOnce = 0,
    kernels: SlowestKernels = 0,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Time training steps of any network.

    Stock torch, eager and compiled, beside mezzo's O2, eager and in graph mode; SimpleNet also at FP32, O1, with compact
    masters and with guard. Exit code 1 if a recipe of --isolate fails.
    """
    from mezzo.bench import bench_static  # torch takes seconds to import: not for --version and --help

    with progress_bar() as report:
        result = bench_static(
            size=size,
            batch_size=batch_size,
            image_size=image_size,
            images=images,
            steps=steps,
            check_steps=check_steps,
            models=model or None,
            recipes=tuple(word for text in recipes for word in split_commas(text)) or None,
            dtype=dtype,
            fuse=fuse,
            isolate=isolate,
            budget_s=budget,
            warm_caches=warm_caches,
            at_once=at_once,
            kernels=kernels,
            device=device,
            progress=report,
            finished=lambda found: show_result(found, kernels),
        )
    print_bench(result, f"{steps} timed steps a recipe; loss after {check_steps} steps", as_json)
    return int(any(each.is_failure for each in result.not_run))
