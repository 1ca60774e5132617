"""Directories of runs as a runner leaves them, without running anything."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mezzo.tipc import RECORDS, RUN, Record, RunInfo

HOSTILE = "<script>alert(1)</script> \"'&]]> \x1b[31mred\x1b[0m \x00\x0b\x1f\ud800\ufffe ${{ 7 * 7 }} {% raw %}"

TABLE = """\
<------------------------------------------------------- op list -------------------------------------------------------->
<--------------- Op Name ---------------- | -- FP16 Calls --- | -- BF16 Calls --- | --- FP32 Calls--- | -- Other Calls -->
  _to_copy                                |  5                |  0                |  6                |  0                
  convolution                             |  2                |  0                |  1                |  0                
  mm                                      |  1                |  0                |  0                |  0                
  upsample_bilinear2d                     |  0                |  0                |  9                |  0                
<------------------------------------------------------ op count: 4 ------------------------------------------------------>

"""

REPORT = f"""\
{"-" * 22} Env info {"-" * 22}
 OS_version: Debian 12
{"-" * 23} Conf info {"-" * 23}
 runtime_device: cpu
{"-" * 23} Model info {"-" * 22}
 model_name: lite
 precision: fp16
{"-" * 23} Data info {"-" * 23}
 batch_size: 2
 data_num: 4
{"-" * 23} Perf info {"-" * 23}
 total time spent(s): 0.1
 preprocess_time(ms): 4.0, inference_time(ms): 20.0, postprocess_time(ms): 1.0
{"-" * 22} Torch info {"-" * 22}
 inference_p50(ms): 19.5, inference_p95(ms): 24.25, inference_p99(ms): 25.0
"""


def losses(*values: object, name: str = "TRAIN") -> str:
    """Return lines of a segmentation's training."""
    lines = [
        f"2024-01-01 00:00:00 [INFO]\t[{name}] epoch: 1, iter: {10 * place}/{10 * len(values)}, loss: {loss}, lr: 0.01"
        for place, loss in enumerate(values, start=1)
    ]
    return "\n".join(lines) + "\n"


def record(step: str = "train-1", status: str = "passed", **values: Any) -> Record:
    """Return a record; `labels` and all other fields can be given."""
    kind = step.partition("-")[0]
    return Record(
        **{
            "step": step,
            "kind": kind,
            "model": "lite",
            "mode": "lite_train_lite_infer",
            "labels": {},
            "command": f"python3 {kind}.py --config lite.yml",
            "status": status,
            "seconds": 1.5,
            **values,
        }
    )


def info(**values: Any) -> RunInfo:
    """Return what holds for a run."""
    return RunInfo(
        **{
            "config": "configs/lite.txt",
            "mode": "lite_train_lite_infer",
            "profile": "seg",
            "model": "lite",
            "command_line": ("mezzo", "tipc", "run"),
            "start": "2024-01-01T00:00:00+00:00",
            "end": "2024-01-01T00:01:00+00:00",
            "result": 0,
            "machine": {"cpu": "Made-up 9000"},
            "versions": {"torch": "2.11"},
            "hashes": {"config": "c0ffee"},
            **values,
        }
    )


def write_run(
    directory: Path, records: Sequence[Record], logs: dict[str, str | bytes] | None = None, **values: Any
) -> Path:
    """Write a run's directory; `logs` are files in it, by their names."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / RUN).write_bytes(info(**values).text().encode(errors="replace"))
    lines = "".join(f"{each.line()}\n" for each in records)
    (directory / RECORDS).write_bytes(lines.encode(errors="replace"))
    for name, text in (logs or {}).items():
        (directory / name).write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    return directory


def full_run(directory: Path) -> Path:
    """Write a run with every stage: two precisions, one card and two, one inference failed, one left out."""
    here = str(directory)
    amp = {"devices": "0", "trainer": "amp_train", "autocast": "null"}
    full = {"devices": "0,1", "trainer": "norm_train", "autocast": "null"}
    cpu = {"device": "cpu", "batch": "1", "threads": "6"}
    notices = ("two CPU processes take the place of GPUs 0,1",)
    records = [
        record("prepare-1", cwd=here, log="prepare.log"),
        record("train-1", labels=amp, cwd=here, log="train-1.log", seconds=75.0, hashes={"config": "c0ffee"}),
        record("eval-1", labels=amp, needs=("train-1",), cwd=here, log="eval-1.log"),
        record("export-1", labels=amp, needs=("train-1",), cwd=here, log="export-1.log"),
        record("infer-1", needs=("export-1",), labels={**cpu, "precision": "fp32"}, cwd=here, log="infer-1.log"),
        record("infer-2", needs=("export-1",), labels={**cpu, "precision": "fp32", "batch": "2"}, status="skipped"),
        record(
            "infer-3", "failed", needs=("export-1",), labels={**cpu, "precision": "fp16"}, cwd=here, log="infer-3.log",
            reason="exit status 1", code=1, argv=("python3", "infer.py"), env={"OMP_NUM_THREADS": "6"}, old_verdict=True,
        ),
        record("infer-4", "skipped", needs=("export-1",), labels={"device": "gpu", "precision": "fp32", "batch": "1"},
               reason="no GPU in this machine"),
        record("train-2", labels=full, notices=notices, cwd=here, log="train-2.log", seconds=130.0),
        record("export-2", "timeout", labels=full, needs=("train-2",), reason="longer than 600 s"),
    ]  # fmt: skip
    logs: dict[str, str | bytes] = {
        "prepare.log": "ready\n",
        "train-1.log": TABLE + losses(0.9, 0.5, 0.3),
        "train-2.log": losses(0.9, 0.48, "nan", 0.29),
        "eval-1.log": "mIoU: 0.5\n",
        "export-1.log": "saved\n",
        "infer-1.log": REPORT,
        "infer-3.log": "\x1b[31mTraceback\x1b[0m\nRuntimeError: <img src=x onerror=alert(1)> no half on this CPU\n",
    }
    skipped = ("fp16 with mkldnn: the shell script leaves it out",)
    return write_run(directory, records, logs, result=1, skipped_combinations=skipped)


def labelled_run(folder: Path) -> None:
    """Put the pictures of one image into the folder of a run, as `write_pictures` does; half of its pixels are right."""
    import numpy as np

    from mezzo.tipc._pictures import FOLDER, INDEX, _classes, _photo

    label = np.zeros((8, 8), np.uint8)
    label[:4] = 1
    pictures = {
        "a-image.jpg": _photo(np.zeros((8, 8, 3), np.uint8)),
        "a-label.png": _classes(label),
        "a-prediction.png": _classes(np.zeros_like(label)),
    }
    (folder / FOLDER).mkdir()
    for name, data in pictures.items():
        (folder / FOLDER / name).write_bytes(data)
    row = {"step": "infer-1", "name": "a.png", "image": "a-image.jpg", "label": "a-label.png"}
    row |= {"prediction": "a-prediction.png", "equal": 0.5}
    (folder / FOLDER / INDEX).write_text(json.dumps([row]))
