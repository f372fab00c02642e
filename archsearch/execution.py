"""How the work of a population is launched: eagerly, captured in CUDA graphs, or compiled as well.

A function is compiled by tracing it once (`make_fx`): vmap, autograd and custom autograd functions
have run by then, so any plain module can be compiled, forward and backward as one graph, and
Inductor fuses what it can. Python is not analysed: shapes are fixed, and so is every branch.

What was compiled is found again by other processes, in Inductor's own cache on disk
(`TORCHINDUCTOR_CACHE_DIR`). Its key holds the graph, shapes, versions and device, but a custom op
only by its name; so the key is given the hash of all kernels' source as well. Inductor passes its
cache by, without a word, where no shape environment is given, as outside `torch.compile`. Custom
ops outside `archsearch_kernels` are not hashed. Knows nothing of models.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from archsearch.kernel_check import source_hash
from archsearch.spec import Execution

_WARM_UP_RUNS = 2


def default_execution(device: torch.device) -> Execution:
    """Compiled on CUDA; eager on a CPU, where compiling takes longer than short trials."""
    return "compiled" if device.type == "cuda" else "eager"


def traced(function: Callable[..., Any], *arguments: Any) -> GraphModule:
    """Trace a function for arguments of these shapes.

    Args:
        function: of tensors, and of dictionaries of them, to a tuple of tensors; it changes none of
            its arguments. Other tensors that it reads are constants from then on.
    """

    def free(*given: Any) -> Any:
        return function(*given)  # the tracer counts the `self` of a method as an argument

    return make_fx(free, tracing_mode="real")(*arguments)


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """Trace a function (see `traced`) and compile the trace, or load what was compiled before."""
    graph = traced(function, *arguments)
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    tagged = torch.compiler.config.patch(cache_key_tag=source_hash())  # type: ignore[attr-defined]
    with tracing(TracingContext(fake)), tagged:
        result: Callable[..., Any] = torch._inductor.compile(graph, list(arguments))
    return result


class Launcher:
    """Runs pieces of work over and over, each under a key, in one of the ways of this module.

    Captured work shares one memory pool: pieces run one after the other, and nothing that one
    leaves behind lies in the pool.
    """

    def __init__(self, execution: Execution, device: torch.device) -> None:
        self.device = device
        self.compiles = execution == "compiled"
        self.captures = execution != "eager" and device.type == "cuda"
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._functions: dict[object, Callable[..., Any]] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.captures else None

    def compiled(self, key: object, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function; if this launcher compiles, as compiled for the key's first arguments."""
        if not self.compiles:
            return function(*arguments)
        if key not in self._functions:
            self._functions[key] = compiled(function, *arguments)
        return self._functions[key](*arguments)

    def run(self, key: object, work: Callable[[], None], changed: Sequence[Tensor]) -> None:
        """Do a piece of work, captured at its first time if this launcher captures.

        Args:
            changed: every tensor that the work changes; warm-up before the capture undoes it.
        """
        if not self.captures:
            work()
            return
        if key not in self._graphs:
            self._graphs[key] = self._capture(work, changed)
        self._graphs[key].replay()

    def _capture(self, work: Callable[[], None], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        before = [tensor.clone() for tensor in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                work()
                for tensor, value in zip(changed, before, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph
