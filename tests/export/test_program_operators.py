"""The list of operators fits what exports use, and holds nothing that a wrong argument makes unsafe."""

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.export import DeployError, load_program, write_program
from mezzo.export._files import trace
from mezzo.export._network import Deployable
from mezzo.export._program_operators import MAX_ELEMENTS, OPERATORS, problem_with_nodes, problem_with_target
from mezzo.export._programs import checked_archive
from mezzo.vision.models import create_model, list_models

LARGE = ("fcn_hrnet_w18", "ocrnet_hrnetw18", "ocrnet_hrnetw48")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LARGE else name for name in list_models()]
)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("fp16", marks=pytest.mark.slow)])
def test_every_network_is_within_the_list(name: str, precision: str, tmp_path: Path) -> None:
    network = Deployable(create_model(name), "softmax", precision)
    program = trace(network, (1, 3, 64, 64))
    targets = {f"torch.ops.{node.target}" for node in program.graph.nodes if "aten." in str(node.target)}
    assert len(targets) > 3
    assert [target for target in targets if problem_with_target(target)] == []


def test_every_operator_of_the_list_is_there() -> None:
    for entry in OPERATORS:
        name, overload = entry.split(".")
        getattr(getattr(torch.ops.aten, name), overload)


def test_no_operator_of_the_list_writes_to_outputs_or_is_known_to_be_unsafe() -> None:
    assert not [
        entry for entry in OPERATORS if entry.endswith((".out", "_out")) or "backward" in entry or "sparse" in entry
    ]
    words = {"as_strided", "set_", "resize_", "empty", "manual_seed", "_print", "from_file", "set_data"}
    assert words.isdisjoint(entry.split(".")[0] for entry in OPERATORS)


