"""Products with a 2:4 weight alone, and one linear layer that trains with 2:4 weights.

"products": our kernel beside dense ones, cuSPARSELt after a search and torchao's CUTLASS kernel. Operands are there before:
casts and compression are not timed, scales of rows and columns are. They are random normal, the weight pruned to 2:4 by
magnitude; dense products take whole weights, as a dense layer has: zeros among them need less power, and a GPU near its limit
multiplies them faster. Several sets, which together exceed the L2 cache, are multiplied in rotation. cuSPARSELt is taken at its
best: every algorithm that it has is timed on the device, those that compute something else are not taken. Its vector alpha is
refused for float8 on Hopper, and there is none for rows of x: sums are written as bfloat16, then one compiled kernel multiplies
them by both scales (a second rounding).

"linear": forward and backward of a layer at the shapes of the published table (the MLP of DINO's ViT-L). As there, a step of
the 2:4 layer prunes and compresses its weight anew, in both directions, its gradient passes straight through, and the weight
gradient is dense; float16, in a CUDA graph and launched one by one. `torch._cslt_sparse_mm` of torch 2.11 makes its plan anew
in every call, 0.1 s each: it has the second table alone, in which it is called few times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
import fast
from ao_lab.measure.turns import Call, Plan, cache_bytes, input_sets, watch_of
from experiments.harness.measuring import Wrong
from experiments.harness.revision import TORCHAO
from experiments.harness.revision import missing as library_missing
from experiments.harness.rows import Row, table_parts
from experiments.report import launched
from experiments.sparsity.timed import DENSE, Table, TimedMethod
from fast.gemm.choose import choose
from fast.gemm.families import HOPPER, Family, Problem
from fast.gemm.families import SPARSE as LAYOUT

KIND = "products"
DENSE_FP8, OWN = "fp8", "2:4"
CUSPARSELT, CUTLASS = "2:4, cuSPARSELt searched", "2:4, torchao CUTLASS"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
#: Largest difference of a product to that in float32, relative to its norm: one or two roundings to bfloat16 (0.17% each), and
#: sums of float8 that a tensor core cuts.
LIMIT = 1e-2
#: Rows of a product that are compared.
COMPARED = 256


@dataclass(frozen=True)
class Operands:
    """x (M, K) and the weight (N, K) with its zeros, of one element; float32 scales (M, 1) and (N, 1), None for bfloat16."""

    x: Tensor
    weight: Tensor
    x_scale: Tensor | None = None
    scale: Tensor | None = None

    @cached_property
    def compressed(self) -> tuple[Tensor, Tensor]:
        """Kept values and metadata."""
        found = fast.compress(self.weight)
        return found[0], found[1]

    @cached_property
    def arranged(self) -> Tensor:
        """Metadata in the order of our kernel."""
        return fast.arrange_sparse_metadata(self.compressed[1], self.weight.dtype)

    @cached_property
    def exact(self) -> Tensor:
        """The first rows of the product in float32."""
        y = self.x[:COMPARED].float() @ self.weight.float().t()
        return (
            y if self.x_scale is None or self.scale is None else y * self.x_scale[:COMPARED] * self.scale.t()
        )

    def check(self, y: Tensor) -> None:
        """`Wrong` where a product differs by more than `LIMIT`, or does not have its shape or dtype."""
        if y.dtype != BF16 or y.shape != (self.x.shape[0], self.weight.shape[0]):
            raise Wrong(f"a product of shape {tuple(y.shape)} in {y.dtype}")
        error = float((y[:COMPARED].float() - self.exact).norm() / self.exact.norm())
        if not error <= LIMIT:
            raise Wrong(f"the product differs by {error:.1e} of its size")


#: Makes a call for each set of operands.
Method = Callable[[tuple[Operands, ...]], list[Call]]
#: Shapes that bars name first, in both orders of lengths where they may be meant either way.
FP8_SHAPES: tuple[Shape, ...] = (
    (128, 4096, 14336), (16, 4096, 14336), (2048, 4096, 14336), (8192, 8192, 8192), (16384, 4096, 14336),
    (64, 4096, 14336), (128, 14336, 4096), (16, 14336, 4096), (2048, 14336, 4096), (16384, 14336, 4096),
)  # fmt: skip
BF16_SHAPES: tuple[Shape, ...] = (
    (128, 4096, 14336), (16, 4096, 14336), (64, 4096, 14336), (128, 14336, 4096), (16, 14336, 4096), (8192, 8192, 8192),
)  # fmt: skip
SETTINGS = {FP8: "float8_e4m3fn, scales of rows and columns, CUDA graph", BF16: "bfloat16, CUDA graph"}
PLAN = Plan(rounds=9, warmup=1, seconds=5.0, span=1e-3, most_calls=32)


def tables(
    device: str, seed: int, fp8: tuple[Shape, ...] = FP8_SHAPES, bf16: tuple[Shape, ...] = BF16_SHAPES
) -> list[Table]:
    """A table for each shape; those of float8 and bfloat16 in turn, so that a short run has both."""
    found = [table_of(device, seed, shape, FP8) for shape in fp8]
    for place, shape in enumerate(bf16):
        found.insert(2 * place + 1, table_of(device, seed, shape, BF16))
    return found


def table_of(device: str, seed: int, shape: Shape, element: torch.dtype) -> Table:
    """All methods of a shape."""
    m, k, n = shape
    made = partial(calls, shape, device, seed)
    methods = [TimedMethod(DENSE, partial(made, BF16, dense, sparse=False))]
    if element == FP8:
        methods.append(TimedMethod(DENSE_FP8, partial(made, FP8, dense_fp8, sparse=False)))
    methods += [
        TimedMethod(OWN, partial(made, element, own)),
        TimedMethod(CUSPARSELT, partial(made, element, product), foreign=True),
    ]
    if element == FP8:
        methods.append(TimedMethod(CUTLASS, partial(made, FP8, cutlass), missing_cutlass(), foreign=True))
    return Table(
        KIND, "x".join(map(str, shape)), SETTINGS[element], tuple(methods), PLAN, operations=2.0 * m * k * n,
        graph=device == "cuda", needed=12.0,
    )  # fmt: skip


def calls(
    shape: Shape, device: str, seed: int, element: torch.dtype, method: Method, *, sparse: bool = True
) -> list[Call]:
    """A call of a method for each set of operands, the first compared with the exact product."""
    sets = operands(shape, element, device, seed, sparse=sparse)
    made = method(sets)
    sets[0].check(made[0]())
    return made


def dense(sets: tuple[Operands, ...]) -> list[Call]:
    """cuBLAS."""
    return [partial(torch.mm, one.x, one.weight.t()) for one in sets]


def dense_fp8(sets: tuple[Operands, ...]) -> list[Call]:
    """torch._scaled_mm with fast sums, as torchao calls it for inference."""

    def call(one: Operands, scale: Tensor) -> Tensor:
        return torch._scaled_mm(
            one.x, one.weight.t(), scale_a=one.x_scale, scale_b=scale, out_dtype=BF16, use_fast_accum=True
        )

    return [partial(call, one, one.scale.t()) for one in sets if one.scale is not None]


def own(sets: tuple[Operands, ...]) -> list[Call]:
    """`fast.linear_sparse` with fast sums, metadata arranged beforehand."""

    def call(one: Operands, values: Tensor, metadata: Tensor) -> Tensor:
        return fast.linear_sparse(
            one.x, values, metadata, x_scale=one.x_scale, scale=one.scale, out_dtype=BF16
        )

    return [partial(call, one, one.compressed[0], one.arranged) for one in sets]


def missing_cutlass() -> str | None:
    """Why torchao's kernel cannot be measured; None where it can."""
    if (reason := library_missing(TORCHAO)) is not None:
        return reason
    names = ("rowwise_scaled_linear_sparse_cutlass_f8f8", "to_sparse_semi_structured_cutlass_sm9x_f8")
    ops = import_module("torchao.ops")
    absent = [name for name in names if not hasattr(ops, name)]
    return f"missing: this torchao has no {absent[0]}" if absent else None


