"""Products of one input in one launch, in what `torch.compile` makes of a model.

    step = torch.compile(step, options=ao_lab.compile_options())

A layer multiplies its inputs by several weights: those of a gate and of what it gates, or of queries, keys and values. For one
row of inputs each launch loses time at its beginning and end, and the compiler, which fuses products of plain weights by
itself, cannot look into an operator. This pass over the compiled graph fuses them: silu of one times the other as one launch
(`fast.linear_swiglu`, which rounds as the layers by themselves do), others two and two (`fast.linear_pair`).
"""

from __future__ import annotations

import hashlib
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from ao_lab.compile import swiglu_pattern
from ao_lab.compile.swiglu_pattern import HALVES, gated

#: Operators that only say how memory is looked at: the same of the same are the same.
VIEWS = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "t")
#: Arguments of `ao_lab::linear`: its inputs, the parts of the weight, the bias; then how the weight is stored.
PARTS, BIAS = slice(1, 5), 5


class FuseLinears:
    """The pass, for Inductor's `post_grad_custom_pre_pass`: of graphs in which nothing is written in place."""

    def __call__(self, graph: Graph) -> None:
        """Fuse products in place."""
        for node in list(graph.nodes):
            fuse_gated(graph, node)
        fuse_pairs(graph)
        graph.lint()

    def uuid(self) -> str:
        """What the compiler's caches know this pass by: its text."""
        texts = (Path(module).read_bytes() for module in (__file__, swiglu_pattern.__file__))
        return hashlib.sha256(b"".join(texts)).hexdigest()


def fuse_gated(graph: Graph, node: Node) -> None:
    """Fuse silu(gate) * up into one node, where both are products of one 16-bit row by weights of one shape."""
    found = gated(node)
    if found is None or not all(map(is_product, found[:2])):
        return
    gate, up, between = found
    stored = [one.args[BIAS + 1 :] for one in (gate, up)]
    like, wanted = gate.meta["val"], node.meta["val"]
    alike = source(gate.args[0]) == source(up.args[0]) and stored[0][0] == stored[1][0]
    if not alike or like.dtype not in HALVES or wanted.numel() != like.numel():
        return
    with graph.inserting_before(node):
        parts = (*gate.args[PARTS], *up.args[PARTS])
        result = graph.call_function(
            torch.ops.ao_lab.linear_swiglu.default, (gate.args[0], *parts, *stored[0], *stored[1][1:])
        )
        result.meta["val"] = like
        shaped = graph.call_function(torch.ops.aten.reshape.default, (result, list(wanted.shape)))
        shaped.meta.update(node.meta)
        node.replace_all_uses_with(shaped)
    for one in reversed(list(graph.nodes)):
        if one is node or one in {*between, gate, up}:
            graph.erase_node(one)


def fuse_pairs(graph: Graph) -> None:
    """Fuse products of one input, two and two."""
    waiting: dict[Any, Node] = {}
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if not is_product(node):
            continue
        key = (source(node.args[0]), *map(str, node.args[BIAS + 1 :]))
        first = waiting.pop(key, None)
        if first is None:
            waiting[key] = node
        else:
            fuse_pair(graph, first, node, order)


def is_product(node: Node) -> bool:
    """Whether a node multiplies one row by a stored weight, without a bias. Sizes that are left open are not one."""
    if node.op != "call_function" or node.target is not torch.ops.ao_lab.linear.default:
        return False
    x = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if x is None or node.args[BIAS] is not None:
        return False
    return all(isinstance(size, int) for size in x.shape) and x.numel() == x.shape[-1]


def source(value: Any) -> Any:
    """What a value is, so that the same looks at the same memory are equal."""
    if not isinstance(value, Node) or value.op != "call_function":
        return value
    name = getattr(value.target, "__name__", "").partition(".")[0]
    return (name, *map(source, value.args)) if name in VIEWS else value


def fuse_pair(graph: Graph, first: Node, second: Node, order: dict[Node, int]) -> None:
    """Fuse two products into one node, where the parts of the second weight are there by then.

    order: places in the graph as it was; what has been put in since counts as later.
    """
    parts = [part for part in second.args[PARTS] if isinstance(part, Node)]
    if any(order.get(part, len(order)) > order[first] for part in parts):
        return
    with graph.inserting_before(first):
        result = graph.call_function(
            torch.ops.ao_lab.linear_pair.default,
            (first.args[0], *first.args[PARTS], *second.args[PARTS], *first.args[BIAS + 1 :]),
        )
        result.meta["val"] = (first.meta["val"], second.meta["val"])
        for at, node in enumerate((first, second)):
            one = graph.call_function(getitem, (result, at))
            one.meta.update(node.meta)
            node.replace_all_uses_with(one)
    for node in (first, second):
        graph.erase_node(node)


def compile_options() -> dict[str, Any]:
    """Options of `torch.compile` (backend "inductor") with which a model of our weights generates fastest.

    Products of one input are fused. On GPUs that can (Hopper and later), what the compiler writes may begin while the kernel
    in front of it ends, as our kernels do (programmatic dependent launch), where this version of torch has a setting for that;
    that its kernels wait for what they read is then the compiler's care.
    """
    import torch._inductor.config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass

    import fast.matmul.linear_swiglu_ops  # noqa: F401  the operators

    # The compiler's caches want this class, which takes a second to import.
    fuse = type("FuseLinears", (FuseLinears, CustomGraphPass), {})()
    late = {"triton.enable_pdl": True} if hasattr(inductor.triton, "enable_pdl") else {}
    return {"post_grad_custom_pre_pass": fuse, **late}


__all__ = ["FuseLinears", "compile_options"]
