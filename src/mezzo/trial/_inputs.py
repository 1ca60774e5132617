"""Decides how to call a model with a batch: one argument, several, or named ones."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mezzo._torch.dynamo import uncompiled
from mezzo._torch.pytree import tree_leaves

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANYTHING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_BESIDE_TENSOR = {"torch", "typing", "Optional", "Union", "None", "NoneType"}


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a batch as `arguments_of` decides."""
    args, kwargs = arguments_of(model, inputs)
    try:
        return model(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        if len(args) == 1 and isinstance(args[0], (tuple, list)):
            error.add_note(
                f"mezzo: the model was called with the {type(inputs).__name__} of {len(inputs)} inputs as one argument; pass "
                "a dict of named arguments if it takes several"
            )
        raise


def arguments_of(model: nn.Module, inputs: Any) -> Arguments:
    """Return the positional and named arguments for a call of the model.

    If `forward` accepts them, a tuple or list holds positional arguments and a mapping named ones.
    Otherwise `inputs` is the only argument. If both are possible (`forward(x, mask=None)`,
    `forward(*args, **kwargs)`), these rules decide:

    - A tuple holds positional arguments if `forward` has as many parameters without a default, or
      if its first parameter is annotated as a tensor. A list with one item is the only argument.
    - A mapping holds named arguments if one of its keys is the name of a parameter.
    - Otherwise `inputs` is the only argument. A dict of named arguments is never ambiguous.

    For wrappers such as torch.compile and DataParallel, the wrapped model decides.

    >>> arguments_of(nn.Bilinear(2, 2, 1), ("a", "b")), arguments_of(nn.Linear(2, 2), ("a", "b"))
    ((('a', 'b'), {}), ((('a', 'b'),), {}))
    >>> arguments_of(nn.Linear(2, 2), {"input": "a"}), arguments_of(nn.Linear(2, 2), {"image": "a"})
    (((), {'input': 'a'}), (({'image': 'a'},), {}))
    """
    signature = _signature_of(model)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        if _holds_positional(signature, inputs):
            return tuple(inputs), {}
    elif (
        isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs) and _holds_named(signature, inputs)
    ):
        return (), dict(inputs)
    return (inputs,), {}


def _signature_of(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of `forward`, or None if it has none, such as a scripted module."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        signature = None
    inner = uncompiled(model)
    if inner is None and signature is not None and {each.kind for each in signature.parameters.values()} == _ANYTHING:
        inner = getattr(model, "module", None)
    return _signature_of(inner) if isinstance(inner, nn.Module) else signature


def _holds_positional(signature: inspect.Signature | None, inputs: tuple[Any, ...] | list[Any]) -> bool:
    if signature is None:
        return isinstance(inputs, tuple)
    if not _binds(signature, *inputs) or not _binds(signature, inputs):
        return _binds(signature, *inputs)
    if isinstance(inputs, list) and len(inputs) == 1:
        return False
    positional = [each for each in signature.parameters.values() if each.kind in _POSITIONAL]
    required = [each for each in positional if each.default is each.empty]
    return len(required) == len(inputs) or (bool(positional) and _is_tensor(positional[0].annotation))


def _holds_named(signature: inspect.Signature | None, inputs: Mapping[str, Any]) -> bool:
    if signature is None:
        return True
    is_one_argument_too = _binds(signature, inputs)
    return _binds(signature, **inputs) and (
        not is_one_argument_too or any(key in signature.parameters for key in inputs)
    )


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _is_tensor(annotation: Any) -> bool:
    """Return whether an annotation allows only a tensor or None."""
    if annotation is inspect.Parameter.empty:
        return False
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    words = set(re.findall(r"\w+", text)) - _BESIDE_TENSOR
    return bool(words) and all(word.endswith("Tensor") for word in words)


def batch_size_of(inputs: Any, targets: Any = None) -> int | None:
    """Return the first size that all tensors of the batch share.

    Return None if there are no tensors, or if their first sizes differ.

    >>> import torch
    >>> batch_size_of({"scale": torch.ones(()), "image": torch.ones(4, 3)}, torch.ones(4))
    4
    """
    of_inputs, of_targets = (
        {leaf.shape[0] for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()}
        for tree in (inputs, targets)
    )
    return next(iter(of_inputs)) if len(of_inputs) == 1 and of_targets <= of_inputs else None
