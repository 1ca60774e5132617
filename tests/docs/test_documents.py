"""docs/documents.md answers every line of the five documents, and the documents' commands run as they stand.

The documents lie beside the repository, never in it: without them only the page itself is checked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import doc_tables
import pytest
import torch
from doc_pages import ROOT
from doc_tables import code_spans, functions_of, read_page, read_table, table_names

from mezzo.vision.infer import parse_reports
from mezzo.vision.lite import prepare
from originals import DOCUMENTS, ORIGINALS, needs_documents, needs_originals

PAGE = "documents.md"
SUMMARY = "summary"
GUIDE, MOBILENET, SEGMENTATION, OVERVIEW, TEST_GUIDE = NAMES = (
    "amp-guide.md",
    "mobilenetv3-amp.zh.md",
    "segmentation-amp-test.zh.md",
    "tipc-amp-overview.zh.md",
    "tipc-amp-test-guide.zh.md",
)
COLUMNS = ["section", "promise or command", "here", "shown by"]
WORKS, DIFFERS, NOTHING = "works", "differs: ", "no promise"
each_document = pytest.mark.parametrize("name", NAMES)

_PLACE = re.compile(r"(?P<section>.+?) \((?P<first>\d+)(?:-(?P<last>\d+))?\)")
_HEADING = re.compile(r"(?P<inner>\* )?#+ *(?P<number>[IVX]+(?=\.)|\d+(?:\.\d+)*)(?P<bracket>\uff09)?")
_FENCE = re.compile(r" *```")
_COMMAND = re.compile(r"(?:bash|python[\d.]*|pip|>>>|GLOG_v\S*) ")
_FIGURES = re.compile(
    r"^(?:# )?(?:loss[:=]|Time consuming)|^\| \*\*(?:Time|loss)|increased by about|\[Epoch|time spent|_time\(ms\)"
)
_STATUS = "Run successfully with command"


@dataclass(frozen=True, slots=True)
class Answer:
    """A row of the page."""

    section: str
    lines: range
    promise: str
    here: str
    shown_by: tuple[str, ...]


def answers(name: str) -> list[Answer]:
    """Return the rows about a document."""
    found = []
    for row in read_table(PAGE, name):
        place = _PLACE.fullmatch(row["section"])
        assert place is not None, row["section"]
        lines = range(int(place["first"]), int(place["last"] or place["first"]) + 1)
        found.append(Answer(place["section"], lines, row[COLUMNS[1]], row["here"], tuple(code_spans(row["shown by"]))))
    return found


@cache
def lines_of(name: str) -> tuple[str, ...]:
    """Return the lines of a document; line 1 has index 0."""
    return tuple((DOCUMENTS / name).read_text(encoding="utf-8").splitlines())


@cache
def sections(name: str) -> dict[int, str]:
    """Return the section of each line of a document that says something, by number.

    Numbered items below a section, as `1)` in section 3, are sections: `3, 1)`.
    """
    found, section, is_code = {}, "start", False
    for number, line in enumerate(lines_of(name), start=1):
        is_code ^= bool(_FENCE.match(line))
        heading = None if is_code else _HEADING.match(line)
        if heading is not None:
            parent = section.partition(",")[0]
            section = f"{parent}, {heading['number']})" if heading["bracket"] else heading["number"]
        if line.strip() and not line.startswith("<a name="):
            found[number] = section
    return found


def fenced(name: str) -> Iterator[str]:
    """Yield the lines of a document that stand in fenced blocks."""
    is_code = False
    for line in lines_of(name):
        if _FENCE.match(line):
            is_code = not is_code
        elif is_code:
            yield line


def inline_code(name: str) -> set[str]:
    """Return what stands between backquotes in the prose of a document, if it is written in Latin letters."""
    prose, is_code = [], False
    for line in lines_of(name):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code:
            prose.append(line)
    spans = re.findall(r"``([^`]+)``|`([^`]+)`", "\n".join(prose))
    return {text for one, two in spans if (text := (one or two).strip()).isascii()}


def commands_of(name: str) -> list[str]:
    """Return the command lines of a document, in blocks and in the text, and the status lines it shows."""
    found = [line.strip() for line in fenced(name)]
    found = [line[line.index(_STATUS) :] if _STATUS in line else line for line in found]
    found += sorted(inline_code(name))
    return [line for line in found if line.startswith(_STATUS) or _COMMAND.match(line)]


def promises(name: str) -> str:
    """Return the column of promises and commands, for looking things up."""
    return "\n".join(answer.promise for answer in answers(name))


# What is missing on the page: each check returns it, so that a test can take rows out and see that it is noticed.


def wrong_counts() -> list[str]:
    """Return the documents whose rows are not as many as the summary says."""
    wrong = []
    for row in read_table(PAGE, SUMMARY):
        kinds = Counter(answer.here.partition(":")[0] for answer in answers(row["document"]))
        counted = [sum(kinds.values()), *(kinds[kind] for kind in ("works", "differs", NOTHING))]
        if [int(row[column]) for column in ("rows", "works", "differs", NOTHING)] != counted:
            wrong.append(f"{row['document']}: counted {counted}")
    return wrong


def unanswered_lines(name: str) -> list[str]:
    """Return the lines of a document that no row is about, and rows whose section is another one."""
    wrong, answered = [], set[int]()
    for answer in answers(name):
        there = {sections(name)[number] for number in answer.lines if number in sections(name)}
        if there != {answer.section}:
            wrong.append(f"{answer.section} ({answer.lines[0]}): {answer.promise[:60]}")
        answered |= set(answer.lines)
    missing = sorted(set(sections(name)) - answered)
    return wrong + [f"{number}: {lines_of(name)[number - 1][:60]}" for number in missing]


def missing_commands(name: str) -> list[str]:
    """Return the commands of a document that do not stand on the page, between backquotes and letter by letter."""
    spans = {span for answer in answers(name) for span in code_spans(answer.promise)}
    return [command for command in commands_of(name) if command not in spans]


def missing_names(name: str) -> list[str]:
    """Return the code in the text of a document, and the guide's calls and arguments, that stand on neither page."""
    wanted = inline_code(name)
    if name == GUIDE:
        code = "\n".join(fenced(name))
        wanted |= set(re.findall(r"\bpaddle(?:\.\w+)+", code)) | set(re.findall(r"\bT\.\w+", code))
        wanted |= set(re.findall(r"(?:optimizer|scaler|model|exe|loss|scaled)\.\w+(?=\()", code))
        wanted |= set(re.findall(r"\b(\w+)=(?!=)", code)) - {"loss"}
    known = (promises(name) + read_page("migration.md")).casefold()  # the guide also writes Gradscaler, Dataparallel
    return sorted(text for text in wanted if text.casefold() not in known)


