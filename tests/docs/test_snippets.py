"""Python on the pages and in the READMEs runs as pasted: page by page, from top to bottom, in an empty folder."""

import doctest
import linecache
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import READMES, ROOT, Block, blocks, commands, name_of, pages
from torch import nn

LANGUAGES = {"", "bash", "diff", "pycon", "python", "text", "yaml"}

#: How many blocks of a page are not run; each says why above it.
NOT_RUN: dict[str, int] = {}

#: Pages whose code takes more than five seconds, and what takes it.
SLOW = {page: "compiles training steps" for page in ("docs/model.md", "docs/static.md")}

#: Pages whose code needs a framework; make test-integrations runs them.
FRAMEWORKS = {
    f"docs/integrations/{name}.md": name for name in ("lightning", "timm", "torchao", "accelerate", "transformers")
}

#: Pages that another test runs and looks at more closely.
ELSEWHERE = {"docs/tutorial.md": "test_newcomer.py"}

#: What a page asks for that is not on every machine: (as it is written, as it is run, why).
SUBSTITUTIONS = {
    page: [("max_norm=1.0)\nfor", 'max_norm=1.0, backend="aot_eager")\nfor', "to compile it takes 15 s")]
    for page in ("README.md", "README.zh.md")
} | {
    "docs/static.md": [('"gpu"', '"gpu" if torch.cuda.is_available() else "cpu"', "there may be no GPU")],
}


def own_network(names: dict[str, Any]) -> None:
    """Give a page what its reader has: a network, its optimizer, its data, and the usual imports."""
    model = nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    names.update(
        torch=torch,
        nn=nn,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.functional.cross_entropy,
        loader=[(torch.randn(8, 784), torch.randint(10, (8,))) for _ in range(3)],
    )


def published_weights(names: dict[str, Any]) -> None:
    """Put a file with weights for 19 classes where the page expects one."""
    from mezzo.checkpoint import save_pdparams
    from mezzo.vision.models import create_model

    save_pdparams(create_model("pp_liteseg_stdc1", num_classes=19), Path("model.pdparams"))


#: Pages that begin with what the reader has already.
READERS_OWN = {"docs/static.md": own_network, "docs/models.md": published_weights}


