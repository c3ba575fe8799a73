"""Unquantized layers of one input as one matmul of a compiled step, by torch: queries, keys, values; a gate and what it gates.

    join_weights_(model)
    step = torch.compile(step, options=step_options())

For one row of inputs a matmul by each weight reads keys and values at a third of the memory's rate, and adds parts in a launch
of its own. Weights that follow each other in memory are one matrix without a copy: `join_weights_` moves them so, once, and the
pass (`JoinMatmuls`) puts the operator of this module in place of their matmuls. It looks at where weights lie when it runs, and
multiplies by those at once that follow each other. Results are those of torch's matmul by the joined matrix, whose
sums may be added in another order than by each weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional

from ao_lab.compile.fused_linears import FuseLinears, compile_options, source
from fast.ops import no_gradient, register

aten = torch.ops.aten
#: Names of layers of one module that have one input, in the order of transformers' decoders.
NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: The most rows of inputs: more of them keep the GPU busy by any one weight.
MOST_ROWS = 16
#: Where matmuls are joined, and in which dtypes.
DEVICES, DTYPES = ("cuda",), (torch.bfloat16, torch.float16)


def join_weights_(model: nn.Module) -> int:
    """Let weights of layers that multiply the same inputs follow each other in memory, in place; how many groups do now.

    Groups are the NAMES within one module, all of them `nn.Linear` without a bias on a GPU, their weights plain parameters of
    one dtype (bfloat16 or float16) and width. Values, shapes and names do not change; the
    memory of the weights does, so call it before anything records their addresses. Weights that follow each other already stay
    where they are. At most one group is held twice at a time. What a deep copy, a file or `model.to` makes lies apart again.
    """
    groups = [weights for module in model.modules() for weights in _groups(module)]
    for weights in groups:
        if whole_of(weights) is None:
            _join(weights)
    return len(groups)


def _groups(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The weights of a module's children that can be joined: each of its own."""
    children = dict(module.named_children())
    for names in NAMES:
        layers: list[Any] = [children[name] for name in names if name in children]
        if len(layers) == len(names) and all(map(_is_plain, layers)):
            weights = [layer.weight for layer in layers]
            kinds = {(w.dtype, w.device, w.shape[1], w.is_inference()) for w in weights}
            if len(kinds) == 1 and len(set(map(id, weights))) == len(names):
                yield weights


def _is_plain(layer: Any) -> bool:
    w: Any = layer.weight if type(layer) is nn.Linear and layer.bias is None else None
    if type(w) is not nn.Parameter:
        return False
    return w.dtype in DTYPES and w.device.type in DEVICES and w.is_contiguous() and w.numel() > 0


@torch.no_grad()
def _join(weights: Sequence[nn.Parameter]) -> None:
    # Whoever joins them, weights that can be trained stay so, and others as they are.
    with torch.inference_mode(weights[0].is_inference()):
        joined = torch.cat([weight.data for weight in weights])
        at = 0
        for weight in weights:
            weight.data = joined[at : at + len(weight)]
            at += len(weight)


def follow(first: Tensor, second: Tensor) -> bool:
    """Whether a weight lies behind another in one memory, without a gap."""
    return (
        first.is_contiguous()
        and second.is_contiguous()
        and first.data_ptr() + first.nbytes == second.data_ptr()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    )