def missing_figures(name: str) -> list[str]:
    """Return the figures of speed and loss that a document shows and the page does not."""
    shown = "\n".join(line for line in lines_of(name) if _FIGURES.search(line))
    others = re.findall(r"(?:top\d|lr|cost): (\d+\.\d+)", shown)  # of sample lines, whose form counts
    return sorted(set(_numbers(shown)) - set(others) - set(_numbers(promises(name))))


def _numbers(text: str) -> list[str]:
    return re.findall(r"(?<!\d)\d+\.\d+(?!\d)", text)


# -- the page


def test_every_document_has_a_table() -> None:
    assert table_names(PAGE) == [SUMMARY, *NAMES]
    assert [row["document"] for row in read_table(PAGE, SUMMARY)] == list(NAMES)


@each_document
def test_a_row_has_a_verdict_a_reason_and_a_proof(name: str) -> None:
    rows = read_table(PAGE, name)
    assert list(rows[0]) == COLUMNS
    for answer in answers(name):
        assert answer.promise
        if answer.here == NOTHING:
            assert answer.shown_by == (), answer
            continue
        assert answer.here == WORKS or len(answer.here.removeprefix(DIFFERS).split()) > 3, answer
        assert answer.here == WORKS or answer.here.startswith(DIFFERS), answer
        assert answer.shown_by, answer


def test_the_summary_counts_the_rows() -> None:
    assert wrong_counts() == []


