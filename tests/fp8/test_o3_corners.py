"""Level O3 where it is easily wrong: weights that change behind its back, unusual tensors, layers wrapped twice.

Faults that a reviewer found and that are mended, and what looked suspicious and was right.
"""

import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from o3_nets import FP8, RECIPE, batch, calls, layers, region
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear, mse_loss
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from fp8_interpreter import round_as_torch_does
from mezzo.amp import auto_cast, decorate, exclude_layers, is_excluded, keep_in_half
from mezzo.amp._recompute import with_policy_in_replicas
from mezzo.amp.debugging import collect_operator_stats
from mezzo.fp8 import copies_of, fp8_linear, keep_copies, recipe_to_text
from mezzo.model.precision import make_precision
from mezzo.optim import attach, attach_master, refresh_master
from mezzo.proof import bisect
from triton_interpreter import run_interpreted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SIZE = 32


def inputs(rows: int = SIZE) -> Tensor:
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(7)).bfloat16()


def half_layer() -> nn.Linear:
    """Return a decorated layer: its weight is half with a master, so that it gets FP8 copies."""
    layer = nn.Linear(SIZE, SIZE, bias=False)
    decorate(layer, level="O3", dtype="bfloat16", fp8=RECIPE, half_layers=())
    return layer


def with_master(weight: nn.Parameter) -> nn.Parameter:
    attach_master(weight, weight.detach().float())
    return weight


def assert_fresh(result: Tensor, weight: Tensor, x: Tensor | None = None) -> None:
    """The result is what a weight without copies, as it is now, gives."""
    x = inputs() if x is None else x
    assert torch.equal(result, fp8_linear(x, weight.detach().clone(), None, recipe_to_text(RECIPE)))


@torch.no_grad()
def forward(weight: Tensor | nn.Module) -> Tensor:
    with region():
        return weight(inputs()) if isinstance(weight, nn.Module) else linear(inputs(), weight)


@contextmanager
def fp8_calls() -> Iterator[list[int]]:
    """How many FP8 products a block makes, forward and backward."""
    found: list[int] = []
    with collect_operator_stats() as stats:
        yield found
    found += [calls(stats), calls(stats, f"{FP8}_backward")]


class Memory:
    """One piece of memory that an allocator hands out again and again."""

    def __init__(self) -> None:
        self._numbers = np.zeros((SIZE, SIZE), dtype=np.uint16)

    def tensor(self, seed: int) -> Tensor:
        """Return a tensor with storage of its own in this memory."""
        values = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).bfloat16()
        self._numbers[:] = values.view(torch.uint16).numpy()
        return torch.from_numpy(self._numbers).view(torch.bfloat16)


