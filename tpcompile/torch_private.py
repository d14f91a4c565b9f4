"""Every use of torch that is not public API, each with the reason beside it."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the ops' fake kernels
import torch.utils.checkpoint
from torch import (
    _guards,  # whether Dynamo compiles; imported by torch itself
    fx,
)
from torch._C import DisableTorchFunction  # documented, not exported
from torch._C import _set_grad_enabled as set_grad_enabled_call  # what no_grad calls
from torch._dynamo.backends.registry import lookup_backend  # a backend by its name
from torch._dynamo.eval_frame import skip_code  # see skip_frames
from torch._dynamo.exc import ShortenTraceback  # see error_through_dynamo
from torch._ops import HigherOrderOperator, OpOverload  # types of call targets, public in docs only
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # what tracing runs on
from torch.amp.autocast_mode import _enter_autocast as enter_autocast_call  # in graphs of Dynamo
from torch.amp.autocast_mode import _exit_autocast as exit_autocast_call
from torch.distributed.tensor import DTensor
from torch.fx.experimental import _config as fx_config  # settings of symbolic sizes
from torch.multiprocessing.reductions import StorageWeakRef  # undocumented
from torch.utils import _pytree as pytree  # nested arguments of graph nodes; no public twin for it
from torch.utils._python_dispatch import TorchDispatchMode  # documented, not exported

__all__ = [
    "DisableTorchFunction",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "apply_function",
    "call_module",
    "checkpoint_hook",
    "compiler_for",
    "dtensor_as",
    "dtensor_of",
    "enter_autocast_call",
    "error_through_dynamo",
    "exit_autocast_call",
    "functional_collectives",
    "gather_matches",
    "graph_end",
    "group_for",
    "is_batched",
    "is_dynamo_compiling",
    "lengths_of_one",
    "local_of",
    "post_grad_backend",
    "post_grad_graphs",
    "pytree",
    "replace_call",
    "same_storage",
    "scatter_matches",
    "set_checkpoint_hook",
    "set_function_apply",
    "set_grad_enabled_call",
    "shape_guards",
    "skip_frames",
    "spec_of",
    "sym_expr",
    "sym_int",
]

functional_collectives = torch.ops._c10d_functional
"""The collectives that torch.compile traces whole; their public wrappers cost 100 us a call more
and all_reduce's registered backward sums a gradient that is already replicated."""


def group_for(name: str) -> Any:
    """The process group of a name, which is what an axis and functional collectives go by."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    return resolve(name)


def sym_expr(size: Any) -> Any:
    """The sympy expression of a SymInt: public SymInts can be computed with but not read."""
    return size.node.expr


def sym_int(fake_mode: Any, expr: Any, hint: int) -> Any:
    """The SymInt of an expression of a trace's symbols: public code can only compute one."""
    return fake_mode.shape_env.create_symintnode(expr, hint=hint)


def shape_guards(fake_mode: Any) -> list[Any]:
    """Conditions (sympy) that tracing assumed; export keeps them on its shape environment only."""
    env = fake_mode.shape_env
    return [] if env is None else [env.simplify(guard.expr) for guard in env.guards]


def lengths_of_one() -> Any:
    """Trace with sizes that may be 1 or more; export's public settings make 1 a size of its own."""
    config: Any = fx_config
    return config.patch(backed_size_oblivious=True)


def checkpoint_hook() -> Any:
    """What non-reentrant checkpoint calls; `checkpoint` itself is often bound before we come."""
    return torch.utils.checkpoint._checkpoint_without_reentrant_generator


def set_checkpoint_hook(hook: Any) -> None:
    """Replace what `checkpoint_hook` gives."""
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = hook


def apply_function(cls: Any, *args: Any) -> Any:
    """Run a custom autograd function, whatever `set_function_apply` has put in its place."""
    return vars(torch._C._FunctionBase)["apply"].__get__(None, cls)(*args)


def set_function_apply(apply: Any) -> None:
    """Put `apply(cls, *args)` under the `apply` of all custom functions; None takes it away.

    Under, because models often keep `Function.apply` itself, bound before we come.
    """
    below: Any = torch.autograd.function._SingleLevelFunction
    if apply is None:
        del below.apply
    else:
        below.apply = classmethod(apply)


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory; works for fake ones, which have no data_ptr."""
    return StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())


def is_batched(x: torch.Tensor) -> bool:
    """Whether vmap or is_grads_batched runs: two kinds of tensors, no public test of either."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return functorch.is_batchedtensor(x) or functorch.is_legacy_batchedtensor(x)


def local_of(dtensor: DTensor) -> torch.Tensor:
    """A rank's part; `to_local` under no_grad takes ten times as long."""
    return dtensor._local_tensor


def spec_of(dtensor: DTensor) -> Any:
    """Mesh, placements, shape and strides of a DTensor."""
    return dtensor._spec


def dtensor_of(local: torch.Tensor, spec: Any) -> DTensor:
    """A DTensor of a rank's part: the public from_local works its shape out anew."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def dtensor_as(cls: Any, dtensor: DTensor) -> Any:
    """The same DTensor as a subclass: the public constructors make the base class only."""
    return cls.__new__(cls, dtensor._local_tensor, dtensor._spec, requires_grad=False)


class _Reached(Exception):
    """Ends Inductor's passes."""