@each_document
def test_what_shows_it_exists(name: str) -> None:
    for reference in (reference for answer in answers(name) for reference in answer.shown_by):
        path, _, function = reference.partition("::")
        assert (ROOT / path).is_file(), reference
        assert path.startswith(("tests/", "examples/", "benchmarks/")), reference
        assert bool(function) == path.startswith("tests/"), reference
        assert not function or function in functions_of(path), reference


@each_document
def test_measured_times_stand_in_the_benchmarks_that_are_named(name: str) -> None:
    for answer in answers(name):
        files = [path for path in answer.shown_by if path.startswith("benchmarks/")]
        text = "".join((ROOT / path).read_text(encoding="utf-8") for path in files)
        for figure in re.findall(r"\d+\.?\d*(?= ms)", answer.here):
            assert figure in text, answer


# -- the page against the documents


@needs_documents
def test_these_are_all_documents() -> None:
    assert sorted(path.name for path in DOCUMENTS.glob("*.md")) == sorted(NAMES)


@needs_documents
@each_document
def test_no_line_is_without_an_answer(name: str) -> None:
    assert unanswered_lines(name) == []


@needs_documents
@each_document
def test_every_numbered_section_has_a_row(name: str) -> None:
    assert set(sections(name).values()) == {answer.section for answer in answers(name)}


@needs_documents
@each_document
def test_every_command_stands_on_the_page_as_in_the_document(name: str) -> None:
    assert missing_commands(name) == []


@needs_documents
def test_commands_are_found_in_blocks_in_the_text_and_in_samples() -> None:
    assert Counter({name: len(commands_of(name)) for name in NAMES}) == Counter(
        {GUIDE: 0, MOBILENET: 4, SEGMENTATION: 9, OVERVIEW: 2, TEST_GUIDE: 6}
    )


@needs_documents
@each_document
def test_every_name_stands_on_the_page_or_among_the_migrations(name: str) -> None:
    assert missing_names(name) == []


@needs_documents
@each_document
def test_every_figure_stands_on_the_page(name: str) -> None:
    assert missing_figures(name) == []


@needs_documents
def test_every_label_of_the_report_stands_on_the_page() -> None:
    labels = re.findall(
        r"([\w ]+\w(?:\((?:MB|s|ms)\))?):(?= |$)",
        "\n".join(re.sub(r"^.*INFO\] +", "", line) for line in fenced(SEGMENTATION) if "[INFO]" in line),
    )
    assert len(labels) == 24
    assert [label for label in labels if label.strip() not in promises(SEGMENTATION)] == []


@each_document
def test_a_row_that_is_taken_out_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = read_page(PAGE)
    head, mark, table = page.partition(f"<!-- table: {name} -->\n")
    for row in table.partition("\n\n")[0].splitlines()[2:]:
        shorter = head + mark + table.replace(f"{row}\n", "", 1)
        monkeypatch.setattr(doc_tables, "read_page", lambda _, text=shorter: text)
        assert wrong_counts() != [], row


# -- what the commands need


def test_requirements_install_what_the_scripts_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {
        *project["dependencies"],
        *project["optional-dependencies"]["vision"],
        *project["optional-dependencies"]["export"],
    }
    listed: set[str] = set()
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        own = re.fullmatch(r"(?:-e |--editable )?\.(?:\[([\w, ]+)\])?", line.strip())
        if own is None:
            listed.add(line.strip())
            continue
        listed |= {"mezzo", *project["dependencies"]}
        for extra in filter(None, re.split(r"[ ,]+", own[1] or "")):
            listed |= set(project["optional-dependencies"][extra])
    assert "mezzo" in listed, "the scripts import mezzo"
    assert needed <= listed


def test_the_folder_of_the_documents_is_here() -> None:
    folder = ROOT / "test_tipc"
    for name in ("README.md", "prepare.sh", "test_train_inference_python.sh", "common_func.sh"):
        assert (folder / name).is_file()
    for name in ("test_train_inference_python.md", "test_train_amp_inference_python.md"):
        assert (folder / "docs" / name).is_file()
    for name in ("train_infer_python.txt", "train_amp_infer_python.txt"):
        assert (folder / "configs" / "mobilenet_v3_small" / name).is_file()


