"""Whole models and blocks with 2:4 weights: generation with Llama-3.1-8B's shapes, SAM's image encoders.

"decode" generates at batch 1 with 4-bit integers and FP8, dense and 2:4, as `experiments.decode` does. Weights are random,
pruned by magnitude: speed does not depend on values. bfloat16 generates before, between and after.

"blocks" are the linear layers of a block at the rows of decoding, 1 to 16. A call multiplies by all seven weights, as CUDA
graphs over blocks that exceed the L2 cache; layers are `ao_lab`'s, by the kernels that they choose themselves, fp8 in 2:4
storage by those that `ao_lab.tune` chooses. What stands between layers is left out, so ratios are those of the layers.

"vit" and "sam" are SAM's image encoders at their exact shapes with random weights: a training step of ViT-L (forward and
backward without an optimizer), images a second of ViT-h. The published tables call them ViT-L and SAM; "MLP 2:4" is of `lin1`
and `lin2` of every block. Published throughput is of photographs; images here are random.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from ao_lab.measure.turns import Call, Plan, cache_bytes, input_sets
from experiments.decode import run as decode
from experiments.decode.configs import BASE, OURS, Config
from experiments.decode.model import Decoding
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Deadline, Values, Wrong, attempt, bar, keep, status
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.encoders import VIT_H, VIT_L, SamConfig, SamEncoder, is_mlp, random_encoder
from experiments.models.llama import LLAMA_3_1_8B, SCHEME_LIMIT, LlamaConfig, relative_change
from experiments.runs.run import published_shapes
from experiments.runs.settings import Settings
from experiments.sparsity.pairs import PATTERN, inside_blocks
from experiments.sparsity.timed import DENSE, NO_GPU, Table, TimedMethod, rows_of

INT4_GROUP = 64


@torch.no_grad()
def choose_kernels(model: nn.Module, rows: Iterable[int] = ()) -> None:
    """`ao_lab.tune` of one layer of each shape that holds a quantized weight, for one row and further numbers of rows."""
    seen = set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.shape not in seen and is_open(layer):
            seen.add(layer.weight.shape)
            x = torch.randn(1, layer.in_features, device=layer.weight.device, dtype=torch.bfloat16)
            ao_lab.tune(nn.Sequential(layer), x, rows=rows, launches="graph")


def is_open(layer: nn.Linear) -> bool:
    """Whether a layer has a quantized weight whose kernel nothing has chosen."""
    return isinstance(layer.weight, ao_lab.QuantizedTensor) and not ao_lab.explain(layer).layers[0].tuned


def int4(**options: Any) -> object:
    """Symmetric, so that zero stays zero."""
    return ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(INT4_GROUP), **options)


def fp8(**options: Any) -> object:
    """Scales of rows, inputs too."""
    return ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow(), **options)


#: Beside one row, those that kernels are chosen for by timing; others follow the nearest.
TUNED = (16,)
INT4, SPARSE_INT4, FP8, SPARSE_FP8 = "int4", "int4 + 2:4", "fp8", "fp8 + 2:4"


def plain(config: Callable[..., Any], model: nn.Module) -> None:
    """Quantize."""
    ao_lab.quantize_(model, config())


def sparse(config: Callable[..., Any], model: nn.Module) -> None:
    """Prune by magnitude, then quantize in 2:4 storage."""
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN), every_layer)
    ao_lab.quantize_(model, config(sparsity=PATTERN))


def tuned(config: Callable[..., Any], model: nn.Module) -> None:
    """The same, and its kernels chosen by timing, where that was not done for the shape before."""
    sparse(config, model)
    choose_kernels(model, TUNED)


def every_layer(module: nn.Module, name: str) -> bool:
    """All linear layers."""
    return isinstance(module, nn.Linear)


CONVERSIONS: dict[str, Convert] = {
    DENSE: lambda model: None,
    INT4: partial(plain, int4),
    SPARSE_INT4: partial(sparse, int4),
    FP8: partial(plain, fp8),
    SPARSE_FP8: partial(tuned, fp8),
}


KIND = "decode"
SETTING = "batch 1, compiled"
#: Seconds of a configuration, and of the bfloat16 model beside the first.
NEEDED, NEEDED_BASE = 30.0, 80.0


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Config):
    """A configuration whose layers inside the blocks are pruned first and stored 2:4; the last layer stays dense.

    timed: whether the kernels of the sparse layers are chosen by `ao_lab.tune`, as no rule chooses one.
    """

    make: Callable[..., Any]
    timed: bool = False

    def quantize(self, model: nn.Module) -> None:
        """Prune, then quantize."""
        ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN), inside_blocks)
        ao_lab.quantize_(model, self.make(sparsity=PATTERN), filter_fn=inside_blocks)
        if self.timed:
            choose_kernels(model)
        ao_lab.quantize_(model, self.make())


#: By the method of their rows.
CONFIGS = {
    "bfloat16": BASE,
    "int4": Config(setting=OURS, method="int4", build=int4, dependent=True),
    "int4 + 2:4": SparseConfig(setting=OURS, method="int4 + 2:4", build=int4, make=int4, dependent=True),
    "fp8": Config(setting=OURS, method="fp8", build=fp8, dependent=True),
    "fp8 + 2:4": SparseConfig(
        setting=OURS, method="fp8 + 2:4", build=fp8, make=fp8, dependent=True, timed=True
    ),
}


def missing(config: Config) -> str | None:
    """Why a configuration cannot be measured with this copy; None where it can."""
    if isinstance(config, SparseConfig) and not hasattr(ao_lab, "SparseQuantizedTensor"):
        return "missing: this copy stores 2:4 weights dense, with zeros"
    return None


def needed(bench: decode.Bench) -> float:
    """About how many seconds it takes on an H100: bfloat16's compiler tunes what it writes, once for all that stand beside."""
    return NEEDED + (NEEDED_BASE if bench.base is None else 0.0)