class Layers(nn.Module):
    """What users' networks have besides convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.act = nn.Sequential(nn.Hardswish(inplace=True), nn.SiLU(), nn.GELU(), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.gru(self.act(self.norm(self.block(x))))
        y[:, 0] = 1.0
        mask = (y > 0) & (y < 0.5)
        return torch.einsum("bij,bkj->bik", torch.where(mask, y, 0.0), y).clamp(0, 1) + torch.arange(x.shape[1])


def saved(module: nn.Module, sample: Tensor, path: Path, *, is_free: bool = True) -> Path:
    free = ({0: torch.export.Dim.DYNAMIC},) if is_free else None
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch, about the weights of a GRU
        program = torch.export.export(module.eval(), (sample,), dynamic_shapes=free, strict=False)
    write_program(program, path)
    return path


@pytest.mark.parametrize("keep_sizes", [False, True])
def test_ordinary_layers_give_the_same_numbers_from_a_file(keep_sizes: bool, tmp_path: Path) -> None:
    module = Layers()
    path = saved(module, torch.randn(2, 5, 8), tmp_path / "a.pt2")
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(
            load_program(path, keep_sizes=keep_sizes).module()(x), module(x), rtol=0, atol=1e-6
        )  # eager: fused block


class Attention(nn.Module):
    def __init__(self, values: int) -> None:
        super().__init__()
        self.register_buffer("values", torch.ones(2, 2, values, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, self.values)


def test_attention_with_fewer_values_than_keys_does_not_read_beyond_them(tmp_path: Path) -> None:
    path = tmp_path / "a.pt2"
    with torch.no_grad():
        program = torch.export.export(Attention(16), (torch.ones(2, 2, 16, 8),), strict=False)
    write_program(program, path)
    module = load_program(path).module()
    assert torch.equal(module(torch.ones(2, 2, 16, 8)), torch.ones(2, 2, 16, 8))
    module.values = torch.ones(2, 2, 4, 8)
    with pytest.raises((RuntimeError, IndexError)):
        module(torch.ones(2, 2, 16, 8))


def graph_of(path: Path) -> Any:
    """Return the graph that torch is given."""
    with zipfile.ZipFile(checked_archive(path)) as archive:
        (text,) = [archive.read(name) for name in archive.namelist() if name.endswith("models/model.json")]
    return json.loads(text)["graph_module"]["graph"]


def test_values_of_attention_are_cut_to_the_number_of_keys(tmp_path: Path) -> None:
    """Whether torch reads beyond them depends on sizes and processors, so the graph is looked at."""
    with torch.no_grad():
        program = torch.export.export(Attention(16), (torch.ones(2, 2, 16, 8),), strict=False)
    write_program(program, tmp_path / "a.pt2")
    nodes = graph_of(tmp_path / "a.pt2")["nodes"]
    (attention,) = [each for each in nodes if "scaled_dot_product_attention" in each["target"]]
    given = {entry["name"]: entry["arg"] for entry in attention["inputs"]}
    made = {str(each["outputs"][0]): each for each in nodes}
    narrow = made[str(given["value"])]
    cut = {entry["name"]: entry["arg"] for entry in narrow["inputs"]}
    assert narrow["target"] == "torch.ops.aten.narrow.default"
    assert (cut["dim"], cut["start"]) == ({"as_int": -2}, {"as_int": 0})
    size = made[str(cut["length"])]
    assert size["target"] == "torch.ops.aten.sym_size.int"
    assert [entry["arg"] for entry in size["inputs"]] == [given["key"], {"as_int": -2}]


class Recurrent(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, **options)

    def forward(self, x: Tensor) -> Tensor:
        output, (hidden, cell) = self.lstm(x)
        return torch.cat([output.flatten(), hidden.flatten(), cell.flatten()])


@pytest.mark.parametrize("keep_sizes", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"batch_first": True},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
        {"bias": False, "num_layers": 3},
    ],
)
def test_an_lstm_gives_the_same_numbers_from_a_file(options: dict[str, Any], keep_sizes: bool, tmp_path: Path) -> None:
    module = Recurrent(**options)
    is_batch_first = "batch_first" in options
    free = ({0 if is_batch_first else 1: torch.export.Dim.DYNAMIC},)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of torch, about the weights of an LSTM
        program = torch.export.export(module.eval(), (torch.randn(3, 5, 8),), dynamic_shapes=free, strict=False)
    write_program(program, tmp_path / "a.pt2")  # without a warning
    loaded = load_program(tmp_path / "a.pt2", keep_sizes=keep_sizes).module()
    x = torch.randn(4, 5, 8) if is_batch_first else torch.randn(3, 7, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("part", ["weight_ih_l0", "weight_hh_l1", "bias_hh_l0"])
def test_an_lstm_of_small_weights_does_not_read_beyond_them(part: str, tmp_path: Path) -> None:
    path = saved(Recurrent(num_layers=2, batch_first=True), torch.randn(2, 5, 8), tmp_path / "a.pt2")
    loaded = load_program(path).module()
    assert loaded(torch.randn(2, 5, 8)).isfinite().all()
    setattr(loaded.lstm, part, nn.Parameter(torch.ones(3)))
    with pytest.raises(RuntimeError, match="shape"):
        loaded(torch.randn(2, 5, 8))


class Started(nn.Module):
    """An LSTM that begins with states of its own."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.register_buffer("state", torch.zeros(1, count, 6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x, (self.state, self.state))[0]
        return output


def test_an_lstm_of_few_or_other_states_does_not_read_beyond_them(tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Started(2).eval(), (x,), strict=False)
    write_program(program, tmp_path / "a.pt2")
    loaded = load_program(tmp_path / "a.pt2").module()
    right = loaded(x)
    loaded.state = torch.zeros(1, 2, 6, dtype=torch.float16)  # read as float32 it would be half as long
    torch.testing.assert_close(loaded(x), right)
    loaded.state = torch.zeros(1, 1, 6)
    with pytest.raises((RuntimeError, IndexError)):
        loaded(x)


