"""Sizes of products: what is expected comes from the shapes that the layers are made with."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.amp import auto_cast
from mezzo.proof import Changes, apply_changes
from mezzo.proof._products import Product, ProductSink, is_product
from mezzo.record import KernelRun, listening
from mezzo.record._kernel_runs import describe_op

CHANNELS_LAST = torch.channels_last
Run = Callable[[], object]


def products_of(run: Run) -> list[Product]:
    sink = ProductSink()
    with listening(sink):
        run()
    return sink.products


def product_of(run: Run) -> Product:
    (product,) = products_of(run)
    return product


def sizes(product: Product) -> tuple[int, int, int]:
    """Return M, K, N."""
    return product.rows, product.inputs, product.outputs


# -- linear layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "rows"), [((3,), 1), ((7, 3), 7), ((2, 7, 3), 14), ((2, 4, 7, 3), 56), ((1, 3), 1)], ids=str
)
def test_a_linear_layer_has_a_row_for_each_vector(shape: tuple[int, ...], rows: int, bias: bool) -> None:
    layer, x = nn.Linear(3, 5, bias=bias), torch.ones(shape)
    product = product_of(lambda: layer(x))
    assert sizes(product) == (rows, 3, 5)
    assert (product.api_op, product.groups, product.is_channels_last) == ("linear", 1, None)
    assert not product.is_convolution
    assert is_product(product.op)


def test_a_transposed_batch_is_the_same_product() -> None:
    layer, x = nn.Linear(3, 5), torch.ones(7, 2, 3).transpose(0, 1)
    assert sizes(product_of(lambda: layer(x))) == (14, 3, 5)


@pytest.mark.parametrize(
    ("run", "op", "expected"),
    [
        (lambda: torch.ones(4, 5) @ torch.ones(5, 6), "mm", (4, 5, 6)),
        (lambda: torch.mm(input=torch.ones(4, 5), mat2=torch.ones(5, 6)), "mm", (4, 5, 6)),
        (lambda: torch.addmm(torch.ones(6), torch.ones(4, 5), torch.ones(5, 6)), "addmm", (4, 5, 6)),
        (lambda: torch.addmm(torch.ones(4, 6), torch.ones(4, 5), torch.ones(5, 6)), "addmm", (4, 5, 6)),
        (lambda: torch.bmm(torch.ones(9, 4, 5), torch.ones(9, 5, 6)), "bmm", (4, 5, 6)),
        (lambda: torch.baddbmm(torch.ones(9, 4, 6), torch.ones(9, 4, 5), torch.ones(9, 5, 6)), "baddbmm", (4, 5, 6)),
        (lambda: torch.ones(2, 3, 4, 5) @ torch.ones(2, 3, 5, 6), "bmm", (4, 5, 6)),
        (lambda: torch.ones(4, 5) @ torch.ones(6, 5).t(), "mm", (4, 5, 6)),
        (lambda: torch.einsum("bij,bjk->bik", torch.ones(9, 4, 5), torch.ones(9, 5, 6)), "bmm", (4, 5, 6)),
        (lambda: torch.einsum("ij,kj->ik", torch.ones(4, 5), torch.ones(6, 5)), "bmm", (4, 5, 6)),
        (lambda: torch.einsum("nchw,kc->nkhw", torch.ones(2, 5, 3, 4), torch.ones(6, 5)), "bmm", (2 * 3 * 4, 5, 6)),
        (lambda: torch.tensordot(torch.ones(4, 5), torch.ones(5, 6), 1), "mm", (4, 5, 6)),
    ],
)
def test_a_matrix_product_has_rows_inputs_and_outputs(run: Run, op: str, expected: tuple[int, int, int]) -> None:
    product = product_of(run)
    assert (product.op, sizes(product), product.groups) == (op, expected, 1)


@pytest.mark.parametrize(
    "run",
    [
        lambda: torch.ones(4, 5) @ torch.ones(5),
        lambda: torch.addmv(torch.ones(4), torch.ones(4, 5), torch.ones(5)),
        lambda: torch.ones(5) @ torch.ones(5),
        lambda: torch.ones(2, 3, dtype=torch.long) @ torch.ones(3, 4, dtype=torch.long),
        lambda: torch.ones(4, 5) * torch.ones(4, 5),
        lambda: F.avg_pool2d(torch.ones(1, 2, 4, 4), 2),
    ],
    ids=["matrix by vector", "addmv", "dot", "integers", "element-wise", "pooling"],
)
def test_what_is_no_product_of_two_floating_matrices_is_left_out(run: Run) -> None:
    assert products_of(run) == []


# -- convolutions


@pytest.mark.parametrize(
    ("layer", "shape", "rows"),
    [
        (nn.Conv1d(3, 5, 3), (2, 3, 8), 2 * 6),
        (nn.Conv2d(3, 5, 3), (2, 3, 8, 6), 2 * 6 * 4),
        (nn.Conv3d(3, 5, 3), (2, 3, 8, 6, 4), 2 * 6 * 4 * 2),
        (nn.Conv2d(3, 5, 3, stride=2, padding=1), (2, 3, 8, 6), 2 * 4 * 3),
        (nn.Conv2d(3, 5, 3, dilation=2, bias=False), (2, 3, 8, 6), 2 * 4 * 2),
        (nn.Conv2d(3, 5, 3), (3, 8, 6), 6 * 4),
        # a transposed one has (n - 1) * stride + kernel pixels a side
        (nn.ConvTranspose1d(3, 5, 3, stride=2), (2, 3, 8), 2 * 17),
        (nn.ConvTranspose2d(3, 5, 3, stride=2), (2, 3, 8, 6), 2 * 17 * 13),
        (nn.ConvTranspose3d(3, 5, 2), (2, 3, 4, 4, 4), 2 * 5**3),
    ],
    ids=str,
)
def test_a_convolution_has_a_row_for_each_pixel_it_writes(layer: nn.Module, shape: tuple[int, ...], rows: int) -> None:
    x = torch.ones(shape)
    product = product_of(lambda: layer(x))
    assert sizes(product) == (rows, 3, 5)
    assert product.groups == 1
    assert product.is_convolution


@pytest.mark.parametrize(
    ("layer", "channels", "groups"),
    [
        (nn.Conv2d(4, 6, 3, groups=2), (4, 6), 2),
        (nn.Conv1d(4, 6, 3, groups=2), (4, 6), 2),
        (nn.Conv2d(8, 8, 3, groups=8), (8, 8), 8),
        (nn.Conv2d(8, 16, 3, groups=8, bias=False), (8, 16), 8),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 6), 2),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2), (4, 6), 2),
        (nn.ConvTranspose2d(8, 8, 3, groups=8), (8, 8), 8),
    ],
    ids=str,
)
def test_a_grouped_convolution_has_all_its_channels_and_its_groups(
    layer: nn.Module, channels: tuple[int, int], groups: int
) -> None:
    x = torch.ones(2, channels[0], *[8] * (1 if isinstance(layer, nn.Conv1d) else 2))
    product = product_of(lambda: layer(x))
    assert (product.inputs, product.outputs, product.groups) == (*channels, groups)


def test_sizes_are_not_taken_from_strides_or_paddings() -> None:
    layer = nn.Conv2d(3, 5, (3, 5), stride=(2, 3), padding=(4, 7), dilation=(1, 2))
    product = product_of(lambda: layer(torch.ones(2, 3, 20, 30)))
    height, width = (20 + 8 - 3) // 2 + 1, (30 + 14 - 9) // 3 + 1
    assert (sizes(product), product.groups) == ((2 * height * width, 3, 5), 1)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 5, 3), nn.Conv2d(3, 3, 3, groups=3), nn.ConvTranspose2d(3, 5, 3)], ids=str
)
def test_the_layout_is_that_of_the_image(layer: nn.Module) -> None:
    x = torch.ones(2, 3, 8, 6)
    assert product_of(lambda: layer(x)).is_channels_last is False
    assert product_of(lambda: layer(x.to(memory_format=CHANNELS_LAST))).is_channels_last is True


def test_with_channels_last_weights_only_the_first_convolution_reads_the_images_layout() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    net.to(memory_format=CHANNELS_LAST)  # type: ignore[call-overload]
    assert [p.is_channels_last for p in products_of(lambda: net(torch.ones(2, 3, 8, 8)))] == [False, True]


@pytest.mark.parametrize("spatial", [1, 3])
def test_only_images_with_two_sides_have_a_layout(spatial: int) -> None:
    layer = nn.Conv1d(3, 5, 3) if spatial == 1 else nn.Conv3d(3, 5, 3)
    assert product_of(lambda: layer(torch.ones(2, 3, *[6] * spatial))).is_channels_last is None


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(8, 4, 1), (2, 8, 1, 1)), (nn.Conv2d(1, 4, 3), (2, 1, 8, 8))],
    ids=["pixel", "channel"],
)
def test_one_pixel_or_one_channel_with_such_weights_is_never_the_wrong_layout(
    layer: nn.Conv2d, shape: tuple[int, ...]
) -> None:
    assert product_of(lambda: layer(torch.ones(shape))).is_channels_last is True


def test_one_pixel_has_the_layout_of_its_weight() -> None:
    layer, x = nn.Conv2d(8, 4, 3, padding=1), torch.ones(2, 8, 1, 1)
    assert product_of(lambda: layer(x)).is_channels_last is False
    layer.to(memory_format=CHANNELS_LAST)  # type: ignore[call-overload]
    assert product_of(lambda: layer(x)).is_channels_last is True


def test_what_follows_a_padded_channels_last_convolution_is_channels_last() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 8, 3))
    apply_changes(net, Changes(channels_last=True, pad_channels=(("0", 4, 8),)))
    x = torch.ones(2, 3, 8, 8).to(memory_format=CHANNELS_LAST)
    assert [product.is_channels_last for product in products_of(lambda: net(x))] == [True, True]


def test_a_convolution_of_integers_runs_under_the_sink() -> None:
    x, weight = torch.ones(1, 1, 4, 4, dtype=torch.long), torch.ones(1, 1, 2, 2, dtype=torch.long)
    assert len(products_of(lambda: F.conv2d(x, weight))) <= 1


@pytest.mark.parametrize(
    "mode",
    [
        nullcontext,
        torch.no_grad,
        pytest.param(torch.inference_mode),
    ],
)
def test_products_do_not_depend_on_gradients(mode: Callable[[], AbstractContextManager[None]]) -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(80, 7))
    with mode():
        products = products_of(lambda: net(torch.ones(2, 3, 6, 6)))
    assert [sizes(product) for product in products] == [(2 * 16, 3, 5), (2, 80, 7)]


# -- attention and recurrent layers


def test_fused_attention_has_no_sizes_and_counts_as_a_product_of_its_time() -> None:
    names: list[str] = []

    class Names(ProductSink):
        def wants(self, op: Any) -> bool:
            names.append(op.name)
            return super().wants(op)

    sink, query = Names(), torch.randn(2, 3, 16, 8, requires_grad=True)
    with listening(sink):
        F.scaled_dot_product_attention(query, query, query).sum().backward()
    assert sink.products == []
    assert len([name for name in names if is_product(name)]) == 2  # forward and backward


def test_attention_in_parts_has_two_batched_products() -> None:
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.ones(3, 5, 8)
    products = products_of(lambda: layer(x, torch.ones(3, 6, 8), torch.ones(3, 6, 8)))
    batched = [product for product in products if product.op in ("bmm", "baddbmm")]
    # 3 samples of 2 heads with 4 features: 5 queries by 6 keys, then by 6 values
    assert [sizes(product) for product in batched] == [(5, 4, 6), (5, 6, 4)]
    assert [product.input_shape for product in batched] == [(6, 5, 4), (6, 5, 6)]
    assert {product.inputs for product in products if product not in batched} == {8}


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "convolution", "convolution_backward", "_scaled_mm", "linear"])
def test_products_are_known_by_name(name: str) -> None:
    assert is_product(name)


@pytest.mark.parametrize(
    "name",
    [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ],
)
def test_fused_attention_is_a_product(name: str) -> None:
    assert hasattr(torch.ops.aten, name)
    assert is_product(name)


@pytest.mark.parametrize("name", ["add", "mul", "native_batch_norm", "_to_copy", "_softmax", "convolve", ""])
def test_other_operators_are_no_products(name: str) -> None:
    assert not is_product(name)


@pytest.mark.parametrize("name", ["_cudnn_rnn", "_cudnn_rnn_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"])
def test_fused_recurrent_layers_are_products(name: str) -> None:
    assert hasattr(torch.ops.aten, name)
    assert is_product(name)


@pytest.mark.parametrize("name", ["_addmm_activation", "_grouped_mm"])
def test_fused_and_grouped_products_are_products(name: str) -> None:
    assert hasattr(torch.ops.aten, name)
    assert is_product(name)


# -- places, and what is counted once


def test_a_product_tells_its_module_and_line() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 5)))
    first, second = products_of(lambda: net(torch.ones(2, 3)))
    assert (first.module, second.module) == ("0", "1.1")
    file, _, number = first.line.rpartition(":")
    assert file == __file__
    line = Path(__file__).read_text(encoding="utf-8").splitlines()[int(number) - 1]
    assert line.strip().startswith("first, second")


def test_the_same_product_is_kept_once_and_another_size_apart() -> None:
    layer = nn.Linear(3, 5)

    def run() -> None:
        for rows in (7, 7, 9, 7):
            layer(torch.ones(rows, 3))

    assert [product.rows for product in products_of(run)] == [7, 9]


def test_products_of_the_backward_and_the_optimizer_are_left_out() -> None:
    layer = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def run() -> None:
        layer(torch.ones(7, 3, requires_grad=True)).sum().backward()
        optimizer.step()

    assert [sizes(product) for product in products_of(run)] == [(7, 3, 5)]


@pytest.mark.parametrize("cpu_compute", ["native", "float32"])
@pytest.mark.parametrize(("level", "dtype"), [("O1", "float16"), ("O1", "bfloat16"), ("O2", "bfloat16")])
def test_auto_cast_changes_no_sizes(level: str, dtype: str, cpu_compute: str) -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3, groups=1), nn.ReLU(), nn.Flatten(), nn.Linear(80, 7))

    def run() -> Tensor:
        with auto_cast(level=level, dtype=dtype, cpu_compute=cpu_compute):
            out: Tensor = net(torch.ones(2, 3, 6, 6))
        return out

    found = [(sizes(p), p.module, p.api_op, p.groups, p.is_channels_last) for p in products_of(run)]
    assert found == [((2 * 16, 3, 5), "0", "conv2d", 1, False), ((2, 80, 7), "3", "linear", 1, None)]


def test_nothing_is_kept_alive_by_a_product() -> None:
    layer, x = nn.Linear(3, 5), torch.ones(7, 3)
    product = product_of(lambda: layer(x))
    assert not any(isinstance(getattr(product, name), Tensor) for name in Product.__slots__)
    hash(product)


def test_a_scaled_product_has_the_sizes_of_its_factors() -> None:
    func = torch.ops.aten._scaled_mm.default
    a = torch.ones(16, 32).to(torch.float8_e4m3fn)
    b = torch.ones(48, 32).to(torch.float8_e4m3fn).t()
    args = (a, b, torch.ones(16, 1), torch.ones(1, 48))
    out = torch.ones(16, 48, dtype=torch.bfloat16)
    sink = ProductSink()
    sink.receive(KernelRun(describe_op(func), func, args, {}, out, "forward", "", "_scaled_mm", ""))
    assert [sizes(product) for product in sink.products] == [(16, 32, 48)]
