"""The calls of a program: an fx graph, its variables, and the modules and tensors it uses."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from mezzo._torch.pytree import tree_leaves, tree_map, tree_structure, tree_unflatten
from mezzo.static._input_names import escaped, identifier_of
from mezzo.static._program_graph import evaluate_functions, mark, needed_for
from mezzo.static._region import enter_guard, is_inside_guard, leave_guard
from mezzo.static._trial import Trials
from mezzo.static._variables import InputSpec, ProgramError, Variable

if TYPE_CHECKING:
    from mezzo.static._program import Program


class Calls:
    """Calls on variables, in the order in which they were written.

    Args:
        program: The program that its variables belong to.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._graph = Graph()
        self._counts: dict[str, int] = {}
        self.root = nn.Module()
        """Holds every module, parameter and tensor that is used."""
        self.constants = nn.Module()
        """Tensors that are not parameters. They never become half."""
        self.root.add_module("constants", self.constants)
        self.variables: dict[str, Variable] = {}
        self.trials = Trials()

    def copy(self, program: Program, *, for_test: bool) -> Calls:
        """Return the same calls, on the same modules and names, for another program."""
        other = Calls(program)
        other.root, other.constants, other.trials = self.root, self.constants, self.trials
        other._counts = dict(self._counts)
        nodes: dict[Node, Node] = {}
        other._graph.graph_copy(self._graph, nodes)
        for name, variable in self.variables.items():
            other._new(nodes[variable._node], variable._trials, name, variable._spec)
        if for_test:
            evaluate_functions(other._graph)
        return other

    @property
    def inputs(self) -> list[Variable]:
        """The variables that are fed, in the order they were written."""
        return [variable for variable in self.variables.values() if variable._spec is not None]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are called."""
        return [module for module in self.root.children() if module is not self.constants]

    def parameter_names(self) -> dict[int, str]:
        """Return the names of parameters by identity, as their own module knows them."""
        names: dict[int, str] = {id(p): name for name, p in self.root._parameters.items() if p is not None}
        for module in self.modules:
            names.update({id(p): name for name, p in module.named_parameters()})
        return names

    # ---- writing

    def add_input(self, spec: InputSpec, name: str) -> Variable:
        """Add an input after the others, and return its variable."""
        trials = self.trials.inputs(spec)
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        with self._graph.inserting_after(inputs[-1]) if inputs else self._graph.inserting_before():
            node = self._graph.placeholder(identifier_of(name))
            if node.name != node.target:  # reserved by the generated code, or the name of another node
                self._graph.erase_node(node)
                node = self._graph.placeholder(escaped(name))
        return self._new(node, trials, name, spec)

    def add_call(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Add a call of a module, a function or a method (by name).

        Return the variables of its results.

        Raises:
            ProgramError: The call does not take these variables.
        """
        name = _name_of(target)
        results = self.trials.results(target, args, kwargs, name)
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
            self.trials.has_guard = True
            self._graph.call_function(leave_guard)
        return self._variables_of(node, results, name)

    def rename(self, variable: Variable, name: str) -> None:
        """Give a variable another name."""
        del self.variables[variable.name]
        variable.name = name
        self.variables[name] = variable

    def _as_node(self, value: Any) -> Any:
        if isinstance(value, Variable):
            return value._node
        if isinstance(value, nn.Parameter):
            name = f"parameter_{len(self.root._parameters)}"
            self.root.register_parameter(name, value)
            return self._graph.get_attr(name)
        if isinstance(value, Tensor):
            name = f"tensor_{len(self.constants._buffers)}"
            self.constants.register_buffer(name, value)
            return self._graph.get_attr(f"constants.{name}")
        return value

    def _keep(self, module: nn.Module) -> str:
        """Return the name of a module in the program; add the module if it is new."""
        for name, known in self.root.named_children():
            if known is module:
                return name
        name = f"{type(module).__name__}_{len(self.root._modules) - 1}"
        self.root.add_module(name, module)
        return name

    def _variables_of(self, node: Node, results: Sequence[Any], name: str) -> Any:
        """Return the results of a call with a variable in place of each tensor."""
        if isinstance(results[0], Tensor):
            return self._new(node, tuple(results), self._fresh(name))
        spec = tree_structure(results[0])
        if tree_structure(results[1]) != spec:
            raise ProgramError(
                f"{name} returns another number of values for another batch size; the number must not depend on it"
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
        variable = self.variables[name] = Variable(self._program, node, trials, name, spec)
        return variable

    def _fresh(self, name: str) -> str:
        while True:
            number = self._counts.get(name, 0)
            self._counts[name] = number + 1
            if f"{name}_{number}" not in self.variables:
                return f"{name}_{number}"

    # ---- modules made from the calls

    def training_module(self, wanted: Sequence[Variable], float32_names: Iterable[str]) -> GraphModule:
        """Return all calls as a module from the inputs, in order, to the wanted variables."""
        graph, nodes = self._copy_of_graph(float32_names)
        graph.output(tuple(nodes[variable._node] for variable in wanted))
        return GraphModule(self.root, graph)

    def part_for(
        self,
        names: Sequence[str],
        float32_names: Iterable[str] = (),
        output: Callable[[Graph, list[Node]], Any] = lambda graph, nodes: tuple(nodes),
        *,
        evaluates: bool = False,
    ) -> tuple[GraphModule, list[Variable]]:
        """Return a module that computes some variables, and the inputs that it takes.

        Args:
            names: The variables.
            float32_names: Variables that stay in float32.
            output: Builds the module's result from the nodes of these variables.
            evaluates: Functions with a `training` argument, such as dropout, run in eval mode.
        """
        graph, nodes = self._copy_of_graph(float32_names)
        if evaluates:
            evaluate_functions(graph)
        end = graph.output(output(graph, [nodes[self.variables[name]._node] for name in names]))
        needed = needed_for(graph, end, self.root)
        for node in reversed(graph.nodes):
            if node not in needed:
                graph.erase_node(node)
        left = set(graph.nodes)
        inputs = [v for v in self.inputs if _placeholder(nodes[v._node]) in left]
        return GraphModule(self.root, graph), inputs

    def _copy_of_graph(self, float32_names: Iterable[str]) -> tuple[Graph, dict[Node, Node]]:
        """Return a copy of the graph, and a dict from nodes of this graph to nodes of the copy.

        Variables that stay in float32 are marked with their names in the copy.
        """
        graph = Graph()
        nodes: dict[Node, Node] = {}
        graph.graph_copy(self._graph, nodes)
        for name in float32_names:
            if name in self.variables:
                mark(graph, nodes, self.variables[name])
        return graph, nodes

    def __str__(self) -> str:
        text = str(self._graph)
        for variable in self.inputs:
            text = text.replace(variable._node.name, variable.name) if variable._node.name != variable.name else text
        return "\n".join(text.splitlines()[1:])


def _placeholder(node: Node) -> Node:
    """Return the input behind a node: `mark` inserts a node with the input's name after it."""
    while node.op != "placeholder":
        node = node.all_input_nodes[0]
    return node


def _name_of(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, nn.Module):
        return type(target).__name__.lower()
    name: str = getattr(target, "__name__", type(target).__name__)
    return name.strip("_")


def _paths(results: Any) -> list[tuple[Any, ...]]:
    """Return, for each leaf of a result, the indices that lead to it."""
    if isinstance(results, dict):
        return [(key, *path) for key in results for path in _paths(results[key])]
    if isinstance(results, (list, tuple)):
        return [(index, *path) for index, part in enumerate(results) for path in _paths(part)]
    return [()]


def _constant(values: Sequence[Any], name: str) -> Any:
    """Return a result that is not a tensor, if it is the same for every batch size.

    Raises:
        ProgramError: It differs, or is of another type than int, float, str and None.
    """
    first, second = values
    if not isinstance(first, (int, float, str, type(None))):
        raise ProgramError(
            f"{name} returns a {type(first).__name__}: calls of a program return tensors in tuples, lists and dicts"
        )
    if first != second:
        raise ProgramError(
            f"{name} returns a number that depends on the batch size: compute it inside a module or function that the "
            "program calls"
        )
    return first