def python_pages() -> list[Any]:
    """Return the pages of docs/ with Python on them."""
    found = []
    for page in pages():
        if page in READMES or name_of(page) in ELSEWHERE:
            continue
        if any(block.language in ("python", "pycon") for block in blocks(page)):
            marks = [pytest.mark.slow] if name_of(page) in SLOW else []
            if name_of(page) in FRAMEWORKS:
                marks += [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]  # their own warnings
            found.append(pytest.param(page, marks=marks, id=name_of(page)))
    return found


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block; tracebacks have the lines of its page."""
    code = block.code
    for written, meant, _ in SUBSTITUTIONS.get(name_of(block.page), []):
        code = code.replace(written, meant)
    if block.language == "pycon":
        check_session(code, str(block), names)
        return
    padded = "\n" * (block.line - 1) + code
    file = f"{name_of(block.page)} (block at {block.line})"
    linecache.cache[file] = (len(padded), None, padded.splitlines(keepends=True), file)
    exec(compile(padded, file, "exec"), names)  # noqa: S102  # our own text


def check_session(code: str, name: str, names: dict[str, Any]) -> None:
    """Run a session as a doctest, in names that the other blocks of the page share."""
    test = doctest.DocTestParser().get_doctest(code, {}, name, name, 0)
    test.globs = names
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    assert runner.run(test, out=report.append, clear_globs=False).failed == 0, "".join(report)


def run_page(page: Path) -> dict[str, Any]:
    """Run all that runs on a page; return the names that it leaves."""
    names: dict[str, Any] = {"__name__": "__main__"}
    READERS_OWN.get(name_of(page), lambda names: None)(names)
    for block in blocks(page):
        if block.language in ("python", "pycon") and block.reason is None and block.title is None:
            run(block, names)
    return names


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", python_pages())
def test_python_of_a_page_runs_from_top_to_bottom(page: Path) -> None:
    from mezzo import static

    try:
        with static.program_guard(static.Program()):
            run_page(page)
    finally:
        static.disable_static()


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_the_readme_trains_proves_and_compiles(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_page(page)
    printed = capsys.readouterr().out
    assert names["model"][0].weight.dtype is torch.bfloat16
    assert names["loss"].isfinite()
    assert "op list" in printed
    assert re.search(r"^0 +linear +bfloat16", printed, re.MULTILINE)
    assert "aot_eager" in str(names["train_step"].report())


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_each_block_of_the_readme_runs_by_itself(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            run(block, {"__name__": "__main__"})


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_both_sides_of_the_diff_train(page: Path) -> None:
    (diff,) = [block for block in blocks(page) if block.language == "diff"]
    for sign, other in ("-+", "+-"):
        names: dict[str, Any] = {}
        own_network(names)
        before = names["model"][0].weight.detach().clone()
        lines = [line[1:] for line in diff.code.splitlines() if line[:1] != other]
        exec("\n".join(lines).replace('"cuda"', '"cpu"'), names)  # noqa: S102  # our own text
        assert names["loss"].isfinite(), sign
        assert not torch.equal(names["model"][0].weight.float(), before), sign
    added = [line for line in diff.code.splitlines() if line[0:1] == "+" and not line.startswith("+import")]
    assert len(added) == 5


def test_blocks_that_are_not_run_are_counted_and_say_why() -> None:
    counted: dict[str, int] = {}
    for block in (block for page in pages() for block in blocks(page)):
        assert block.reason is not None or not block.is_marked, f"{block}: write <!-- not run: the reason --> above it"
        if block.reason is not None:
            assert len(block.reason.split()) >= 3, f"{block}: {block.reason!r} is no reason"
            counted[name_of(block.page)] = counted.get(name_of(block.page), 0) + 1
    assert counted == NOT_RUN


def test_every_block_has_a_language_that_is_looked_after() -> None:
    for block in (block for page in pages() for block in blocks(page)):
        assert block.language in LANGUAGES, f"{block}: {block.language}"


def test_a_block_with_a_title_is_a_file_that_a_command_of_its_page_runs() -> None:
    titled = [block for page in pages() for block in blocks(page) if block.title is not None]
    assert titled, "nothing was found: is the title's form another one now?"
    for block in titled:
        assert any(str(block.title) in command for command in commands(block.page)), f"{block}: {block.title}"


def test_substitutions_and_tables_speak_of_what_is_there() -> None:
    for name, changes in SUBSTITUTIONS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for written, _, why in changes:
            assert written in text, f"{name}: {written} is not there any more ({why})"
    for name in (*NOT_RUN, *SLOW, *FRAMEWORKS, *READERS_OWN, *ELSEWHERE):
        assert (ROOT / name).exists(), name
    for file in ELSEWHERE.values():
        assert (Path(__file__).parent / file).exists(), file


def test_line_numbers_of_a_failing_block_are_those_of_the_page(tmp_path: Path) -> None:
    page = ROOT / "docs" / "made_up.md"
    block = Block(page, 7, "python", None, "x = 1\nraise ValueError(x)\n", False, None)
    with pytest.raises(ValueError, match="1") as caught:
        run(block, {})
    assert caught.traceback[-1].lineno + 1 == 8
    assert re.fullmatch(r"docs/made_up.md \(block at 7\)", str(caught.traceback[-1].frame.code.raw.co_filename))


def test_a_session_that_differs_from_the_page_fails() -> None:
    with pytest.raises(AssertionError, match=r"Expected:\s+3\s+Got:\s+2"):
        check_session(">>> 1 + 1\n3\n", "page", {})
