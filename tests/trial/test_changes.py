"""Changes leave results as they are: padded layers are compared with themselves unpadded, in float64."""

import copy
import pickle
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mezzo import amp
from mezzo.amp.debugging import collect_operator_stats
from mezzo.proof import Changes, apply_changes
from mezzo.record import listening
from mezzo.trial import (
    NO_CHANGES,
    ChangesError,
    can_be_padded,
    channels_of,
    pad_layer,
    read_changes,
)

# float64, sums of at most 200 products near 1: their order may differ, 200 * 2**-53 is 2e-14
TOLERANCE = 1e-12


# -- the file

NAMES = st.text(string.ascii_letters + string.digits + "_-: é#'\"{}[]&*!|>%@`", min_size=1, max_size=12)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(".".join)
CHANGES = st.builds(
    Changes,
    channels_last=st.booleans(),
    pad_channels=st.lists(
        st.tuples(PATHS, st.integers(1, 10**6), st.integers(1, 10**6)), max_size=4, unique_by=lambda row: row[0]
    ).map(tuple),
    custom_white_list=st.lists(
        st.sampled_from(["softmax", "sum.dim", "aten::matmul", "elementwise_add"]), max_size=3
    ).map(tuple),
)


@given(changes=CHANGES)
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, changes: Changes) -> None:
    path = tmp_path_factory.mktemp("changes") / "changes.yaml"
    changes.write(path)
    assert read_changes(path) == changes


@pytest.mark.parametrize(
    "name", ["0", "no", "yes", "null", "1.0", "1e3", "0x10", "~", "on", "12:30:00", "2026-11-16", ""]
)
def test_a_path_that_yaml_would_take_for_something_else_stays_a_path(tmp_path: Path, name: str) -> None:
    changes = Changes(pad_channels=((name, 4, 64),))
    changes.write(tmp_path / "changes.yaml")
    assert read_changes(str(tmp_path / "changes.yaml")) == changes


def test_the_file_holds_only_what_is_changed(tmp_path: Path) -> None:
    assert NO_CHANGES.to_dict() == {}
    assert NO_CHANGES.are_none
    for changes in (
        Changes(channels_last=True),
        Changes(pad_channels=(("a", 1, 1),)),
        Changes(custom_white_list=("add",)),
    ):
        assert len(changes.to_dict()) == 1
        assert not changes.are_none
    path = tmp_path / "changes.yaml"
    path.write_text("# nothing\n", encoding="utf-8")
    assert read_changes(path) == NO_CHANGES


SUCH_AS = r"must be such as \{in: 4, out: 64\}"
ALLOWED = "allowed keys: channels_last, pad_channels, custom_white_list"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a: b", "not YAML: expected ',' or '}'"),
        ("\0", "not YAML: the character U\\+0000"),
        ("!!python/object/apply:os.getcwd []", "os.getcwd' is not used here"),
        ("pad: {}\nlayout: nhwc", rf"has \['layout', 'pad'\]; {ALLOWED}"),
        ("1: 2", "the key '1'"),
        ("- channels_last", f"has list; {ALLOWED}"),
        ("channels_last", f"has str; {ALLOWED}"),
        ("channels_last: 1", "channels_last is 1; must be true or false"),
        ("channels_last: 'true'", "channels_last is 'true'; must be true or false"),
        ("channels_last:", "channels_last is None; must be true or false"),
        ("pad_channels: [stem]", r"pad_channels must map a layer to its channels, such as stem: \{in: 4, out: 64\}"),
        ("pad_channels:", r"pad_channels must map a layer to its channels, such as stem: \{in: 4, out: 64\}"),
        ("pad_channels: {stem: 64}", f"pad_channels of 'stem' is 64; {SUCH_AS}"),
        ("pad_channels: {stem: {in: 4}}", rf"pad_channels of 'stem' is \{{'in': 4\}}; {SUCH_AS}"),
        ("pad_channels: {a: {in: 4, out: 8, to: 9}}", f"pad_channels of 'a' is .*'to': 9.*; {SUCH_AS}"),
        ("pad_channels: {a: {in: 0, out: 8}}", f"pad_channels of 'a' is .*'in': 0.*; {SUCH_AS}"),
        ("pad_channels: {a: {in: 4, out: -8}}", f"pad_channels of 'a' is .*'out': -8.*; {SUCH_AS}"),
        ("pad_channels: {a: {in: true, out: 8}}", f"pad_channels of 'a' is .*'in': True.*; {SUCH_AS}"),
        ("pad_channels: {a: {in: 4.0, out: 8}}", f"pad_channels of 'a' is .*'in': 4.0.*; {SUCH_AS}"),
        ("custom_white_list: softmax", "custom_white_list must be a list of operator names"),
        ("custom_white_list: [1]", "custom_white_list must be a list of operator names"),
        ("custom_white_list:", "custom_white_list must be a list of operator names"),
        ("custom_white_list: [sofmax]", "unknown operator 'sofmax'; did you mean 'softmax'"),
    ],
)
def test_a_file_with_something_else_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "changes.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ChangesError, match=message) as caught:
        read_changes(path)
    assert str(caught.value).startswith(f"{path}:")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ChangesError, match=r"no\.yaml: no such file"):
        read_changes(tmp_path / "no.yaml")
    with pytest.raises(ChangesError, match="is a folder, not a file"):
        read_changes(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ChangesError, match=r"binary\.yaml:1: not UTF-8 text"):
        read_changes(tmp_path / "binary.yaml")