class UpdatesByData(Optimizer):
    """SGD as many optimizers outside of torch write it: through `.data`, which no version counts."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-1.0)


def train_by_data(layer: nn.Module, optimizer: Optimizer) -> None:
    for _ in range(2):
        with region():
            loss = layer(inputs()).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# Weights that change


def test_a_weight_without_master_whose_edits_torch_does_not_count_is_converted_in_each_call() -> None:
    weight = nn.Parameter(torch.randn(SIZE, SIZE).bfloat16())
    forward(weight)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # as FSDP2 fills its parameters
        weight.mul_(3)
    assert_fresh(forward(weight), weight)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_a_layer_that_fsdp2_gathers_computes_with_what_the_last_step_left() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        layer: Any = nn.Linear(SIZE, SIZE, bias=False)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = SGD(layer.parameters(), lr=0.5)
        for _ in range(4):
            master = layer.weight.to_local().detach().clone()
            with region():
                result = layer(inputs())
            assert_fresh(result.detach(), master.bfloat16())
            result.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("is_decorated", [False, True])
def test_updates_through_data_of_a_weight_without_master_reach_the_next_forward(is_decorated: bool) -> None:
    layer = nn.Linear(SIZE, SIZE, bias=False)
    optimizer = UpdatesByData(layer.parameters())
    if is_decorated:
        options: dict[str, Any] = {"fp8": RECIPE, "half_layers": (), "master_weight": False}
        decorate(layer, optimizer, level="O3", dtype="bfloat16", **options)
    train_by_data(layer.bfloat16(), optimizer)
    assert_fresh(forward(layer), layer.weight)


def test_updates_of_masters_through_data_reach_the_next_forward() -> None:
    layer = nn.Linear(SIZE, SIZE, bias=False)
    optimizer = UpdatesByData(layer.parameters())
    decorate(layer, optimizer, level="O3", dtype="bfloat16", fp8=RECIPE, half_layers=())
    train_by_data(layer, optimizer)
    assert_fresh(forward(layer), layer.weight)


def test_an_alias_made_anew_for_each_call_follows_its_weight() -> None:
    # nn.DataParallel hands its first replica such aliases.
    weight = half_layer().weight
    forward(weight)
    forward(weight.data)
    with torch.no_grad():
        weight.mul_(3)
    assert_fresh(forward(weight.data), weight)


def test_a_weight_that_comes_back_to_an_earlier_address_is_converted_anew() -> None:
    memory, layer = Memory(), half_layer()
    layer.weight.data = memory.tensor(1)
    forward(layer)
    layer.weight.data = torch.zeros(SIZE, SIZE).bfloat16()  # no forward sees this one
    layer.weight.data = memory.tensor(2)
    assert_fresh(forward(layer), layer.weight)


def test_the_bits_of_a_weight_read_as_another_dtype_are_not_that_weight() -> None:
    weight, x = half_layer().weight, inputs().half()
    forward(weight)
    other = weight.detach().view(torch.float16)
    assert_fresh(fp8_linear(x, other, None, recipe_to_text(RECIPE)), other, x)


def test_copies_that_were_interrupted_while_made_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = half_layer()
    forward(layer)
    layer.weight.data.mul_(1000)

    def interrupt(*_: Any, **__: Any) -> Tensor:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "stack", interrupt)  # the last part of `WeightCopies.renew`
        with pytest.raises(KeyboardInterrupt):
            refresh_master(layer.weight)
    assert_fresh(forward(layer), layer.weight)


@pytest.mark.parametrize("is_parameter", [True, False])
def test_a_new_weight_at_the_address_of_a_dead_one_does_not_get_its_copies(is_parameter: bool) -> None:
    memory = Memory()
    dead = with_master(nn.Parameter(memory.tensor(1)))
    forward(dead)
    assert copies_of(dead) is not None
    address = dead.data_ptr()
    del dead
    gc.collect()
    weight = with_master(nn.Parameter(memory.tensor(2))) if is_parameter else memory.tensor(2)
    assert weight.data_ptr() == address
    assert_fresh(forward(weight), weight)


def _edit_by_set(layer: nn.Linear) -> None:
    layer.weight.set_(torch.randn(SIZE, SIZE).bfloat16())  # type: ignore[call-overload]


def _edit_for_inference(layer: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight.mul_(3)


def _edit_a_detached_alias(layer: nn.Linear) -> None:
    layer.weight.detach().mul_(3)


@pytest.mark.parametrize("edit", [_edit_by_set, _edit_for_inference, _edit_a_detached_alias])
def test_edits_that_torch_counts_are_followed(edit: Callable[[nn.Linear], None]) -> None:
    layer = half_layer()
    forward(layer)
    with torch.no_grad():
        edit(layer)
    assert_fresh(forward(layer), layer.weight)


def test_weights_that_are_views_of_one_flat_buffer_follow_it() -> None:
    flat = torch.randn(2 * SIZE * SIZE).bfloat16()
    both = [with_master(nn.Parameter(part.view(SIZE, SIZE))) for part in flat.chunk(2)]
    for weight in both:
        forward(weight)
    flat.mul_(3)
    for weight in both:
        assert_fresh(forward(weight), weight)


def test_a_part_of_a_weight_at_its_address_is_not_the_weight() -> None:
    weight = with_master(nn.Parameter(torch.randn(2 * SIZE, SIZE).bfloat16()))
    forward(weight)
    assert_fresh(forward(weight[:SIZE]), weight[:SIZE])


def test_a_parametrised_weight_is_converted_in_each_call() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(SIZE, SIZE, bias=False))
    optimizer = SGD(layer.parameters(), lr=0.5)
    decorate(layer, optimizer, level="O3", dtype="bfloat16", fp8=RECIPE, half_layers=())
    train_by_data(layer, optimizer)
    assert_fresh(forward(layer), layer.weight)


@pytest.mark.skipif(not INTERPRETED, reason="run by the next test")
def test_zeros_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    round_as_torch_does(monkeypatch)
    weight = nn.Parameter(torch.zeros(SIZE, SIZE).half())
    attach_master(weight, torch.zeros(SIZE, SIZE))
    copies = keep_copies(weight)
    assert copies is not None
    copies.operand(weight)
    attach(optimizer := SGD([weight], lr=1e-3))
    weight.grad = torch.rand(SIZE, SIZE).half() + 0.5
    optimizer.step()
    assert copies.is_of(weight)
    back = copies.values.float() * copies.state[0]
    torch.testing.assert_close(back, weight.detach().float(), rtol=2**-4, atol=0.0)  # half of the last of three bits


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_weight_of_zeros_is_not_zero_in_fp8_after_its_first_update() -> None:
    run_interpreted(f"{Path(__file__)}::test_zeros_in_the_interpreter")


# Layers that stay in half


def test_handles_may_be_removed_in_any_order() -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE))
    in_half, excluded = keep_in_half(net, "0"), exclude_layers(net, "0")
    in_half.remove()
    assert is_excluded(net[0])
    with region():
        assert net(inputs()).dtype is torch.float32
    excluded.remove()
    with region():
        assert net(inputs()).dtype is torch.bfloat16


def test_handles_removed_last_first_leave_the_layer_as_it_was() -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE))
    in_half, excluded = keep_in_half(net, "0"), exclude_layers(net, "0")
    excluded.remove()
    with fp8_calls() as found, region(), torch.no_grad():
        assert net(inputs()).dtype is torch.bfloat16
    assert found == [0, 0]
    in_half.remove()
    assert "forward" not in net[0].__dict__
    with fp8_calls() as found, region(), torch.no_grad():
        net(inputs())
    assert found == [1, 0]


class EndsInAttention(nn.Module):
    """A layer, and attention whose projection of the output is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.attention = nn.MultiheadAttention(SIZE, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend to x itself."""
        x = self.first(x)
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


def test_the_last_layer_stays_in_half_where_it_is_the_output_of_attention() -> None:
    net = EndsInAttention()
    decorate(net, level="O3", dtype="bfloat16", fp8=RECIPE)
    with fp8_calls() as found, region(), torch.no_grad():
        net(torch.randn(2, 16, SIZE))
    assert found == [0, 0]  # attention as a whole is the last layer


@pytest.mark.parametrize("keep", [keep_in_half, exclude_layers])
def test_a_replica_of_a_kept_layer_computes_with_its_own_weight(keep: Any) -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False))
    keep(net, nn.Linear)
    replica: Any = net[0]._replicate_for_data_parallel()  # what DataParallel makes for another device
    replica._parameters = {}
    replica.weight, replica.bias = torch.zeros(SIZE, SIZE), None
    apply = with_policy_in_replicas(lambda modules, x: [module(x) for module in modules])
    with region(), torch.no_grad():
        (result,) = apply([replica], inputs())
        assert not result.any()
        assert net(inputs()).any()


def test_training_with_what_bisect_wrote_keeps_the_layers_in_half_that_bisect_kept(tmp_path: Path) -> None:
    x, target = batch()
    found = bisect(layers(), x, target, mse_loss, level="O3", dtype="bfloat16", steps=1, fp8=RECIPE)
    assert found.outcome == "nothing needed"
    found.write(tmp_path / "lists.yml")
    net = layers()
    make_precision("bf16", "O3", lists=tmp_path / "lists.yml", fp8=RECIPE.to_dict()).prepare(net)
    with fp8_calls() as made, region(), torch.no_grad():
        net(x)
    assert made == [3, 0]  # five layers, of which the first and the last stay in half


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_kept_layer_recomputes_is_in_half_too(use_reentrant: bool) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    net = nn.Sequential(Recomputed())
    decorate(net, level="O3", dtype="bfloat16", fp8=RECIPE, half_layers="0")
    with fp8_calls() as found:
        with region():
            result = net(inputs().requires_grad_())
        result.float().sum().backward()
    assert found == [0, 0]


def test_an_interrupted_forward_of_a_kept_layer_leaves_the_region_as_it_was() -> None:
    class Interrupted(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            raise KeyboardInterrupt

    net = nn.Sequential(Interrupted())
    keep_in_half(net, "0")
    with fp8_calls() as found, region(), torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            net(inputs())
        half_layer()(inputs())
    assert found == [1, 0]


def test_inner_regions_decide_for_themselves() -> None:
    weight, x = half_layer().weight.detach().float(), inputs().float()
    with fp8_calls() as found, region(), torch.no_grad():
        with auto_cast(level="O2", dtype="bfloat16"):
            assert linear(x, weight).dtype is torch.bfloat16
        with torch.autocast("cpu", dtype=torch.float16):
            assert linear(x, weight).dtype is torch.float16
        with auto_cast(enable=False):
            assert linear(x, weight).dtype is torch.float32
    assert found == [0, 0]


# Unusual tensors and derivatives


@pytest.mark.parametrize("shape", [(SIZE, SIZE), (2, 16, SIZE)])
def test_what_follows_a_layer_may_work_in_place(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, grads = torch.randn(shape), []
    layer = half_layer()
    for activation in (nn.ReLU(inplace=True), nn.ReLU()):
        with region():
            result = activation(layer(x))
        grads.append(torch.autograd.grad(result.float().square().sum(), layer.weight)[0])
    assert torch.equal(grads[0], grads[1])


def test_a_sparse_matrix_is_multiplied_as_at_o2() -> None:
    sparse, other = torch.eye(SIZE).to_sparse(), inputs().float()
    with auto_cast(level="O2", dtype="bfloat16"):
        wanted = sparse @ other
    with region():
        assert torch.equal(sparse @ other, wanted)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
def test_a_nested_tensor_goes_through_a_layer_as_at_o2() -> None:
    nested, layer = torch.nested.nested_tensor([torch.randn(16, SIZE), torch.randn(SIZE, SIZE)]), nn.Linear(SIZE, SIZE)
    with auto_cast(level="O2", dtype="bfloat16"):
        wanted = layer(nested)
    with region():
        result = layer(nested)
    for one, other in zip(result.unbind(), wanted.unbind(), strict=True):
        # Operands of both are off by up to a sixteenth, sums of 32.
        torch.testing.assert_close(one, other, rtol=0.2, atol=0.2)


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (1,),
        (1, SIZE),
        (SIZE, SIZE),
    ],
)
def test_a_bias_of_any_shape_gets_its_gradient(shape: tuple[int, ...]) -> None:
    weight, bias = half_layer().weight, nn.Parameter(torch.randn(shape).bfloat16())
    with region():
        result = linear(inputs(), weight, bias)
    result.float().sum().backward()
    assert bias.grad is not None
    wanted = SIZE * SIZE / max(1, bias.numel())  # each element of the result, whose gradient is 1, has one of the bias
    assert torch.equal(bias.grad, torch.full(shape, wanted).bfloat16())


def test_a_forward_derivative_is_computed_in_half_as_under_torch_func() -> None:
    layer, x = nn.Linear(SIZE, SIZE, bias=False), inputs().float()
    with forward_ad.dual_level(), region():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert tangent is not None
    wanted = layer.weight.detach().double().sum(1).expand(SIZE, -1)
    torch.testing.assert_close(tangent.double(), wanted, rtol=2**-6, atol=2**-6)  # bfloat16, sums of 32


def test_a_second_derivative_fails_with_what_to_do() -> None:
    layer, x = half_layer(), inputs().requires_grad_()
    with region():
        result = layer(x)
    (slope,) = torch.autograd.grad(result.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"keep_in_half|level O2"):
        slope.float().square().sum().backward()


# What documents say


# torch.compile


@pytest.mark.slow
def test_a_compiled_layer_with_any_number_of_rows_is_fp8_where_the_eager_one_is() -> None:
    net = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE)).bfloat16()
    compiled: Any = torch.compile(net, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (32, 48, 40, 64, 33):  # symbolic from the second on; 40 and 33 are no multiples of 16
        results = []
        for run in (compiled, net):
            with region():
                result = run(inputs(rows))
            (grad,) = torch.autograd.grad(result.float().square().sum(), net[0].weight)
            results.append((result, grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        with fp8_calls() as found, region(), torch.no_grad():
            net(inputs(rows))
        assert found == ([0, 0] if rows % 16 else [2, 0])


def test_a_compiled_layer_follows_edits_of_its_weight() -> None:
    layer = half_layer()
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        with region(), torch.no_grad():
            assert_fresh(compiled(inputs()), layer.weight)
            layer.weight.mul_(3)
    layer.load_state_dict({"weight": torch.randn(SIZE, SIZE)})
    with region(), torch.no_grad():
        assert_fresh(compiled(inputs()), layer.weight)
    assert copies_of(layer.weight) is not None
