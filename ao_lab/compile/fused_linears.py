"""Products of one input in one launch, in what `torch.compile` makes of a model.

    step = torch.compile(step, options=ao_lab.compile_options())

A layer multiplies its inputs by several weights: those of a gate and of what it gates, or of queries, keys and values. For one
row of inputs each launch loses time at its beginning and end, and the compiler, which fuses products of plain weights by
itself, cannot look into an operator. This pass over the compiled graph fuses them: silu of one times the other as one launch
(`fast.linear_swiglu`, which rounds as the layers by themselves do), others two and two (`fast.linear_pair`). Preshuffled
weights have operators of their own (`fast.matmul.preshuffled.pair`), also for two or three of different rows
(`fast.matmul.preshuffled.several`: queries, keys and values), and so have 4-bit integers in 2:4 storage
(`fast.sparsity.linear_sparse_int4`), all for up to 16 rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fast.matmul.preshuffled import pair, several
from fast.sparsity import linear_sparse_int4 as sparse_pair

# That is: silu(gate) * up in a compiled graph, found by what the compiler makes of silu in the version of torch at hand.

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
    example = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(example, torch.Tensor) or example.dtype not in HALVES:
        return None
    graph = silu_graph(example.dtype)
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


#: The most rows of inputs whose programs have dependent launches: more rows take longer with them (times: reports/LOG.md).
MOST_LATE = 32
#: How operators begin that multiply inputs, their first argument, by a weight.
TIMES_WEIGHTS = ("ao_lab.linear", "ao_lab.scaled_mm", "aten.mm.", "aten._int_mm.", "aten._scaled_mm.")
#: Operators that only say how memory is looked at: the same of the same are the same.
VIEWS = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "permute", "t")


@dataclass(frozen=True)
class Product:
    """An operator of ours, `ao_lab::name`, of which `name_pair` and `name_swiglu` are two at once.

    Its arguments are inputs, parts of the weight, the bias, and how the weight is stored, the shape first. bias: the bias's
    place. rows: the most rows of inputs. mixed: whether a gate and what it gates may be stored in different ways. described:
    how many arguments behind the bias say how a weight is stored (further ones are left out of two products at once); of 0 its
    parts do, codes first and scales last, and behind the bias are zero points or nothing.
    """

    name: str
    bias: int
    rows: int
    mixed: bool
    described: int

    def parts(self, node: Node) -> tuple[Any, ...]:
        """What the weight of a node consists of."""
        return tuple(node.args[1 : self.bias])

    def form(self, node: Node) -> tuple[Any, ...]:
        """The arguments that say how it is stored."""
        return tuple(node.args[self.bias + 1 : self.bias + 1 + self.described])

    def has_zero_points(self, node: Node) -> bool:
        """Whether there are some behind the bias, for which there are no two products at once."""
        return not self.described and any(one is not None for one in node.args[self.bias + 1 :])

    def rows_of(self, node: Node) -> Any:
        """What says how many rows it has: its shape, or that of the product."""
        return self.form(node)[0] if self.described else node.meta["val"].shape[-1]

    def stored(self, node: Node) -> tuple[Any, ...]:
        """What two weights have in common that are stored alike, besides their rows where arguments do not say them."""
        if self.described:
            return self.form(node)
        scale = node.args[self.bias - 1].meta["val"]  # type: ignore[union-attr]
        return scale.shape[1], scale.dtype

    def is_known(self, node: Node) -> bool:
        """Whether it is said how the weight of a node is stored."""
        scale = node.args[self.bias - 1]
        return self.described > 0 or (isinstance(scale, Node) and "val" in scale.meta)

    def at_once(self, kind: str) -> Any:
        """The operator of two products. kind: pair or swiglu."""
        return getattr(torch.ops.ao_lab, f"{self.name}_{kind}").default


PRODUCTS = {
    f"ao_lab.{each.name}.default": each
    for each in (
        Product("linear", 5, 1, True, 3),
        Product("linear_small", 4, pair.MOST_ROWS, False, 2),
        Product("linear_sparse_int4", 4, sparse_pair.MOST_ROWS, False, 0),
    )
}


#: Of which weights of different rows are multiplied at once.
SEVERAL = PRODUCTS["ao_lab.linear_small.default"]


class FuseLinears:
    """The pass, for Inductor's `post_grad_custom_pre_pass`: of graphs in which nothing is written in place."""

    def __call__(self, graph: Graph) -> None:
        """Fuse products in place."""
        if most_rows(graph) > MOST_LATE:
            without_dependent_launches()
        for node in list(graph.nodes):
            fuse_gated(graph, node)
        fuse_several(graph)
        fuse_pairs(graph)
        graph.lint()

    def uuid(self) -> str:
        """What the compiler's caches know this pass by: its text."""
        modules = (__file__, pair.__file__, several.__file__, sparse_pair.__file__)
        return hashlib.sha256(b"".join(Path(module).read_bytes() for module in modules)).hexdigest()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of the compiler's class, which pickle does not find by name, a call that makes it."""
        return (inductor_pass, ()) if type(self) is inductor_class() else super().__reduce_ex__(protocol)


