"""R7: a list name reaches every public entry point of what it means; read off the operator recorder."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo.amp import auto_cast, debugging

A, B, V = torch.rand(4, 4), torch.rand(4, 4), torch.rand(4)
IMAGE = torch.rand(1, 4, 6, 6)
LABELS = torch.tensor([0, 1, 2, 3])

#: For a list name: each way to reach the operator through torch's public API.
ENTRY_POINTS: dict[str, list[Callable[[], Tensor]]] = {
    "matmul": [
        lambda: A @ B, lambda: A.matmul(B), lambda: torch.mm(A, B), lambda: A.mm(B), lambda: F.linear(A, B, V),
        lambda: torch.addmm(V, A, B), lambda: torch.bmm(A[None], B[None]), lambda: A @ V, lambda: torch.mv(A, V),
        lambda: torch.baddbmm(A[None], A[None], B[None]), lambda: torch.einsum("ij,jk", A, B), lambda: torch.inner(A, B),
        lambda: torch.addbmm(A, A[None], B[None]), lambda: torch.linalg.multi_dot([A, B, A]),
        lambda: torch.addmv(V, A, V), lambda: torch.tensordot(A, B, 1), lambda: nn.Linear(4, 4)(A),
        lambda: torch.linalg.matmul(A, B),
    ],
    "conv2d": [
        lambda: F.conv2d(IMAGE, torch.rand(2, 4, 3, 3)), lambda: nn.Conv2d(4, 2, 3, padding="same")(IMAGE),
        lambda: torch.conv2d(IMAGE, torch.rand(4, 1, 3, 3), groups=4), lambda: nn.Conv2d(4, 2, 3)(IMAGE),
    ],
    "depthwise_conv2d": [lambda: F.conv2d(IMAGE, torch.rand(4, 1, 3, 3), groups=4)],
    "softmax": [
        lambda: A.softmax(1), lambda: F.softmax(A, 1), lambda: torch.softmax(A, 1), lambda: nn.Softmax(1)(A),
        lambda: F.softmin(A, 1), lambda: torch.special.softmax(A, 1),
    ],
    "reduce_sum": [lambda: A.sum(), lambda: torch.sum(A, 1), lambda: A.sum((0, 1)), lambda: A.sum(dim=None)],
    "reduce_mean": [lambda: A.mean(), lambda: torch.mean(A, 1), lambda: A.mean((0, 1))],
    "pow": [lambda: A**2, lambda: 2**A, lambda: A.pow(3), lambda: torch.pow(A, 0.5), lambda: A**B],
    "p_norm": [lambda: A.norm(), lambda: torch.norm(A, dim=1), lambda: torch.linalg.norm(A), lambda: A.norm(p=3, dim=1),
               lambda: torch.linalg.vector_norm(A), lambda: torch.linalg.matrix_norm(A)],
    "elementwise_add": [lambda: A + B, lambda: torch.add(A, B), lambda: A.add(B), lambda: 1 + A, lambda: A + 1],
    "elementwise_sub": [lambda: A - B, lambda: torch.sub(A, B), lambda: 1 - A],
    "elementwise_mul": [lambda: A * B, lambda: torch.multiply(A, B), lambda: A.mul(2)],
    "elementwise_div": [lambda: A / B, lambda: torch.true_divide(A, B), lambda: A.div(2)],
    "layer_norm": [lambda: F.layer_norm(A, (4,)), lambda: nn.LayerNorm(4)(A)],
    "group_norm": [lambda: F.group_norm(IMAGE, 2), lambda: nn.GroupNorm(2, 4)(IMAGE)],
    "cross_entropy": [lambda: F.cross_entropy(A, LABELS), lambda: nn.CrossEntropyLoss(label_smoothing=0.1)(A, LABELS),
                      lambda: F.cross_entropy(A, torch.softmax(B, 1))],
    "sigmoid_cross_entropy_with_logits": [lambda: F.binary_cross_entropy_with_logits(A, B),
                                          lambda: nn.BCEWithLogitsLoss()(A, B)],
    "bilinear_interp_v2": [lambda: F.interpolate(IMAGE, scale_factor=2.0, mode="bilinear"),
                           lambda: nn.UpsamplingBilinear2d(scale_factor=2)(IMAGE),
                           lambda: F.interpolate(IMAGE, size=9, mode="bilinear")],
    "nearest_interp_v2": [lambda: F.interpolate(IMAGE, scale_factor=2.0), lambda: nn.Upsample(scale_factor=2.0)(IMAGE)],
    "lookup_table_v2": [lambda: F.embedding(LABELS, A), lambda: nn.Embedding(4, 4)(LABELS),
                        lambda: nn.EmbeddingBag(4, 4)(LABELS[None])],
    "flash_attn": [lambda: F.scaled_dot_product_attention(A[None], B[None], B[None])],
    "exp": [lambda: A.exp(), lambda: torch.exp(A)],
    "square": [lambda: A.square(), lambda: torch.square(A)],
}  # fmt: skip

#: Not arithmetic of the operator: casts, copies, random numbers, and the sign that softmin puts before softmax.
MOVES = set("neg _to_copy to copy_ rand uniform_ normal_ fill_ ones zeros full scalar_tensor clone".split())


def dtypes_of_kernels(call: Callable[[], Tensor], **lists: list[str]) -> set[str]:
    """Return the float dtypes in which anything but casts, copies and random numbers ran."""
    region = auto_cast(level="O2" if "custom_black_list" in lists else "O1", dtype="bfloat16", **lists)
    with torch.no_grad(), region, debugging.collect_operator_stats(print_table=False) as stats:
        call()
    kinds: set[str] = set()
    for name, (_, bf16, fp32, _) in stats.totals().items():
        if name not in MOVES:
            kinds |= ({"half"} if bf16 else set()) | ({"float32"} if fp32 else set())
    return kinds


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_a_black_listed_name_is_float32_by_every_entry_point(name: str) -> None:
    for number, call in enumerate(ENTRY_POINTS[name]):
        assert dtypes_of_kernels(call, custom_black_list=[name]) <= {"float32"}, f"entry point {number}"


@pytest.mark.parametrize("name", sorted(set(ENTRY_POINTS) - {"matmul", "conv2d", "depthwise_conv2d", "flash_attn"}))
def test_a_white_listed_name_is_half_by_every_entry_point(name: str) -> None:
    for number, call in enumerate(ENTRY_POINTS[name]):
        assert "half" in dtypes_of_kernels(call, custom_white_list=[name]), f"entry point {number}"


EINSUMS = [
    ("ij,jk->ik", True), ("bij,bjk->bik", True), ("ij,ij->i", True), ("i,i->", True), ("...ij,...jk->...ik", True),
    ("ij,jk", True), (" i j , j k -> i k ", True), ("iJ,Jk->ik", True), ("ij,ij", True), ("ij,jk,kl->il", True),
    ("ij->ji", False), ("ij->i", False), ("ii->i", False), ("ii", False), ("ij,ij->ij", False), ("i,j->ij", False),
    ("i,j", False), ("...i,...i->...i", False), ("ij,k->i", False), ("bij->bji", False),
]  # fmt: skip


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("equation", "is_product"), EINSUMS)
def test_only_an_einsum_that_contracts_is_a_product(equation: str, is_product: bool, level: str) -> None:
    operands = [
        torch.full([3] * sum(c.isalpha() for c in part), 1e5) for part in equation.partition("->")[0].split(",")
    ]
    with auto_cast(level=level):
        result = torch.einsum(equation, *operands)
    assert result.dtype is (torch.float16 if is_product else torch.float32)
    if not is_product:
        assert torch.equal(result, torch.einsum(equation, *operands))  # 1e5 is inf in float16


def test_an_einsum_by_lists_of_numbers_is_classified_too() -> None:
    x = torch.full((3, 3), 1e5)
    with auto_cast():
        assert torch.einsum(x, [0, 1], [1, 0]).dtype is torch.float32
        assert torch.einsum(x, [0, 1], x, [1, 2], [0, 2]).dtype is torch.float16


def test_the_gray_einsum_is_half_where_its_operands_are() -> None:
    x = torch.ones(3, 3).half()
    with auto_cast():
        assert torch.einsum("ij,ij->ij", x, x).dtype is torch.float16
        assert torch.einsum("ij,ij->ij", x, x.float()).dtype is torch.float32