def whole_of(weights: Sequence[Tensor]) -> Tensor | None:
    """The matrix that weights (N_i, K) are together, a view; None where they do not follow each other."""
    if not all(follow(first, second) for first, second in pairwise(weights)):
        return None
    first, rows = weights[0].detach(), sum(len(w) for w in weights)
    return first if len(weights) == 1 else first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def runs_of(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Weights in order, those together that follow each other."""
    runs = [[weights[0]]]
    for first, second in pairwise(weights):
        if follow(first, second):
            runs[-1].append(second)
        else:
            runs.append([second])
    return runs


def linear_joined_op(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x (M, K) times the transposes of weights (N_i, K), side by side: (M, sum of N_i), as torch's matmul rounds it.

    One matmul for all weights that follow each other.
    """
    made = [functional.linear(x, whole) for run in runs_of(weights) if (whole := whole_of(run)) is not None]
    return made[0] if len(made) == 1 else torch.cat(made, -1)


def _fake(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return x.new_empty((x.shape[0], sum(w.shape[0] for w in weights)))


LINEAR_JOINED_OP = register(
    "linear_joined", linear_joined_op, _fake, no_gradient("linear_joined", "call torch.nn.functional.linear"),
    schema="(Tensor x, Tensor[] weights) -> Tensor",
)  # fmt: skip


def weight_of(node: Node) -> Node | None:
    """The weight (N, K) of a node that is few rows times its transpose; None of others."""
    if node.op != "call_function" or node.target is not aten.mm.default:
        return None
    x, turned = node.args
    if not isinstance(turned, Node) or turned.target not in (aten.permute.default, aten.t.default):
        return None
    w = turned.args[0]
    if not isinstance(w, Node) or w.op != "placeholder" or not isinstance(x, Node):
        return None
    rows, weight = x.meta.get("val"), w.meta.get("val")
    return w if rows is not None and weight is not None and _is_taken(rows, weight) else None


def _is_taken(rows: Tensor, weight: Tensor) -> bool:
    """Whether rows of inputs are few, of a dtype and a device that are joined, and the weight's rows lie side by side."""
    few = isinstance(rows.shape[0], int) and 0 < rows.shape[0] <= MOST_ROWS
    return few and rows.dtype in DTYPES and rows.device.type in DEVICES and weight.is_contiguous()


def join_matmuls(graph: Graph) -> None:
    """Put one operator in place of the matmuls of each input by weights that are arguments of the program."""
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if weight_of(node) is not None:
            alike.setdefault(source(node.args[0]), []).append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            _fuse(graph, nodes)


def _fuse(graph: Graph, nodes: list[Node]) -> None:
    weights = [weight_of(node) for node in nodes]
    with graph.inserting_before(nodes[0]):
        result = graph.call_function(torch.ops.ao_lab.linear_joined.default, (nodes[0].args[0], weights))
        values = [node.meta["val"] for node in nodes]
        result.meta["val"] = torch.cat(values, -1)
        at = 0
        for node, value in zip(nodes, values, strict=True):
            end = at + value.shape[-1]
            part = graph.call_function(aten.slice.Tensor, (result, 1, at, end))
            part.meta.update(node.meta)
            part.meta["val"] = result.meta["val"][:, at:end]
            node.replace_all_uses_with(part)
            at = end
    for node in nodes:
        graph.erase_node(node)


class JoinMatmuls(FuseLinears):
    """The pass: that of quantized weights, then matmuls by others."""

    def __call__(self, graph: Graph) -> None:
        """Fuse matmuls in place."""
        super().__call__(graph)
        join_matmuls(graph)
        graph.lint()

    def uuid(self) -> str:
        """What the compiler's caches know this pass by: the texts of both."""
        return hashlib.sha256(super().uuid().encode() + Path(__file__).read_bytes()).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of the compiler's class a call that makes it."""
        return (joining_pass, ()) if type(self) is _inductor_class() else super().__reduce_ex__(protocol)


@cache
def _inductor_class() -> type[JoinMatmuls]:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return type("JoinMatmuls", (JoinMatmuls, CustomGraphPass), {})


def joining_pass() -> JoinMatmuls:
    """The pass as the compiler takes it. Pickles name this function."""
    return _inductor_class()()


def step_options() -> dict[str, Any]:
    """`compile_options`, with matmuls by unquantized weights of one input joined, too."""
    return {**compile_options(), "post_grad_custom_pre_pass": joining_pass()}


__all__ = [
    "JoinMatmuls",
    "join_matmuls",
    "join_weights_",
    "linear_joined_op",
    "runs_of",
    "step_options",
    "whole_of",
]