@cache
def inductor_class() -> type[FuseLinears]:
    """FuseLinears as a class of the compiler's, which its caches want; made once, as importing that takes a second."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return type("FuseLinears", (FuseLinears, CustomGraphPass), {})


def inductor_pass() -> FuseLinears:
    """The pass as the compiler takes it. Pickles name this function."""
    return inductor_class()()


def most_rows(graph: Graph) -> int:
    """The most rows of inputs that a product has in a graph; 0 where there is none, or sizes are left open."""
    inputs = (value.meta.get("val") for value in map(input_of, graph.nodes) if value is not None)
    fixed = (x for x in inputs if x is not None and all(isinstance(size, int) for size in x.shape))
    return max((x.numel() // max(x.shape[-1], 1) for x in fixed), default=0)


def input_of(node: Node) -> Node | None:
    """The inputs of a product by a weight, ours or torch's; None of other nodes."""
    name = str(node.target)
    at = 1 if name == "aten.addmm.default" else 0 if name.startswith(TIMES_WEIGHTS) else None
    inputs = None if at is None else node.args[at]
    return inputs if isinstance(inputs, Node) else None


def without_dependent_launches() -> None:
    """In the program that is being compiled: the compiler puts options back behind it."""
    import torch._inductor.config as inductor

    if hasattr(inductor.triton, "enable_pdl"):
        inductor.triton.enable_pdl = False


def fuse_gated(graph: Graph, node: Node) -> None:
    """Fuse silu(gate) * up into one node, where both are products of the same few 16-bit rows by weights of one shape."""
    pair = gated(node)
    products = [product_of(one) for one in pair[:2]] if pair else []
    if pair is None or products[0] is None or products[0] is not products[1]:
        return
    (gate, up, between), product = pair, products[0]
    like, wanted = gate.meta["val"], node.meta["val"]
    alike = source(gate.args[0]) == source(up.args[0]) and product.rows_of(gate) == product.rows_of(up)
    if not alike or like.dtype not in HALVES or wanted.numel() != like.numel():
        return
    if not product.mixed and product.stored(gate) != product.stored(up):
        return
    with graph.inserting_before(node):
        form = (*product.form(gate), *product.form(up)[1:]) if product.mixed else product.form(gate)
        arguments = (gate.args[0], *product.parts(gate), *product.parts(up), *form)
        result = graph.call_function(product.at_once("swiglu"), arguments)
        result.meta["val"] = like
        shaped = graph.call_function(torch.ops.aten.reshape.default, (result, list(wanted.shape)))
        shaped.meta.update(node.meta)
        node.replace_all_uses_with(shaped)
    for one in reversed(list(graph.nodes)):
        if one is node or one in {*between, gate, up}:
            graph.erase_node(one)


def fuse_several(graph: Graph) -> None:
    """Fuse products of one input by preshuffled weights of one scheme whose shapes are not all alike, as many as an operator
    takes at once."""
    alike: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        product = product_of(node)
        if product is SEVERAL:
            (_, length), scheme = product.form(node)
            alike.setdefault((source(node.args[0]), length, scheme), []).append(node)
    order = {node: at for at, node in enumerate(graph.nodes)}
    for nodes in alike.values():
        for at in range(0, len(nodes), several.MOST_WEIGHTS):
            some = nodes[at : at + several.MOST_WEIGHTS]
            if len({SEVERAL.form(node)[0][0] for node in some}) > 1:
                fuse_some(graph, some, order)


