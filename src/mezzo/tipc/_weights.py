"""Weights that a certification starts from: fetched into the cache, left out of lite modes where that is impossible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from mezzo._errors import MezzoError, RunError
from mezzo.config import load_recipe
from mezzo.fetch import cached, fetch, place_of, terminal_progress
from mezzo.models import convert
from mezzo.tipc._plan import Plan, Step
from mezzo.tipc._profiles import PROFILES
from mezzo.tipc._wanted import WantedWeights, recipes_of, weights_of

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


def fetch_weights(recipes: Iterable[str], root: Path, *, lite: bool, say: Say) -> dict[str, str]:
    """Fetch the weights that recipes name by an address; return the reason for each address that cannot be had.

    Args:
        recipes: YAML files, from the root.
        root: The repository.
        lite: Such runs show that everything works: what cannot be fetched is left out.
        say: Is told about each address.

    Raises:
        RunError: Weights cannot be fetched, and the run is not a lite one; the message says where to put the file.
    """
    lacking: dict[str, str] = {}
    for each in _all_weights(recipes, root):
        try:
            with terminal_progress(each.url) as progress:
                say(f"weights {each.url}: in {fetch(each.url, progress=progress)}")
        except RunError as error:
            if not lite:
                raise
            lacking[each.url] = str(error)
            say(f"{error}; lite modes start without these weights")
    return lacking


def not_cached(plan: Plan, root: Path) -> dict[str, str]:
    """Return the addresses that the trainings of a plan of ours need and that are not in the cache, each with a reason."""
    if not PROFILES[plan.profile].launcher:
        return {}
    recipes = [name for step in plan.steps if step.kind == "train" for name in recipes_of(step.bare)]
    return {
        each.url: "not in the cache; `prepare` and `run` fetch it if there is a network"
        for each in _all_weights(recipes, root)
        if cached(each.url) is None
    }


def left_out(step: Step, root: Path, lacking: Mapping[str, str]) -> Step:
    """Return a training that starts without the weights that cannot be had."""
    if step.kind != "train" or not lacking or "--pretrained" in step.bare:
        return step
    for each in _all_weights(recipes_of(step.bare), root):
        if each.url in lacking:
            notice = f"starts without {each.url} ({lacking[each.url]}); put the file at {place_of(each.url)} to use it"
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
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(source, target)
    except MezzoError as error:
        say(str(error))
        return False
    say(f"{target}: the weights of {url}")
    return True


def _all_weights(recipes: Iterable[str], root: Path) -> list[WantedWeights]:
    """Return the weights of recipes, each once; a recipe that is not there has none: its command says so."""
    there = [root / name for name in dict.fromkeys(recipes) if (root / name).is_file()]
    return list(dict.fromkeys(each for path in there for each in weights_of(load_recipe(path))))
