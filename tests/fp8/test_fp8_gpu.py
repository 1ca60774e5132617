"""FP8 on a GPU that has it: operands, products, training, captured steps, memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from mezzo.amp import Fp8Recipe, GradScaler, Policy, auto_cast, decorate
from mezzo.fp8 import E4M3, E5M2, AmaxHistory, Operand, fp8_linear, make_operand, multiply, recipe_to_text
from mezzo.fp8._operands import turn_operand
from mezzo.optim import attach_master, step_tier
from mezzo.record import release_memory
from mezzo.static import capture_step, compile_step
from no_waiting import no_waiting

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.is_available() and not HAS_FP8, reason="needs compute capability 8.9"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # its advice for float32 products
]

HALVES = (torch.bfloat16, torch.float16)
SUM_ERROR = 2.0**-8
"""Of the sum of absolute products: Tensor Cores line up the products of an instruction by the largest and keep some 13 bits,
emulation keeps float32's 24. Rounding its factors to FP8 moves a product by 2**-4 or more."""
LOSS_RTOL = 5e-3
"""A loss is a mean over many outputs, each of which is off by no more than SUM_ERROR of its products."""


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two FP8 tensors are the same numbers, signs of zeros included; not a number equals itself."""
    is_nan = one.float().isnan()
    bits = [tensor.view(torch.uint8).masked_fill(is_nan, 0) for tensor in (one, other)]
    return torch.equal(is_nan, other.float().isnan()) and torch.equal(*bits)


def by_torch(make: Callable[[], Operand]) -> Operand:
    with step_tier("fused"):
        return make()


def matrix(rows: int, columns: int, half: torch.dtype, seed: int = 0) -> Tensor:
    """Return numbers from far below the smallest FP8 number to the largest."""
    torch.manual_seed(seed)
    spread = torch.logspace(-6, 3, columns, device="cuda")
    return (torch.randn(rows, columns, device="cuda") * spread).to(half)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 16), (63, 65), (129, 1000), (1024, 2048)])
def test_operands_by_triton_equal_those_of_torch_bit_for_bit(
    rows: int, columns: int, dtype: torch.dtype, half: torch.dtype
) -> None:
    x = matrix(rows, columns, half)
    for headroom in (1.0, 2.0):

        def make(headroom: float = headroom) -> Operand:
            return make_operand(x, dtype, sums=torch.float32, headroom=headroom)

        ours, stock = make(), by_torch(make)
        assert same_bits(ours.values, stock.values)
        assert same_bits(ours.transposed, stock.transposed)
        assert torch.equal(ours.inverse, stock.inverse)
        # float32 sums in another order: units of 2**-24, as many as there are rows
        bound = 2.0**-22 * x.float().abs().sum(0)
        assert bool(((ours.column_sums.double() - x.double().sum(0)).abs() <= bound).all())


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 16), (63, 65), (129, 1000), (1024, 2048)])
def test_operands_by_row_equal_those_of_torch_bit_for_bit(
    rows: int, columns: int, dtype: torch.dtype, half: torch.dtype
) -> None:
    x = matrix(rows, columns, half)
    ours = make_operand(x, dtype, by_row=True)
    stock = by_torch(lambda: make_operand(x, dtype, by_row=True))
    assert same_bits(ours.values, stock.values)
    assert same_bits(ours.transposed, stock.transposed)
    assert torch.equal(ours.inverse, stock.inverse)
    assert torch.equal(ours.transposed_inverse, stock.transposed_inverse)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (63, 65), (129, 1000), (1024, 2048)])
def test_a_turned_operand_has_the_same_bits(rows: int, columns: int) -> None:
    values = matrix(rows, columns, torch.bfloat16).clamp(-448, 448).to(E4M3)
    history = AmaxHistory(4, torch.device("cuda"))
    history.load(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    turned = turn_operand(values, torch.tensor([8.0], device="cuda"), history)
    assert same_bits(turned, values.t().contiguous())
    assert history.amaxes.tolist() == [8.0, 1.0, 2.0, 3.0]
    assert (history.amax.item(), history.used.item()) == (8.0, 4.0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_infinite_numbers_become_nan_in_both(dtype: torch.dtype) -> None:
    x = matrix(64, 64, torch.bfloat16)
    x[3, 5] = float("inf")
    ours = make_operand(x, dtype)
    assert same_bits(ours.values, by_torch(lambda: make_operand(x, dtype)).values)
    assert ours.values[3, 5].float().isnan()


def test_delayed_scales_by_triton_are_those_of_torch() -> None:
    ours, stock = (AmaxHistory(4, torch.device("cuda")) for _ in range(2))
    for seed, factor in enumerate((1.0, 8.0, 0.25, 0.25, 0.25, 0.25, 0.25)):
        x = (factor * torch.randn(48, 80, device="cuda")).bfloat16()
        mine = make_operand(x, history=ours)
        other = by_torch(lambda x=x: make_operand(x, history=stock))
        assert same_bits(mine.values, other.values), seed
        assert torch.equal(mine.inverse, other.inverse)
        assert torch.equal(ours.amaxes, stock.amaxes)
        assert torch.equal(ours.amax, stock.amax)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [False, True])
def test_a_product_of_small_whole_numbers_is_exact(
    fast: bool, dtype: torch.dtype, by_row: bool, half: torch.dtype
) -> None:
    # Sums of 256 products of at most 4: 11 bits, which every accumulator keeps. Not square: a swapped side would show.
    torch.manual_seed(0)
    a, b = (torch.randint(-2, 3, (rows, 256), device="cuda").to(half) for rows in (48, 112))
    bias = None if by_row else torch.randint(-9, 10, (112,), device="cuda").to(half)
    left, right = make_operand(a, dtype, by_row=by_row), make_operand(b, by_row=by_row)
    made = multiply(left.values, left.inverse, right.values, right.inverse, half, bias=bias, fast=fast)
    exact = a.double() @ b.double().t() + (0 if bias is None else bias.double())
    rounded = exact.to(torch.bfloat16 if by_row else half)  # by row the product is made in bfloat16
    assert made.dtype is half
    assert torch.equal(made, rounded.to(half))


@pytest.mark.parametrize("rows", [16, 32, 4096])
def test_few_rows_and_many_are_multiplied(rows: int) -> None:
    a, b = torch.ones(rows, 32, device="cuda").bfloat16(), torch.ones(16, 32, device="cuda").bfloat16()
    left, right = make_operand(a), make_operand(b)
    made = multiply(left.values, left.inverse, right.values, right.inverse, torch.bfloat16)
    assert torch.equal(made, torch.full((rows, 16), 32.0, device="cuda").bfloat16())


def test_a_bias_with_strides_is_added_as_it_reads() -> None:
    a, b = torch.zeros(16, 32, device="cuda").bfloat16(), torch.ones(16, 32, device="cuda").bfloat16()
    left, right = make_operand(a), make_operand(b)
    for bias in (torch.arange(32.0, device="cuda").bfloat16()[::2], torch.ones(1, device="cuda").bfloat16().expand(16)):
        made = multiply(left.values, left.inverse, right.values, right.inverse, torch.bfloat16, bias=bias)
        assert torch.equal(made[0], bias)


def layer_results(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, recipe: Fp8Recipe) -> list[Tensor]:
    """Return output and gradients of input, weight and bias, of the second call: a delayed scale is then one."""
    made: list[Tensor] = []
    own = nn.Parameter(weight.clone())
    attach_master(own, weight.float())  # so that its FP8 copies are kept
    for _ in range(2):
        leaf, offset = x.clone().requires_grad_(), bias.clone().requires_grad_()
        out = fp8_linear(leaf, own, offset, recipe_to_text(recipe))
        made = [out.detach(), *torch.autograd.grad(out, (leaf, own, offset), grad)]
    return made


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("gradient", ["e5m2", "e4m3"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scaling": "delayed"},
        {"granularity": "row"},
        {"fast_accumulation": "always"},
        {"fast_accumulation": "never"},
    ],
    ids=lambda settings: " ".join(settings.values()) or "default",
)
def test_output_and_gradients_of_a_layer_are_those_of_emulation(
    settings: dict[str, Any], gradient: str, half: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 128, 1024, device="cuda", dtype=half)
    weight = torch.randn(768, 1024, device="cuda", dtype=half) / 32
    bias = torch.randn(768, device="cuda", dtype=half)
    grad = torch.randn(4, 128, 768, device="cuda", dtype=half) * 1e-2
    by_hardware = layer_results(x, weight, bias, grad, Fp8Recipe(gradient=gradient, **settings))
    emulated = layer_results(x, weight, bias, grad, Fp8Recipe(gradient=gradient, emulate=True, **settings))
    flat_x, flat_grad = x.flatten(0, 1).float().abs(), grad.flatten(0, 1).float().abs()
    sizes = [
        (flat_x @ weight.float().abs().t()).view_as(emulated[0]) + bias.float().abs(),
        (flat_grad @ weight.float().abs()).view_as(emulated[1]),
        flat_grad.t() @ flat_x,
        flat_grad.sum(0),
    ]
    eps = torch.finfo(torch.bfloat16 if settings.get("granularity") == "row" else half).eps
    for name, made, want, size in zip(("output", "input", "weight", "bias"), by_hardware, emulated, sizes, strict=True):
        assert made.dtype is half
        # Two roundings of the result besides: of the product, and, by row, of the sum with the bias.
        bound = 2 * eps * want.float().abs() + (1.2 * SUM_ERROR + (eps if name == "output" else 0)) * size
        assert bool(((made.float() - want.float()).abs() <= bound).all()), name


def test_emulation_itself_is_as_near_to_the_exact_product_as_fp8_allows() -> None:
    x, weight = (torch.randn(rows, 512, device="cuda").bfloat16() for rows in (256, 384))
    recipe = recipe_to_text(Fp8Recipe(emulate=True))
    made = fp8_linear(x, weight, None, recipe)
    exact = x.double() @ weight.double().t()
    # Each factor is off by up to 2**-4, uniformly: 2**-4 / 3**0.5 in the mean square, times 2**0.5 for two; ours is below.
    assert ((made.double() - exact).norm() / exact.norm()).item() < 2**0.5 * 2**-4 / 3**0.5


class Stack(nn.Module):
    """Layers of 1024, a ReLU between them."""

    def __init__(self, layers: int = 4, width: int = 1024, has_relu: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.has_relu = has_relu

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() if self.has_relu else layer(x)
        return x


class Training:
    """A stack trained at O3 (or O2), on a batch of its own."""

    def __init__(
        self, dtype: str, level: str = "O3", rows: int = 512, model: Stack | None = None, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = (model or Stack()).cuda()
        width = self.model.layers[0].in_features
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        fp8 = Fp8Recipe(min_width=0, min_size=0, **settings) if level == "O3" else None
        half_layers = () if level == "O3" else None
        decorate(self.model, self.optimizer, level=level, dtype=dtype, fp8=fp8, half_layers=half_layers)
        self.policy = Policy.create(level, dtype, fp8=fp8)
        self.scaler = GradScaler(
            enable=dtype == "float16", init_loss_scaling=1024.0, decr_every_n_nan_or_inf=1, incr_every_n_steps=1000
        )
        self.x = torch.rand(rows, width, device="cuda")
        self.y = torch.rand(rows, width, device="cuda")

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with auto_cast(policy=self.policy):
            loss = mse_loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def captured(self) -> Callable[[Tensor, Tensor], Tensor]:
        batch = (self.x, self.y)
        step = capture_step(self.model, mse_loss, self.optimizer, batch, scaler=self.scaler, policy=self.policy)
        assert step.is_captured
        return step

    def losses(self, step: Callable[[Tensor, Tensor], Tensor], steps: int = 10) -> list[float]:
        return [step(self.x, self.y).item() for _ in range(steps)]


RECIPES = pytest.mark.parametrize(
    "settings",
    [{}, {"scaling": "delayed"}, {"granularity": "row"}],
    ids=lambda settings: " ".join(settings.values()) or "default",
)


@RECIPES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_stack_trains_as_its_emulation_does(dtype: str, settings: dict[str, Any]) -> None:
    real, emulated = Training(dtype, **settings), Training(dtype, emulate=True, **settings)
    losses = real.losses(real.step)
    assert losses == pytest.approx(emulated.losses(emulated.step), rel=LOSS_RTOL)
    assert losses[-1] < 0.95 * losses[0]


@RECIPES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_captured_step_trains_as_the_eager_one(dtype: str, settings: dict[str, Any]) -> None:
    eager, captured = Training(dtype, **settings), Training(dtype, **settings)
    expected = eager.losses(eager.step)
    losses = captured.losses(captured.captured())
    # The same kernels; a library may cut a sum otherwise where it has other memory to work in.
    assert losses == pytest.approx(expected, rel=LOSS_RTOL)
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize(
    "settings", [{}, {"scaling": "delayed"}, {"granularity": "row"}], ids=["current", "delayed", "row"]
)
def test_a_compiled_step_trains_as_the_eager_one(settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    eager, compiled = Training("bfloat16", **settings), Training("bfloat16", **settings)
    step = compile_step(compiled.model, mse_loss, compiled.optimizer, policy=compiled.policy, backend="inductor")
    # Inductor keeps in float32 what eager rounds to bfloat16 in between: units of 2**-8 before an operand is rounded.
    assert compiled.losses(step) == pytest.approx(eager.losses(eager.step), rel=2 * LOSS_RTOL)


@pytest.mark.parametrize("settings", [{}, {"scaling": "delayed"}], ids=["current", "delayed"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_an_overflow_skips_one_step_and_no_more(is_captured: bool, settings: dict[str, Any]) -> None:
    training = Training("float16", **settings)
    step = training.captured() if is_captured else training.step
    training.losses(step, 2)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    bad = training.y.clone()
    bad[0] = 1e30  # of a row some outputs are above zero, and let a gradient through
    step(training.x, bad)
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    after = training.losses(step, 3)
    training.scaler.flush()
    assert training.scaler.skipped_steps == 1
    assert training.scaler.get_scale() == 512.0
    assert after[-1] < after[0]


@RECIPES
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_steps_wait_for_nothing(dtype: str, settings: dict[str, Any]) -> None:
    training = Training(dtype, **settings)
    training.step(training.x, training.y)  # kernels are built and loaded
    with no_waiting():
        for _ in range(5):
            training.step(training.x, training.y)


def peak_bytes(level: str, has_relu: bool) -> tuple[int, int]:
    """Return the most memory that training takes over what is there already, and the parameters of its layers."""
    release_memory(torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    training = Training("bfloat16", level, rows=2048, model=Stack(8, 2048, has_relu))
    training.losses(training.step, 3)
    torch.cuda.reset_peak_memory_stats()
    training.losses(training.step, 2)
    parameters = sum(layer.weight.numel() for layer in training.model.layers)
    return torch.cuda.max_memory_allocated() - before, parameters


@pytest.mark.parametrize("has_relu", [False, True])
def test_fp8_takes_at_most_two_bytes_a_parameter_more_than_o2(has_relu: bool) -> None:
    o2, parameters = peak_bytes("O2", has_relu)
    o3, _ = peak_bytes("O3", has_relu)
    kept_besides = 8 * 2048 * 2048 if has_relu else 0  # a ReLU keeps the input of the next layer, which keeps it in FP8
    assert o3 - o2 <= 2 * parameters + kept_besides


def test_a_layer_that_is_not_fp8_is_computed_in_half_as_at_o2() -> None:
    layer, x = nn.Linear(1024, 1000).cuda(), torch.rand(64, 1024, device="cuda")  # 1000 is no multiple of 16
    with torch.no_grad(), auto_cast(level="O3", dtype="bfloat16"):
        made = layer(x)
    expected = linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(made, expected.detach())
