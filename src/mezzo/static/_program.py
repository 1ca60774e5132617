"""Programs: calls written down, closed by an optimizer, captured and run."""

from __future__ import annotations

import operator
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.optim import Optimizer

from mezzo._torch.pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from mezzo.amp import GradScaler, Policy, current_policy, float32_copy
from mezzo.amp.debugging import OperatorStats
from mezzo.dtypes import HALF_DTYPES
from mezzo.errors import unknown_choice
from mezzo.files import say
from mezzo.static._compile import CompiledStep
from mezzo.static._forward import Forward
from mezzo.static._graph import Capture, CapturedGraph
from mezzo.static._input_names import escaped, identifier_of
from mezzo.static._program_graph import by_name, evaluate_functions, mark, needed_for
from mezzo.static._region import Precision, enter_guard, is_inside_guard, leave_guard, refuse_missing_guard
from mezzo.static._save import load_forward, save_forward
from mezzo.static._trial import Trials
from mezzo.static._variables import InputSpec, ProgramError, Variable, begin_writing_without_guard, modules_unwatched

_KEPT = 8
"""Combinations of fetched variables that are kept compiled."""


@dataclass(slots=True)
class Training:
    """What `minimize` adds to a program."""

    loss: Variable
    optimizer: Optimizer
    scaler: GradScaler | None = None
    max_norm: float | None = None
    prepare: Callable[[], None] | None = None
    """Called once, before the first step, when weights are where they are trained."""


