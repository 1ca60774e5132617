"""Rewrites of an untrusted program: checks before operators that torch does not check enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ATEN = "torch.ops.aten."
#: Replace uninitialised memory, which may hold data of another program, by zeros.
_ZEROS = {
    "empty.memory_format": "zeros.default",
    "empty_like.default": "zeros_like.default",
    "new_empty.default": "new_zeros.default",
}
_MOST_LAYERS = 1000


class _Graph:
    """The graph of a program, with methods that add nodes."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._count = 0
        self.nodes: list[Any] = []

    def sizes(self, name: str) -> list[int | None]:
        """Return the sizes of a tensor from the file; None for a free size."""
        return [size.get("as_int") for size in self._graph["tensor_values"][name]["sizes"]]

    def tensor(self, operator: str, like: str, /, **arguments: Any) -> str:
        """Add a node; return the name of its output, whose metadata is a copy of that of `like`."""
        name = self._free("tensor_values")
        self._graph["tensor_values"][name] = self._graph["tensor_values"][like]
        self._add(operator, arguments, {"as_tensor": {"name": name}}, name)
        return name

    def size(self, tensor: str, axis: int) -> str:
        """Add a node for a size of a tensor; return its name."""
        name = self._free("sym_int_values")
        self._graph["sym_int_values"][name] = self._graph["tensor_values"][tensor]["sizes"][axis]
        self._add("sym_size.int", {"self": _tensor(tensor), "dim": _int(axis)}, {"as_sym_int": {"as_name": name}}, name)
        return name

    def _free(self, kind: str) -> str:
        while f"checked_{self._count}" in self._graph[kind]:
            self._count += 1
        self._count += 1
        return f"checked_{self._count - 1}"

    def _add(self, operator: str, arguments: dict[str, Any], output: Any, name: str) -> None:
        self.nodes.append(
            {
                "target": f"{_ATEN}{operator}",
                "inputs": [{"name": key, "arg": value, "kind": 1} for key, value in arguments.items()],
                "outputs": [output],
                "metadata": {},
                "is_hop_single_tensor_return": None,
                "name": name,
            }
        )


def rewrite(graph: Any) -> str | None:
    """Insert checks before unsafe operators, or replace them.

    Unsafe operators can read beyond their tensors, or return uninitialised memory.

    Args:
        graph: The graph in the JSON of `torch.export`; changed in place.

    Returns:
        Why the program is refused: no check exists for the arguments of an operator. None
        otherwise.
    """
    made = _Graph(graph)
    for node in graph["nodes"]:
        operator = str(node["target"]).removeprefix(_ATEN)
        if operator in _ZEROS:
            node["target"] = f"{_ATEN}{_ZEROS[operator]}"
            if operator == "empty.memory_format":
                node["inputs"] = [entry for entry in node["inputs"] if entry["name"] != "memory_format"]
        change = _CHANGES.get(operator)
        if change is None:
            made.nodes.append(node)
        elif problem := change(made, node):
            return problem
    graph["nodes"] = made.nodes
    return None


def _attention(graph: _Graph, node: Any) -> None:
    """Narrow the values of attention to the number of keys: torch 2.13 reads beyond shorter ones.

    `narrow` raises if there are fewer values than keys, and costs nothing if the numbers are equal.
    """
    arguments = _arguments(node)
    keys, values = (arguments[name]["as_tensor"]["name"] for name in ("key", "value"))
    count = graph.size(keys, -2)
    arguments["value"]["as_tensor"] = {"name": _narrow(graph, values, -2, count)}
    graph.nodes.append(node)