def cutlass(sets: tuple[Operands, ...]) -> list[Call]:
    """torchao's kernel, which applies both scales."""
    ops = import_module("torchao.ops")

    def call(one: Operands, values: Tensor, metadata: Tensor, x_scale: Tensor, scale: Tensor) -> Tensor:
        made: Tensor = ops.rowwise_scaled_linear_sparse_cutlass_f8f8(
            one.x, x_scale, values, metadata, scale, None, BF16
        )
        return made

    found: list[Call] = []
    for one in sets:
        if one.x_scale is not None and one.scale is not None:
            stored = ops.to_sparse_semi_structured_cutlass_sm9x_f8(one.weight)
            found.append(partial(call, one, *stored, one.x_scale.reshape(-1), one.scale.reshape(-1)))
    return found


def family_today(row: Row) -> Family | None:
    """What multiplies the operands of a row of ours today, on a Hopper GPU of 132 multiprocessors; None of other rows."""
    kind, _, shape = table_parts(row.table)
    element = next((one for one, setting in SETTINGS.items() if setting == row.setting), None)
    if (kind, row.method) != (KIND, OWN) or element is None:
        return None
    m, k, n = map(int, shape.split("x"))
    return next(choose(Problem(LAYOUT, m, n, k, BF16, HOPPER, str(element).removeprefix("torch."))))


