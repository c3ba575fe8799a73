"""One linear layer, forward and backward, dense and 2:4, at the shapes of the published table (the MLP of DINO's ViT-L).

As there, a step of the 2:4 layer prunes and compresses its weight anew, in both directions, its gradient passes straight
through, and the weight gradient is dense. Operands are float16, random normal. In a CUDA graph, as published, and launched one
by one. `torch._cslt_sparse_mm` of torch 2.11 makes its plan anew in every call, 0.1 s each: it has the second table alone, in
which it is called few times.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

import ao_lab
import fast
from experiments.harness.outcome import Wrong
from experiments.harness.timing import Call, Plan
from experiments.sparsity.speed.sides import DENSE, Side, Table

KIND = "linear"
#: Rows, inputs, outputs.
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((13008, 1024, 4096), (13008, 4096, 1024))
GRAPH, EAGER = (f"forward + backward, float16, {launched}" for launched in ("CUDA graph", "eager"))
SPARSE, KEPT, PRUNING = "2:4", "2:4, masks kept", "prune + compress"
#: The 2:4 layer by our own kernels; the others multiply by cuSPARSELt.
OWN, OWN_KEPT = "2:4, own kernels", "2:4, own kernels, masks kept"
GRAPH_PLAN = Plan(rounds=15, warmup=1, seconds=6.0, span=2e-3, most_calls=8)
EAGER_PLAN = Plan(rounds=15, warmup=1, seconds=6.0, span=2e-3, most_calls=8, fewest=3)
#: Largest difference of outputs to a product of the masked weight in float32, relative to its norm: float16 keeps 11 bits.
LIMIT = 2e-3


def tables(
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
            sides = sides_of(shape, device, seed, own, libraries)
            data = "x".join(map(str, shape))
            found.append(Table(KIND, data, setting, sides, plan, graph=setting == GRAPH, needed=needed))
    return found


def sides_of(
    shape: Shape, device: str, seed: int, own: str, libraries: tuple[str, ...] = ()
) -> tuple[Side, ...]:
    """Dense, 2:4 by our own kernels and by each library's products."""
    named = ((own, OWN, OWN_KEPT, False), *((products, SPARSE, KEPT, True) for products in libraries))
    layers = [
        Side(name, partial(sparse, shape, device, seed, products, renew=name == renewed), foreign=foreign)
        for products, renewed, kept, foreign in named
        for name in (renewed, kept)
    ]
    pruned = Side(PRUNING, partial(pruning, shape, device, seed))
    return Side(DENSE, partial(dense, shape, device, seed)), *layers[:2], pruned, *layers[2:]


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


def dense(shape: Shape, device: str, seed: int, dtype: torch.dtype = torch.float16) -> Call:
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
    if not error <= LIMIT:
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


__all__ = ["EAGER", "GRAPH", "KEPT", "KIND", "OWN", "OWN_KEPT", "PRUNING", "SHAPES", "SPARSE", "tables"]
