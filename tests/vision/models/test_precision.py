"""All nine networks in half precision, in another memory layout, exported, compiled, and through `.pdparams`."""

import copy
from pathlib import Path

import pytest
import torch
from everyone import MODELS, QUICK, train_logits, with_rule
from reference import images, outputs_of
from torch import Tensor

from mezzo.amp import auto_cast, debugging, decorate
from mezzo.checkpoint import load_pdparams, save_pdparams
from mezzo.vision.models.losses import CrossEntropyLoss

NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in QUICK)]
SLOWER = ["mobilenet_v3_small", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "mobilenet_v3_small")]

#: Largest root mean square difference of logits from float32's, over their standard deviation, in training: batch norms
#: that see one pixel an image enlarge every rounding, most in the long chain of STDC2. bfloat16 has eight times the error.
LIMITS = {"float16": {"pp_liteseg_stdc2": 0.2, "": 0.03}, "bfloat16": {"pp_liteseg_stdc2": 0.7, "": 0.2}}
#: The same of the loss, relative: its errors are averaged over all pixels.
LOSS_LIMITS = {"float16": 0.01, "bfloat16": 0.05}


def loss_of(name: str, logits: Tensor) -> Tensor:
    classes = logits.shape[1]
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (logits.shape[0], *logits.shape[2:]), generator=generator)
    return (
        torch.nn.functional.cross_entropy(logits, labels) if labels.dim() == 1 else CrossEntropyLoss()(logits, labels)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_stays_near_float32(name: str, level: str, dtype: str) -> None:
    expected = train_logits(with_rule(name))
    model = with_rule(name)
    if level == "O2":
        decorate(model, level=level, dtype=dtype)
    with auto_cast(level=level, dtype=dtype):
        outputs = train_logits(model)
        loss = loss_of(name, outputs[0])
    assert outputs[0].dtype == getattr(torch, dtype)
    assert loss.dtype == torch.float32
    limit = LIMITS[dtype].get(name, LIMITS[dtype][""])
    for out, right in zip(outputs, expected, strict=True):
        assert (out.float() - right).std() < limit * right.std()
    assert loss.item() == pytest.approx(loss_of(name, expected[0]).item(), rel=LOSS_LIMITS[dtype])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_leaks_to_float32_at_o2(name: str) -> None:
    model = decorate(with_rule(name), level="O2", dtype="bfloat16")
    with (
        debugging.collect_operator_stats(print_table=False, leaks=True) as stats,
        auto_cast(level="O2", dtype="bfloat16"),
    ):
        train_logits(model)
    assert not stats.leaks, "\n".join(map(str, stats.leaks))


@pytest.mark.parametrize("name", NAMES)
def test_channels_last_is_the_same_network(name: str) -> None:
    model = with_rule(name).double()
    with torch.no_grad():
        expected = outputs_of(copy.deepcopy(model).train(), images("train"))
        other = model.to(memory_format=torch.channels_last).train()
        outputs = outputs_of(other, images("train").contiguous(memory_format=torch.channels_last))
    for out, right in zip(outputs, expected, strict=True):
        assert (out - right).abs().max() < 1e-5 * right.std()  # float64: what is left is the layout


@pytest.mark.parametrize("name", SLOWER)
def test_export_gives_the_same_logits(name: str) -> None:
    model = with_rule(name).eval()
    x = images("eval", torch.float32)[:, :, :96, :128].contiguous()
    exported = torch.export.export(model, (x,)).module()
    with torch.no_grad():
        expected, outputs = outputs_of(model, x), outputs_of(exported, x)
    for out, right in zip(outputs, expected, strict=True):
        assert (out - right).abs().max() <= 1e-5 * right.std()


@pytest.mark.parametrize("name", SLOWER)
def test_compile_has_no_graph_break(name: str) -> None:
    model = with_rule(name).train()
    x = images("train", torch.float32)
    expected = outputs_of(copy.deepcopy(model), x)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outputs = outputs_of(compiled, x)
    sum(out.float().square().mean() for out in outputs).backward()
    for out, right in zip(outputs, expected, strict=True):
        assert (out - right).detach().abs().max() <= 1e-3 * right.detach().std()  # decompositions sum in another order
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.gpu
@pytest.mark.slow  # Inductor builds hundreds of kernels a network: minutes for each HRNet
@pytest.mark.filterwarnings("default")  # Inductor gives advice about TF32
@pytest.mark.parametrize(("name", "level"), [*((name, "O0") for name in MODELS), *((name, "O2") for name in QUICK)])
def test_inductor_has_no_graph_break(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = images("train", torch.float32).cuda()
    expected = outputs_of(with_rule(name).train().cuda(), x)
    model = with_rule(name).train().cuda()
    if level == "O2":
        decorate(model, level=level)
    torch._dynamo.reset()
    with auto_cast(level=level):
        outputs = outputs_of(torch.compile(model, fullgraph=True), x)
    sum(out.float().square().mean() for out in outputs).backward()
    # float32: sums in another order; half: the same limits as without compilation
    limit = 1e-3 if level == "O0" else LIMITS["float16"].get(name, LIMITS["float16"][""])
    for out, right in zip(outputs, expected, strict=True):
        assert (out.float() - right).detach().std() <= limit * right.detach().std()
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [None, "O2"])
def test_pdparams_bring_every_bit_back(name: str, level: str | None, tmp_path: Path) -> None:
    model = with_rule(name)
    expected = {k: v.clone() for k, v in model.state_dict().items() if not k.endswith("num_batches_tracked")}
    if level is not None:
        decorate(model, level=level)
    save_pdparams(model, tmp_path / "model.pdparams")
    other = with_rule(name)
    with torch.no_grad():
        for value in other.state_dict().values():
            value.zero_()
    report = load_pdparams(other, tmp_path / "model.pdparams")
    assert report.missing == report.unexpected == report.mismatched == ()
    state = other.state_dict()
    assert all(torch.equal(state[key], value) for key, value in expected.items())
    if level is not None:  # and into a decorated one: its masters
        load_pdparams(model, tmp_path / "model.pdparams")
        assert all(torch.equal(model.state_dict()[key], value) for key, value in expected.items())
