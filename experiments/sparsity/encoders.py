"""SAM's image encoders at their exact shapes with random weights: a training step of ViT-L, images a second of ViT-h.

The published tables call them ViT-L and SAM; "MLP 2:4" is of `lin1` and `lin2` of every block. Published throughput of SAM is
of the encoder too, on photographs; images here are random. A training step is forward and backward without an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

import ao_lab
from experiments.harness.bench import Call, Plan
from experiments.harness.cuda_graph import compiled_runs
from experiments.models.encoders import VIT_H, VIT_L, SamConfig, SamEncoder, is_mlp, random_encoder
from experiments.models.llama import SCHEME_LIMIT, relative_change
from experiments.sparsity.sides import DENSE, Side, Table

TRAINING, INFERENCE = "vit", "sam"
MLP, INT8, ALL = "MLP 2:4", "int8 dynamic", "attention and MLP 2:4"
#: Training by our own kernels; `MLP` multiplies by cuSPARSELt there. Images of a step.
OWN, BATCH = "MLP 2:4, own kernels", 8
PLAN = Plan(rounds=7, warmup=1, seconds=20.0, span=0.0, most_calls=1)
#: Of calls that last most of a second.
LONG_PLAN = replace(PLAN, fewest=3)
Convert = Callable[[SamEncoder, Tensor], object]


def training_tables(
    device: str, seed: int, config: SamConfig = VIT_L, batch: int = BATCH, products: str = "cusparselt",
    own: str = "sparse_wgmma", backend: str = "inductor", dtype: torch.dtype = torch.float16,
) -> list[Table]:  # fmt: skip
    """Forward and backward, compiled as the published ones are. cuSPARSELt by itself, last: torch makes its plan anew in each
    of a step's hundred products, a tenth of a second each."""
    base = partial(trained, config, batch, device, seed, dtype, backend)
    setting, dense = training_setting(batch), Side(DENSE, base)
    others = Side(MLP, partial(base, products=products), foreign=True)
    return [
        Table(
            TRAINING,
            config.name,
            setting,
            (dense, Side(OWN, partial(base, products=own))),
            PLAN,
            batch,
            needed=90.0,
        ),
        Table(TRAINING, config.name, f"{setting}, cuSPARSELt", (dense, others), PLAN, batch, needed=150.0),
    ]


def training_setting(batch: int = BATCH) -> str:
    """The setting of rows of a training step."""
    return f"forward + backward, float16, compiled, batch {batch}"


def trained(
    config: SamConfig,
    batch: int,
    device: str,
    seed: int,
    dtype: torch.dtype,
    backend: str,
    products: str = "",
) -> Call:
    """A step; with `products` the MLPs are 2:4 and find their masks anew in each step."""
    model = random_encoder(config, device, dtype, seed).train()
    if products:
        sparse = ao_lab.SparseTrainingConfig(
            masks="recomputed", transposable=True, gradient="straight-through", products=products
        )
        ao_lab.sparsify_(model, sparse, is_mlp)
    images = images_of(config, batch, device, seed, dtype).requires_grad_()
    # Before compilation: a batch of one would be compiled for too, and the next one for any length.
    with torch.no_grad():
        gradient = torch.ones_like(model(images[:1])).expand(batch, -1, -1, -1).contiguous()
    for block in model.blocks:
        block.compile(backend=backend)

    def step() -> None:
        model(images).backward(gradient)
        model.zero_grad(set_to_none=True)
        images.grad = None
        if products:
            ao_lab.step_sparsity_(model)

    step()
    with compiled_runs():
        step()
    return step


def images_of(config: SamConfig, batch: int, device: str, seed: int, dtype: torch.dtype) -> Tensor:
    """Random images, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    size = batch, 3, config.image, config.image
    return torch.randn(size, generator=generator, device=device, dtype=dtype)


def inference_tables(
    device: str, seed: int, config: SamConfig = VIT_H, batch: int = 32, backend: str = "inductor",
    dtype: torch.dtype = torch.bfloat16,
) -> list[Table]:  # fmt: skip
    """Forward passes, compiled, dense and converted in each way."""
    made = partial(encoded, config, batch, device, seed, dtype, backend)
    sides = tuple(
        Side(name, partial(made, convert=convert), missing(name)) for name, convert in CONVERSIONS.items()
    )
    setting = f"forward, bfloat16, compiled, batch {batch}"
    return [Table(INFERENCE, config.name, setting, sides, LONG_PLAN, batch, needed=200.0)]


@torch.no_grad()
def encoded(
    config: SamConfig,
    batch: int,
    device: str,
    seed: int,
    dtype: torch.dtype,
    backend: str,
    *,
    convert: Convert,
) -> Call:
    """A forward pass; `Wrong` where its result is not finite."""
    model = random_encoder(config, device, dtype, seed).eval().requires_grad_(False)
    images = images_of(config, batch, device, seed, dtype)
    convert(model, images)
    relative_change(model(images[:1]).float(), None, SCHEME_LIMIT, "")
    for block in model.blocks:
        block.compile(backend=backend)

    @torch.no_grad()
    def forward() -> Tensor:
        return model(images)

    forward()
    with compiled_runs():
        forward()
    return forward


def is_linear(module: nn.Module, name: str) -> bool:
    """All linear layers."""
    return isinstance(module, nn.Linear)


def int8(model: SamEncoder, images: Tensor) -> None:
    """INT8 with dynamic inputs, all linear layers."""
    ao_lab.quantize_(model, ao_lab.Int8DynamicActivationInt8WeightConfig(), filter_fn=is_linear)


def mlp_sparse(model: SamEncoder, images: Tensor) -> None:
    """The MLPs pruned and compressed, and the kernels of their products chosen by timing."""
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(storage="compressed"), is_mlp)  # type: ignore[call-arg]
    choose_kernels(model, images)


def choose_kernels(model: SamEncoder, images: Tensor) -> None:
    """By timing at the rows that all images give a layer: of one image are that many times fewer, and its scores fit anywhere
    without a compiler."""
    patches = (images.shape[-1] // model.config.patch) ** 2
    ao_lab.tune(model, images[:1], rows=[images.shape[0] * patches], launches="graph")


def all_sparse(model: SamEncoder, images: Tensor) -> None:
    """All linear layers likewise."""
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(storage="compressed"), is_linear)  # type: ignore[call-arg]
    choose_kernels(model, images)


#: By method what is done to a dense model, of images of the batch that is timed.
CONVERSIONS: dict[str, Convert] = {
    DENSE: lambda model, images: None,
    INT8: int8,
    MLP: mlp_sparse,
    ALL: all_sparse,
}


def missing(method: str) -> str | None:
    """Why a method cannot be measured with this copy; None where it can."""
    if method in (MLP, ALL) and not hasattr(ao_lab, "SparseQuantizedTensor"):
        return "missing: this copy stores 2:4 weights dense, with zeros"
    return None
