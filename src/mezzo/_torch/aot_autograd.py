"""AOTAutograd: forward and backward of a captured graph, traced into aten operators.

Why: graph mode traces under the policy, so that the kernels of eager mode decide every cast; it
shows both graphs, and runs them operator by operator where there is no compiler.
Releases: 2.11 to 2.15. Imported when it is called: it loads half of the compiler.
Without it: no backend `aot_eager`, and no table of the operators of a captured step. Compiled code computes backward
passes of float32 parts in half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch.fx import GraphModule


def backward_outside_autocast() -> AbstractContextManager[Any]:
    """Return a context in which AOTAutograd traces backward passes outside of autocast, where a loop calls `backward`.

    By default it traces them under the autocast of the forward pass. Products of float32 gradients are half then.
    """
    from torch._functorch import config

    return cast(AbstractContextManager[Any], config.patch(backward_pass_autocast="off"))


def trace_and_run(
    module: GraphModule,
    inputs: Sequence[Any],
    tidy: Callable[[GraphModule], None],
    show: Callable[[GraphModule], None],
) -> Any:
    """Trace a graph, with its backward where gradients are on.

    Return a function that runs it operator by operator.

    Args:
        module: What Dynamo captured.
        inputs: Example inputs.
        tidy: Gets what was traced, forward and backward in one graph, and may change it.
        show: Gets the forward and then, in training, the backward.
    """
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import default_partition

    def split(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        tidy(joint)
        forward, backward = default_partition(joint, *args, **kwargs)
        show(forward)
        show(backward)
        return forward, backward

    def run_inference(gm: GraphModule, example_inputs: Any) -> Any:
        tidy(gm)
        show(gm)
        return run(gm, example_inputs)

    def run(gm: GraphModule, example_inputs: Any) -> Any:
        return make_boxed_func(gm.forward)

    with backward_outside_autocast():
        return aot_module_simplified(
            module, list(inputs), fw_compiler=run, bw_compiler=run, inference_compiler=run_inference, partition_fn=split
        )