# -- the commands themselves: slow

O1 = "python3 train.py --data-path=./ILSVRC2012 --lr=0.1 --batch-size=256 --amp_level=O1"
O2 = "python3 train.py --data-path=./ILSVRC2012 --lr=0.1 --batch-size=256 --amp_level=O2"
ON_GPU = "python3.7 train.py --amp_level=O2 --device=gpu --epochs=1 --data-path=./lite_data"
PREPARE = "bash test_tipc/prepare.sh ${your_params_file} lite_train_lite_infer"
RUN = "bash test_tipc/test_train_inference_python.sh ${your_params_file} lite_train_lite_infer"
PERSONS = "test_tipc/configs/pphumanseg_lite/train_linux_gpu_normal_amp_infer_python_linux_gpu_cpu.txt"
PREPARE_PERSONS, RUN_PERSONS = (command.replace("${your_params_file}", PERSONS) for command in (PREPARE, RUN))
OWN = "test_tipc/configs/my_net/train_amp_infer_python.txt"
TEMPLATE = (
    ORIGINALS / "mobilenetv3-tutorial" / "test_tipc" / "configs" / "mobilenet_v3_small" / "train_amp_infer_python.txt"
)

#: The log line of the MobileNetV3 document, of its 16 images at a rate of 0.1.
LOG_LINE = re.compile(
    r"^\[Epoch (\d+), iter: 0\] top1: \d\.\d{5}, top5: \d\.\d{5}, lr: 0\.10000, loss: \d+\.\d{5}, "
    r"avg_reader_cost: \d+\.\d{5} sec, avg_batch_cost: \d+\.\d{5} sec, avg_samples: 16\.0, avg_ips: \d+\.\d{5} images/sec\.$",
    re.MULTILINE,
)
HAS_GPU = torch.cuda.is_available()
LIMIT_S = 1200
"""For one command; five minutes on two busy cores."""


@needs_documents
def test_the_commands_below_are_those_of_the_documents() -> None:
    assert {O1, O2} < set(commands_of(MOBILENET))
    assert {ON_GPU, PREPARE, RUN} < set(commands_of(TEST_GUIDE))
    assert {RUN, PREPARE_PERSONS, RUN_PERSONS} < set(commands_of(SEGMENTATION))
    assert LOG_LINE.findall("\n".join(fenced(MOBILENET))) == ["1", "2", "1", "2"]


