"""`mezzo bench llm`: training steps of Llama models, stock torch and torchao beside mezzo."""

from collections.abc import Iterable
from typing import Annotated

from mezzo._options import Option, split_commas
from mezzo.cli._bench_static import AtOnce, SlowestKernels, recipe_words, show_result
from mezzo.cli._common import Device, Json, Steps
from mezzo.cli._show import print_bench, progress_bar


def _sizes() -> Iterable[str]:
    from mezzo.bench import LLAMA_SIZES

    return LLAMA_SIZES


def llm(
    size: Annotated[
        str, Option("tiny, 0.4b, 1b, 3b or 8b: the last three have the widths of Llama 3.", suggest=_sizes)
    ] = "0.4b",
    layers: Annotated[int | None, Option("Number of layers.", default_text="as published")] = None,
    length: Annotated[int | None, Option("Tokens in a row.", default_text="4096; 2048 for 0.4b")] = None,
    words: Annotated[int | None, Option("Size of the vocabulary.", default_text="as published")] = None,
    batch_size: Annotated[int | None, Option("Rows in a batch.", default_text="8, 4, 2 or 1 by size")] = None,
    mask: Annotated[
        bool, Option("Attention gets the mask tensor that transformers makes in compiled code; otherwise is_causal.")
    ] = False,
    recompute: Annotated[bool, Option("Recompute each layer in the backward pass: less memory, more time.")] = False,
    recipes: Annotated[
        tuple[str, ...],
        Option(
            "Which ways to train: stock-eager, stock-compile, stock-bf16-compile (bfloat16 weights, no masters), "
            "torchao, mezzo-eager, mezzo-graph, mezzo-o3-graph; the last three also with -plain, -compact (masters), "
            "-compact-state (bfloat16), -compact-saving (memory), -delayed-compact or -row-compact (scales of FP8).",
            suggest=recipe_words,
            default_text="all",
        ),
    ] = (),
    steps: Steps = 20,
    check_steps: Annotated[int, Option("Steps of the training whose final loss is shown.")] = 50,
    fuse: Annotated[bool, Option("Prepare mezzo's networks with fuse=True.")] = True,
    isolate: Annotated[bool, Option("Each recipe in a process of its own.")] = False,
    at_once: AtOnce = 0,
    kernels: SlowestKernels = 0,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Time training steps of Llama models.

    A model of transformers, in bfloat16 with AdamW: tokens per second, the share of the GPU's half-precision rate (MFU),
    peak memory and loss of stock torch, torchao (if it is installed) and mezzo's O2 and O3. Exit code 1 if a recipe of
    --isolate fails.
    """
    from mezzo.bench import bench_static  # torch takes seconds to import: not for --version and --help

    with progress_bar() as report:
        result = bench_static(
            models=(f"transformers:llama-{size}",),
            layers=layers,
            length=length,
            words=words,
            mask=mask,
            batch_size=batch_size,
            recompute=recompute,
            recipes=tuple(word for text in recipes for word in split_commas(text)) or None,
            steps=steps,
            check_steps=check_steps,
            fuse=fuse,
            isolate=isolate,
            at_once=at_once,
            kernels=kernels,
            device=device,
            progress=report,
            finished=lambda found: show_result(found, kernels),
        )
    print_bench(result, f"{steps} timed steps a recipe; loss after {check_steps} steps", as_json)
    return int(any(each.is_failure for each in result.not_run))
