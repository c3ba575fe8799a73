"""silu(gate) * up in a compiled graph, found by what the compiler makes of silu in the version of torch at hand."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
#: Operators that give the same elements in the same order another shape.
SHAPES = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
#: Numbers that a product and silu are fused for.
HALVES = (torch.bfloat16, torch.float16)


def behind_shapes(value: Any, seen: set[Node]) -> Any:
    """What a value is in another shape; the nodes that give it one are noted in `seen`."""
    while isinstance(value, Node) and value.op == "call_function" and value.target in SHAPES:
        seen.add(value)
        value = value.args[0]
    return value


@lru_cache(maxsize=8)
def silu_graph(dtype: torch.dtype) -> Graph:
    """The graph of silu of one tensor, decomposed as the compiler does."""
    from torch._inductor.decomposition import select_decomp_table

    # A function of one argument: silu itself has another, whether it writes in place.
    result = make_fx(lambda v: torch.nn.functional.silu(v), select_decomp_table())(
        torch.zeros(1, dtype=dtype)
    )
    graph: Graph = result.graph
    return graph


def silu_of(value: Any, seen: set[Node]) -> Any:
    """What a node is the silu of, None if it is none; the nodes on the way are noted in `seen`."""
    found = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(found, torch.Tensor) or found.dtype not in HALVES:
        return None
    graph = silu_graph(found.dtype)
    start, *_, end = graph.nodes
    bound: dict[Node, Any] = {}
    if not _alike(value, end.args[0], bound):
        return None
    seen.update(node for pattern, node in bound.items() if pattern is not start)
    return bound.get(start)


def _alike(node: Any, pattern: Any, bound: dict[Node, Any]) -> bool:
    """Whether a value is computed as the pattern says; what each of its nodes stands for goes into `bound`."""
    if not isinstance(pattern, Node):
        return bool(node == pattern)
    if pattern in bound:
        return bound[pattern] is node
    if pattern.op != "placeholder":
        same = isinstance(node, Node) and node.target == pattern.target and node.kwargs == pattern.kwargs
        if not same or len(node.args) != len(pattern.args):
            return False
        if not all(_alike(one, other, bound) for one, other in zip(node.args, pattern.args, strict=True)):
            return False
    bound[pattern] = node
    return True


def gated(node: Node) -> tuple[Node, Node, set[Node]] | None:
    """(gate, up, nodes between) of a node that is silu(gate) * up and the only one that wants them; None for others."""
    if node.op != "call_function" or node.target is not aten.mul.Tensor:
        return None
    for first, second in (node.args, node.args[::-1]):
        seen: set[Node] = set()
        gate = behind_shapes(silu_of(behind_shapes(first, seen), seen), seen)
        up = behind_shapes(second, seen)
        if not (isinstance(gate, Node) and isinstance(up, Node)):
            continue
        within = {*seen, gate, up}
        if gate is not up and all(user in within or user is node for one in within for user in one.users):
            return gate, up, seen
    return None


__all__ = ["HALVES", "gated"]
