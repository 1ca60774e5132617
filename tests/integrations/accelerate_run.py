"""One process of a training by `MezzoAccelerator`: writes its weights, and those after a resumed half of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(folder: Path, dtype: str) -> None:
    import torch
    from torch import nn

    from mezzo import Precision
    from mezzo.integrations.accelerate import MezzoAccelerator

    folder.mkdir(exist_ok=True)
    accelerator = MezzoAccelerator(cpu=True, precision=Precision("O2", dtype))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    count, rank = accelerator.num_processes, accelerator.process_index
    x, y = torch.linspace(-1, 1, 64).reshape(8, 8), torch.linspace(0, 1, 32).reshape(8, 4)
    skipped = []

    def take_steps(numbers: range) -> None:
        for number in numbers:
            inputs, targets = (each.roll(number, 0).chunk(count)[rank] for each in (x, y))
            accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)

    def weights() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}

    take_steps(range(2))
    accelerator.save_state(str(folder / "state"))
    take_steps(range(2, 4))
    report = {"kind": type(model).__name__, "processes": count, "skipped": list(skipped)}
    found = {"weights": weights()}
    accelerator.load_state(str(folder / "state"))
    take_steps(range(2, 4))
    torch.save({**found, "resumed": weights()}, folder / f"{rank}.pt")
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))
    accelerator.end_training()
    time.sleep(0.1)  # gloo's threads need the GIL to end: see mezzo/model/parallel.py


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
