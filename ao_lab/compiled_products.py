"""Products of one input in one launch, in what `torch.compile` makes of a model.

    step = torch.compile(step, options=ao_lab.compile_options())

A layer multiplies its inputs by several weights: those of a gate and of what it gates, or of queries, keys and values. For one
row of inputs each launch loses time at its beginning and end, and the compiler, which joins products of plain weights by
itself, cannot look into an operator. This pass over the compiled graph joins them two and two (`fast.linear_pair`).
"""

from __future__ import annotations

import hashlib
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

#: Operators that only say how memory is looked at: the same of the same are the same.
VIEWS = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "t")
#: Arguments of `ao_lab::linear`: its inputs, the parts of the weight, the bias; then how the weight is stored.
PARTS, BIAS = slice(1, 5), 5


class JoinProducts:
    """The pass, for Inductor's `post_grad_custom_pre_pass`."""

    def __call__(self, graph: Graph) -> None:
        """Join pairs of products in place."""
        waiting: dict[Any, Node] = {}
        for node in list(graph.nodes):
            if not is_product(node):
                continue
            key = (source(node.args[0]), *map(str, node.args[BIAS + 1 :]))
            first = waiting.pop(key, None)
            if first is None:
                waiting[key] = node
            else:
                join(graph, first, node)
        graph.lint()

    def uuid(self) -> str:
        """What the compiler's caches know this pass by: its text."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


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


def join(graph: Graph, first: Node, second: Node) -> None:
    """Put one node in place of two products, where the parts of the second weight are there by then."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    parts = [part for part in second.args[PARTS] if isinstance(part, Node)]
    if any(order[part] > order[first] for part in parts):
        return
    with graph.inserting_before(first):
        made = graph.call_function(
            torch.ops.ao_lab.linear_pair.default,
            (first.args[0], *first.args[PARTS], *second.args[PARTS], *first.args[BIAS + 1 :]),
        )
        made.meta["val"] = (first.meta["val"], second.meta["val"])
        for at, node in enumerate((first, second)):
            one = graph.call_function(getitem, (made, at))
            one.meta.update(node.meta)
            node.replace_all_uses_with(one)
    for node in (first, second):
        graph.erase_node(node)


def compile_options() -> dict[str, Any]:
    """Options of `torch.compile` (backend "inductor") under which products of one input are joined."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    import fast.ops  # noqa: F401  the operators

    # The compiler's caches want this class, which takes a second to import.
    return {"post_grad_custom_pre_pass": type("JoinProducts", (JoinProducts, CustomGraphPass), {})()}


__all__ = ["JoinProducts", "compile_options"]
