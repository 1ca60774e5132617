"""All nine networks with the rule's weights: exported, and loaded by a process that cannot import them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mezzo.export import Description, ExportOptions, export_model

MODELS = Path(__file__).parents[1] / "models"
SIZES = [(1, 64, 96), (2, 96, 64), (1, 97, 131)]
TOLERANCE = 1e-4  # of the logits' standard deviation: sums in another order

RELOAD = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("mezzo.vision"): raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import numpy as np
from pathlib import Path
from mezzo.export import EngineOptions, load_engine, read_deployed
folder = Path(sys.argv[1])
model = read_deployed(folder)
inputs = np.load(folder / "inputs.npz")
for engine in ("torch", "onnxruntime"):
    loaded, _ = load_engine(model, EngineOptions(), engine)
    np.savez(folder / f"{engine}.npz", **{name: loaded.run(inputs[name]) for name in inputs})
"""


def everyone():
    """Return the helpers of the networks' own tests."""
    sys.path.insert(0, str(MODELS))
    try:
        spec = importlib.util.find_spec("everyone")
        assert spec is not None
        return importlib.import_module("everyone")
    finally:
        sys.path.remove(str(MODELS))


NAMES = list(json.loads((MODELS / "zoo" / "models.json").read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_process_without_the_networks_gives_their_logits(name: str, tmp_path: Path) -> None:
    network = everyone().with_rule(name).eval()
    task = "classification" if name == "mobilenet_v3_small" else "segmentation"
    with torch.no_grad():
        logits = network(torch.zeros(1, 3, 64, 64))
    classes = (logits[0] if isinstance(logits, list) else logits).shape[1]
    described = Description(task=task, model_name=name, num_classes=classes, transforms=({"type": "Normalize"},))
    export_model(network, described, ExportOptions(save_dir=tmp_path, output_op="none"))
    rng = np.random.default_rng(0)
    inputs = {f"{n}_{h}_{w}": rng.standard_normal((n, 3, h, w), dtype=np.float32) for n, h, w in SIZES}
    np.savez(tmp_path / "inputs.npz", **inputs)
    done = subprocess.run([sys.executable, "-c", RELOAD, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for key, x in inputs.items():
        with torch.no_grad():
            outputs = network(torch.from_numpy(x))
        right = (outputs[0] if isinstance(outputs, list) else outputs).numpy()
        for engine in ("torch", "onnxruntime"):
            error = np.abs(np.load(tmp_path / f"{engine}.npz")[key] - right).max() / right.std()
            assert error <= TOLERANCE, (key, engine)