def run(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Rows of all configurations that have none; nothing is measured without a GPU at full scale."""
    bench = decode.Bench.of(settings)
    torch.manual_seed(settings.seed)
    table = table_name(KIND, settings.scale, bench.shape.name)
    with bar("decoding", len(CONFIGS)) as step:
        for name, config in CONFIGS.items():
            if not journal.finished(table, SETTING, name):
                reason = None if published_shapes(settings) else NO_GPU
                reason = reason or missing(config) or deadline.reason(needed(bench))
                values = status(reason) if reason else attempt(lambda one=config: measure(bench, one))
                keep(journal, failed, rows_of(settings, table_of(bench), {name: values}))
            step(name)


def table_of(bench: decode.Bench) -> Table:
    """Where the rows belong."""
    return Table(KIND, bench.shape.name, SETTING)


@torch.no_grad()
def measure(bench: decode.Bench, config: Config) -> Values:
    """All values of one configuration. Logits of a pruned model are compared with those of bfloat16's pruned as it is: random
    weights without half of them are another model, whose logits differ by their whole size."""
    if not isinstance(config, SparseConfig):
        return decode.measure_one(bench, config)
    bench.baseline()
    dense = bench.logits
    bench.logits = pruned_logits(bench)
    try:
        return decode.measure_one(bench, config)
    finally:
        bench.logits = dense


def pruned_logits(bench: decode.Bench) -> torch.Tensor:
    """Of the prompt, by the bfloat16 model with its blocks pruned and nothing quantized."""
    model = copy.deepcopy(bench.baseline().model)
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN), inside_blocks)
    return Decoding(model, bench.plan, decode.prompt_of(bench)).prefill().float()


BLOCKS_KIND = "blocks"
ROWS = (1, 16, 4, 2, 8)
BLOCKS_SETTING = "all linear layers of a block, bfloat16 inputs, CUDA graph"
PLAN = Plan(rounds=9, warmup=1, seconds=4.0, span=1e-3, most_calls=16)
#: Largest difference of a layer's output to that of its weight's values in float32, relative to its norm: 8 bits of inputs.
LIMIT = 6e-2
#: Bytes of an element of the smallest storage: 4 bits, half of them kept, a quarter of their places.
LEAST = 0.375
Convert = Callable[[nn.Module], object]


def tables(
    device: str, seed: int, config: LlamaConfig = LLAMA_3_1_8B, rows: tuple[int, ...] = ROWS
) -> list[Table]:
    """A table for each number of rows."""
    made = partial(calls, shapes_of(config), device, seed)
    elements = sum(k * n for k, n in shapes_of(config))
    return [
        Table(
            BLOCKS_KIND, f"{config.name}, {count} rows", BLOCKS_SETTING,
            tuple(TimedMethod(name, partial(made, count, convert)) for name, convert in CONVERSIONS.items()),
            PLAN, operations=2.0 * count * elements, graph=device == "cuda", needed=25.0,
        )
        for count in rows
    ]  # fmt: skip


def shapes_of(config: LlamaConfig) -> tuple[tuple[int, int], ...]:
    """Inputs and outputs of a block's layers; queries, keys and values are one, and so are gate and up."""
    width, inner = config.width, config.feed_forward
    head = width // config.heads
    return (
        (width, width + 2 * config.kv_heads * head), (width, width), (width, 2 * inner), (inner, width),
    )  # fmt: skip


def calls(
    shapes: tuple[tuple[int, int], ...], device: str, seed: int, rows: int, convert: Convert
) -> list[Call]:
    """A call for each block; `Wrong` where a layer of the first computes something else than its weight says."""
    generator = torch.Generator(device).manual_seed(seed)
    least = int(LEAST * sum(k * n for k, n in shapes))
    count = input_sets(least, cache_bytes()) if device == "cuda" else 1
    inputs = {k: torch.randn(rows, k, generator=generator, device=device).bfloat16() for k, _ in shapes}
    blocks = [layers_of(shapes, device, generator, convert) for _ in range(count)]
    for layer in blocks[0]:
        check(layer, inputs[layer.in_features])
    return [partial(multiply, block, inputs) for block in blocks]


def layers_of(
    shapes: tuple[tuple[int, int], ...], device: str, generator: torch.Generator, convert: Convert
) -> list[nn.Linear]:
    """The layers of a block with random weights, converted one by one."""
    found = []
    for k, n in shapes:
        layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
        layer.weight.normal_(std=k**-0.5, generator=generator)
        convert(holder := nn.Sequential(layer))
        found.append(holder[0])
    return found


@torch.no_grad()
def multiply(block: list[nn.Linear], inputs: dict[int, Tensor]) -> list[Tensor]:
    """All products."""
    return [layer(inputs[layer.in_features]) for layer in block]


@torch.no_grad()
def check(layer: nn.Linear, x: Tensor) -> None:
    """`Wrong` for an output that is not the weight's."""
    weight: Any = layer.weight
    values = weight.dequantize() if isinstance(weight, ao_lab.QuantizedTensor) else weight
    exact = x.float() @ values.float().t()
    error = float((layer(x).float() - exact).norm() / exact.norm())
    if not error <= LIMIT:
        raise Wrong(f"the layer {tuple(weight.shape)} differs by {error:.1e} of its size")


TRAINING, INFERENCE = "vit", "sam"
MLP, INT8, ALL = "MLP 2:4", "int8 dynamic", "attention and MLP 2:4"
#: Training by our own kernels; `MLP` multiplies by cuSPARSELt there. Images of a step.
OWN, BATCH = "MLP 2:4, own kernels", 8
ENCODER_PLAN = Plan(rounds=7, warmup=1, seconds=20.0, span=0.0, most_calls=1)
#: Of calls that last most of a second.
LONG_PLAN = replace(ENCODER_PLAN, fewest=3)
EncoderConvert = Callable[[SamEncoder, Tensor], object]


def training_tables(
    device: str, seed: int, config: SamConfig = VIT_L, batch: int = BATCH, products: str = "cusparselt",
    own: str = "sparse_wgmma", backend: str = "inductor", dtype: torch.dtype = torch.float16,
) -> list[Table]:  # fmt: skip
    """Forward and backward, compiled as the published ones are. cuSPARSELt by itself, last: torch makes its plan anew in each
    of a step's hundred products, a tenth of a second each."""
    base = partial(trained, config, batch, device, seed, dtype, backend)
    setting, dense = training_setting(batch), TimedMethod(DENSE, base)
    others = TimedMethod(MLP, partial(base, products=products), foreign=True)
    return [
        Table(
            TRAINING,
            config.name,
            setting,
            (dense, TimedMethod(OWN, partial(base, products=own))),
            ENCODER_PLAN,
            batch,
            needed=90.0,
        ),
        Table(
            TRAINING,
            config.name,
            f"{setting}, cuSPARSELt",
            (dense, others),
            ENCODER_PLAN,
            batch,
            needed=150.0,
        ),
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
    methods = tuple(
        TimedMethod(name, partial(made, convert=convert), encoder_missing(name))
        for name, convert in ENCODER_CONVERSIONS.items()
    )
    setting = f"forward, bfloat16, compiled, batch {batch}"
    return [Table(INFERENCE, config.name, setting, methods, LONG_PLAN, batch, needed=200.0)]


@torch.no_grad()
def encoded(
    config: SamConfig,
    batch: int,
    device: str,
    seed: int,
    dtype: torch.dtype,
    backend: str,
    *,
    convert: EncoderConvert,
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
    encoder_choose_kernels(model, images)


def encoder_choose_kernels(model: SamEncoder, images: Tensor) -> None:
    """By timing at the rows that all images give a layer: of one image are that many times fewer, and its scores fit anywhere
    without a compiler."""
    patches = (images.shape[-1] // model.config.patch) ** 2
    ao_lab.tune(model, images[:1], rows=[images.shape[0] * patches], launches="graph")


def all_sparse(model: SamEncoder, images: Tensor) -> None:
    """All linear layers likewise."""
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(storage="compressed"), is_linear)  # type: ignore[call-arg]
    encoder_choose_kernels(model, images)


#: By method what is done to a dense model, of images of the batch that is timed.
ENCODER_CONVERSIONS: dict[str, EncoderConvert] = {
    DENSE: lambda model, images: None,
    INT8: int8,
    MLP: mlp_sparse,
    ALL: all_sparse,
}


def encoder_missing(method: str) -> str | None:
    """Why a method cannot be measured with this copy; None where it can."""
    if method in (MLP, ALL) and not hasattr(ao_lab, "SparseQuantizedTensor"):
        return "missing: this copy stores 2:4 weights dense, with zeros"
    return None