class Checkout:
    """A folder with the scripts of the repository, in which a command runs as in the documents.

    Args:
        folder: An empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("train.py", "export.py", "val.py", "tools", "deploy"):
            (folder / name).symlink_to(ROOT / name)
        made = shutil.ignore_patterns("data", "output", "lite_cpu.yml")
        shutil.copytree(ROOT / "test_tipc", folder / "test_tipc", ignore=made)
        (folder / "src" / "mezzo").mkdir(parents=True)  # by this folder a checkout of mezzo is known
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in ("python3", "python3.7"):
            (bin_folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n', encoding="utf-8")
            (bin_folder / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "MEZZO_PYTHON": sys.executable,
            "MEZZO_HOME": str(folder / "home"),
            "MEZZO_OFFLINE": "1",
        }
        self.environment.pop("GLOG_v", None)

    def run(self, command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command line as a reader's shell does."""
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # then a certification ends its steps; a kill would leave them behind
            out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def passes(self, command: str, **environment: str) -> str:
        """Run a command line that has to pass, and return what it printed."""
        done = self.run(command, **environment)
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def put_own_text(self, *changes: tuple[str, str]) -> None:
        """Copy the tutorial's text as the test guide says; `changes` are further replacements."""
        text = TEMPLATE.read_text(encoding="utf-8")
        for old, new in (("model_name:mobilenet_v3_small", "model_name:my_net"), *changes):
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (self.folder / OWN).parent.mkdir(exist_ok=True)
        (self.folder / OWN).write_text(text, encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A folder as a reader of the documents has it."""
    return Checkout(tmp_path)


def make_sixteen_images(folder: Path) -> None:
    """Draw a set with one training and one validation image for each of 16 classes."""
    prepare("imagenet_lite", folder, count=(1, 1), size=(64, 64))


@pytest.mark.slow
@pytest.mark.parametrize("command", [O1, O2], ids=["O1", "O2"])
def test_mobilenet_trains_by_the_command_of_its_document(command: str, checkout: Checkout) -> None:
    """On 16 images, as in the document's log; two of its 90 epochs, and no processes that read data."""
    make_sixteen_images(checkout.folder / "ILSVRC2012")
    text = checkout.passes(f"{command} --epochs 2 --workers 0")
    assert LOG_LINE.findall(text) == ["1", "2"]


def operator_calls(text: str, operator: str) -> list[int]:
    """Return the counts of an operator in the operator table: float16, bfloat16, float32, other."""
    (row,) = re.findall(rf"^ +{operator} +\|(.*)$", text, re.MULTILINE)
    return [int(cell) for cell in row.split("|")]


@pytest.mark.slow
def test_the_command_of_the_test_guide_trains_and_shows_its_operators(checkout: Checkout) -> None:
    make_sixteen_images(checkout.folder / "lite_data")
    done = checkout.run(ON_GPU, GLOG_v="5")
    text = done.stdout
    if not HAS_GPU:
        assert done.returncode == 2
        assert done.stderr == "mezzo: --device gpu: this machine has no CUDA device; use --device cpu\n"
        text = checkout.passes(ON_GPU.replace("--device=gpu", "--device=cpu"), GLOG_v="5")
    assert "training 1 iterations in fp16 O2 on " in text
    float16, bfloat16, float32, other = operator_calls(text, "convolution")
    assert (float16 + float32, bfloat16, other) == (52, 0, 0)
    assert float16 == 52 or not HAS_GPU, "on a GPU every convolution is half"
    assert sum(operator_calls(text, "hardswish")[:1]) == 19, "activations are half on every device"


@pytest.mark.slow
def test_the_check_of_the_machine_has_its_counterpart(checkout: Checkout) -> None:
    """`torch.cuda.get_device_capability()` for Paddle's call; `mezzo check` for those without a GPU as well."""
    found = json.loads(checkout.passes("python3 -m mezzo check --json"))
    capability = checkout.run("python3 -c 'import torch; print(torch.cuda.get_device_capability())'")
    assert (capability.returncode == 0) == HAS_GPU == bool(found["gpus"])
    for gpu in found["gpus"][:1]:
        assert capability.stdout == f"({gpu['capability'][0]}, {gpu['capability'][1]})\n"


@needs_originals
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), "train.py --amp_level=O2 --output-dir="),
        ((("--amp_level=O2", "--amp_level=O1"),), "train.py --amp_level=O1 --output-dir="),
        (
            (
                ("trainer:amp_train", "trainer:normal_train"),
                ("amp_train:train.py --amp_level=O2", "normal_train:train.py"),
            ),
            "train.py --output-dir=./test_tipc/output/my_net/lite_train_lite_infer/normal_train_gpus_0_autocast_False",
        ),
    ],
    ids=["template", "O1", "float32"],
)
def test_lines_13_and_14_choose_training_and_level(
    changes: tuple[tuple[str, str], ...], expected: str, checkout: Checkout
) -> None:
    checkout.put_own_text(*changes)
    lines = (checkout.folder / OWN).read_text(encoding="utf-8").splitlines()
    trainer = lines[12].removeprefix("trainer:")
    assert lines[13].startswith(f"{trainer}:train.py")
    plan = checkout.passes(f"python3 -m mezzo tipc plan {OWN} lite_train_lite_infer --compat")
    assert f"  python3.7 {expected}" in plan


@needs_originals
@pytest.mark.slow
def test_a_failed_command_is_printed_with_the_reason(checkout: Checkout) -> None:
    checkout.put_own_text(("--amp_level=O2", "--amp_level=O9"))
    checkout.passes(PREPARE, your_params_file=OWN)
    done = checkout.run(RUN, your_params_file=OWN)
    assert done.returncode == 1
    assert "Run failed with command - my_net - python3.7 train.py --amp_level=O9 " in done.stdout
    assert "$ python3.7 train.py --amp_level=O9 " in done.stdout
    assert "| mezzo: unknown amp_level 'O9'; allowed: O0, OD, O1, O2, O3" in done.stdout
    assert _STATUS not in done.stdout


