"""The right-hand columns of docs/migration.md run, and no call of the guide is without a row."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_pages import DOCS, blocks
from doc_tables import code_spans, read_table, table_names

from mezzo import amp, static

PAGE = "migration.md"
TABLES = table_names(PAGE)
SHELL = ("torchrun ", "mezzo ", "python ")

#: What the AMP guide's code calls, block by block. `T` is paddle.vision.transforms, `nn` is paddle.nn.
GUIDE_CALLS = """
    paddle.seed numpy.random.seed paddle.CUDAPlace paddle.nn.Layer paddle.nn.LayerList paddle.nn.Linear
    paddle.io.Dataset paddle.io.DataLoader RandomDataset
    paddle.nn.MSELoss paddle.optimizer.SGD model.parameters label._to model(data) mse(output, loss.backward
    optimizer.step optimizer.clear_grad(set_to_zero=False) loss.numpy
    paddle.amp.GradScaler(init_loss_scaling=1024) paddle.amp.auto_cast(custom_white_list={"elementwise_add"},
    scaler.scale(loss) scaled.backward scaler.step(optimizer) scaler.update
    paddle.amp.decorate(models=model, paddle.amp.auto_cast(level="O2") paddle.amp.auto_cast(level="O1")
    paddle.set_device("gpu") nn.Sequential nn.Flatten(1) nn.Tanh paddle.Model(net) amp_configs model.prepare(
    paddle.nn.CrossEntropyLoss paddle.metric.Accuracy paddle.vision.transforms T.Compose T.Transpose T.Normalize
    paddle.vision.datasets.MNIST(mode="train", model.fit( paddle.is_compiled_with_cuda
    accumulate_batchs_num
    paddle.enable_static paddle.static.default_main_program paddle.static.default_startup_program
    paddle.static.data(name= optimizer.minimize(loss) paddle.static.Executor(place) exe.run(startup_program)
    exe.run(main_program, data.name loss.name use_program_cache=True loader()
    paddle.static.amp.CustomOpLists(custom_white_list= paddle.static.amp.decorate(optimizer=optimizer, amp_lists=
    init_loss_scaling=128.0 use_dynamic_loss_scaling=True use_pure_fp16=True use_fp16_guard=False
    optimizer.amp_init(place, paddle.static.global_scope paddle.static.amp.fp16_guard
    paddle.DataParallel(model)
""".split()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return what the page's first block defines; a program, a folder and a group of processes of this test alone."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    program = static.Program()
    program.backend = "aot_eager"  # as exact as compiled code, and there at once
    defined: dict[str, Any] = {}
    exec(next(block.code for block in blocks(DOCS / PAGE) if block.language == "python"), defined)  # noqa: S102  # our own text
    with static.program_guard(program):
        yield defined
    static.disable_static()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:no C\\+\\+ compiler:UserWarning")  # compile_step says it on machines without one
@pytest.mark.parametrize("table", TABLES)
def test_right_hand_column_runs_from_top_to_bottom(table: str, names: dict[str, Any]) -> None:
    for row in read_table(PAGE, table):
        theirs, ours, *_ = row.values()
        snippets = code_spans(ours)
        assert snippets, f"{theirs}: nothing to run"
        for snippet in snippets:
            if not snippet.startswith(SHELL):
                exec(snippet, names)  # noqa: S102  # our own text


def test_every_call_of_the_guide_has_a_row() -> None:
    theirs = " ".join(
        next(iter(row.values())) for table in TABLES if "paddle" in table for row in read_table(PAGE, table)
    )
    assert [call for call in GUIDE_CALLS if call not in theirs] == []


def test_torch_s_numbers_for_the_scaler_are_torch_s() -> None:
    stock = torch.amp.GradScaler("cpu")
    row = next(row for row in read_table(PAGE, "torch.amp") if row["torch"].startswith("the same numbers"))
    scaler = eval(code_spans(row["mezzo"])[0], {"amp": amp})
    assert scaler.get_init_loss_scaling() == stock.get_scale()
    assert scaler.get_incr_ratio() == stock.get_growth_factor()
    assert scaler.get_decr_ratio() == stock.get_backoff_factor()
    assert scaler.get_incr_every_n_steps() == stock.get_growth_interval()
    assert scaler.get_decr_every_n_nan_or_inf() == 1
