"""Rewrites of an ONNX model that make CPU runtimes faster.

Each rewrite keeps the result up to rounding; verification of the export checks it. Measurements are
in benchmarks/infer_x86_202611.md.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo.export import LABELS_LAST

ALIGNED = 4
"""ONNX Runtime uses its fast convolutions only if the number of channels is a multiple of this."""

#: Operators that apply the same function to every channel of their first input.
_CHANNELWISE = frozenset({"Relu", "HardSwish", "HardSigmoid", "Sigmoid", "Clip", "Resize", "MaxPool", "AveragePool"})

Slots = tuple[int, ...]
"""For each channel of a padded tensor: the index of the original channel, or -1 for padding."""


def rewrite(model: Any) -> Any:
    """Apply all rewrites to an ONNX model in place; return it."""
    for change in (put_labels_last, mean_by_convolution, pad_channels):
        graph = _Graph(model.graph)  # rebuild the lookups after each change
        change(graph)
        graph.drop_unused()
    return model


class _Graph:
    """An ONNX graph with lookups of constants, producers, users and shapes."""

    def __init__(self, graph: Any) -> None:
        import onnx

        self._onnx = onnx
        self.proto = graph
        self.constants: dict[str, NDArray[Any]] = {
            tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer
        }
        self.producer = {name: node for node in graph.node for name in node.output}
        self.users: dict[str, list[Any]] = defaultdict(list)
        for node in graph.node:
            for name in node.input:
                self.users[name].append(node)
        self._shapes = {
            value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self._types = {
            value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self._names = {*self.producer, *self.constants}

    def is_float32(self, name: str) -> bool:
        """Whether a value is known to be float32."""
        return bool(self._types.get(name) == self._onnx.TensorProto.FLOAT)

    def shape(self, name: str) -> Sequence[int]:
        """Return the sizes of a value, 0 for free ones; () if unknown."""
        return self._shapes.get(name, ())

    def set_channels(self, name: str, count: int) -> None:
        """Set the number of channels of a value, here and in the file."""
        shape = self._shapes.get(name)
        if shape is not None and len(shape) > 1:
            self._shapes[name] = [shape[0], count, *shape[2:]]
        for value in self.proto.value_info:
            if value.name == name:
                value.type.tensor_type.shape.dim[1].dim_value = count

    def is_output(self, name: str) -> bool:
        """Return whether a value is an output of the model."""
        return any(value.name == name for value in self.proto.output)

    def attribute(self, node: Any, name: str, default: Any) -> Any:
        """Return an attribute of a node."""
        for item in node.attribute:
            if item.name == name:
                return self._onnx.helper.get_attribute_value(item)
        return default

    def set_attribute(self, node: Any, name: str, value: Any) -> None:
        """Set an attribute of a node."""
        kept = [item for item in node.attribute if item.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, self._onnx.helper.make_attribute(name, value)])

    def _fresh(self, hint: str) -> str:
        name = next(name for n in itertools.count(1) if (name := f"{hint}_{n}") not in self._names)
        self._names.add(name)
        return name

    def add_constant(self, value: NDArray[Any], hint: str) -> str:
        """Add a constant; return its name."""
        name = self._fresh(f"mezzo_{hint}")
        self.proto.initializer.append(self._onnx.numpy_helper.from_array(value, name))
        self.constants[name] = value
        return name

    def insert(self, before: Any, kind: str, inputs: Sequence[str], hint: str, **attributes: Any) -> str:
        """Add a node in front of another one; return the name of its output."""
        name = self._fresh(hint)
        made = self._onnx.helper.make_node(kind, list(inputs), [name], name=name, **attributes)
        place = next(n for n, node in enumerate(self.proto.node) if node.output[0] == before.output[0])
        self.proto.node.insert(place, made)
        self.producer[name] = made
        return name

    def drop_unused(self) -> None:
        """Remove unused constants."""
        used = {name for node in self.proto.node for name in node.input}
        kept = [tensor for tensor in self.proto.initializer if tensor.name in used]
        del self.proto.initializer[:]
        self.proto.initializer.extend(kept)

    def nodes(self, kind: str) -> list[Any]:
        """Return the nodes of a kind."""
        return [node for node in self.proto.node if node.op_type == kind]


def put_labels_last(graph: _Graph) -> None:
    """Move the classes to the last axis before the final resize and arg-max.

    Arg-max over planes reads memory in strides. With the classes last, the resize writes and the
    arg-max reads memory in order.
    """
    for best in graph.nodes("ArgMax"):
        resize = graph.producer.get(best.input[0])
        if resize is None or resize.op_type != "Resize" or graph.attribute(best, "axis", 0) != 1:
            continue
        alone = len(graph.users[resize.output[0]]) == 1 and not graph.is_output(resize.output[0])
        by_sizes = len(resize.input) == 4 and bool(resize.input[3]) and not any(resize.input[1:3])
        if not alone or not by_sizes or graph.attribute(best, "keepdims", 1) != 0:
            continue
        order = graph.add_constant(np.array([0, 2, 3, 1], np.int64), "order")
        resize.input[0] = graph.insert(resize, "Transpose", [resize.input[0]], LABELS_LAST, perm=[0, 2, 3, 1])
        resize.input[3] = graph.insert(resize, "Gather", [resize.input[3], order], "mezzo_sizes")
        graph.set_attribute(best, "axis", 3)
        _forget_shape(graph, resize.output[0])


def mean_by_convolution(graph: _Graph) -> None:
    """Replace means over channels by convolutions, which read the blocked layout directly."""
    for node in graph.nodes("ReduceMean"):
        axes = graph.constants.get(node.input[1]) if len(node.input) > 1 else None
        shape = graph.shape(node.input[0])
        over_channels = axes is not None and axes.tolist() == [1] and len(shape) == 4 and bool(shape[1])
        if not over_channels or not graph.attribute(node, "keepdims", 1) or not graph.is_float32(node.input[0]):
            continue
        weight = graph.add_constant(np.full((1, shape[1], 1, 1), 1 / shape[1], np.float32), "mean")
        node.op_type = "Conv"
        node.input[1] = weight
        del node.attribute[:]


def pad_channels(graph: _Graph) -> None:
    """Pad channels of convolutions with zeros to a multiple of ALIGNED, except in outputs."""
    for node in graph.nodes("Conv"):
        weight = graph.constants.get(node.input[1])
        if weight is None or graph.attribute(node, "group", 1) != 1 or weight.shape[0] % ALIGNED == 0:
            continue
        if not _has_known_bias(graph, node):
            continue
        count = weight.shape[0]
        slots: Slots = tuple(range(count)) + (-1,) * (-count % ALIGNED)
        changes = _followers(graph, node.output[0], slots)
        if changes:
            _pad_constants(graph, node, slots)
            for change in changes:
                change()


def _has_known_bias(graph: _Graph, node: Any) -> bool:
    return len(node.input) < 3 or not node.input[2] or node.input[2] in graph.constants


def _followers(graph: _Graph, first: str, slots: Slots) -> list[Callable[[], None]] | None:
    """Return the changes that a padded value requires; None if the padding would be visible or useless."""
    waiting = [(first, slots)]
    changes: list[Callable[[], None]] = []
    reached: set[str] = set()
    gains = False
    while waiting:
        name, now = waiting.pop()
        if graph.is_output(name):
            return None
        for user in graph.users[name]:
            following = _behind(graph, user, name, now)
            if following is None:
                return None
            if user.output[0] in reached:
                return None  # a value concatenated with itself: only one path would be padded
            reached.add(user.output[0])
            passed, change = following
            changes += [change] if change is not None else []
            gains = gains or (change is not None and passed is not None)  # a depthwise convolution
            if passed is not None:
                waiting.append((user.output[0], passed))
        changes.append(functools.partial(graph.set_channels, name, len(now)))
    return changes if gains else None


def _behind(graph: _Graph, user: Any, name: str, slots: Slots) -> tuple[Slots | None, Callable[[], None] | None] | None:
    """Return the channels that a node passes on and its changes; None if it cannot take padding."""
    if len(user.output) != 1:  # indices of maxima depend on the channels
        return None
    if user.op_type == "Concat":
        if graph.attribute(user, "axis", 0) != 1 or list(user.input).count(name) != 1:
            return None
        return _joined(graph, user, name, slots)
    if user.op_type in _CHANNELWISE and user.input[0] == name:
        if user.op_type == "Resize" and len(user.input) == 4 and user.input[3]:
            return None  # its sizes depend on the channels
        return slots, None
    if user.op_type != "Conv" or user.input[0] != name or user.input[1] not in graph.constants:
        return None
    group, weight = graph.attribute(user, "group", 1), graph.constants[user.input[1]]
    if group == 1:
        return None, lambda: _pad_inputs(graph, user, slots)
    if group == weight.shape[0] and weight.shape[1] == 1 and _has_known_bias(graph, user):
        return slots, lambda: _pad_depthwise(graph, user, slots)
    return None


def _joined(graph: _Graph, user: Any, name: str, slots: Slots) -> tuple[Slots, None] | None:
    """Return the channels of concatenated values."""
    joined: list[int] = []
    seen = 0
    for each in user.input:
        shape = graph.shape(each)
        if len(shape) != 4 or (not shape[1] and each != name):
            return None
        own = slots if each == name else tuple(range(shape[1]))
        joined += [slot + seen if slot >= 0 else -1 for slot in own]
        seen += sum(slot >= 0 for slot in own)
    return tuple(joined), None


def _padded(values: NDArray[Any], slots: Slots, axis: int) -> NDArray[Any]:
    """Return the values in the order of the slots, zeros for padding."""
    taken = np.take(values, [max(slot, 0) for slot in slots], axis=axis)
    empty = [number for number, slot in enumerate(slots) if slot < 0]
    if empty:
        place: list[Any] = [slice(None)] * values.ndim
        place[axis] = empty
        taken[tuple(place)] = 0
    return taken


def _pad_constants(graph: _Graph, node: Any, slots: Slots) -> None:
    node.input[1] = graph.add_constant(_padded(graph.constants[node.input[1]], slots, 0), "weight")
    if len(node.input) > 2 and node.input[2]:
        node.input[2] = graph.add_constant(_padded(graph.constants[node.input[2]], slots, 0), "bias")


def _pad_inputs(graph: _Graph, node: Any, slots: Slots) -> None:
    node.input[1] = graph.add_constant(_padded(graph.constants[node.input[1]], slots, 1), "weight")


def _pad_depthwise(graph: _Graph, node: Any, slots: Slots) -> None:
    _pad_constants(graph, node, slots)
    graph.set_attribute(node, "group", len(slots))


def _forget_shape(graph: _Graph, name: str) -> None:
    """Remove the outdated shape of a value from the file."""
    kept = [value for value in graph.proto.value_info if value.name != name]
    del graph.proto.value_info[:]
    graph.proto.value_info.extend(kept)
