import textwrap

import pytest
import torch
from torch import nn

from mezzo.bench import ModelError, load_workload, simple_net_workload
from mezzo.errors import RunError

CPU = torch.device("cpu")


@pytest.fixture
def write_model(tmp_path):
    """Return a function that writes net.py and returns its FILE:FACTORY for `build`."""

    def write(code):
        (tmp_path / "net.py").write_text(textwrap.dedent(code))
        return f"{tmp_path / 'net.py'}:build"

    return write


def test_simple_net_starts_near_two_thirds_so_that_every_layer_matters():
    workload = simple_net_workload(256, 64, CPU)
    loss = workload.loss_fn(workload.model(workload.inputs), workload.targets)
    assert loss.item() == pytest.approx(2 / 3, rel=0.1)  # E[label^2] + E[output^2] = 1/3 + 1/3
    assert len(workload.model.linears) == 9
    bound = (6 / 512) ** 0.5
    assert all(layer.weight.abs().max() <= bound and not layer.bias.any() for layer in workload.model.linears)


def test_simple_net_task_gives_the_same_numbers_each_time():
    first, second = simple_net_workload(16, 4, CPU), simple_net_workload(16, 4, CPU)
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.model.linears[8].weight, second.model.linears[8].weight)
    assert first.inputs.min() >= 0
    assert first.inputs.max() < 1


def test_factory_may_return_its_own_data_and_loss(write_model):
    reference = write_model("""
        import torch
        from torch import nn
        def build():
            return nn.Linear(3, 5), torch.zeros(2, 3), torch.tensor([1, 2]), nn.functional.cross_entropy
    """)
    workload = load_workload(reference, batch_size=64)
    assert workload.inputs.shape == (2, 3)
    assert workload.loss_fn(workload.model(workload.inputs), workload.targets).ndim == 0


@pytest.mark.parametrize(
    ("layer", "shape", "out"),
    [("nn.Linear(3, 5)", (4, 3), (4, 5)), ("nn.Conv2d(3, 2, 1)", (4, 3, 64, 64), (4, 2, 64, 64))],
)
def test_module_alone_gets_inputs_for_its_first_layer(write_model, layer, shape, out):
    reference = write_model(f"from torch import nn\ndef build(): return nn.Sequential({layer}, nn.ReLU())")
    workload = load_workload(reference, batch_size=4)
    assert workload.inputs.shape == shape
    assert workload.targets.shape == out


def test_file_may_import_its_neighbours_and_hold_dataclasses(write_model, tmp_path):
    (tmp_path / "mezzo_test_neighbour.py").write_text("WIDTH = 7")
    reference = write_model("""
        from __future__ import annotations
        from dataclasses import dataclass
        from mezzo_test_neighbour import WIDTH
        from torch import nn
        @dataclass
        class Config:
            width: int = WIDTH
        def build(): return nn.Linear(Config().width, 1)
    """)
    assert load_workload(reference, batch_size=2).inputs.shape == (2, 7)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("net.py", "'net.py': must be FILE:FACTORY, such as net.py:build_model"),
        ("net.py:", "must be FILE:FACTORY"),
        ("/nowhere/net.py:build", "there is no file '/nowhere/net.py'"),
    ],
)
def test_bad_reference_is_an_error(reference, message):
    with pytest.raises(ModelError, match=message):
        load_workload(reference, batch_size=1)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("", r"net\.py: defines no function; 'build' must be one that returns"),
        ("def biuld(): pass", r"net\.py: unknown factory 'build'; did you mean 'biuld'\? allowed: biuld"),
        ("build = 3", r"net\.py: 'build' is a int, must be a function that returns an nn\.Module or"),
        ("def build(): return 3", r"returned int, must return an nn\.Module or \(module, inputs, targets, loss_fn\)"),
        ("def build(): return 1, 2, 3", r"returned \(int, int, int\), must return"),
        ("def build(): return 1, 2, 3, 4", r"returned \(int, int, int, int\), must return"),
        ("\nimport no_such_module", r"net\.py:2: cannot be imported: ModuleNotFoundError: No module named"),
        ("def build(:", r"net\.py: cannot be imported: SyntaxError"),
        ("from torch import nn\ndef build(): return nn.ReLU()", "has no linear or convolution layer"),
        ("from torch import nn\ndef build(): return nn.LSTM(2, 2)", "has no linear or convolution layer"),
        (
            "from torch import nn\ndef build(): return nn.Sequential(nn.Linear(3, 5), nn.Linear(4, 2))",
            r"does not take inputs of shape \(2, 3\): .*; return \(module, inputs, targets, loss_fn\) to give",
        ),
        (
            "from torch import nn\nclass Net(nn.Linear):\n  def forward(self, x): return {}\nbuild = lambda: Net(3, 4)",
            "its output is dict, not a tensor",
        ),
    ],
)
def test_bad_model_file_is_an_error_that_says_what_to_return(write_model, code, message):
    with pytest.raises(ModelError, match=message):
        load_workload(write_model(code), batch_size=2)


def test_factory_that_raises_is_a_failed_run_with_its_place(write_model):
    with pytest.raises(RunError, match=r"net\.py:3: build\(\) raised KeyError: 'x'"):
        load_workload(write_model("def build():\n    pass\n    return {}['x']"), batch_size=2)


def test_copy_leaves_the_original_untouched_and_moves_nested_inputs():
    workload = simple_net_workload(4, 2, CPU)
    nested = type(workload)(workload.model, {"a": [workload.inputs]}, (workload.targets, "text"), workload.loss_fn)
    copied = nested.copied(torch.device("meta"))
    assert copied.inputs["a"][0].device.type == "meta"
    assert copied.targets[1] == "text"
    assert next(nested.model.parameters()).device.type == "cpu"
    assert isinstance(copied.model, nn.Module)
