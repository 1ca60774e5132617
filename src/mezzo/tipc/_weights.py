"""Weights that a certification starts from: fetched into the cache; lite modes can train without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mezzo.checkpoint import convert
from mezzo.errors import MezzoError, RunError
from mezzo.fetch import cached, fetch, place_of, terminal_progress
from mezzo.files import report_write_errors
from mezzo.tipc._config import LITE_MODES
from mezzo.tipc._inputs import find_weights
from mezzo.tipc._plan import Plan, PlanStep
from mezzo.tipc._profiles import PROFILES

_SEG, _OLD_SEG = "https://paddleseg.bj.bcebos.com/dygraph", "https://bj.bcebos.com/paddleseg/dygraph"
# Published weights of the networks that the documents name, by the model_name of the text.
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


def fetch_weights(plan: Plan, root: Path, report: Callable[[str], None]) -> dict[str, str]:
    """Fetch the weights that the trainings of a plan start from; return the reason for each failure.

    Lite modes only show that everything works, so they train without missing weights. Other modes do not.

    Raises:
        RunError: Weights cannot be fetched, and the mode is not a lite one; the message says where to put the file.
        FetchError: An address cannot be used, or its file in the cache has changed.
    """
    missing: dict[str, str] = {}
    for url in _addresses(plan, root):
        try:
            with terminal_progress(url) as progress:
                report(f"weights {url}: in {fetch(url, progress=progress)}")
        except RunError as error:
            if plan.mode not in LITE_MODES:
                raise
            missing[url] = str(error).removeprefix(f"{url}: ").partition(";")[0]
            report(f"{error}; lite modes start without these weights")
    return missing


def uncached_weights(plan: Plan, root: Path) -> dict[str, str]:
    """Return the addresses that the trainings of a plan need and that are not in the cache, each with a reason.

    Raises:
        RecipeError: A recipe is wrong.
        FetchError: An address cannot be used, or its file in the cache has changed.
    """
    missing = [url for url in _addresses(plan, root) if cached(url, record=False) is None]
    return dict.fromkeys(missing, "not in the cache yet; `prepare` and `run` fetch it")


def train_without_weights(step: PlanStep, root: Path, missing: Mapping[str, str]) -> PlanStep:
    """Return a training that starts without the weights that cannot be fetched."""
    for each in find_weights(step, root) if missing else ():
        if each.url in missing:
            notice = f"starts without {each.url}: {missing[each.url]}; to use it, put the file at {place_of(each.url)}"
            step = step.with_arguments(f"--opts {each.setting}=null").with_notice(notice)
    return step


def place_published_weights(model: str, target: Path, report: Callable[[str], None]) -> bool:
    """Put the published weights of a network at a path; return whether that worked."""
    url = PUBLISHED.get(model)
    if url is None or target.suffix != ".pdparams":
        return False
    try:
        with terminal_progress(url) as progress:
            source = fetch(url, progress=progress)
        with report_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        convert(source, target)
    except MezzoError as error:
        report(str(error))
        return False
    report(f"{target}: the weights of {url}")
    return True


def _addresses(plan: Plan, root: Path) -> list[str]:
    """Return the URLs of pretrained weights in a plan; none if its commands are not mezzo's."""
    if not PROFILES[plan.profile].runs_mezzo:
        return []
    return list(dict.fromkeys(each.url for step in plan.steps for each in find_weights(step, root)))
