"""What the doctor says of FP8: gains worked out by hand from given times, and a small stack examined at O3 by emulation."""

from dataclasses import replace

import pytest
import torch
from examined import examination, kernel, measured
from torch import Tensor, nn

from mezzo.amp import Fp8Recipe
from mezzo.amp.debugging import Fp8Row, KernelRow
from mezzo.proof import advise
from mezzo.proof._doctor import examine
from mezzo.proof._examination import Examination
from mezzo.proof._fp8_rules import fp8
from mezzo.proof._products import Product
from mezzo.trial import TrialSetup, Workload

RECIPE = Fp8Recipe(emulate=True, min_width=0, min_size=0)


def product(module: str, op: str = "addmm", *, rows: int = 4096, inputs: int = 4096, outputs: int = 4096) -> Product:
    return Product(
        op=op,
        api_op="linear",
        module=module,
        line="",
        input_shape=(rows, inputs),
        inputs=inputs,
        outputs=outputs,
        rows=rows,
        groups=1,
        is_channels_last=None,
    )


def seen_with(kernels: list[KernelRow], products: list[Product], *, level: str = "O2", **more: object) -> Examination:
    step_ms = sum(each.time_us for each in kernels) / 1e3
    amp = replace(measured(kernels, step_ms=step_ms, host_ms=step_ms / 2), products=tuple(products))
    seen = examination(amp, setup=TrialSetup(level=level), **more)  # type: ignore[arg-type]
    seen.workload = replace(seen.workload, model=nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))))
    seen.__dict__.update(fp8_speedup=1.75, fp8_rows=[])
    return seen


def of_module(row: KernelRow, module: str) -> KernelRow:
    return replace(row, module=module)


# What O3 would bring


def test_o3_is_advised_with_the_gain_of_faster_products_less_the_bytes_that_converting_moves() -> None:
    kernels = [of_module(kernel("addmm", 7.0), "1"), of_module(kernel("addmm", 7.0), "2"), kernel("add", 6.0)]
    seen = seen_with(kernels, [product("1"), product("2")])
    (advice,) = fp8(seen)
    # 14 ms of products take 8; six bytes for each of two times 4096 x 8192 numbers at 1e12 bytes a second take 0.4
    saved_ms = 14 * (1 - 1 / 1.75) - 2 * 6 * 4096 * 8192 / 1e9
    assert advice.gain == pytest.approx(20 / (20 - saved_ms))
    assert advice.kind == "fp8"
    assert advice.seen.startswith("2 products of linear layers take 70% of the kernels' time and could be FP8")
    assert "mezzo compare --levels O2,O3 and mezzo bisect --level O3" in advice.todo
    assert advice.setup == replace(seen.setup, level="O3", is_decorated=True)


@pytest.mark.parametrize(
    "products",
    [
        [product("0"), product("3")],  # the first and the last layer
        [product("1", outputs=4100)],
        [product("1", inputs=256, outputs=256)],
        [product("1", op="bmm")],
    ],
    ids=["first and last", "odd", "narrow", "attention"],
)
def test_what_cannot_be_fp8_brings_nothing(products: list[Product]) -> None:
    assert list(fp8(seen_with([of_module(kernel("addmm", 9.0), "1")], products))) == []


def test_a_gpu_without_fp8_and_a_cpu_are_told_nothing() -> None:
    for capability in ((8, 0), None):
        seen = seen_with([of_module(kernel("addmm", 9.0), "1")], [product("1")], capability=capability)
        assert list(fp8(seen)) == []


# At O3


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.fp8._product.why_no_fp8", lambda device: None)
    monkeypatch.setattr("mezzo.proof._fp8_rules.why_no_fp8", lambda device: None)


def test_shares_are_those_of_multiplying_and_of_converting(hopper: None) -> None:
    multiplying = replace(kernel("mezzo::fp8_linear", 6.0, dtype="float8"), on_tensor_cores=True)
    converting = kernel("mezzo::fp8_linear", 1.0, dtype="float8")
    half = replace(kernel("addmm", 2.0), on_tensor_cores=True)
    seen = seen_with(
        [multiplying, converting, half, kernel("add", 1.0)],
        [product("1", "mezzo::fp8_linear"), product("3")],
        level="O3",
    )
    assert seen.amp.product_s == pytest.approx(0.008)
    assert seen.amp.fp8_s == pytest.approx(0.006)
    assert seen.amp.convert_s == pytest.approx(0.001)
    shares, kept = fp8(seen)
    assert shares.seen == (
        "1 of 2 products of linear layers are FP8, 75% of the products' time; "
        "converting operands takes 10% of the kernels' time"
    )
    assert (kept.where, kept.seen) == ("3", "in half: it is kept in half")
    assert "half_layers=()" in kept.todo


