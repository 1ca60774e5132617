"""Graph mode beside stock torch, eager and compiled, on any network (`mezzo bench static`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec

import torch

from mezzo.bench._frame import Progress, simple_net_sizes
from mezzo.bench._isolate import IsolatedCall, OverBudget, call_isolated
from mezzo.bench._machine import read_machine
from mezzo.bench._networks import find_network
from mezzo.bench._static_recipes import StaticRecipe, choose_recipes
from mezzo.bench._static_result import NotRun, StaticBench, StaticResult, StaticSettings
from mezzo.bench._static_run import build_recipe, measure_recipe, measure_recipe_beside
from mezzo.devices import find_device
from mezzo.dtypes import HALF_SPELLINGS
from mezzo.errors import OptionError, RunError, unknown_choice
from mezzo.fp8 import why_no_fp8
from mezzo.record import release_memory

DEFAULT_MODELS = ("SimpleNet", "mobilenet_v3_small")
Variant = tuple[str, StaticRecipe]


def bench_static(
    *,
    size: int | None = None,
    batch_size: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    images: int | None = None,
    steps: int = 20,
    check_steps: int = 50,
    models: Sequence[str] | None = None,
    recipes: Sequence[str] | None = None,
    dtype: str | None = None,
    fuse: bool = False,
    isolate: bool = False,
    budget_s: float | None = None,
    warm_caches: int = 0,
    at_once: int = 0,
    kernels: int = 0,
    layers: int | None = None,
    length: int | None = None,
    words: int | None = None,
    mask: bool = False,
    recompute: bool = False,
    device: str | None = None,
    progress: Progress | None = None,
    finished: Callable[[StaticResult | NotRun], object] = lambda result: None,
) -> StaticBench:
    """Train networks with every recipe, stock and mezzo's, eager and compiled; return times, memory and losses.

    Each network trains at the size, with the batch, the loss and the optimizer of its own recipe. Random
    weights first train `check_steps` steps on four batches that can be learned; then steps are timed.

    Args:
        size: Width of SimpleNet; None: 8192 on a GPU, 256 on a CPU.
        batch_size: Of every network; None: that of its recipe. SimpleNet: 2048 on a GPU, 64 on a CPU.
        image_size: Side of the images, or their height and width; None: those of the network's recipe.
        images: Batch size of image networks; goes before `batch_size`.
        steps: Timed steps of each recipe.
        check_steps: Steps of the training whose loss, loss scale and skipped steps are reported.
        models: SimpleNet, names of `mezzo.vision.models`, timm:NAME, transformers:gpt2, bert, llama or
            llama-SIZE; None: SimpleNet, and on a GPU mobilenet_v3_small.
        recipes: Words such as stock-eager or mezzo-graph-channels-last (`recipe_choices`); None: all.
        dtype: float16 or bfloat16; None: bfloat16 for timm and transformers, otherwise float16.
        fuse: Prepare mezzo's side with `fuse=True`.
        isolate: Each recipe in a process of its own. A recipe that fails is then named in the result.
        budget_s: Longest first step in seconds; a recipe that takes longer is killed. Implies `isolate`.
        warm_caches: Build all recipes in this many processes at the same time, before anything is measured.
        at_once: Build this many recipes at the same time, each in a process of its own, which then waits: they are
            measured one after the other. Their networks must fit into the device's memory together. 0: no.
        kernels: Above 0: profile each recipe on a GPU; results have the kernels of a step. A command prints this many.
        layers: Number of layers of Llama models; None: as published.
        length: Tokens in a row of Llama models; None: that of the model.
        words: Vocabulary of Llama models; None: that of the model.
        mask: Llama models get the mask tensor of transformers; False: attention is called as causal.
        recompute: Llama models recompute their layers in the backward pass.
        device: cpu, cuda, cuda:i, gpu or gpu:i; None: the GPU if there is one.
        progress: Called after every step.
        finished: Called with each result as soon as it is there, so that a run that is stopped shows them.

    Raises:
        MezzoError: A network is unknown, or its package is missing.
        ValueError: Another option is wrong.
    """
    place = find_device(device)
    if dtype is not None and dtype not in HALF_SPELLINGS:
        raise OptionError(unknown_choice("--dtype", dtype, HALF_SPELLINGS))
    simple_net = simple_net_sizes(place, size, batch_size)
    settings = StaticSettings(
        device=str(place),
        models=tuple(models or (DEFAULT_MODELS if place.type == "cuda" else DEFAULT_MODELS[:1])),
        size=simple_net["size"],
        simple_net_batch=simple_net["batch_size"],
        batch_size=batch_size,
        images=images,
        image_size=(image_size, image_size) if isinstance(image_size, int) else image_size,
        steps=steps,
        check_steps=check_steps,
        recipes=None if recipes is None else tuple(recipes),
        dtype=None if dtype is None else HALF_SPELLINGS[dtype],
        fuse=fuse,
        isolate=isolate or budget_s is not None,
        budget_s=budget_s,
        warm_caches=warm_caches,
        at_once=at_once,
        kernels=kernels,
        layers=layers,
        length=length,
        words=words,
        mask=mask,
        recompute=recompute,
    )
    networks = [find_network(model, settings.sizes) for model in settings.models]
    variants = [(each.name, recipe) for each in networks for recipe in choose_recipes(each.kind, each.name, recipes)]
    cold = (
        _warm([each for each in variants if _impossible(each, place) is None], settings, progress)
        if warm_caches
        else {}
    )
    results: list[StaticResult] = []
    not_run: list[NotRun] = []
    for variant, found in _measure_all(variants, settings, place, progress):
        finished(found)
        if isinstance(found, NotRun):
            not_run.append(found)
        else:
            results.append(replace(found, cold_build_s=cold.get(variant)))
        release_memory(place)
    return StaticBench(settings=settings, results=tuple(results), machine=read_machine(place), not_run=tuple(not_run))


def _impossible(variant: Variant, device: torch.device) -> NotRun | None:
    """Return why a recipe cannot run here; None if it can."""
    model, recipe = variant
    is_missing = recipe.by == "torchao" and find_spec("torchao") is None
    is_fp8 = recipe.by == "torchao" or recipe.level == "O3"
    reason = "needs torchao: pip install torchao" if is_missing else why_no_fp8(device) if is_fp8 else None
    return None if reason is None else NotRun(model=model, recipe=recipe, reason=reason, is_failure=False)


def _measure_all(
    variants: list[Variant], settings: StaticSettings, device: torch.device, progress: Progress | None
) -> Iterator[tuple[Variant, StaticResult | NotRun]]:
    """Yield each recipe with its result as soon as it is there."""
    possible = []
    for variant in variants:
        reason = _impossible(variant, device)
        if reason is None:
            possible.append(variant)
        else:
            yield variant, reason
    if settings.at_once:
        for start in range(0, len(possible), settings.at_once):
            yield from _measure_together(possible[start : start + settings.at_once], settings, progress)
        return
    for variant in possible:
        if settings.isolate:
            yield variant, _measure_alone(variant, settings, progress)
        else:
            yield variant, measure_recipe(*variant, settings, progress)


def _measure_together(
    variants: list[Variant], settings: StaticSettings, progress: Progress | None
) -> Iterator[tuple[Variant, StaticResult | NotRun]]:
    """Build recipes at the same time in processes that wait after the first step; then measure one after the other."""
    with ExitStack() as processes:
        threads = max(1, (os.cpu_count() or 1) // len(variants))
        calls: dict[Variant, IsolatedCall[StaticResult]] = {}
        for variant in variants:
            call = IsolatedCall(
                measure_recipe_beside, *variant, settings, threads, budget_s=settings.budget_s, is_held=True
            )
            calls[variant] = processes.enter_context(call)
        failed: dict[Variant, RunError] = {}
        for variant, call in calls.items():
            try:
                call.wait_for_report()
            except RunError as error:
                failed[variant] = error
                call.end()  # its memory is free for the others
            if progress is not None:
                progress(f"building {variant[0]}, {variant[1].name}", 1, 1)
        for variant, call in calls.items():
            try:
                if variant in failed:
                    raise failed[variant]
                yield variant, call.result(progress)
            except RunError as error:
                yield variant, _not_run(variant, error)
            finally:
                call.end()


def _not_run(variant: Variant, error: RunError) -> NotRun:
    model, recipe = variant
    return NotRun(model=model, recipe=recipe, reason=str(error), is_failure=not isinstance(error, OverBudget))


def _measure_alone(variant: Variant, settings: StaticSettings, progress: Progress | None) -> StaticResult | NotRun:
    """Measure in a fresh process; a failure is a part of the result, so that it does not lose the others."""
    model, recipe = variant
    try:
        return call_isolated(measure_recipe, model, recipe, settings, budget_s=settings.budget_s, progress=progress)
    except RunError as error:
        return _not_run(variant, error)


def _warm(variants: list[Variant], settings: StaticSettings, progress: Progress | None) -> dict[Variant, float]:
    """Build all recipes in parallel processes; return the seconds of the first steps.

    A recipe that fails here, or is over the budget, has none. It is measured all the same: that decides, and it
    finds what was compiled until then in the caches.
    """
    threads = max(1, (os.cpu_count() or 1) // settings.warm_caches)

    def build(variant: Variant) -> float | None:
        try:
            return call_isolated(build_recipe, *variant, settings, threads, budget_s=settings.budget_s)
        except RunError:
            return None
        finally:
            if progress is not None:
                progress(f"building {variant[0]}, {variant[1].name}", 1, 1)

    pool = ThreadPoolExecutor(settings.warm_caches)
    try:
        built = list(pool.map(build, variants))
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C no further build starts
    return {variant: seconds for variant, seconds in zip(variants, built, strict=True) if seconds is not None}
