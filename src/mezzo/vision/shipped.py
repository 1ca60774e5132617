"""The recipes that come with mezzo, by name: YAML files, TIPC texts, and the scripts that the texts call.

In a checkout they lie where the documents name them: test_tipc/configs, tools, deploy. A wheel holds the same tree beside
this file. Importing this module does not import torch.
"""

import re
import shutil
from pathlib import Path, PurePosixPath

from mezzo.errors import MezzoError, OptionError, unknown_choice
from mezzo.files import is_regular, report_write_errors

RECIPES = (
    "deeplabv3p_resnet50",
    "fcn_hrnetw18",
    "fcn_hrnetw18_small",
    "mobilenet_v3_small",
    "ocrnet_hrnetw18",
    "ocrnet_hrnetw48",
    "pp_liteseg_stdc1",
    "pp_liteseg_stdc2",
    "pphumanseg_lite",
)
"""Their names: the folders of test_tipc/configs."""

RECIPE_HELP = f"Recipe that comes with mezzo, instead of --config: {', '.join(RECIPES)}."

_ALIASES = {
    "pp_humanseg_server": "deeplabv3p_resnet50",
    "pp_humanseg_mobile": "fcn_hrnetw18_small",
    "pp_liteseg_t": "pp_liteseg_stdc1",
    "pp_liteseg_b": "pp_liteseg_stdc2",
}
_CONFIGS = "test_tipc/configs"
_NAME = re.compile(r"[\w-]+(/[\w-]+)?")
_AMP_TEXTS = ("train_linux_gpu_normal_amp_infer_python_linux_gpu_cpu", "train_amp_infer_python")
MARKER = "test_tipc/.mezzo"
"""Says that the TIPC texts of a folder are mezzo's."""
_SCRIPTS = {  # as the documents name them -> where they are kept
    **{name: name for name in ("deploy/python/infer.py", "deploy/inference_python/infer.py")},
    **{name: name for name in ("test_tipc/common_func.sh", "test_tipc/prepare.sh")},
    "test_tipc/test_train_inference_python.sh": "test_tipc/test_train_inference_python.sh",
    **{f"tools/{name}.py": f"tools/{name}.py" for name in ("train", "val", "export", "export_model")},
    **{f"{name}.py": f"tools/{name}.py" for name in ("train", "val", "export")},
}


class UnknownRecipe(MezzoError):
    """There is no recipe of a name, or none of the kind that is asked for."""


def find_recipe(name: str) -> str:
    """Return the recipe of a name, in any spelling, or of a network.

    Raises:
        UnknownRecipe: There is none; the message has the nearest.

    >>> find_recipe("PP_HumanSeg_Lite"), find_recipe("pp_liteseg_t")
    ('pphumanseg_lite', 'pp_liteseg_stdc1')
    """
    known = {_plain(each): each for each in RECIPES} | {_plain(each): of for each, of in _ALIASES.items()}
    if _plain(name) not in known:
        raise UnknownRecipe(unknown_choice("recipe", name, (*RECIPES, *_ALIASES)))
    return known[_plain(name)]


def recipe_file(name: str) -> Path:
    """Return the YAML file of a recipe.

    Raises:
        UnknownRecipe: There is no such recipe, or it is a classifier, which has no file.
    """
    recipe = find_recipe(name)
    found = sorted((shipped_tree() / _CONFIGS / recipe).glob(f"{recipe}*.yml"))
    if not found:
        raise UnknownRecipe(f"{name} is a classifier and has no file: give --model {recipe} and --data-path FOLDER")
    return found[0]


def config_of(config: Path | None, recipe: str | None) -> Path | None:
    """Return the YAML file that `--config` or `--recipe` names; None if neither is given.

    Raises:
        OptionError: Both are given.
        UnknownRecipe: There is no such recipe.
    """
    if recipe is None:
        return config
    if config is not None:
        raise OptionError("both of --config and --recipe: give one of them")
    return recipe_file(recipe)


def is_name(text: Path) -> bool:
    """Whether an argument can only be the name of a recipe: `NAME` or `NAME/TEXT`, and no such file is here.

    >>> is_name(Path("pphumanseg_lite")), is_name(Path("configs/net/x.txt"))
    (True, False)
    """
    return bool(_NAME.fullmatch(text.as_posix())) and not text.is_file()


def text_name(text: Path) -> str:
    """Return the path of a recipe's TIPC text, relative to the folder that its commands run in.

    Args:
        text: `NAME` for the documented text of mixed precision, `NAME/TEXT` for another one of the recipe.

    Raises:
        UnknownRecipe: There is no such recipe or text.
    """
    recipe = find_recipe(text.parts[0])
    texts = sorted(path.stem for path in (shipped_tree() / _CONFIGS / recipe).glob("*.txt"))
    wanted = text.parts[1] if len(text.parts) == 2 else next(each for each in _AMP_TEXTS if each in texts)
    if wanted not in texts:
        raise UnknownRecipe(unknown_choice(f"text of {recipe}", wanted, texts))
    return f"{_CONFIGS}/{recipe}/{wanted}.txt"


def text_file(text: Path, folder: Path) -> Path:
    """Return a recipe's TIPC text: that of `folder`, if `write_recipe` was there, otherwise mezzo's own."""
    name = text_name(text)
    return Path(name) if is_regular(folder / name) else shipped_tree() / name


def write_recipe(name: str, folder: Path) -> list[Path]:
    """Write what the commands of a recipe's texts name: its files, their bases and the scripts. Files that exist stay.

    Returns:
        The files that were written.
    """
    tree, recipe = shipped_tree(), find_recipe(name)
    wanted = dict(_SCRIPTS)
    for part in (recipe, "_base_"):
        names = (f"{_CONFIGS}/{part}/{path.name}" for path in sorted((tree / _CONFIGS / part).iterdir()))
        wanted |= {name: name for name in names if PurePosixPath(name).suffix in (".txt", ".yml")}
    written = []
    for name, kept_as in wanted.items():
        target = folder / name
        if not target.exists() and not target.is_symlink():
            with report_write_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(tree / kept_as, target)
            written.append(target)
    if written:
        with report_write_errors(folder / MARKER):
            (folder / MARKER).write_text("These TIPC texts came with mezzo.\n", encoding="utf-8")
    return written


def shipped_tree() -> Path:
    """Return the folder that holds test_tipc, tools and deploy: of a wheel, or of a checkout."""
    for folder in (Path(__file__).with_name("tree"), Path(__file__).parents[3]):
        if (folder / _CONFIGS).is_dir():
            return folder
    raise MezzoError("this installation of mezzo has no recipes: install a wheel, or run from a checkout")


def _plain(name: str) -> str:
    return "".join(each for each in name.lower() if each.isalnum())