# -- what cannot be applied


class OwnLinear(nn.Linear):
    pass


def awkward_net() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 5, 3),
            "grouped": nn.Conv2d(4, 4, 3, groups=2),
            "transposed": nn.ConvTranspose2d(4, 4, 3),
            "reflecting": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            "own": OwnLinear(4, 4),
            "norm": nn.BatchNorm2d(4),
        }
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("stem", 4, 8), "the model has no layer 'stem'"),
        (("conv.weight", 4, 8), "the model has no layer 'conv.weight'"),
        (("grouped", 8, 8), "'grouped' is a Conv2d; must be"),
        (("transposed", 8, 8), "'transposed' is a ConvTranspose2d; must be"),
        (("reflecting", 8, 8), "'reflecting' is a Conv2d; must be"),
        (("own", 8, 8), "'own' is a OwnLinear; must be"),
        (("norm", 8, 8), "'norm' is a BatchNorm2d; must be"),
        (("", 8, 8), "'' is a ModuleDict; must be"),
        (("conv", 2, 8), "'conv' has 3 inputs and 5 outputs, cannot become 2, 8"),
        (("conv", 4, 4), "'conv' has 3 inputs and 5 outputs, cannot become 4, 4"),
    ],
)
def test_a_layer_that_cannot_be_padded_is_refused_and_nothing_is_changed(
    row: tuple[str, int, int], message: str
) -> None:
    model = awkward_net()
    with pytest.raises(ChangesError, match=f"^pad_channels: {message}"):
        apply_changes(model, Changes(channels_last=True, pad_channels=(("conv", 4, 8), row)))
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert model.get_parameter("conv.weight").is_contiguous()


def test_a_reflecting_convolution_is_refused_for_its_padding_mode() -> None:
    with pytest.raises(ChangesError, match="padding_mode"):
        apply_changes(nn.Sequential(awkward_net()["reflecting"]), Changes(pad_channels=(("0", 8, 8),)))


# -- what is applied


def test_changes_come_from_an_object_or_a_file_and_the_lists_are_returned(tmp_path: Path) -> None:
    changes = Changes(channels_last=True, pad_channels=(("0", 4, 8),), custom_white_list=("softmax", "add"))
    changes.write(tmp_path / "changes.yaml")
    for source in (changes, tmp_path / "changes.yaml", str(tmp_path / "changes.yaml")):
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(3, 3))
        assert apply_changes(model, source) == {"custom_white_list": ["softmax", "add"]}
        assert model.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
        assert model(torch.zeros(1, 3, 5, 5)).shape == (1, 5, 3, 3)