class Normed(nn.Module):
    """What is rewritten when it is loaded: weight norms and memory that is not written at first."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.linears = nn.Sequential(norm(nn.Linear(8, 8)), norm(nn.Linear(8, 8), dim=1), norm(nn.Linear(8, 8), dim=-1))
        self.norm = norm(nn.LayerNorm(8))
        self.convolution = norm(nn.Conv1d(5, 5, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        empty = torch.empty(x.shape[0], 1, 1, memory_format=torch.contiguous_format).fill_(1.0)
        like, new = torch.empty_like(x).copy_(x), x.new_empty(1).fill_(2.0)
        return self.convolution(self.norm(self.linears(x))) + empty + like + new


@pytest.mark.parametrize("keep_sizes", [False, True])
def test_weight_norms_and_empty_tensors_give_the_same_numbers(keep_sizes: bool, tmp_path: Path) -> None:
    module = Normed()
    path = saved(module, torch.randn(2, 5, 8), tmp_path / "a.pt2")
    x = torch.randn(3, 5, 8)
    with torch.no_grad():
        torch.testing.assert_close(load_program(path, keep_sizes=keep_sizes).module()(x), module(x))


class Unwritten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape[0], 1000) + torch.empty_like(x).sum() + x.new_empty(1000)


def test_memory_that_was_never_written_is_not_shown(tmp_path: Path) -> None:
    path = saved(Unwritten(), torch.randn(2, 5, 8), tmp_path / "a.pt2")
    torch.empty(64, 1000).fill_(7.0)  # what the next one would get
    assert load_program(path).module()(torch.ones(64, 5, 8)).abs().max() == 0


def test_a_weight_norm_of_few_lengths_does_not_write_beyond_them(tmp_path: Path) -> None:
    path = saved(Normed(), torch.randn(2, 5, 8), tmp_path / "a.pt2")
    targets = {each["target"] for each in graph_of(path)["nodes"]}
    assert not [target for target in targets if "_weight_norm" in target or "empty" in target]


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.as_strided((2, 2), (1, 1))


@pytest.mark.parametrize(
    ("module", "word"), [(Strided(), r"as_strided\.default"), (Recurrent(proj_size=3), r"lstm\.input.*projections")]
)
def test_a_program_that_cannot_be_loaded_again_warns_when_it_is_written(
    module: nn.Module, word: str, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=f"will not load this program: the operator '{word}"):
        path = saved(module, torch.randn(2, 5, 8), tmp_path / "a.pt2", is_free=False)
    with pytest.raises(DeployError, match=f"the operator '{word}.*ONNX"):
        load_program(path)


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        worst = torch.full_like(x, float("nan")).nan_to_num(0.0, float("inf"), -1.0)
        return x.masked_fill(x > 0, float("-inf")).softmax(-1).clamp(max=float("inf")) + worst


@pytest.mark.parametrize("keep_sizes", [False, True])
def test_numbers_without_end_are_read(keep_sizes: bool, tmp_path: Path) -> None:
    x = torch.randn(2, 5, 8)
    path = saved(Masked(), x, tmp_path / "a.pt2")  # without a warning
    torch.testing.assert_close(load_program(path, keep_sizes=keep_sizes).module()(x), Masked()(x), equal_nan=True)


def node(name: str, **arguments: Any) -> dict[str, Any]:
    inputs = [{"name": key, "arg": value, "kind": 1} for key, value in arguments.items()]
    target = name if name.startswith("_operator") else f"torch.ops.aten.{name}"
    return {"target": target, "inputs": inputs, "outputs": [{"as_sym_int": {"as_name": arguments.get("to", "n")}}]}


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (node("full.default", size={"as_ints": [2**20, 2**20]}, fill_value={"as_float": 1.0}), "makes a tensor"),
        (node("zeros.default", size={"as_sym_ints": [{"as_int": 2**40}, {"as_name": "s0"}]}), "makes a tensor"),
        (node("arange.default", end={"as_int": 2**40}), "makes a tensor"),
        (node("arange.start_step", start={"as_int": 0}, end={"as_int": 9}, step={"as_float": 1e-12}), "makes a tensor"),
        (node("repeat.default", repeats={"as_ints": [2**15, 2**15]}), "makes a tensor"),
        (node("upsample_bilinear2d.vec", scale_factors={"as_floats": [1e6, 1e6]}), "makes a tensor"),
        (node("pad.default", pad={"as_ints": [2**40, 1]}), "makes a tensor"),
        (node("zeros.default", size={"as_ints": [1]}, layout={"as_layout": 1}), "sparse"),
        (node("div.Tensor_mode", other={"as_tensor": {"name": "x"}}, rounding_mode={"as_string": "trunc"}), "trunc"),
        (node("div.Tensor_mode", other={"as_int": -1}, rounding_mode={"as_string": "trunc"}), "trunc"),
        (node("div.Tensor_mode", other={"as_int": 2**32 - 1}, rounding_mode={"as_string": "trunc"}), "trunc"),
        (node("div_.Tensor_mode", other={"as_float": 2**64 - 1}, rounding_mode={"as_string": "trunc"}), "trunc"),
        (node("div.Scalar_mode", other={"as_int": 2**31}, rounding_mode={"as_string": "trunc"}), "trunc"),
        (node("div.Scalar_mode", other={"as_float": 0.5}, rounding_mode={"as_string": "trunc"}), "trunc"),
        (node("repeat_interleave.Tensor", output_size={"as_int": 3}), "repeat_interleave.Tensor"),
        (node("upsample_bicubic2d.default", scales_h={"as_float": 1e-30}), "scale"),
        (node("upsample_nearest1d.default", scales={"as_float": 5000.0}), "scale"),
        (node("upsample_nearest3d.default", scales_h={"as_none": True}, scales_d={"as_float": "NaN"}), "scale"),
        (node("upsample_bilinear2d.vec", scale_factors={"as_floats": [2.0, 1e-30]}), "scale"),
        (node("_upsample_bicubic2d_aa.vec", scale_factors={"as_floats": [-2.0, 2.0]}), "scale"),
        (node("upsample_nearest2d.default", scales_w={"as_sym_float": {"as_name": "s"}}), "scale"),
        (node("_upsample_nearest_exact2d.vec", scale_factors={"as_float_lists": [[1e-30]]}), "scale"),
        (node("_to_copy.default", device={"as_device": {"type": "meta", "index": None}}), "device"),
        (node("_to_copy.default", device={"as_string": "meta"}), "device"),
        (
            node("relu.default", self={"as_none": True, "as_tensor": {"name": "x"}}),
            "not a tensor, a number or an option",
        ),
        (node("relu.default", self={"as_string_to_argument": {}}), "not a tensor, a number or an option"),
        (node("grid_sampler.default", interpolation_mode={"as_int": 7}), "mode"),
        (node("relu.default", self={"as_custom_obj": {"name": "x"}}), "not a tensor, a number or an option"),
        (node("_operator.pow", a={"as_int": 9}, b={"as_int": 10**9}), "power"),
        (node("_operator.pow", a={"as_int": 9}, b={"as_sym_int": {"as_name": "s0"}}), "power"),
    ],
)
def test_arguments_that_crash_or_fill_the_machine_are_refused(refused: dict[str, Any], word: str) -> None:
    assert word in str(problem_with_nodes([refused]))


@pytest.mark.parametrize(
    "accepted",
    [
        node("full.default", size={"as_ints": [2**14, 2**14]}, fill_value={"as_float": 1e300}),
        node("slice.Tensor", dim={"as_int": 0}, start={"as_int": 0}, end={"as_int": 2**63 - 1}),
        node("div.Tensor_mode", other={"as_int": 2}, rounding_mode={"as_string": "trunc"}),
        node("div.Tensor_mode", other={"as_int": -(2**31) + 1}, rounding_mode={"as_string": "trunc"}),
        node("div.Tensor_mode", other={"as_float": 1.5}, rounding_mode={"as_string": "trunc"}),
        node("div.Tensor_mode", other={"as_tensor": {"name": "x"}}, rounding_mode={"as_string": "floor"}),
        node("upsample_bicubic2d.default", scales_h={"as_none": True}, scales_w={"as_float": 0.5}),
        node("upsample_bilinear2d.vec", scale_factors={"as_floats": [2.0, 1 / 4096]}),
        node("repeat_interleave.self_int", repeats={"as_int": 2}),
        node("_to_copy.default", device={"as_device": {"type": "cuda", "index": 0}}),
        node("_to_copy.default", device={"as_none": True}),
        node("_operator.pow", a={"as_sym_int": {"as_name": "s0"}}, b={"as_int": 2}),
    ],
)
def test_ordinary_arguments_are_not(accepted: dict[str, Any]) -> None:
    assert problem_with_nodes([accepted]) is None
    assert MAX_ELEMENTS == 2**28


def test_squares_of_squares_are_refused() -> None:
    squares = []
    for number in range(8):
        last = {"as_sym_int": {"as_name": f"n{number}"}}
        squares.append(node("_operator.mul", a=last, b=last))
        squares[-1]["outputs"] = [{"as_sym_int": {"as_name": f"n{number + 1}"}}]
    assert problem_with_nodes(squares[:5]) is None
    assert "factors" in str(problem_with_nodes(squares))
