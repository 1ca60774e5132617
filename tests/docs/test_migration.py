"""The right-hand columns of docs/migration.md run, and no call of the guide is without a row."""

import inspect
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doc_pages import DOCS, blocks
from doc_tables import Row, code_spans, read_table, table_names
from PIL import Image
from torch import nn

from mezzo import amp, static

PAGE = "migration.md"
TABLES = [name for name in table_names(PAGE) if name != "differences"]
SHELL = ("torchrun ", "mezzo ", "python ")

#: What the AMP guide's code calls, block by block, and what the TIPC document asks a user to run first. `T` is
#: paddle.vision.transforms, `nn` is paddle.nn.
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
    use_fp16_guard=True paddle.DataParallel(model) paddle.device.cuda.get_device_capability()
""".split()

#: What later releases of Paddle call.
LATER_CALLS = """
    paddle.amp.AmpScaler paddle.amp.amp_guard paddle.amp.amp_decorate paddle.amp.autocast(
    paddle.amp.is_autocast_enabled() paddle.amp.get_autocast_dtype()
    paddle.amp.debugging.set_checked_op_list paddle.amp.debugging.set_skipped_op_list
    paddle.amp.debugging.compare_accuracy paddle.static.amp.AutoMixedPrecisionLists
    paddle.static.amp.cast_model_to_fp16 paddle.static.amp.cast_parameters_to_fp16
""".split()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return what the page's code blocks define; a program, a folder and a group of processes of this test alone."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
    for key, value in place.items():
        monkeypatch.setenv(key, value)
    program = static.Program()
    program.backend = "aot_eager"  # as exact as compiled code, and there at once
    defined: dict[str, Any] = {}
    for block in blocks(DOCS / PAGE):
        if block.language == "python":
            exec(block.code, defined)  # noqa: S102  # our own text
    with static.program_guard(program):
        yield defined
    static.disable_static()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:no C\\+\\+ compiler:UserWarning")  # compile_step says it on machines without one
# A row of O1 follows one of O2, with one model.
@pytest.mark.filterwarnings("ignore:decorate.level=.*but auto_cast:UserWarning")
@pytest.mark.parametrize("table", TABLES)
def test_right_hand_column_runs_from_top_to_bottom(table: str, names: dict[str, Any]) -> None:
    for row in read_table(PAGE, table):
        run_row(row, names)


def run_row(row: Row, names: dict[str, Any]) -> None:
    """Run the right-hand side of a row."""
    theirs, ours, *_ = row.values()
    snippets = code_spans(ours)
    assert snippets, f"{theirs}: nothing to run"
    for snippet in snippets:
        if not snippet.startswith(SHELL):
            exec(snippet, names)  # noqa: S102  # our own text


def row_of(table: str, call: str) -> Row:
    """Return the one row whose left-hand side has a call."""
    (found,) = [row for row in read_table(PAGE, table) if call in row["Paddle"]]
    return found


# -- rows that run, and do what Paddle does


def images() -> list[Any]:
    """Return images as data sets have them: PIL's in gray and colour, arrays with and without channels."""
    rng = np.random.default_rng(0)
    gray = rng.integers(0, 256, (28, 20), dtype=np.uint8)
    colour = rng.integers(0, 256, (28, 20, 3), dtype=np.uint8)
    return [Image.fromarray(gray), Image.fromarray(colour), gray, gray[..., None], colour]


@pytest.mark.parametrize("image", images(), ids=["PIL gray", "PIL colour", "HW", "HW1", "HW3"])
def test_transform_of_the_high_level_table_takes_pil_images_and_arrays(image: Any, names: dict[str, Any]) -> None:
    run_row(row_of("paddle model", "T.Compose"), names)
    array = np.asarray(image)
    pixels = array.reshape(*array.shape[:2], -1).astype(np.float64)
    transformed = names["transform"](image)
    assert transformed.dtype is torch.float32
    assert transformed.shape == (pixels.shape[2], 28, 20)
    for channel in range(pixels.shape[2]):
        np.testing.assert_allclose(transformed[channel], pixels[:, :, channel] / 127.5 - 1, atol=1e-6)


def test_data_of_the_high_level_table_are_images_as_paddle_s_transform_gives_them(names: dict[str, Any]) -> None:
    for call in ("T.Compose", "datasets.MNIST"):
        run_row(row_of("paddle model", call), names)
    assert all(isinstance(digit, Image.Image) for digit in names["digits"])
    assert all(image.shape == (1, 28, 28) and -1 <= image.min() <= image.max() <= 1 for image, _ in names["data"])


class Movable:
    """Stands for a model or a tensor: this machine may have no second place to move them to."""

    place: Any = None

    def to(self, place: Any) -> "Movable":
        self.place = place
        return self


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize(
    ("call", "variable", "device"),
    [
        ("paddle.CUDAPlace(0)", "place", "cuda:0"),
        ("paddle.CPUPlace()", "place", "cpu"),
        ("paddle.set_device", "device", "cuda"),
    ],
)
def test_model_and_data_move_to_the_place(
    call: str, variable: str, device: str, has_gpu: bool, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    names.update(model=Movable(), data=Movable(), label=Movable())
    run_row(row_of("paddle set-up", call), names)
    expected = torch.device(device if has_gpu else "cpu")
    assert [names[name].place for name in ("model", "data", "label")] == [expected] * 3
    assert names[variable] == expected


def test_batch_of_the_loop_moves_to_the_model(names: dict[str, Any]) -> None:
    names.update(data=Movable(), label=Movable())
    run_row(row_of("paddle loop", "label._to"), names)
    where = next(names["model"].parameters()).device
    assert [names[name].place for name in ("data", "label")] == [where] * 2


def test_model_of_a_process_moves_to_its_own_gpu(names: dict[str, Any]) -> None:
    names["model"] = Movable()
    run_row(row_of("paddle distributed", "init_parallel_env"), names)
    expected = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    assert names["model"].place == expected


@pytest.mark.parametrize("has_gpu", [True, False])
def test_capability_is_none_without_a_gpu(
    has_gpu: bool, names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    row = row_of("paddle set-up", "get_device_capability")
    run_row(row, names)
    assert names["capability"] == ((9, 0) if has_gpu else None)
    assert "mezzo check" in row["note"]


@pytest.mark.parametrize(
    ("table", "call", "name"),
    [
        ("paddle network", "paddle.nn.LayerList", "linears"),
        ("paddle network", "`paddle.nn.Linear(16, 16)`", "layer"),
        ("paddle network", "paddle.nn.Sequential", "net"),
        ("paddle model", "nn.Sequential", "net"),
    ],
)
def test_linear_layers_start_as_paddle_s(table: str, call: str, name: str, names: dict[str, Any]) -> None:
    run_row(row_of(table, call), names)
    layers = [module for module in names[name].modules() if isinstance(module, nn.Linear)]
    assert layers
    for layer in layers:
        limit = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert layer.bias.count_nonzero() == 0
        assert 0.9 * limit < layer.weight.abs().max() <= limit  # torch's own limit is 1 / sqrt(in_features)


def test_optimizers_have_paddle_s_weight_decay(names: dict[str, Any]) -> None:
    for call in ("paddle.optimizer.Adam(", "paddle.optimizer.AdamW("):
        run_row(row_of("paddle network", call), names)
    assert type(names["adam"]) is torch.optim.Adam
    assert names["adam"].defaults["weight_decay"] == 0
    assert names["adamw"].defaults["weight_decay"] == 0.01


def test_saved_weights_are_loaded_again(names: dict[str, Any]) -> None:
    run_row(row_of("paddle loop", "paddle.save"), names)
    before = [param.detach().clone() for param in names["model"].parameters()]
    nn.init.zeros_(names["model"][0].weight)
    run_row(row_of("paddle loop", "paddle.load"), names)
    for param, saved in zip(names["model"].parameters(), before, strict=True):
        torch.testing.assert_close(param.detach(), saved, rtol=0, atol=0)


def test_accumulated_gradients_update_once_in_so_many_batches(names: dict[str, Any]) -> None:
    names["scaler"] = amp.GradScaler(init_loss_scaling=1024)
    before = names["model"][0].weight.detach().clone()
    run_row(row_of("paddle amp", "accumulate_batchs_num"), names)
    assert not torch.equal(names["model"][0].weight, before)
    assert names["model"][0].weight.grad is None


# -- coverage


def test_every_call_of_the_guide_has_a_row() -> None:
    theirs = " ".join(
        next(iter(row.values())) for table in TABLES if "paddle" in table for row in read_table(PAGE, table)
    )
    assert [call for call in (*GUIDE_CALLS, *LATER_CALLS) if call not in theirs] == []


def test_every_argument_and_method_of_torch_amp_has_a_row() -> None:
    rows = read_table(PAGE, "torch.amp")
    theirs = " ".join(row["torch"] for row in rows)
    methods = [name for name in vars(torch.amp.GradScaler) if not name.startswith("_")]
    assert [name for name in methods if f"scaler.{name}(" not in theirs] == []
    for function in (torch.amp.GradScaler, torch.autocast):
        (whole,) = [
            row["torch"] for row in rows if f"{function.__name__}(" in row["torch"] and "enabled=True" in row["torch"]
        ]
        arguments = [name for name in inspect.signature(function).parameters if name != "device"]
        assert [name for name in arguments if f"{name}=" not in whole] == []


def test_torch_s_numbers_for_the_scaler_are_torch_s() -> None:
    stock = torch.amp.GradScaler("cpu")
    row = next(row for row in read_table(PAGE, "torch.amp") if row["torch"].startswith("the same numbers"))
    scaler = eval(code_spans(row["mezzo"])[0], {"amp": amp})
    assert scaler.get_init_loss_scaling() == stock.get_scale()
    assert scaler.get_incr_ratio() == stock.get_growth_factor()
    assert scaler.get_decr_ratio() == stock.get_backoff_factor()
    assert scaler.get_incr_every_n_steps() == stock.get_growth_interval()
    assert scaler.get_decr_every_n_nan_or_inf() == 1


def test_the_two_lines_of_the_scaler_row_make_the_same_scaler_and_the_rest_is_mezzos() -> None:
    row = next(row for row in read_table(PAGE, "torch.amp") if "init_scale=1024.0" in row["torch"])
    by_torch, by_paddle = (eval(code, {"amp": amp}) for code in code_spans(row["mezzo"]))
    assert repr(by_torch) == repr(by_paddle) == repr(amp.GradScaler(init_loss_scaling=1024.0))
    assert "2^15, 2.0, 0.5, 1000, and shrinking takes 2 bad steps" in row["note"]
    left_out = amp.GradScaler("cuda")
    assert (left_out.get_scale(), left_out.get_growth_factor(), left_out.get_backoff_factor()) == (2.0**15, 2.0, 0.5)
    assert (left_out.get_growth_interval(), left_out.get_decr_every_n_nan_or_inf()) == (1000, 2)