def test_no_changes_change_nothing() -> None:
    model = awkward_net()
    assert apply_changes(model, NO_CHANGES) == {}
    assert not any("forward" in module.__dict__ for module in model.modules())


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return output and gradients of input, weight and bias."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    out = layer(x)
    scale = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * scale).sum().backward()
    gradients = [x.grad, *(p.grad for p in layer.parameters())]
    return [out.detach(), *(g.clone() for g in gradients if g is not None)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def check_padding(layer: nn.Module, x: Tensor, inputs: int, outputs: int) -> None:
    layer, x = layer.double(), x.double()
    expected, before = results(layer, x), {name: value.clone() for name, value in layer.state_dict().items()}
    padded = copy.deepcopy(layer)
    pad_layer(padded, inputs, outputs)
    assert_same(results(padded, x), expected)
    after = padded.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert channels_of(padded) == channels_of(layer)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"stride": 2},
    {"dilation": 2},
    {"padding": 1},
    {"padding": "same"},
    {"padding": "valid"},
    {"stride": 2, "dilation": 2, "padding": 3, "bias": False},
    {"kernel_size": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", [(4, 8), (3, 8), (4, 5), (3, 5)], ids=str)
@pytest.mark.parametrize(("kind", "spatial"), [(nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)])
def test_a_padded_convolution_gives_the_same_output_and_gradients(
    kind: type[nn.Conv2d], spatial: int, sizes: tuple[int, int], options: dict[str, Any]
) -> None:
    layer = kind(3, 5, **{"kernel_size": 3, **options})
    check_padding(layer, torch.randn(2, 3, *(7, 6, 8)[:spatial]), *sizes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 4, 3), (0, 3)], ids=str)
def test_a_padded_linear_layer_gives_the_same_output_and_gradients(shape: tuple[int, ...], bias: bool) -> None:
    check_padding(nn.Linear(3, 5, bias=bias), torch.randn(shape), 8, 16)


def test_a_padded_convolution_takes_one_image_without_a_batch() -> None:
    check_padding(nn.Conv2d(3, 5, 3), torch.randn(3, 6, 6), 4, 8)


def test_a_padded_convolution_over_channels_last_images_gives_the_same_in_that_layout() -> None:
    layer = nn.Conv2d(3, 5, 3, padding=1).double()
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    expected = results(layer, x)
    model = nn.Sequential(layer, nn.ReLU())
    apply_changes(model, Changes(channels_last=True, pad_channels=(("0", 4, 8),)))
    assert_same(results(model[0], x), expected)
    assert model(x).is_contiguous(memory_format=torch.channels_last)


def test_rectangular_kernels_strides_and_paddings_are_kept() -> None:
    layer = nn.Conv2d(3, 5, (3, 1), stride=(1, 2), padding=(2, 0), dilation=(2, 1))
    check_padding(layer, torch.randn(2, 3, 9, 8), 8, 16)


def test_the_layer_really_computes_with_more_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5, 3))
    apply_changes(model, Changes(pad_channels=(("0", 4, 8), ("2", 8, 16))))
    shapes: dict[str, tuple[int, ...]] = {}

    class Watch:
        wants_lines = wants_times = False

        def wants(self, op: Any) -> bool:
            return op.name in ("convolution", "addmm")

        def receive(self, seen: Any) -> None:
            shapes[seen.op.name] = tuple(seen.args[1].shape)
            shapes[f"{seen.op.name} out"] = tuple(seen.out.shape)

    with listening(Watch()):
        out = model(torch.ones(2, 3, 3, 3))
    assert shapes["convolution"] == (8, 4, 3, 3)
    assert shapes["convolution out"] == (2, 8, 1, 1)
    assert shapes["addmm"] == (2, 8)
    assert shapes["addmm out"] == (2, 16)
    assert out.shape == (2, 3)


def test_padding_twice_is_padding_to_the_last_sizes() -> None:
    layer = nn.Linear(3, 5).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = results(layer, x)
    model = nn.Sequential(layer)
    for inputs, outputs in ((8, 8), (16, 32), (4, 8)):
        apply_changes(model, Changes(pad_channels=(("0", inputs, outputs),)))
        assert_same(results(layer, x), expected)


def padded_net() -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))
    apply_changes(model, Changes(channels_last=True, pad_channels=(("0", 4, 8), ("3", 24, 8))))
    return model


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])  # noqa: S301
def test_a_copy_of_a_padded_model_is_padded_and_has_its_own_weights(copied: Any) -> None:
    model, x = padded_net(), torch.randn(2, 3, 4, 4)
    expected = model(x)
    other = copied(model)
    assert torch.equal(other(x), expected)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert torch.equal(other(x), torch.zeros(2, 3))
    assert torch.equal(model(x), expected)