@needs_originals
@pytest.mark.slow
def test_your_own_model_goes_through_the_commands_of_the_test_guide(checkout: Checkout) -> None:
    """The tutorial's text in a folder of its own, with nothing but `model_name` changed."""
    checkout.put_own_text()
    checkout.passes(PREPARE, your_params_file=OWN)
    assert "0 errors" in checkout.passes(f"python3 -m mezzo tipc lint {OWN} lite_train_lite_infer")
    plan = checkout.passes(f"python3 -m mezzo tipc plan {OWN} lite_train_lite_infer")
    steps = re.findall(r"^(train|eval|export|infer)-\d", plan, re.MULTILINE)
    assert Counter(steps) == {"train": 2, "eval": 2, "export": 2, "infer": 4}
    text = checkout.passes(RUN, your_params_file=OWN)
    assert "Run failed" not in text
    skipped = len(re.findall(r"^ skipped  ", text, re.MULTILINE))
    assert text.count(_STATUS) == len(steps) - skipped
    assert HAS_GPU or skipped == 2
    output = "./test_tipc/output/my_net/lite_train_lite_infer"
    status = (
        f"{_STATUS} - my_net - python3.7 train.py --amp_level=O2 --output-dir={output}/amp_train_gpus_0_autocast_True"
    )
    assert status in text
    assert (
        f"{_STATUS} - my_net - python3.7 deploy/inference_python/infer.py --use-gpu=False --model-dir={output}/" in text
    )
    (report,) = parse_reports(
        (checkout.folder / output / "python_infer_cpu_batchsize_1.log").read_text(encoding="utf-8")
    )
    assert (report["runtime_device"], report["batch_size"]) == ("cpu", 1)


@needs_originals
@pytest.mark.slow
def test_segmentation_goes_through_the_commands_of_its_document(checkout: Checkout) -> None:
    """The release's own text and recipe, for PP-HumanSeg-Lite."""
    for path in (ORIGINALS / "seg-2.6" / "test_tipc" / "configs" / "pphumanseg_lite").iterdir():
        shutil.copyfile(path, checkout.folder / "test_tipc" / "configs" / "pphumanseg_lite" / path.name)
    checkout.passes(PREPARE_PERSONS)
    text = checkout.passes(RUN_PERSONS)
    assert "Run failed" not in text
    (results,) = (checkout.folder / "test_tipc" / "output" / "pphumanseg_lite").rglob("results_python.log")
    status = results.read_text(encoding="utf-8")  # in the colour of the scripts, which a pipe does not get
    for command in (
        "train.py --config",
        "export.py --config",
        "deploy/python/infer.py --device=cpu --enable_mkldnn=True",
    ):
        line = f" {_STATUS} - pphumanseg_lite - python3.7 {command}"
        assert line in text
        assert f"\x1b[33m{line}" in status
    skipped = len(re.findall(r"^ skipped  ", text, re.MULTILINE))
    assert text.count(_STATUS) == 8 - skipped
    name = "python_infer_cpu_usemkldnn_True_threads_6_precision_fp32_batchsize_1.log"
    output = checkout.folder / "test_tipc" / "output" / "pphumanseg_lite"
    for log in (output / name, output / "lite_train_lite_infer" / name):
        said = log.read_text(encoding="utf-8")
        titles = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[INFO\]\s+-+ (\w+ info) -+$", said, re.MULTILINE)
        assert titles[:6] == ["Env info", "Paddle info", "Conf info", "Model info", "Data info", "Perf info"]
        (report,) = parse_reports(said)
        expected = {"model_name": "pphumanseg_lite", "precision": "fp32", "runtime_device": "cpu", "batch_size": 1}
        expected |= {"enable_mkldnn": True, "cpu_math_library_num_threads": 6, "log_api_version": 1.0}
        expected |= {"data_num": 50, "input_shape": "dynamic"}
        assert expected.items() <= report.items()
        assert report["inference_time(ms)"] > 0