def post_grad_backend(found: list[tuple[bool, fx.Graph]]) -> Any:
    """A backend of torch.compile that notes (is backward, graph) and runs them as they are.

    The graphs are those that Inductor's micro-pipeline pass gets, which it has no public way to
    show: its passes before that one change views and drop ops, so that a matcher sees what it sees
    under torch.compile.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import post_grad as module

    post_grad: Any = module

    def note(inner: fx.GraphModule, given: Any, **options: Any) -> Any:
        def stop(graph: fx.Graph) -> None:
            found.append((bool(options.get("is_backward")), graph))
            raise _Reached

        post_grad.view_to_reshape(inner)
        run: Any = post_grad.micro_pipeline_tp_pass
        post_grad.micro_pipeline_tp_pass = stop
        try:
            with config.patch(_micro_pipeline_tp=True), suppress(_Reached):
                post_grad.post_grad_passes(inner, bool(options.get("is_inference")))
        finally:
            post_grad.micro_pipeline_tp_pass = run
        inner.recompile()
        call: Any = lambda args: inner(*args)  # noqa: E731  (takes an attribute)
        call._boxed_call = True
        return call

    return partial(compile_fx, inner_compile=note)


def post_grad_graphs(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor], fake_mode: Any
) -> list[tuple[bool, fx.Graph]]:
    """What `post_grad_backend` notes of a module, forward and backward, without running it."""
    from torch._functorch import config

    found: list[tuple[bool, fx.Graph]] = []
    backend = post_grad_backend(found)
    flag = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True  # only Dynamo sets it, which does not run here
    try:
        with config.patch(force_non_lazy_backward_lowering=True), fake_mode:
            backend(module, inputs)
    finally:
        torch.compiler._is_compiling_flag = flag
    return found


def gather_matches(graph: fx.Graph) -> dict[fx.Node, list[Any]]:
    """All-gathers that Inductor's matcher finds -> the matmuls of each that it can fuse.

    As `fuse_all_gather_matmul`, which does nothing without symmetric memory and does not say why.
    """
    from torch._inductor.fx_passes import micro_pipeline_tp as matcher

    found = {}
    for match in matcher.find_all_gather_patterns(graph):
        shard = match.shard_node.meta["val"]
        matmuls = [
            matmul.nodes
            for matmul in matcher._find_consumer_matmuls(match.res_node)
            if match.res_node not in matmul.arg_ancestor_nodes
        ]
        small = match.gather_dim in (-1, shard.ndim - 1) and shard.shape[-1] < 1024
        found[match.ag_node] = [] if small else matmuls
    return found


def scatter_matches(graph: fx.Graph) -> dict[fx.Node, Any]:
    """Reduce-scatters that Inductor's matcher finds -> the matmul it can fuse, or None."""
    from torch._inductor.fx_passes import micro_pipeline_tp as matcher

    found = {}
    for match in matcher.find_reduce_scatter_patterns(graph):
        nodes = getattr(match.match, "nodes", match.match)
        producer = matcher._find_producer_matmul(match.input_node)
        alone = len(match.input_node.users) == 1 or all(u in nodes for u in match.input_node.users)
        found[match.reduce_scatter_node] = producer if alone else None
    return found


def is_dynamo_compiling() -> bool:
    """Whether Dynamo traces, calls a backend or makes guards: `is_compiling` tells traced code."""
    return _guards.CompileContext.current_compile_id() is not None


def skip_frames(*functions: Any) -> None:
    """Let Dynamo inline functions, but not compile them where compiled code calls them.

    `torch.compiler.disable` would break the graph of a caller.
    """
    for function in functions:
        skip_code(function.__code__)


def error_through_dynamo(error: Exception) -> Exception:
    """The same error, of its class and of one that Dynamo lets pass: it wraps all others."""
    kind = type(error)
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    bases: tuple[Any, ...] = (kind, ShortenTraceback)
    both = type(kind.__name__, bases, own)
    new = both.__new__(both, *error.args)
    new.__dict__.update(vars(error), first_useful_frame=None)
    return new


def call_module(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What calling a module does, whatever `replace_call` has put in its place."""
    return module._call_impl(*args, **kwargs)


def replace_call(module: Any, call: Any) -> None:
    """Let a module's calls go to `call`, where Module.compile has put nothing yet.

    A class of its own, or a wrapper, would be part of what Dynamo traces; this is not, and is no
    part of copies.
    """
    if module._compiled_call_impl is None:
        module.__dict__["_compiled_call_impl"] = call


def graph_end(gm: Any) -> tuple[bool, str, Any]:
    """(whether the graph broke, why it ends, the user's frames) of a graph from Dynamo."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None:
        return False, "", ()
    return reason.graph_break, reason.reason, reason.user_stack


def compiler_for(name: str) -> Any:
    """A registered backend as a function of a graph from Dynamo: it has no public twin."""
    return lookup_backend(name)
