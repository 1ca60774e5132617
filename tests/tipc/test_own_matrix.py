"""Our own certification texts: nine networks, the documented forms, and nothing in them that is not there."""

import re
import shlex
from pathlib import Path
from posixpath import normpath

import pytest

from mezzo.tipc import choose_profile, find_data, make_plan, parse_config

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "test_tipc" / "configs"
RECIPES = {
    "pp_liteseg_stdc1": "pp_liteseg_stdc1_cityscapes_1024x512_160k.yml",
    "pp_liteseg_stdc2": "pp_liteseg_stdc2_cityscapes_1024x512_160k.yml",
    "pphumanseg_lite": "pphumanseg_lite_mini_supervisely.yml",
    "fcn_hrnetw18_small": "fcn_hrnetw18_small_v1_humanseg_192x192_mini_supervisely.yml",
    "deeplabv3p_resnet50": "deeplabv3p_resnet50_humanseg_512x512_mini_supervisely.yml",
    "fcn_hrnetw18": "fcn_hrnetw18_1024x512_cityscapes.yml",
    "ocrnet_hrnetw18": "ocrnet_hrnetw18_cityscapes_1024x512_160k.yml",
    "ocrnet_hrnetw48": "ocrnet_hrnetw48_cityscapes_1024x512.yml",
}
PLAIN = "train_infer_python.txt"
SEG_O1, SEG_O2 = "train_linux_gpu_normal_amp_infer_python_linux_gpu_cpu.txt", "train_amp_o2_infer_python.txt"
CLS_O2, CLS_O1 = "train_amp_infer_python.txt", "train_amp_o1_infer_python.txt"
SEGMENTATION = [(name, text) for name in RECIPES for text in (PLAIN, SEG_O1, SEG_O2)]
CLASSIFICATION = [("mobilenet_v3_small", text) for text in (PLAIN, CLS_O2, CLS_O1)]


def folder_of(name: str) -> str:
    """Return the folder that the commands of a network's text read their data from."""
    text = (CONFIGS / name / PLAIN).read_text(encoding="ascii")
    profile, _ = choose_profile(None, text, REPOSITORY)
    plan, config = make_plan(text, "lite_train_lite_infer", profile), parse_config(text, profile)
    (data,) = find_data(plan, config, REPOSITORY)
    return normpath(data.folder)


FOLDERS = {name: folder_of(name) for name in (*RECIPES, "mobilenet_v3_small")}

# Where the forms have their headers, and the index of the last line that is used (line 0 is the first header).
SEG_HEADERS, SEG_LINES = {0: "train", 22: "eval", 26: "export", 35: "infer"}, 52
TUTORIAL_HEADERS, TUTORIAL_LINES = {0: "train", 15: "eval", 18: "infer"}, 32


def lines_of(name: str, text: str) -> list[str]:
    content = (CONFIGS / name / text).read_text(encoding="ascii")
    assert content.endswith("\n")
    return content.removesuffix("\n").split("\n")


def field(lines: list[str], index: int) -> tuple[str, str]:
    key, _, value = lines[index].partition(":")
    return key, value


def headers_of(lines: list[str]) -> dict[int, str]:
    found = {index: re.fullmatch(r"=+(\w+)_params=+", line) for index, line in enumerate(lines) if line[:1] == "="}
    return {index: match[1] for index, match in found.items() if match}


def test_nine_directories_with_three_texts_each():
    found = {(path.parent.name, path.name) for path in CONFIGS.glob("*/*.txt")}
    assert found == {*SEGMENTATION, *CLASSIFICATION}
    assert {name for name, _ in found} == set(FOLDERS)
    assert len(FOLDERS) == 9


@pytest.mark.parametrize(("name", "text"), [*SEGMENTATION, *CLASSIFICATION])
def test_text_is_clean_and_says_its_own_name(name, text):
    lines = lines_of(name, text)
    assert all(line and line == line.strip() and line.count(":") <= 1 for line in lines)
    variant = {SEG_O2: "_amp_o2", CLS_O1: "_amp_o1"}.get(text, "")  # else its results would lie over the others'
    assert lines[1] == f"model_name:{name}{variant}"
    assert lines[2:4] == ["python:python3.7", "gpu_list:0|0,1"]


@pytest.mark.parametrize(("name", "text"), SEGMENTATION)
def test_segmentation_text_has_the_landmarks_of_its_form(name, text):
    lines = lines_of(name, text)
    assert len(lines) == SEG_LINES
    assert headers_of(lines) == SEG_HEADERS
    keys = {9: "--model_path", 14: "trainer", 23: "eval", 27: "--save_dir", 28: "--model_path", 29: "norm_export"}
    keys |= {
        36: "infer_model",
        37: "infer_export",
        39: "inference",
        46: "--config",
        47: "--image_path",
        50: "--save_dir",
    }
    assert {index: field(lines, index)[0] for index in keys} == keys


