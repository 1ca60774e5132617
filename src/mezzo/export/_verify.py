"""Verification: compare exported files with the network, on random and on real images."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mezzo.export import Deployed, DeployError, EngineOptions, OutputOp, load_engine
from mezzo.export._engine import Images
from mezzo.export._network import Deployable, finish
from mezzo.export._programs import own_program

#: Largest error of a float32 export; it comes from another order of sums.
MAX_ERROR = 1e-4
#: Some networks amplify rounding, for example with batch norms after a few training steps: their
#: float32 and float64 outputs differ by more than MAX_ERROR. Their exports may differ by this many
#: times that difference, because folded batch norms round every weight, and then the sums, once
#: more. Measured: 8 times for a PP-LiteSeg after 20 steps, whose own rounding is 7e-4.
OWN_ROUNDINGS = 16
#: Smallest share of equal classes of a variant in lower precision.
MIN_AGREEMENT = {"fp16": 0.98, "bf16": 0.95, "int8": 0.9}


@dataclass(frozen=True, slots=True)
class Check:
    """The comparison of one file, run by one engine, with the float32 network."""

    precision: str
    engine: str
    inputs: str
    """The images: random ones of a size, or real ones."""
    error: float
    """Largest difference.

    Logits: divided by their standard deviation. Probabilities: divided by the largest one. Labels:
        the
    best logit minus the logit of the exported label, divided by the standard deviation of the
    logits.
    """
    agreement: float
    """Share of equal classes."""
    is_fine: bool
    own_rounding: float = 0.0
    """Difference of the network in float32 and float64; measured if the error is above MAX_ERROR."""

    def __str__(self) -> str:
        own = f" (the network's own rounding: {self.own_rounding:.2e})" if self.own_rounding else ""
        verdict = own if self.is_fine else f"{own}  BEYOND TOLERANCE"
        return (
            f"{self.precision} {self.engine:12s} {self.inputs:22s} "
            f"max error {self.error:.2e}, same class {self.agreement:8.4%}{verdict}"
        )


def verify(
    network: Deployable,
    model: Deployed,
    precision: str,
    inputs: Sequence[tuple[str, Sequence[Images]]],
    *,
    min_agreement: float | None = None,
) -> list[Check]:
    """Return the difference of each file of a precision from the float32 network.

    Args:
        network: The exported network, in float32.
        model: The exported model.
        precision: Precision of the files.
        inputs: Names and batches of images.
        min_agreement: Smallest share of equal classes that is fine; None for the default of the
            precision.
    """
    kinds = {"program": "torch", "onnx": "onnxruntime"}
    needed = MIN_AGREEMENT.get(precision, 0.0) if min_agreement is None else min_agreement
    checks = []
    for kind, name in kinds.items():
        if not model.has(precision, kind):
            continue
        run = _runner(model, precision, kind, name)
        for what, batches in inputs:
            error, own, same = 0.0, 0.0, []
            is_fine = True
            for images in batches:
                logits = _logits(network, images)
                output = torch.from_numpy(run(images))
                off = distance(output, logits, model.output_op)
                error = max(error, off)
                same.append(_agreement(output, logits))
                if precision == "fp32" and off > MAX_ERROR:
                    own = max(own, own_rounding(network, images, logits))
                    is_fine = is_fine and off <= OWN_ROUNDINGS * own
            agreement = float(np.mean(same))
            # In float32 the error decides: nearly equal logits may change the order of classes.
            if precision != "fp32":
                is_fine = agreement >= needed and math.isfinite(error)
            checks.append(Check(precision, name, what, error, agreement, is_fine, own))
    return checks


def _runner(model: Deployed, precision: str, kind: str, name: str) -> Callable[[Images], NDArray[Any]]:
    """Return a function that runs a file; torch runs a new program that the engine refuses."""
    try:
        engine, _ = load_engine(model, EngineOptions(precision=precision, device=_device(precision, kind)), name)
    except DeployError:
        if kind != "program":
            raise
        program = own_program(model.file(precision, kind))

        def run(images: Images) -> NDArray[Any]:
            with torch.inference_mode():
                output: NDArray[Any] = program(torch.from_numpy(images)).numpy()
            return output

        return run
    return engine.run


def own_rounding(network: Deployable, images: Images, logits: torch.Tensor) -> float:
    """Return the difference of the float32 and float64 logits over their standard deviation.

    The result is 0 if it is not finite, so that non-finite logits never widen the tolerance.
    """
    exact = copy.deepcopy(network.network).double()
    with torch.inference_mode():
        outputs = exact(torch.from_numpy(images).double())
    right = outputs[0] if isinstance(outputs, list | tuple) else outputs
    ratio = _over((logits.double() - right).abs().max(), right.std())
    return ratio if math.isfinite(ratio) else 0.0


def _device(precision: str, kind: str) -> str:
    """Return the device for a file: half programs run on the GPU if there is one, which is faster."""
    is_half_program = kind == "program" and precision in ("fp16", "bf16")
    return "cuda:0" if is_half_program and torch.cuda.is_available() else "cpu"


def distance(output: torch.Tensor, logits: torch.Tensor, output_op: OutputOp) -> float:
    """Return the difference of an output from the one that the logits imply; see `Check.error`."""
    if output_op != "argmax":
        right = finish(logits, output_op)
        return _over((output - right).abs().max(), right.std() if output_op == "none" else right.max())
    taken = logits.gather(1, output.long().clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return _over((logits.amax(dim=1) - taken).max(), logits.std())


def _over(difference: torch.Tensor, scale: torch.Tensor) -> float:
    """Return a difference over a scale (0: not scaled); a non-finite difference is infinite."""
    size = scale.item()
    ratio = difference.item() / (size if math.isfinite(size) and size > 0 else 1.0)
    return ratio if math.isfinite(ratio) else math.inf


def _agreement(output: torch.Tensor, logits: torch.Tensor) -> float:
    labels = output if not output.is_floating_point() else output.argmax(dim=1)
    return (labels == logits.argmax(dim=1)).float().mean().item()


def _logits(network: Deployable, images: Images) -> torch.Tensor:
    with torch.inference_mode():
        return network.logits(torch.from_numpy(images))


def random_inputs(shape: tuple[int, ...]) -> list[tuple[str, list[Images]]]:
    """Return random images of three sizes; free sizes differ from those that the network was traced with."""
    rng = np.random.default_rng(0)
    free = [(1, 96, 128), (2, 64, 160), (1, 97, 131)]
    sizes = dict.fromkeys(
        tuple(given if given > 0 else size for given, size in zip(shape, (batch, 3, height, width), strict=True))
        for batch, height, width in free
    )
    return [(f"random {'x'.join(map(str, size))}", [rng.standard_normal(size, dtype=np.float32)]) for size in sizes]