def _lstm(graph: _Graph, node: Any) -> str | None:
    """Force LSTM weights and states to the shapes and dtype that torch does not check.

    `reshape` raises if the number of elements differs, and costs nothing if the shape is right.
    """
    arguments = _arguments(node)
    layers = arguments["num_layers"]["as_int"]
    directions = 2 if arguments["bidirectional"]["as_bool"] is not False else 1
    kinds = 4 if arguments["has_biases"]["as_bool"] is not False else 2
    weights = [tensor["name"] for tensor in arguments["params"]["as_tensors"]]
    states = [tensor["name"] for tensor in arguments["hx"]["as_tensors"]]
    if type(layers) is not int or not 0 < layers < _MOST_LAYERS or len(weights) != layers * directions * kinds:
        return "the operator 'lstm.input' must have no projections; use the ONNX file of this network"
    images = arguments["input"]["as_tensor"]["name"]
    is_batch_first = arguments["batch_first"]["as_bool"] is not False
    said = graph.sizes(images)
    hidden = graph.sizes(weights[1])[-1]
    steps = said[1 if is_batch_first else 0] if len(said) == 3 else None
    width = said[-1]
    if hidden is None or width is None or steps is None or len(states) != 2:
        return "the operator 'lstm.input' must have sequences of fixed length; use the ONNX file of this network"
    shape = [-1, steps, width] if is_batch_first else [steps, -1, width]
    images = graph.tensor("reshape.default", images, self=_tensor(images), shape={"as_ints": shape})
    batch = graph.size(images, 0 if is_batch_first else 1)

    def shaped(tensor: str, sizes: list[int]) -> str:
        tensor = graph.tensor("reshape.default", tensor, self=_tensor(tensor), shape={"as_ints": sizes})
        tensor = graph.tensor("contiguous.default", tensor, self=_tensor(tensor))
        return graph.tensor("type_as.default", tensor, self=_tensor(tensor), other=_tensor(images))

    for number, weight in enumerate(weights):
        layer, kind = divmod(number, kinds)
        inputs = width if layer < directions else directions * hidden
        weights[number] = shaped(weight, [4 * hidden, *([inputs], [hidden], [], [])[kind]])
    for number, state in enumerate(states):
        whole = shaped(state, [layers * directions, -1, hidden])
        states[number] = _narrow(graph, whole, 1, batch)
    arguments["input"]["as_tensor"] = {"name": images}
    arguments["params"]["as_tensors"] = [{"name": name} for name in weights]
    arguments["hx"]["as_tensors"] = [{"name": name} for name in states]
    graph.nodes.append(node)
    return None


def _weight_norm(graph: _Graph, node: Any) -> str | None:
    """Replace the operator by `g * v / |v|`: torch writes a norm per row of `v` into memory like `g`."""
    arguments = _arguments(node)
    weight, lengths = (arguments[name]["as_tensor"]["name"] for name in ("v", "g"))
    axis = arguments.get("dim", {"as_int": 0})["as_int"]
    others = [other for other in range(len(graph.sizes(weight))) if other != axis]
    if type(axis) is not int or axis < -1:
        return f"the operator '_weight_norm' has the invalid axis {axis!r}"
    if others:
        over = {"as_ints": others} if axis >= 0 else {"as_none": True}
        more = {"ord": _int(2), "dim": over, "keepdim": {"as_bool": axis >= 0}}
        norm = graph.tensor("linalg_vector_norm.default", lengths, self=_tensor(weight), **more)
    else:
        norm = graph.tensor("abs.default", lengths, self=_tensor(weight))
    ratio = graph.tensor("div.Tensor", lengths, self=_tensor(lengths), other=_tensor(norm))
    node["target"] = f"{_ATEN}mul.Tensor"
    node["inputs"] = [
        {"name": name, "arg": _tensor(tensor), "kind": 1} for name, tensor in (("self", weight), ("other", ratio))
    ]
    graph.nodes.append(node)
    return None


def _narrow(graph: _Graph, tensor: str, axis: int, length: str) -> str:
    """Narrow a tensor along an axis; the program raises at run time if the tensor is shorter."""
    until = {"as_sym_int": {"as_name": length}}
    cut = graph.tensor("narrow.default", tensor, self=_tensor(tensor), dim=_int(axis), start=_int(0), length=until)
    return graph.tensor("contiguous.default", cut, self=_tensor(cut)) if axis >= 0 else cut


def _arguments(node: Any) -> dict[str, Any]:
    return {entry["name"]: entry["arg"] for entry in node["inputs"]}


def _tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def _int(value: int) -> dict[str, Any]:
    return {"as_int": value}


_CHANGES: dict[str, Callable[[_Graph, Any], str | None]] = {
    "scaled_dot_product_attention.default": _attention,
    "lstm.input": _lstm,
    "_weight_norm.default": _weight_norm,
}