kernel_state = partial(launched.kernel_state, chosen=family_today)
current = partial(launched.current, chosen=family_today)
outdated_words = partial(launched.outdated_words, chosen=family_today)


#: Rows, inputs, outputs.
Shape = tuple[int, int, int]
LARGEST = 448.0


@lru_cache(maxsize=3)
def operands(
    shape: Shape, element: torch.dtype, device: str, seed: int, *, sparse: bool
) -> tuple[Operands, ...]:
    """Sets of a shape, the same for the same seed."""
    m, k, n = shape
    least = element.itemsize * (m * k + n * k // (2 if sparse else 1)) + 2 * m * n
    generator = torch.Generator(device).manual_seed(seed)
    count = input_sets(least, cache_bytes()) if device == "cuda" else 1
    return tuple(drawn(shape, element, generator, sparse=sparse) for _ in range(count))


def drawn(shape: Shape, element: torch.dtype, generator: torch.Generator, *, sparse: bool) -> Operands:
    """One set."""
    m, k, n = shape
    draw: dict[str, Any] = {"generator": generator, "device": generator.device, "dtype": BF16}
    x, weight = torch.randn(m, k, **draw), torch.randn(n, k, **draw) * k**-0.5
    if sparse:
        weight = weight.masked_fill(~fast.prune(weight), 0)
    if element == BF16:
        return Operands(x, weight)
    (x, x_scale), (weight, scale) = quantized(x), quantized(weight)
    return Operands(x, weight, x_scale, scale)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn with a float32 scale for each row; zeros stay zeros."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


#: Identifier, split of the sum, and how its parts are added.
Algorithm = tuple[int, int, int]
TIMED = 5


def product(sets: tuple[Operands, ...]) -> list[Call]:
    """A call for each set of operands by the quickest algorithm."""
    stored = [torch._cslt_compress(one.weight) for one in sets]
    found = [(time_of(sets[0], stored[0], one), one) for one in algorithms(sets[0], stored[0])]
    right = [(seconds, one) for seconds, one in found if seconds is not None]
    if not right:
        raise Wrong(f"none of {len(found)} algorithms of cuSPARSELt computes the product")
    best = min(right)[1]
    return [partial(multiplied, one, packed, best) for one, packed in zip(sets, stored, strict=True)]


def multiplied(one: Operands, stored: Tensor, algorithm: Algorithm) -> Tensor:
    """The product with its scales."""
    alg_id, split_k, mode = algorithm
    settings: dict[str, Any] = {"alg_id": alg_id, "split_k": split_k, "split_k_mode": mode}
    if one.weight.dtype == FP8:
        settings["out_dtype"] = BF16
    sums = torch._cslt_sparse_mm(stored, one.x.t(), transpose_result=True, **settings)
    return sums if one.x_scale is None else scaling()(sums, one.x_scale, one.scale)


@lru_cache(maxsize=1)
def scaling() -> Any:
    """sums times both scales, one kernel."""
    return torch.compile(_scaled, dynamic=True)


def _scaled(sums: Tensor, x_scale: Tensor, scale: Tensor) -> Tensor:
    return (sums.float() * x_scale * scale.t()).to(BF16)


def algorithms(one: Operands, stored: Tensor) -> Iterator[Algorithm]:
    """What the library's own search finds, which looks at splits of the sum too, then every identifier without one."""
    library: Any = torch._C._cusparselt
    out = BF16 if one.weight.dtype == FP8 else None
    alg_id, split_k, mode, most = map(int, library.mm_search(stored, one.x.t(), None, None, out, True))
    first = (alg_id, split_k, mode if split_k != 1 else -1)
    yield first
    yield from (one for number in range(most) if (one := (number, 1, -1)) != first)


def time_of(one: Operands, stored: Tensor, algorithm: Algorithm) -> float | None:
    """Seconds of a product; None where the library refuses the algorithm or its result is wrong."""
    try:
        one.check(multiplied(one, stored, algorithm))
        # As a graph: by single calls the host's planning is timed, and any algorithm is as good as another at few rows.
        watch = watch_of(one.x.device.type)
        graph = watch.capture([partial(multiplied, one, stored, algorithm)] * TIMED)
        return min(watch.seconds([graph] * TIMED)) / TIMED
    except (RuntimeError, Wrong):
        return None


LINEAR_KIND = "linear"
SHAPES: tuple[Shape, ...] = ((13008, 1024, 4096), (13008, 4096, 1024))
GRAPH, EAGER = (f"forward + backward, float16, {launched}" for launched in ("CUDA graph", "eager"))
SPARSE, KEPT, PRUNING = "2:4", "2:4, masks kept", "prune + compress"
#: The 2:4 layer by our own kernels; the others multiply by cuSPARSELt.
LINEAR_OWN, OWN_KEPT = "2:4, own kernels", "2:4, own kernels, masks kept"
GRAPH_PLAN = Plan(rounds=15, warmup=1, seconds=6.0, span=2e-3, most_calls=8)
EAGER_PLAN = Plan(rounds=15, warmup=1, seconds=6.0, span=2e-3, most_calls=8, fewest=3)
#: Largest difference of outputs to a product of the masked weight in float32, relative to its norm: float16 keeps 11 bits.
LINEAR_LIMIT = 2e-3


def linear_tables(
    device: str,
    seed: int,
    shapes: tuple[Shape, ...] = SHAPES,
    products: str = "cusparselt",
    own: str = "sparse_wgmma",
) -> list[Table]:
    """For each shape a table of CUDA graphs, which have no cuSPARSELt, then one of calls one by one, cuSPARSELt last."""
    found = []
    for setting, plan, libraries, needed in (
        (GRAPH, GRAPH_PLAN, (), 15.0),
        (EAGER, EAGER_PLAN, (products,), 40.0),
    ):
        for shape in shapes:
            methods = methods_of(shape, device, seed, own, libraries)
            data = "x".join(map(str, shape))
            found.append(
                Table(LINEAR_KIND, data, setting, methods, plan, graph=setting == GRAPH, needed=needed)
            )
    return found


def methods_of(
    shape: Shape, device: str, seed: int, own: str, libraries: tuple[str, ...] = ()
) -> tuple[TimedMethod, ...]:
    """Dense, 2:4 by our own kernels and by each library's products."""
    named = ((own, LINEAR_OWN, OWN_KEPT, False), *((products, SPARSE, KEPT, True) for products in libraries))
    layers = [
        TimedMethod(
            name, partial(sparse, shape, device, seed, products, renew=name == renewed), foreign=foreign
        )
        for products, renewed, kept, foreign in named
        for name in (renewed, kept)
    ]
    pruned = TimedMethod(PRUNING, partial(pruning, shape, device, seed))
    return TimedMethod(DENSE, partial(linear_dense, shape, device, seed)), *layers[:2], pruned, *layers[2:]


def layer_of(
    shape: Shape, device: str, seed: int, dtype: torch.dtype
) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A layer, its input and the gradient of its output, the same for the same seed."""
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(seed)
    layer = nn.Linear(k, n, device=device, dtype=dtype)
    with torch.no_grad():
        layer.weight.normal_(std=k**-0.5, generator=generator)
        layer.bias.zero_()
    x = torch.randn(m, k, generator=generator, device=device, dtype=dtype).requires_grad_()
    g = torch.randn(m, n, generator=generator, device=device, dtype=dtype)
    return nn.Sequential(layer), x, g


def step_of(model: nn.Sequential, x: Tensor, g: Tensor) -> Call:
    """Forward and backward of all three products; nothing accumulates."""

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x), (x, *model.parameters()), g)

    return step


def linear_dense(shape: Shape, device: str, seed: int, dtype: torch.dtype = torch.float16) -> Call:
    """The dense layer."""
    return step_of(*layer_of(shape, device, seed, dtype))


def sparse(
    shape: Shape, device: str, seed: int, products: str, dtype: torch.dtype = torch.float16, *, renew: bool
) -> Call:
    """The 2:4 layer, with or without new masks in each step; `Wrong` where its output is not that of the masked weight."""
    model, x, g = layer_of(shape, device, seed, dtype)
    config = ao_lab.SparseTrainingConfig(
        masks="recomputed", transposable=True, gradient="straight-through", products=products
    )
    exact = expected(model[0].weight, x)
    ao_lab.sparsify_(model, config)
    error = float((model(x).detach().float() - exact).norm() / exact.norm())
    if not error <= LINEAR_LIMIT:
        raise Wrong(f"the output differs by {error:.1e} of its size from the product of the masked weight")
    step = step_of(model, x, g)
    if not renew:
        return step

    def renewing() -> tuple[Tensor, ...]:
        found = step()
        ao_lab.step_sparsity_(model)
        return found

    return renewing


def expected(weight: Tensor, x: Tensor) -> Tensor:
    """The product in float32 of what one-shot pruning by magnitude leaves with transposable masks."""
    plain = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device))
    plain[0].weight.data = weight.detach().float()
    ao_lab.sparsify_(plain, ao_lab.SparsityConfig(transposable=True))
    with torch.no_grad():
        return plain(x.float())


def pruning(shape: Shape, device: str, seed: int, dtype: torch.dtype = torch.float16) -> Call:
    """Masks and compressed storage of the weight along its rows, by our kernels: one of the two directions of a step."""
    model, _, _ = layer_of(shape, device, seed, dtype)
    weight = model[0].weight.detach()
    return lambda: fast.compress(weight, "2:4")
