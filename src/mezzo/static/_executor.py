"""`Executor`: feeds a program by name and fetches by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezzo.devices import find_device
from mezzo.errors import unknown_choice
from mezzo.static._current import default_main_program
from mezzo.static._program import Program
from mezzo.static._variables import ProgramError, Variable


class Executor:
    """Runs programs on a device.

    >>> from mezzo.static import Program, data, program_guard
    >>> program = Program()
    >>> program.backend = "aot_eager"
    >>> with program_guard(program):
    ...     x = data("x", [None, 2])
    ...     y = x * 2 + 1
    >>> Executor("cpu").run(program, feed={"x": [[1.0, 2.0]]}, fetch_list=[y])
    [array([[3., 5.]], dtype=float32)]
    """

    def __init__(self, device: str | torch.device | None = None) -> None:
        """Choose a device: `cpu`, `cuda`, `cuda:1`, `gpu` or `gpu:1`.

        None: a GPU if there is one, otherwise the CPU.
        """
        self.device = find_device(device, "Executor({!r})")

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Variable | str] | None = None,
        *,
        use_program_cache: bool = True,
        return_numpy: bool = True,
    ) -> list[Any]:
        """Run a program once, as a training step if it has an optimizer; return the fetched values.

        Args:
            program: None: the default main program. Running a startup program has no effect.
            feed: A value for each input, by name: arrays, tensors or lists, cast to the declared
                dtype. A program without an optimizer only needs the inputs of the fetched
                variables.
            fetch_list: Variables or their names.
            use_program_cache: Accepted without effect: a program is always captured once per shape.
            return_numpy: False returns tensors on the device, without host synchronisation.

        Raises:
            ProgramError: A fed or fetched name is unknown, or a fed value has the wrong shape.
        """
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise TypeError(f"Executor.run: {type(program).__name__} is not a mezzo.static.Program")
        if isinstance(fetch_list, (str, Variable)):
            raise TypeError(f"fetch_list: give a list, [{fetch_list!r}]")
        fetches = [program.variable(fetch) for fetch in (() if fetch_list is None else fetch_list)]
        if not program.inputs and not fetches and program.training is None:
            return []  # a startup program
        program.to(self.device)
        inputs = program.inputs_for(fetches)
        results = program.run(self._feeds(program, inputs, {} if feed is None else feed), fetches)
        return [_to_numpy(result) for result in results] if return_numpy else results

    def _feeds(self, program: Program, inputs: Sequence[Variable], feed: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of the needed inputs, in order, on the device."""
        names = [variable.name for variable in program.inputs]
        for name in feed:
            if name not in names:
                raise ProgramError(unknown_choice("input in feed", name, names))
        feeds = []
        for variable in inputs:
            if variable.name not in feed:
                needed = ", ".join(variable.name for variable in inputs)
                raise ProgramError(f"feed has no {variable.name!r}: the program reads {needed}")
            feeds.append(self._tensor(variable, feed[variable.name]))
        return feeds

    def _tensor(self, variable: Variable, value: Any) -> Tensor:
        spec = variable._spec
        assert spec is not None
        try:
            tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ProgramError(
                f"feed[{variable.name!r}]: {type(value).__name__} is not an array of numbers ({error})"
            ) from error
        if not spec.fits(tensor.shape):
            raise ProgramError(
                f"feed[{variable.name!r}] has shape {list(tensor.shape)}; it was declared as {list(spec.shape)}"
                + (", where -1 is any size" if -1 in spec.shape else "")
            )
        fed = tensor.to(self.device, spec.dtype, non_blocking=True)
        # A program may write into its inputs (an in-place activation), but must not write into the
        # caller's tensor.
        return fed.clone() if fed.data_ptr() == tensor.data_ptr() and isinstance(value, Tensor) else fed


def _to_numpy(tensor: Tensor) -> Any:
    values = tensor.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
