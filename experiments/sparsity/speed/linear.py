"""One linear layer, forward and backward, dense and 2:4, at the shapes of the published table (the MLP of DINO's ViT-L).

As there, a step of the 2:4 layer prunes and compresses its weight anew, in both directions, its gradient passes straight
through, and the weight gradient is dense. Operands are float16, random normal. Launched one by one; published: a CUDA graph.
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
SETTING = "forward + backward, float16, eager"
SPARSE, KEPT, PRUNING = "2:4", "2:4, masks kept", "prune + compress"
#: The 2:4 layer by our own kernels; the others multiply by cuSPARSELt.
OWN, OWN_KEPT = "2:4, own kernels", "2:4, own kernels, masks kept"
PLAN = Plan(rounds=15, warmup=1, seconds=6.0, span=2e-3, most_calls=8)
#: Largest difference of outputs to a product of the masked weight in float32, relative to its norm: float16 keeps 11 bits.
LIMIT = 2e-3


def tables(
    device: str,
    seed: int,
    shapes: tuple[Shape, ...] = SHAPES,
    products: str = "cusparselt",
    own: str = "sparse_wgmma",
) -> list[Table]:
    """A table for each shape."""
    return [
        Table(
            KIND,
            "x".join(map(str, shape)),
            SETTING,
            (
                Side(DENSE, partial(dense, shape, device, seed)),
                Side(SPARSE, partial(sparse, shape, device, seed, products, renew=True)),
                Side(KEPT, partial(sparse, shape, device, seed, products, renew=False)),
                Side(OWN, partial(sparse, shape, device, seed, own, renew=True)),
                Side(OWN_KEPT, partial(sparse, shape, device, seed, own, renew=False)),
                Side(PRUNING, partial(pruning, shape, device, seed)),
            ),
            PLAN,
            needed=20.0,
        )
        for shape in shapes
    ]


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


__all__ = ["KEPT", "KIND", "OWN", "OWN_KEPT", "PRUNING", "SETTING", "SHAPES", "SPARSE", "tables"]
