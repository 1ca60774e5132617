"""Weights that a certification starts from: fetched into the cache, left out of lite modes where that is impossible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from mezzo.checkpoint import convert
from mezzo.errors import MezzoError, RunError
from mezzo.fetch import cached, fetch, place_of, terminal_progress
from mezzo.files import explained
from mezzo.tipc._config import LITE_MODES
from mezzo.tipc._plan import Plan, Step
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._wanted import weights_of

Say = Callable[[str], None]
_SEG, _OLD_SEG = "https://paddleseg.bj.bcebos.com/dygraph", "https://bj.bcebos.com/paddleseg/dygraph"
#: Weights that others published for the networks of the documents, by the name of the model in its text.
PUBLISHED = {
    "mobilenet_v3_small": "https://paddle-model-ecology.bj.bcebos.com/model/mobilenetv3_reprod/"
    "mobilenet_v3_small_pretrained.pdparams",
    "pphumanseg_lite": f"{_SEG}/humanseg/train/pphumanseg_lite_generic_192x192.zip",
    "fcn_hrnetw18_small": f"{_SEG}/humanseg/train/fcn_hrnetw18_small_v1_humanseg_192x192.zip",
    "deeplabv3p_resnet50": f"{_SEG}/humanseg/train/deeplabv3p_resnet50_os8_humanseg_512x512_100k.zip",
    "pp_liteseg_stdc1": f"{_SEG}/cityscapes/pp_liteseg_stdc1_cityscapes_1024x512_scale1.0_160k/model.pdparams",
    "pp_liteseg_stdc2": f"{_SEG}/cityscapes/pp_liteseg_stdc2_cityscapes_1024x512_scale1.0_160k/model.pdparams",
    "ocrnet_hrnetw18": f"{_OLD_SEG}/cityscapes/ocrnet_hrnetw18_cityscapes_1024x512_160k/model.pdparams",
    "ocrnet_hrnetw48": f"{_OLD_SEG}/cityscapes/ocrnet_hrnetw48_cityscapes_1024x512_160k/model.pdparams",
    "fcn_hrnetw18": f"{_OLD_SEG}/cityscapes/fcn_hrnetw18_cityscapes_1024x512_80k/model.pdparams",
}


def fetch_weights(plan: Plan, root: Path, say: Say) -> dict[str, str]:
    """Fetch the weights that the trainings of a plan start from; return the reason for each that cannot be had.

    Lite modes show that everything works: they go on without. Other modes do not.

    Raises:
        RunError: Weights cannot be fetched, and the mode is not a lite one; the message says where to put the file.
        FetchError: An address cannot be used, or its file in the cache has changed.
    """
    lacking: dict[str, str] = {}
    for url in _addresses(plan, root):
        try:
            with terminal_progress(url) as progress:
                say(f"weights {url}: in {fetch(url, progress=progress)}")
        except RunError as error:
            if plan.mode not in LITE_MODES:
                raise
            lacking[url] = str(error).removeprefix(f"{url}: ").partition(";")[0]
            say(f"{error}; lite modes start without these weights")
    return lacking


def not_cached(plan: Plan, root: Path) -> dict[str, str]:
    """Return the addresses that the trainings of a plan need and that are not in the cache, each with a reason.

    Raises:
        ConfigError: A recipe is wrong.
        FetchError: An address cannot be used, or its file in the cache has changed.
    """
    missing = [url for url in _addresses(plan, root) if cached(url, record=False) is None]
    return dict.fromkeys(missing, "not in the cache yet; `prepare` and `run` fetch it")


def left_out(step: Step, root: Path, lacking: Mapping[str, str]) -> Step:
    """Return a training that starts without the weights that cannot be had."""
    for each in weights_of(step, root) if lacking else ():
        if each.url in lacking:
            notice = f"starts without {each.url}: {lacking[each.url]}; to use it, put the file at {place_of(each.url)}"
            step = replace(step.longer(f" --opts {each.setting}=null"), notices=(*step.notices, notice))
    return step


def published(model: str, target: Path, say: Say) -> bool:
    """Put the published weights of a network in place; return whether that worked, say it if not."""
    url = PUBLISHED.get(model)
    if url is None or target.suffix != ".pdparams":
        return False
    try:
        with terminal_progress(url) as progress:
            source = fetch(url, progress=progress)
        with explained(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        convert(source, target)
    except MezzoError as error:
        say(str(error))
        return False
    say(f"{target}: the weights of {url}")
    return True


def _addresses(plan: Plan, root: Path) -> list[str]:
    """Return the URLs of pretrained weights in a plan; empty for the plan of another repository."""
    if not PROFILES[plan.profile].runs_mezzo:
        return []
    return list(dict.fromkeys(each.url for step in plan.steps for each in weights_of(step, root)))
