"""Programs: record calls, close them with an optimizer, capture and run them."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer

from mezzo.amp import GradScaler, Policy, current_policy, float32_copy
from mezzo.dtypes import HALF_DTYPES
from mezzo.errors import unknown_choice
from mezzo.files import say
from mezzo.record import OperatorStats
from mezzo.static._calls import Calls
from mezzo.static._compile import CompiledStep
from mezzo.static._forward import Forward
from mezzo.static._graph import Capture, CapturedGraph
from mezzo.static._program_graph import by_name
from mezzo.static._region import CastRules, refuse_missing_guard
from mezzo.static._save import load_forward, save_forward
from mezzo.static._step import precision_of_step
from mezzo.static._variables import InputSpec, ProgramError, Variable, begin_writing_without_guard, modules_unwatched

_KEPT = 8
"""How many combinations of fetched variables stay compiled."""


@dataclass(slots=True)
class Training:
    """What `minimize` adds to a program."""

    loss: Variable
    optimizer: Optimizer
    scaler: GradScaler | None = None
    max_norm: float | None = None
    prepare: Callable[[], None] | None = None
    """Called once before the first step, when the weights are on their device."""


class Program:
    """Recorded calls on variables, in order.

    A run is a training step after `minimize`, and a forward before it.

    >>> x = Program().data("x", [None, 4])
    >>> torch.relu(nn.Linear(4, 2)(x))
    Variable('relu_0', shape=[-1, 2], dtype=float32)
    """

    def __init__(self) -> None:
        self.calls = Calls(self)
        """What was written: the graph of calls, and what they use."""
        self._is_test = False
        self._is_warned_of_region = False
        self.training: Training | None = None
        self.precision = CastRules()
        self.backend = "inductor"
        """As in `compile_step`: inductor, aot_eager or eager."""
        self._steps: OrderedDict[Any, CompiledStep | Forward] = OrderedDict()
        self._needed_inputs: dict[tuple[str, ...], list[Variable]] = {}

    # ---- writing

    def data(self, name: str, shape: Sequence[int | None], dtype: str | torch.dtype = "float32") -> Variable:
        """Add an input; see `mezzo.static.data`."""
        self._refuse_closed("input")
        if not isinstance(name, str):
            raise ProgramError(f"name={name!r}: an input's name is a string; got {type(name).__name__}")
        if name in self.calls.variables:
            raise ProgramError(f"the program has a variable {name!r} already; choose another name")
        variable = self.calls.add_input(InputSpec(shape, dtype, name), name)
        begin_writing_without_guard()
        return variable

    def record(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Add a call and return the variables of its results.

        Every call on a variable ends in this method.
        """
        self._refuse_closed("call")
        self._warn_of_region()
        self._steps.clear()
        self._needed_inputs.clear()
        return self.calls.add_call(target, args, kwargs)

    def _warn_of_region(self) -> None:
        """Warn once that an `auto_cast` region around recorded calls has no effect."""
        if current_policy() is not None and not self._is_warned_of_region:
            self._is_warned_of_region = True
            warnings.warn(
                "auto_cast around calls of a program has no effect, they run later: enter it around Executor.run, or use "
                "mezzo.static.amp.decorate(optimizer, level=...)",
                UserWarning,
                stacklevel=_user_level(),
            )

    def _refuse_closed(self, what: str) -> None:
        if self.training is not None:
            raise ProgramError(
                f"the program was closed by minimize and takes no {what} any more: write everything that you want to "
                "fetch before minimize"
            )

    # ---- closing

    def close(self, training: Training, precision: CastRules) -> None:
        """Make the program a training step; `minimize` calls this."""
        loss, optimizer = training.loss, training.optimizer
        if self.training is not None:
            raise ProgramError("the program has an optimizer already: call minimize once per program")
        if any(trial.numel() != 1 for trial in loss._trials):
            raise ProgramError(
                f"{loss.name!r} has shape {list(loss.shape)}: minimize takes one number; call .mean() on it"
            )
        owned = {id(p) for p in self.parameters()}
        if not any(id(p) in owned for group in optimizer.param_groups for p in group["params"]):
            raise ProgramError(
                "the optimizer has no parameter of this program: give it the parameters of the modules that were called"
            )
        if self.precision.is_on and not precision.is_on:
            raise ProgramError(
                f"the program runs at {self.precision}, but this optimizer would train it in float32: train it by "
                "static.amp.decorate(optimizer, ...).minimize(loss)"
            )
        self._check(precision)
        self.training, self.precision = training, precision
        self._steps.clear()

    def cast(self, precision: CastRules) -> None:
        """Run a program without an optimizer in mixed precision; `static.amp.cast_model_to_fp16` calls this."""
        if self.training is not None:
            raise ProgramError("the program was closed by minimize: use static.amp.decorate(optimizer, ...) before it")
        self._check(precision)
        self.precision = precision
        self._steps.clear()

    def _check(self, precision: CastRules) -> None:
        if precision.use_guard and precision.is_on:
            refuse_missing_guard(self.calls.trials.has_guard)
        self._refuse_unknown_names(precision)

    def _refuse_unknown_names(self, precision: CastRules) -> None:
        known = [*self.calls.variables, *self.calls.parameter_names().values()]
        for name in sorted(precision.float32_names):
            if name not in known:
                raise ProgramError(unknown_choice("custom_black_varnames", name, known))

    def clone(self, for_test: bool = False) -> Program:
        """Return a copy without the optimizer, which calls the same modules and has the same names.

        Args:
            for_test: Modules run in eval mode, in float32.
        """
        other = Program()
        other.calls, other._is_test, other.backend = self.calls.copy(other, for_test=for_test), for_test, self.backend
        if not for_test:
            other.precision = self.precision
        return other

    # ---- its parts

    @property
    def inputs(self) -> list[Variable]:
        """The variables that are fed, in the order they were written."""
        return self.calls.inputs

    def inputs_for(self, fetches: Sequence[Variable]) -> list[Variable]:
        """Return the inputs that a run reads: in training all, otherwise those of the fetches."""
        if self.training is not None:
            return self.inputs
        names = tuple(variable.name for variable in fetches)
        if names not in self._needed_inputs:
            self._needed_inputs[names] = self.calls.part_for(names)[1]
        return self._needed_inputs[names]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are called."""
        return self.calls.modules

    def parameters(self) -> Iterable[nn.Parameter]:
        """Yield the parameters of all modules that are called."""
        return self.calls.root.parameters()

    def variable(self, name: str | Variable) -> Variable:
        """Return a variable by its name.

        Raises:
            ProgramError: The program has no variable of this name.
        """
        if isinstance(name, Variable) and name._program.calls.root is not self.calls.root:
            raise ProgramError(f"{name.name!r} is a variable of another program")
        wanted = name.name if isinstance(name, Variable) else name
        if wanted not in self.calls.variables:
            raise ProgramError(unknown_choice("variable", wanted, list(self.calls.variables)))
        return self.calls.variables[wanted]

    # ---- running

    def to(self, device: torch.device) -> None:
        """Move the weights of a program to a device."""
        root = self.calls.root
        if any(tensor.device != device for tensor in (*root.parameters(), *root.buffers())):
            root.to(device)
            self._steps.clear()

    def run(self, feeds: Sequence[Tensor], fetches: Sequence[Variable]) -> list[Tensor]:
        """Run the program on input tensors, as a training step if it is closed.

        Return the fetched values.
        """
        with modules_unwatched():
            key = (tuple(variable.name for variable in fetches), self._precision_now(), self.backend)
            runner = self._steps.get(key)
            if runner is None:
                runner = self._build(fetches)
                while len(self._steps) >= _KEPT:
                    self._steps.popitem(last=False)
                self._steps[key] = runner
            self._steps.move_to_end(key)
            return list(runner.run(feeds))[-len(fetches) :] if fetches else list(runner.run(feeds))[:0]

    def _precision_now(self) -> CastRules:
        """Return the precision of a run.

        If it is off but weights are half, return one that computes in float32.
        """
        if self.precision.is_on:
            return self.precision
        half = next((p.dtype for p in self.parameters() if p.dtype in HALF_DTYPES), None)
        if half is None:
            return self.precision
        return CastRules(Policy.create("O2", half).in_float32())

    def _build(self, fetches: Sequence[Variable]) -> CompiledStep | Forward:
        training = self.training
        if training is not None and training.prepare is not None:
            prepare, training.prepare = training.prepare, None
            prepare()
        capture = Capture(self._precision_now(), self.backend, self.calls.parameter_names())
        in_float32 = self.precision.float32_names
        if training is None:
            names = [variable.name for variable in fetches]
            return Forward(self.calls.part_for(names, in_float32)[0], capture, self._is_test)
        return CompiledStep(
            self.calls.training_module([training.loss, *fetches], in_float32),
            [self.calls.root],
            training.optimizer,
            precision_of_step(None, self.precision.policy, training.scaler, self.calls.root),
            capture,
            training.max_norm,
            smallest_batch=len(self.inputs),
        )

    # ---- files

    def save(self, path: str | Path, fetch_list: Sequence[Variable | str]) -> None:
        """Write the part that computes some variables as a `torch.export` file.

        The file computes in eval mode and float32; `load` reads it.

        Args:
            path: Usually ends in .pt2.
            fetch_list: Variables or their names. Inputs that they do not need, such as labels, are
                left out.

        Raises:
            RunError: torch cannot export it.
        """
        names = [self.variable(fetch).name for fetch in fetch_list]
        for name in names:
            if self.calls.variables[name]._spec is not None:
                raise ProgramError(
                    f"{name!r} is an input: fetch_list takes variables that are computed from the inputs"
                )
        module, inputs = self.calls.part_for(
            names, output=lambda graph, nodes: graph.call_function(by_name, (names, nodes)), evaluates=True
        )
        with modules_unwatched():
            save_forward(module, [v._spec for v in inputs if v._spec is not None], Path(path))

    def inference_module(self, fetch_list: Sequence[Variable | str]) -> GraphModule:
        """Return the part that computes some variables as a module, for `mezzo.export` for example.

        The module takes the inputs that these variables need, in order, and returns a tuple. It is
        a copy in float32, on the CPU, in eval mode.
        """
        names = [self.variable(fetch).name for fetch in fetch_list]
        part, _ = self.calls.part_for(names, evaluates=True)
        module = float32_copy(part).eval()
        assert isinstance(module, GraphModule)
        return module

    @staticmethod
    def load(path: str | Path) -> Program:
        """Return a program from a file of `save`; the same names are fed and fetched.

        Raises:
            DeployError: The file is damaged, or holds more than a forward.
        """
        exported, inputs = load_forward(Path(path))
        program = Program()
        variables = [program.data(name, shape, dtype) for name, (shape, dtype) in inputs.items()]
        module = exported.module()
        for name, variable in program.record(module, variables, {}).items():
            program.calls.rename(variable, name)
        return program

    # ---- what was captured

    @property
    def graphs(self) -> list[CapturedGraph]:
        """The graphs captured so far with the current precision and backend."""
        now = (self._precision_now(), self.backend)
        return [graph for key, runner in self._steps.items() if key[1:] == now for graph in runner.graphs]

    def operators(self, include_views: bool = False) -> OperatorStats:
        """Return the operator table of the last captured graph: operators and their dtypes.

        Raises:
            ProgramError: The program has not run yet, or its backend is 'eager'.
        """
        graphs = self.graphs
        if not graphs:
            raise ProgramError("no graph was captured yet: run the program once, with another backend than 'eager'")
        return graphs[-1].operators(include_views)

    def print(self) -> None:
        """Print the recorded calls and, after a run, the captured graph."""
        say(self)

    def __str__(self) -> str:
        lines = [f"program, {self.precision}:", *(f"  {line}" for line in str(self.calls).splitlines())]
        if self.training is not None:
            lines.append(f"  minimize {self.training.loss.name} by {type(self.training.optimizer).__name__}")
        return "\n".join([*lines, *(str(graph) for graph in self.graphs[-1:])])


def _user_level() -> int:
    """Return the `stacklevel` of the user's line, past the frames of mezzo and torch."""
    ours, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((ours, torchs)):
        frame, level = frame.f_back, level + 1
    return level
