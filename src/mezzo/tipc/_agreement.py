"""Compare what one exported model predicts on the CPU and on the GPU."""

from pathlib import Path

import numpy as np

from mezzo.export import EngineOptions, load_engine, read_deployed
from mezzo.tipc._record import Record
from mezzo.tipc._shell import export_folders

_IMAGES = 4
_SIDE = 256  # height and width if the export leaves them open


def exported_folder(record: Record) -> Path | None:
    """Return the folder that an export command has written, None if it has no model."""
    folders = [Path(record.cwd) / name for name in export_folders(record.command)]
    return next((folder for folder in folders if (folder / "deploy.yaml").is_file()), None)


def agreement(folder: Path) -> tuple[float, int]:
    """Return the share of equal classes on the CPU and on the first GPU, and the number of (smooth random) images."""
    model = read_deployed(folder)
    shape = [side if side > 0 else _SIDE for side in model.input_shape[2:]]
    draws = np.random.default_rng(0).standard_normal((_IMAGES, 3, *shape), dtype=np.float32)
    images = np.cumsum(np.cumsum(draws, -1), -2) / 50
    labels = []
    for device in ("cpu", "cuda:0"):
        engine, _ = load_engine(model, EngineOptions(device=device))
        outputs = [np.asarray(engine.run(images[index : index + 1].astype(np.float32))) for index in range(_IMAGES)]
        labels.append([output if output.dtype.kind in "iu" else output.argmax(1) for output in outputs])
    equal = [float((one == other).mean()) for one, other in zip(*labels, strict=True)]
    return float(np.mean(equal)), _IMAGES