@pytest.mark.parametrize(("name", "text"), CLASSIFICATION)
def test_classification_text_has_the_landmarks_of_its_form(name, text):
    lines = lines_of(name, text)
    assert len(lines) == TUTORIAL_LINES
    assert headers_of(lines) == TUTORIAL_HEADERS
    keys = {5: "--epochs", 6: "--output-dir", 7: "--batch-size", 8: "--pretrained", 12: "trainer", 16: "eval"}
    keys |= {19: "--save-inference-dir", 21: "norm_export", 23: "train_model", 26: "inference", 29: "--model-dir"}
    assert {index: field(lines, index)[0] for index in keys} == keys


@pytest.mark.parametrize(("name", "text"), SEGMENTATION)
def test_segmentation_trains_at_the_level_of_its_text(name, text):
    lines = lines_of(name, text)
    trainer = field(lines, 14)[1]
    assert field(lines, 15)[0] == trainer == ("norm_train" if text == PLAIN else "amp_train")
    level = {PLAIN: [], SEG_O1: ["fp16", "O1"], SEG_O2: ["fp16", "O2"]}[text]
    assert re.findall(r"--(?:precision|amp_level) (\S+)", lines[15]) == level
    assert lines[15].endswith("--do_eval --save_interval 500 --seed 100")
    steps = 20 if text == PLAIN else 50
    assert f"lite_train_lite_infer={steps}|" in lines[6]


@pytest.mark.parametrize(("name", "text"), CLASSIFICATION)
def test_classification_trains_at_the_level_of_its_text(name, text):
    lines = lines_of(name, text)
    trainer = field(lines, 12)[1]
    assert field(lines, 13)[0] == trainer == ("norm_train" if text == PLAIN else "amp_train")
    level = {PLAIN: [], CLS_O2: ["O2"], CLS_O1: ["O1"]}[text]
    assert re.findall(r"--amp_level=(\S+)", lines[13]) == level
    data = f"--data-path={FOLDERS[name]}"  # the form never passes its own --data-path line
    assert data in lines[13]
    assert data in lines[16]


@pytest.mark.parametrize(("name", "text"), SEGMENTATION)
def test_segmentation_names_its_recipe_everywhere(name, text):
    recipe = f"test_tipc/configs/{name}/{RECIPES[name]}"
    assert (REPOSITORY / recipe).is_file()
    lines = lines_of(name, text)
    named = [found for line in lines for found in re.findall(r"--config (\S+)", line)]
    assert set(named) == {recipe}
    assert len(named) == (4 if text == PLAIN else 3)  # train, export, export of published weights; eval in float32


@pytest.mark.parametrize(("name", "text"), [*SEGMENTATION, *CLASSIFICATION])
def test_scripts_are_there(name, text):
    scripts = [
        words[0]
        for line in lines_of(name, text)
        if (words := shlex.split(line.partition(":")[2])) and words[0].endswith(".py")
    ]
    assert len(scripts) >= 4
    assert all((REPOSITORY / script).is_file() for script in scripts)


@pytest.mark.parametrize(("name", "text"), [*SEGMENTATION, *CLASSIFICATION])
def test_data_lie_where_preparation_puts_them(name, text):
    paths = {found for line in lines_of(name, text) for found in re.findall(r"test_tipc/data/[\w./]+", line)}
    assert paths
    assert all(Path(path).is_relative_to(FOLDERS[name]) for path in paths)
    shown = {"pphumanseg_lite": "test.txt", "pp_liteseg_stdc1": "cityscapes_val_5.list"}
    if name in shown:
        assert f"{FOLDERS[name]}/{shown[name]}" in paths


@pytest.mark.parametrize(
    "file", ["README.md", "docs/test_train_inference_python.md", "docs/test_train_amp_inference_python.md"]
)
def test_documents_name_every_network_and_only_files_that_are_there(file):
    text = (REPOSITORY / "test_tipc" / file).read_text(encoding="utf-8")
    assert not [name for name in FOLDERS if name not in text]
    named = set(re.findall(r"test_tipc/(?:configs|docs)/[\w./]+\.(?:txt|md|yml)", text)) - {
        "test_tipc/configs/pphumanseg_lite/lite_cpu.yml"
    }
    named |= set(re.findall(r"test_tipc/\w+\.sh", text))
    assert named
    assert not [path for path in named if not (REPOSITORY / path).is_file()]
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert not [link for link in links if not (REPOSITORY / "test_tipc" / file).parent.joinpath(link).exists()]


def test_recipe_for_machines_without_gpu_is_not_kept_in_git():
    ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/test_tipc/configs/*/lite_cpu*.yml", "/test_tipc/data/", "/test_tipc/output/"} <= set(ignored)