def test_a_checkpoint_of_the_model_fits_the_padded_one_and_back() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3)).double()
    padded = padded_net().double()
    padded.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(padded(x), plain(x), rtol=TOLERANCE, atol=TOLERANCE)
    plain.load_state_dict(padded.state_dict())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inside_auto_cast_a_padded_layer_computes_in_half_and_agrees(dtype: str) -> None:
    plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))
    padded = padded_net()
    padded.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 4, 4)
    half = getattr(torch, dtype)
    with amp.auto_cast(dtype=dtype, cpu_compute="native"), collect_operator_stats(False) as stats:
        out = padded(x)
        expected = plain(x)
    assert out.dtype is half
    column = 0 if dtype == "float16" else 1
    assert stats.totals()["convolution"][column] == stats.totals()["addmm"][column] == 2
    # both round the same products; sums of 27 and 20 may round once more or less
    torch.testing.assert_close(out, expected, rtol=4 * torch.finfo(half).eps, atol=4 * torch.finfo(half).eps)
    out.float().sum().backward()
    assert all(param.grad is not None and param.grad.shape == param.shape for param in padded.parameters())


def test_a_padded_model_can_be_decorated_and_trained_at_o2() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))
    padded = padded_net()
    padded.load_state_dict(plain.state_dict())
    x, losses = torch.randn(4, 3, 4, 4), []
    for model in (plain, padded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trained, optimizer = amp.decorate(models=model, optimizers=optimizer, level="O2", dtype="bfloat16")
        for _ in range(5):
            with amp.auto_cast(level="O2", dtype="bfloat16"):
                loss = trained(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        assert all(param.dtype is torch.bfloat16 for param in trained.parameters())
    # 8 bits of mantissa: five steps whose sums round differently
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_hooks_of_a_padded_layer_run() -> None:
    layer = nn.Linear(3, 5)
    shapes = []
    layer.register_forward_hook(lambda module, args, out: shapes.append((args[0].shape, out.shape)))
    pad_layer(layer, 8, 8)
    layer(torch.ones(2, 3))
    assert shapes == [((2, 3), (2, 5))]


def test_an_input_of_the_wrong_size_is_still_an_error() -> None:
    for wrong in (2, 4, 8):
        layer = nn.Linear(3, 5)
        pad_layer(layer, 8, 8)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            layer(torch.ones(2, wrong))


def test_a_layer_padded_before_it_is_excluded_stays_padded_and_is_in_float32() -> None:
    model = nn.Sequential(nn.Linear(3, 5))
    apply_changes(model, Changes(pad_channels=(("0", 8, 8),)))
    handle = amp.exclude_layers(model, "0")
    with amp.auto_cast(dtype="bfloat16"):
        assert model(torch.ones(1, 3)).dtype is torch.float32
    handle.remove()
    with amp.auto_cast(dtype="bfloat16"):
        assert model(torch.ones(1, 3)).dtype is torch.bfloat16
    assert type(model[0]) is not nn.Linear


def test_a_layer_excluded_before_it_is_padded_stays_in_float32() -> None:
    model = nn.Sequential(nn.Linear(3, 5))
    amp.exclude_layers(model, "0")
    apply_changes(model, Changes(pad_channels=(("0", 8, 8),)))
    with amp.auto_cast(dtype="bfloat16"):
        assert model(torch.ones(1, 3)).dtype is torch.float32


def test_a_layer_with_a_forward_of_its_own_cannot_be_padded() -> None:
    layer = nn.Linear(3, 5)
    layer.__dict__["forward"] = lambda x: x
    assert not can_be_padded(layer)


@pytest.mark.parametrize("layer", [nn.Linear(3, 5), nn.Conv1d(3, 5, 1)], ids=["linear", "conv1d"])
def test_a_padded_layer_takes_its_input_by_keyword(layer: nn.Module) -> None:
    pad_layer(layer, 8, 8)
    layer(input=torch.ones(3, 3))


def test_a_replica_for_data_parallel_computes_with_its_own_weights() -> None:
    layer = nn.Linear(3, 5)
    pad_layer(layer, 8, 8)
    replica: Any = layer._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(5, 3), torch.zeros(5)
    assert torch.equal(replica(torch.ones(2, 3)), torch.zeros(2, 5))