def fuse_some(graph: Graph, nodes: list[Node], order: dict[Node, int]) -> None:
    """Fuse products into one node, where the parts of all weights are there by the first of them. order: see `fuse_pair`."""
    first = nodes[0]
    parts = [part for node in nodes for part in SEVERAL.parts(node)]
    if any(order.get(part, len(order)) > order[first] for part in parts if isinstance(part, Node)):
        return
    rows = [SEVERAL.form(node)[0][0] for node in nodes]
    (_, length), scheme = SEVERAL.form(first)
    with graph.inserting_before(first):
        arguments = (first.args[0], parts, rows, length, scheme)
        result = graph.call_function(torch.ops.ao_lab.linear_small_several.default, arguments)
        result.meta["val"] = [node.meta["val"] for node in nodes]
        for at, node in enumerate(nodes):
            one = graph.call_function(getitem, (result, at))
            one.meta.update(node.meta)
            node.replace_all_uses_with(one)
    for node in nodes:
        graph.erase_node(node)


def fuse_pairs(graph: Graph) -> None:
    """Fuse products of one input, two and two."""
    waiting: dict[Any, Node] = {}
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        product = product_of(node)
        if product is None:
            continue
        key = (product, source(node.args[0]), *map(str, product.stored(node)))
        first = waiting.pop(key, None)
        if first is None:
            waiting[key] = node
        else:
            fuse_pair(graph, product, first, node, order)


def product_of(node: Node) -> Product | None:
    """Of a node that multiplies few rows by a stored weight, without a bias; None for others, and where sizes are left open."""
    product = PRODUCTS.get(str(node.target)) if node.op == "call_function" else None
    x = node.args[0].meta.get("val") if product is not None and isinstance(node.args[0], Node) else None
    if product is None or x is None or node.args[product.bias] is not None or not product.is_known(node):
        return None
    if product.has_zero_points(node):
        return None
    few = all(isinstance(size, int) for size in x.shape) and 0 < x.numel() <= product.rows * x.shape[-1]
    return product if few else None


def source(value: Any) -> Any:
    """What a value is, so that the same looks at the same memory are equal."""
    if not isinstance(value, Node) or value.op != "call_function":
        return value
    name = getattr(value.target, "__name__", "").partition(".")[0]
    return (name, *map(source, value.args)) if name in VIEWS else value


def fuse_pair(graph: Graph, product: Product, first: Node, second: Node, order: dict[Node, int]) -> None:
    """Fuse two products into one node, where the parts of the second weight are there by then.

    order: places in the graph as it was; what has been put in since counts as later.
    """
    parts = [part for part in product.parts(second) if isinstance(part, Node)]
    if any(order.get(part, len(order)) > order[first] for part in parts):
        return
    with graph.inserting_before(first):
        arguments = (first.args[0], *product.parts(first), *product.parts(second), *product.form(first))
        result = graph.call_function(product.at_once("pair"), arguments)
        result.meta["val"] = (first.meta["val"], second.meta["val"])
        for at, node in enumerate((first, second)):
            one = graph.call_function(getitem, (result, at))
            one.meta.update(node.meta)
            node.replace_all_uses_with(one)
    for node in (first, second):
        graph.erase_node(node)


def compile_options() -> dict[str, Any]:
    """Options for `torch.compile` (backend "inductor") with which a model with our weights generates fastest.

    Matmuls with the same input are fused. On Hopper and later GPUs, kernels that the compiler generates may start while the
    previous kernel ends, as our kernels do (programmatic dependent launch), if this version of torch has a setting for it and
    no matmul's input has more than 32 tokens (a compiled weight gradient counts its own); the compiler then inserts the waits.
    Pass them as `options=`, after which torch restores its own; if they are set for a whole process, dependent launches stay as
    the last program left them.
    """
    import torch._inductor.config as inductor

    import fast.matmul.linear_pair  # noqa: F401  the operators; those of preshuffled weights are imported above

    late = {"triton.enable_pdl": True} if hasattr(inductor.triton, "enable_pdl") else {}
    return {"post_grad_custom_pre_pass": inductor_pass(), **late}


__all__ = ["FuseLinears", "compile_options", "gated"]