class Program:
    """Calls on variables, in order; with an optimizer (`minimize`) a training step, without one a forward.

    >>> x = Program().data("x", [None, 4])
    >>> torch.relu(nn.Linear(4, 2)(x))
    Variable('relu_0', shape=[-1, 2], dtype=float32)
    """

    def __init__(self) -> None:
        self._graph = Graph()
        self._root = nn.Module()
        self.constants = nn.Module()
        """Tensors that are no parameters; they stay as they are."""
        self._root.add_module("constants", self.constants)
        self._variables: dict[str, Variable] = {}
        self._counts: dict[str, int] = {}
        self._trials = Trials()
        self._is_test = False
        self._is_warned_of_region = False
        self.training: Training | None = None
        self.precision = Precision()
        self.backend = "inductor"
        """As in `compile_step`: inductor, aot_eager or eager."""
        self._steps: OrderedDict[Any, CompiledStep | Forward] = OrderedDict()
        self._needed_inputs: dict[tuple[str, ...], list[Variable]] = {}

    # ---- writing

    def data(self, name: str, shape: Sequence[int | None], dtype: str | torch.dtype = "float32") -> Variable:
        """Add an input; see `mezzo.static.data`."""
        self._refuse_closed("an input")
        if not isinstance(name, str):
            raise ProgramError(f"name={name!r}: an input's name is a string; got {type(name).__name__}")
        if name in self._variables:
            raise ProgramError(f"the program has a variable {name!r} already; choose another name")
        spec = InputSpec(shape, dtype, name)
        trials = self._trials.inputs(spec)
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        with self._graph.inserting_after(inputs[-1]) if inputs else self._graph.inserting_before():
            node = self._graph.placeholder(identifier_of(name))
            if node.name != node.target:  # a word that the generated code needs for itself, or of another node
                self._graph.erase_node(node)
                node = self._graph.placeholder(escaped(name))
        begin_writing_without_guard()
        return self._new(node, trials, name, spec)

    def _record(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Write a call down and return the variables of its results."""
        self._refuse_closed("another call")
        self._warn_of_region()
        name = _name_of(target)
        results = self._trials.results(target, args, kwargs, name)
        self._steps.clear()
        self._needed_inputs.clear()
        guarded = is_inside_guard()
        if guarded:
            self._graph.call_function(enter_guard)
        nodes = tree_map(self._as_node, (tuple(args), kwargs))
        if isinstance(target, nn.Module):
            node = self._graph.call_module(self._keep(target), *nodes)
        elif isinstance(target, str):
            node = self._graph.call_method(target, *nodes)
        else:
            node = self._graph.call_function(target, *nodes)
        if guarded:
            self._trials.has_guard = True
            self._graph.call_function(leave_guard)
        return self._variables_of(node, results, name)

    def _as_node(self, value: Any) -> Any:
        if isinstance(value, Variable):
            return value._node
        if isinstance(value, nn.Parameter):
            name = f"parameter_{len(self._root._parameters)}"
            self._root.register_parameter(name, value)
            return self._graph.get_attr(name)
        if isinstance(value, Tensor):
            name = f"tensor_{len(self.constants._buffers)}"
            self.constants.register_buffer(name, value)
            return self._graph.get_attr(f"constants.{name}")
        return value

    def _keep(self, module: nn.Module) -> str:
        """Return the name under which a module belongs to the program."""
        for name, known in self._root.named_children():
            if known is module:
                return name
        name = f"{type(module).__name__}_{len(self._root._modules) - 1}"
        self._root.add_module(name, module)
        return name

    def _variables_of(self, node: Node, results: Sequence[Any], name: str) -> Any:
        """Return the results of a call with a variable for each tensor."""
        if isinstance(results[0], Tensor):
            return self._new(node, tuple(results), self._fresh(name))
        spec = tree_structure(results[0])
        if tree_structure(results[1]) != spec:
            raise ProgramError(
                f"{name} returns more or fewer things for another batch: a program needs the same each time"
            )
        variables = []
        leaves = [tree_leaves(result) for result in results]
        for *values, path in zip(*leaves, _paths(results[0]), strict=True):
            if not isinstance(values[0], Tensor):
                variables.append(_constant(values, name))
                continue
            part = node
            for step in path:
                part = self._graph.call_function(operator.getitem, (part, step))
            variables.append(self._new(part, tuple(values), self._fresh(name)))
        return tree_unflatten(variables, spec)

    def _new(self, node: Node, trials: tuple[Tensor, ...], name: str, spec: InputSpec | None = None) -> Variable:
        variable = self._variables[name] = Variable(self, node, trials, name, spec)
        return variable

    def _fresh(self, name: str) -> str:
        while True:
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            if f"{name}_{number}" not in self._variables:
                return f"{name}_{number}"

    def _warn_of_region(self) -> None:
        """Warn once that a region around the writing of a program is not part of it."""
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
                f"the program was closed by minimize and takes no {what.removeprefix('another ').removeprefix('an ')} any "
                "more: write everything that is to be fetched before it"
            )

    # ---- closing

    def close(self, training: Training, precision: Precision) -> None:
        """Make the program a training step; `minimize` calls this."""
        loss, optimizer = training.loss, training.optimizer
        if self.training is not None:
            raise ProgramError("the program has an optimizer already: minimize is called once a program")
        if any(trial.numel() != 1 for trial in loss._trials):
            raise ProgramError(
                f"{loss.name!r} has shape {list(loss.shape)}: minimize takes one number; call .mean() on it"
            )
        owned = {id(p) for p in self.parameters()}
        if not any(id(p) in owned for group in optimizer.param_groups for p in group["params"]):
            raise ProgramError(
                "the optimizer has no parameter of this program: give it the parameters of the modules that were called"
            )
        if precision.use_guard and precision.is_on:
            refuse_missing_guard(self._trials.has_guard)
        self._refuse_unknown_names(precision)
        self.training, self.precision = training, precision
        self._steps.clear()

    def _refuse_unknown_names(self, precision: Precision) -> None:
        known = [*self._variables, *self._parameter_names().values()]
        for name in sorted(precision.float32_names):
            if name not in known:
                raise ProgramError(unknown_choice("custom_black_varnames", name, known))

    def clone(self, for_test: bool = False) -> Program:
        """Return the program as it stands, without its optimizer; for a test its modules run in eval mode.

        The copy calls the same modules and is fed and fetched by the same names.
        """
        other = Program()
        other._root, other._trials = self._root, self._trials
        other.constants = self.constants
        other._counts, other._is_test = dict(self._counts), for_test
        nodes: dict[Node, Node] = {}
        other._graph.graph_copy(self._graph, nodes)
        for name, variable in self._variables.items():
            other._variables[name] = Variable(other, nodes[variable._node], variable._trials, name, variable._spec)
        other.backend = self.backend
        if for_test:
            evaluate_functions(other._graph)
        else:
            other.precision = self.precision
        return other

    # ---- what it consists of

    @property
    def inputs(self) -> list[Variable]:
        """The variables that are fed, in the order they were written."""
        return [variable for variable in self._variables.values() if variable._spec is not None]

    def inputs_for(self, fetches: Sequence[Variable]) -> list[Variable]:
        """Return the inputs that a run reads: all of them in training, otherwise what the fetched variables need."""
        if self.training is not None:
            return self.inputs
        names = tuple(variable.name for variable in fetches)
        if names not in self._needed_inputs:
            self._needed_inputs[names] = self._part_for(names, lambda graph, nodes: tuple(nodes))[1]
        return self._needed_inputs[names]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are called."""
        return [module for module in self._root.children() if module is not self.constants]

    def parameters(self) -> Iterable[nn.Parameter]:
        """Yield the parameters of everything that is called."""
        return self._root.parameters()

    def variable(self, name: str | Variable) -> Variable:
        """Return a variable by its name.

        Raises:
            ProgramError: The program has none of this name.
        """
        if isinstance(name, Variable) and name._program._root is not self._root:
            raise ProgramError(f"{name.name!r} is a variable of another program")
        wanted = name.name if isinstance(name, Variable) else name
        if wanted not in self._variables:
            raise ProgramError(unknown_choice("variable", wanted, list(self._variables)))
        return self._variables[wanted]

    def _parameter_names(self) -> dict[int, str]:
        """Return the names of parameters by identity, as their own module knows them."""
        names: dict[int, str] = {id(p): name for name, p in self._root._parameters.items() if p is not None}
        for module in self.modules:
            names.update({id(p): name for name, p in module.named_parameters()})
        return names

    def parameters_outside_guard(self) -> set[nn.Parameter]:
        """Return the parameters that are used outside `fp16_guard` somewhere."""
        return {param for param, use in self._trials.uses.items() if use.outside}

    # ---- running

    def to(self, device: torch.device) -> None:
        """Move the weights of a program to a device."""
        if any(tensor.device != device for tensor in (*self._root.parameters(), *self._root.buffers())):
            self._root.to(device)
            self._steps.clear()

    def run(self, feeds: Sequence[Tensor], fetches: Sequence[Variable]) -> list[Tensor]:
        """Run the program, or train one step of it, on tensors of its inputs; return what was asked for."""
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

    def _precision_now(self) -> Precision:
        """Return the precision; float32 beside half weights, as a test program in float32 has them, is a policy too."""
        if self.precision.is_on:
            return self.precision
        half = next((p.dtype for p in self.parameters() if p.dtype in HALF_DTYPES), None)
        if half is None:
            return self.precision
        return Precision(Policy.create("O2", half).in_float32())

    def _build(self, fetches: Sequence[Variable]) -> CompiledStep | Forward:
        training = self.training
        if training is not None and training.prepare is not None:
            prepare, training.prepare = training.prepare, None
            prepare()
        capture = Capture(self._precision_now(), self.backend, self._parameter_names())
        if training is None:
            names = [variable.name for variable in fetches]
            return Forward(self._part_for(names, lambda graph, nodes: tuple(nodes))[0], capture, self._is_test)
        compute = self._training_module([training.loss, *fetches])
        return CompiledStep(
            compute,
            [self._root],
            training.optimizer,
            training.scaler,
            capture,
            training.max_norm,
            smallest_batch=len(self.inputs),
        )

    def _training_module(self, wanted: Sequence[Variable]) -> GraphModule:
        """Return everything that was written as a module: the inputs in order, a tuple of some variables."""
        graph, nodes = self._copy_of_graph()
        graph.output(tuple(nodes[variable._node] for variable in wanted))
        return GraphModule(self._root, graph)

    def _part_for(
        self, names: Sequence[str], output: Callable[[Graph, list[Node]], Any], *, evaluates: bool = False
    ) -> tuple[GraphModule, list[Variable]]:
        """Return what gives some variables as a module, and the inputs that are left in it."""
        graph, nodes = self._copy_of_graph()
        if evaluates:
            evaluate_functions(graph)
        end = graph.output(output(graph, [nodes[self._variables[name]._node] for name in names]))
        needed = needed_for(graph, end, self._root)
        places = {variable.name: nodes[variable._node] for variable in self.inputs}
        for node in reversed(graph.nodes):
            if node not in needed:
                graph.erase_node(node)
        left = set(graph.nodes)
        inputs = [v for v in self.inputs if self._placeholder(places[v.name]) in left]
        return GraphModule(self._root, graph), inputs

    @staticmethod
    def _placeholder(node: Node) -> Node:
        """Return the input itself, where its name stands beside it."""
        while node.op != "placeholder":
            node = node.all_input_nodes[0]
        return node

    def _copy_of_graph(self) -> tuple[Graph, dict[Node, Node]]:
        """Return a copy of what was written, with the names of variables that stay in float32, and its nodes."""
        graph = Graph()
        nodes: dict[Node, Node] = {}
        graph.graph_copy(self._graph, nodes)
        for name in self.precision.float32_names:
            if name in self._variables:
                mark(graph, nodes, self._variables[name])
        return graph, nodes

    # ---- files

    def save(self, path: str | Path, fetch_list: Sequence[Variable | str]) -> None:
        """Write what gives some variables, in evaluation and float32, as a `torch.export` file; `load` reads it.

        Args:
            path: Usually ends in .pt2.
            fetch_list: Variables or their names. Inputs that they do not need, such as labels, are left out.

        Raises:
            RunError: torch cannot export it.
        """
        names = [self.variable(fetch).name for fetch in fetch_list]
        for name in names:
            if self._variables[name]._spec is not None:
                raise ProgramError(f"{name!r} is an input: a file gives what is computed from its inputs, not them")
        module, inputs = self._part_for(
            names, lambda graph, nodes: graph.call_function(by_name, (names, nodes)), evaluates=True
        )
        with modules_unwatched():
            save_forward(module, [v._spec for v in inputs if v._spec is not None], Path(path))

    def inference_module(self, fetch_list: Sequence[Variable | str]) -> GraphModule:
        """Return what gives some variables as a module, for `mezzo.export` and whoever takes one.

        It takes the inputs that are needed for them, in order, and returns a tuple. It is a copy in float32, on the CPU, in
        eval mode.
        """
        names = [self.variable(fetch).name for fetch in fetch_list]
        part, _ = self._part_for(names, lambda graph, nodes: tuple(nodes), evaluates=True)
        module = float32_copy(part).eval()
        assert isinstance(module, GraphModule)
        return module

    @staticmethod
    def load(path: str | Path) -> Program:
        """Return a program that gives what was saved: the same names are fed and fetched.

        Raises:
            DeployError: The file is damaged, or holds what a forward has no need of.
        """
        exported, inputs = load_forward(Path(path))
        program = Program()
        variables = [program.data(name, shape, dtype) for name, (shape, dtype) in inputs.items()]
        module = exported.module()
        fetched = program._record(module, variables, {})
        for name, variable in fetched.items():
            del program._variables[variable.name]
            variable.name = name
            program._variables[name] = variable
        return program

    @property
    def graphs(self) -> list[CapturedGraph]:
        """What was captured so far in this precision and by this backend."""
        now = (self._precision_now(), self.backend)
        return [graph for key, runner in self._steps.items() if key[1:] == now for graph in runner.graphs]

    def operators(self, include_views: bool = False) -> OperatorStats:
        """Return operator x dtype of what was captured last: which operator computes in which precision.

        Raises:
            ProgramError: The program has not run yet, or its backend is 'eager'.
        """
        return self._captured().operators(include_views)

    def _captured(self) -> CapturedGraph:
        graphs = self.graphs
        if not graphs:
            raise ProgramError("no graph was captured yet: run the program once, with another backend than 'eager'")
        return graphs[-1]

    def print(self) -> None:
        """Print the program: the calls as they were written, and, once it has run, what was captured."""
        say(self)

    def __str__(self) -> str:
        text = str(self._graph)
        for variable in self.inputs:
            text = text.replace(variable._node.name, variable.name) if variable._node.name != variable.name else text
        lines = [f"program, {self.precision}:", *(f"  {line}" for line in text.splitlines()[1:])]
        if self.training is not None:
            lines.append(f"  minimize {self.training.loss.name} by {type(self.training.optimizer).__name__}")
        return "\n".join([*lines, *(str(graph) for graph in self.graphs[-1:])])


def _user_level() -> int:
    """Return how many frames above a warning the user's own line is: calls come through torch and through operators."""
    ours, torchs = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((ours, torchs)):
        frame, level = frame.f_back, level + 1
    return level


def _name_of(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, nn.Module):
        return type(target).__name__.lower()
    name: str = getattr(target, "__name__", type(target).__name__)
    return name.strip("_")


def _paths(results: Any) -> list[tuple[Any, ...]]:
    """Return, for each leaf of a result, how it is reached by indexing."""
    if isinstance(results, dict):
        return [(key, *path) for key in results for path in _paths(results[key])]
    if isinstance(results, (list, tuple)):
        return [(index, *path) for index, part in enumerate(results) for path in _paths(part)]
    return [()]


def _constant(values: Sequence[Any], name: str) -> Any:
    """Return what a call gives besides tensors, if it is the same for every batch and something that can be kept."""
    first, second = values
    if not isinstance(first, (int, float, str, type(None))):
        raise ProgramError(
            f"{name} returns a {type(first).__name__}: calls of a program return tensors in tuples, lists and dicts"
        )
    if first != second:
        raise ProgramError(
            f"{name} gives a number that depends on a size which each batch brings: do it inside a module or function that "
            "the program calls"
        )
    return first
