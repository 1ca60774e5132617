"""Code that runs again or later keeps the policy: activation checkpointing, custom autograd Functions."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from mezzo.amp import auto_cast, custom_bwd, custom_fwd

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: exp white and mm black: the opposite of torch's own lists, so losing the policy changes dtypes and values.
LISTS = {"custom_white_list": ["exp"], "custom_black_list": ["mm", "linear"]}


def piece(x: Tensor, weight: Tensor) -> Tensor:
    return torch.exp(torch.mm(x, weight) * 0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_under_the_policy_of_the_forward(use_reentrant: bool, device: str) -> None:
    torch.manual_seed(1)
    x = torch.rand(8, 8, device=device, requires_grad=True)
    weight = torch.rand(8, 8, device=device, requires_grad=True)

    def gradients(run: Any) -> tuple[Tensor, Tensor, Tensor]:
        with auto_cast(**LISTS):
            out = run(x, weight)
            assert out.dtype is torch.float16
            loss = out.float().sum()
        return (out, *torch.autograd.grad(loss, (x, weight)))

    def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(piece, x, weight, use_reentrant=use_reentrant)

    if use_reentrant:  # torch.autograd.grad is not allowed with the reentrant form
        plain = gradients(piece)
        with auto_cast(**LISTS):
            out = checkpointed(x, weight)
            loss = out.float().sum()
        loss.backward()
        assert x.grad is not None
        assert weight.grad is not None
        again = (out, x.grad, weight.grad)
    else:
        plain, again = gradients(piece), gradients(checkpointed)
    for expected, seen in zip(plain, again, strict=True):
        assert seen.dtype is expected.dtype
        torch.testing.assert_close(seen, expected, rtol=0, atol=0)


def test_checkpoint_sequential_works_under_a_policy() -> None:
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x = torch.rand(2, 4, requires_grad=True)
    with auto_cast(**LISTS):
        out = checkpoint_sequential(net, 2, x, use_reentrant=False)
    assert out.dtype is torch.float32
    out.sum().backward()
    assert x.grad is not None


def test_checkpointing_outside_a_region_is_left_alone() -> None:
    x = torch.rand(4, 4, requires_grad=True)
    with auto_cast():
        pass
    assert checkpoint(piece, x, torch.eye(4), use_reentrant=False).dtype is torch.float32


class Product(torch.autograd.Function):
    """x @ w whose backward multiplies the incoming half gradient with a saved float32 weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.mm(grad, weight.t()), torch.mm(x.t(), grad)


class DecoratedProduct(Product):
    forward = staticmethod(custom_fwd(Product.forward))
    backward = staticmethod(custom_bwd(Product.backward))


class Float32Product(Product):
    forward = staticmethod(custom_fwd(Product.forward, cast_inputs=torch.float32))
    backward = staticmethod(custom_bwd(Product.backward))


class HalfDecoratedProduct(Product):
    backward = staticmethod(custom_bwd(Product.backward))