def test_each_layer_in_half_is_named_with_its_reason_and_what_to_pad(hopper: None) -> None:
    products = [
        product("a", "mezzo::fp8_linear"),
        product("b", rows=4100),
        product("c", outputs=1000),
        product("d", inputs=64),
    ]
    seen = seen_with([kernel("addmm", 1.0)], products, level="O3")
    _, *halves = fp8(seen)
    assert [(each.where, each.seen, each.todo) for each in halves] == [
        ("b", "in half: its 4100 rows are not a multiple of 16", "pad with zeros to 4112 rows, 4096 -> 4096 features"),
        ("c", "in half: its 1000 outputs are not a multiple of 16", "pad with zeros to 4096 rows, 4096 -> 1008 features"),
        ("d", "in half: 64 -> 4096 is narrower than min_width 768 asks: converting would cost more", ""),
    ]  # fmt: skip


def test_of_many_layers_in_half_the_largest_are_told_one_by_one(hopper: None) -> None:
    products = [product(f"layer{index}", outputs=1000 + 16 * index) for index in range(12)]
    _, *halves = fp8(seen_with([kernel("addmm", 1.0)], products, level="O3"))
    assert halves[0].where == "layer11"
    assert halves[-1].seen == "4 more are in half: layer3, layer2, layer1, layer0"


def test_nothing_in_fp8_is_sent_back_to_o2(hopper: None) -> None:
    shares, *_ = fp8(seen_with([kernel("addmm", 1.0)], [product("c", outputs=1000)], level="O3"))
    assert "level O2" in shares.todo


@pytest.mark.parametrize(
    ("row", "seen_text", "todo"),
    [
        (
            Fp8Row("2", "input", "e4m3", 1, 100, 1.0, 0.2, 0.0, 0),
            "e4m3 rounds 20.0% of it to zero and clips 0.00%",
            "granularity='row', or amp.keep_in_half(model, '2') if mezzo bisect --level O3 names it",
        ),
        (
            Fp8Row("2", "gradient", "e4m3", 1, 100, 1.0, 0.2, 0.0, 0),
            "e4m3 rounds 20.0% of it to zero and clips 0.00%",
            "granularity='row' or gradient='e5m2', or amp.keep_in_half(model, '2')",
        ),
        (
            Fp8Row("2", "weight", "e4m3", 1, 100, 1.0, 0.0, 0.03, 0),
            "e4m3 rounds 0.0% of it to zero and clips 3.00%",
            "scaling='current'",
        ),
    ],
)
def test_a_tensor_that_loses_much_is_named_with_a_remedy(row: Fp8Row, seen_text: str, todo: str, hopper: None) -> None:
    seen = seen_with([kernel("addmm", 1.0)], [product("2", "mezzo::fp8_linear")], level="O3")
    harmless = replace(row, module="1", to_zero_share=0.01, cut_share=0.0)
    seen.__dict__["fp8_rows"] = [row, harmless]
    (advice,) = [each for each in fp8(seen) if each.kind == "fp8-numbers"]
    assert advice.where == f"2, {row.role}"
    assert advice.seen == seen_text
    assert todo in advice.todo


def test_a_stack_is_examined_at_o3_by_emulation() -> None:
    class Small(nn.Module):
        """Its input has a few large numbers, beside which FP8 loses the others."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            scale = torch.full_like(x, 1e-6)
            scale[:, 0] = 1.0
            return self.layer(x * scale)

    model = nn.Sequential(nn.Linear(64, 64), Small(), nn.Linear(64, 64), nn.Linear(64, 10))
    workload = Workload(model, torch.randn(32, 64), torch.randn(32, 10), nn.functional.mse_loss)
    setup = TrialSetup(level="O3", dtype="bfloat16", fp8=RECIPE)
    report = examine(Examination(workload, setup, torch.device("cpu"), 2, None))
    text = str(report)
    assert "hardware: cpu\n    a CPU has no FP8 products: FP8 products were emulated" in text
    assert "2 of 4 products of linear layers are FP8" in text
    assert "fp8: 3\n    in half: its 10 outputs are not a multiple of 16" in text
    assert "fp8: 0\n    in half: it is kept in half" in text
    (lost,) = report.of_kind("fp8-numbers")
    assert lost.where == "1.layer, input"
    assert report.to_dict()["amp"]["fp8_s"] > 0


def test_advise_takes_level_o3() -> None:
    report = advise(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(16, 16), level="O3", steps=1)
    assert "0 of 2 products of linear layers are FP8" in str(report)