def run(function: type[torch.autograd.Function], device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    x = torch.rand(3, 4, device=device, requires_grad=True)
    weight = torch.rand(4, 5, device=device, requires_grad=True)
    with auto_cast():
        out = function.apply(x, weight)
    out.backward(torch.ones_like(out))
    assert x.grad is not None
    assert weight.grad is not None
    return out, x.grad, weight.grad


@pytest.mark.parametrize("device", DEVICES)
def test_a_decorated_function_multiplies_in_half_in_both_directions(device: str) -> None:
    out, x_grad, weight_grad = run(DecoratedProduct, device)
    assert out.dtype is torch.float16
    assert x_grad.dtype is weight_grad.dtype is torch.float32
    torch.manual_seed(2)
    x, weight = torch.rand(3, 4, device=device), torch.rand(4, 5, device=device)
    # inputs rounded to half, sums of 5 and 3 products: 10 mantissa bits
    torch.testing.assert_close(x_grad, torch.ones(3, 5, device=device) @ weight.t(), rtol=2e-3, atol=0)
    torch.testing.assert_close(weight_grad, x.t() @ torch.ones(3, 5, device=device), rtol=2e-3, atol=0)


def test_cast_inputs_runs_both_directions_in_that_dtype() -> None:
    out, x_grad, _ = run(Float32Product)
    assert out.dtype is torch.float32
    torch.manual_seed(2)
    torch.rand(3, 4)
    torch.testing.assert_close(x_grad, torch.ones(3, 5) @ torch.rand(4, 5).t(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_an_undecorated_function_fails_as_under_torch_autocast_with_a_hint(device: str) -> None:
    with pytest.raises(RuntimeError, match="dtype") as ours:
        run(Product, device)
    assert any("mezzo.amp.custom_fwd / custom_bwd" in note for note in ours.value.__notes__)
    x = torch.rand(3, 4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=torch.float16):
        out = Product.apply(x, torch.rand(4, 5, device=device, requires_grad=True))
    with pytest.raises(RuntimeError) as native:
        out.backward(torch.ones_like(out))
    assert str(native.value) == str(ours.value)


def test_custom_bwd_without_custom_fwd_says_so() -> None:
    with pytest.raises(
        RuntimeError, match=r"the forward of this Function has no mezzo\.amp\.custom_fwd; decorate it too"
    ):
        run(HalfDecoratedProduct)


def test_decorated_functions_work_outside_a_region() -> None:
    x = torch.rand(3, 4, requires_grad=True)
    for function in (DecoratedProduct, Float32Product):
        out = function.apply(x, torch.rand(4, 5))
        assert out.dtype is torch.float32
        out.sum().backward()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.exp(layer(y) * 0.1), x, use_reentrant=False)
        return x


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.distributed warns about a process group that is not torn down by its test
def test_sharded_models_recompute_under_the_policy_of_the_forward() -> None:
    """R5 with FSDP2, one rank: parameters are gathered again in the backward, where the region is long left."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def gradients(model: nn.Module) -> list[Tensor]:
        with auto_cast(**LISTS):
            out = model(torch.ones(4, 8, device="cuda"))
        assert out.dtype is torch.float16
        out.float().sum().backward()
        return [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]

    torch.manual_seed(4)
    plain = Checkpointed().cuda()
    sharded = Checkpointed().cuda()
    sharded.load_state_dict(plain.state_dict())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layer in sharded.layers:
            fully_shard(layer)
        fully_shard(sharded)
        for expected, seen in zip(gradients(plain), gradients(sharded), strict=True):
            torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


Pair = namedtuple("Pair", "left right")  # an untyped one, as old code has them


class Containers(torch.autograd.Function):
    """Notes the dtypes of what its forward gets."""

    seen: list[Any] = []  # noqa: RUF012

    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, values: Any) -> Tensor:
        Containers.seen = [values, torch.mm(x, x).dtype]
        return x.clone()

    @staticmethod
    @custom_bwd
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


HALF, WHOLE, DOUBLE = torch.ones(2).half(), torch.ones(2).long(), torch.ones(2).double()


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ((HALF, WHOLE, DOUBLE), list),
        ([[HALF, WHOLE], DOUBLE], lambda got: [*got[0], got[1]]),
        ({"a": HALF, "b": (WHOLE, [DOUBLE])}, lambda got: [got["a"], got["b"][0], got["b"][1][0]]),
        (OrderedDict(a=HALF, b=WHOLE, c=DOUBLE), lambda got: list(got.values())),
        (MappingProxyType({"a": HALF, "b": [WHOLE, DOUBLE]}), lambda got: [got["a"], *got["b"]]),
        (Pair(HALF, Pair(WHOLE, DOUBLE)), lambda got: [got.left, got.right.left, got.right.right]),
    ],
)
def test_cast_inputs_reaches_into_containers(values: Any, read: Callable[[Any], list[Tensor]]) -> None:
    x = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    with auto_cast():
        Containers.apply(x, values)
    got, inside = Containers.seen
    assert [tensor.dtype for tensor in read(got)] == [torch.float32, torch.int64, torch.float64]
    assert inside is torch.float32
    assert isinstance(got, dict) if isinstance(values, MappingProxyType) else type(got) is type(values)
    Containers.apply(x, values)  # outside of a region nothing is cast
    assert read(Containers.seen[0])[0].dtype is torch.float16


def test_cast_inputs_leaves_strings_and_other_objects_alone() -> None:
    thing = object()
    with auto_cast():
        Containers.apply(torch.ones(2, 2), ["text", b"bytes", thing, None, 3])
    assert Containers.seen[0] == ["text", b"bytes", thing, None, 3]


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "layer_norm": lambda: nn.LayerNorm(4),
    "linear and layer_norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    "gelu": lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU()),
    "softmax": lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Dropout(0.0)),
}


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", SCRIPTED)
def test_scripted_layers_do_in_every_call_what_the_layers_themselves_do(
    name: str, level: str, half: torch.dtype
) -> None:
    """TorchScript takes derivatives of its own from the second call on; LayerNorm at O2 raised in its backward."""
    layer = SCRIPTED[name]()
    scripted = torch.jit.script(layer)
    for _ in range(4):
        results = []
        for module in (layer, scripted):
            x = (torch.arange(12.0).reshape(3, 4) / 12).requires_grad_()
            module.zero_grad()
            with auto_cast(level=level, dtype=half):
                out = module(x)
            out.float().square().sum().backward()
            results.append([out, x.grad, *(param.grad for param in module.parameters())])
        for expected, seen in zip(*results, strict=True):
            assert seen.dtype is expected.dtype
            assert torch.equal(seen, expected)
    assert torch._C._get_graph_executor_optimize()
