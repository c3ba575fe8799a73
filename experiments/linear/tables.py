"""Tables: the methods of a part at one shape and number of rows, measured whole or not at all, and their rows.

A table's methods are timed in turn, so ratios are of one run: where one is missing, all are measured again, and take the place
of what was there. Without a GPU at full scale outputs alone are measured.

Experts of a mixture: rows of inputs sorted by expert times the weights (experts, outputs, inputs) of all, as
`torch._grouped_mm` multiplies them.

Of each token two experts are drawn at random, so rows are two a token, and how many an expert has is the same in every method.

What is compared: layers as `ao_lab.quantize_` makes them of `nn.Linear` in bfloat16, and as torchao's does.

Every configuration is a public one with default schemes. A name says what the weight's elements are, their groups, and behind
"dynamic" the blocks of the inputs; where no group is named a scale is of a row, or of what the format says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from ao_lab.gemm.dense import groups_reason, most_fused_rows
from ao_lab.gemm.select import select_kernel
from ao_lab.measure.turns import cache_bytes, input_sets
from experiments.decode.configs import FLOAT8_DYNAMIC, INT8_DYNAMIC, torchao_config
from experiments.harness import revision
from experiments.harness.measuring import Deadline, Values, Wrong, bar, status
from experiments.harness.rows import Journal, Row
from experiments.runs.run import put_table, where_of
from experiments.runs.settings import Settings
from fast.matmul.preshuffled.grouped import average_rows_as_stored

TORCH, OURS, TORCHAO = "torch", "ao_lab", revision.TORCHAO
EXPERTS = "experts"
Build = Callable[[], Any]


@dataclass(frozen=True)
class Method:
    """A layer. build: its configuration, None for the dense layer. compiled: whether torch.compile is needed for its speed."""

    name: str
    build: Build | None = None
    library: str = OURS
    compiled: bool = False

    def quantize(self, layer: Any) -> Any:
        """The linear layer, or batched experts, with its weight quantized, in place."""
        if self.build is None:
            return layer
        holder = nn.Sequential(layer)
        if self.library == TORCHAO:
            from torchao.quantization import quantize_

            quantize_(holder, self.build())
        else:
            ao_lab.quantize_(holder, self.build(), ao_lab.linear_and_experts)
        return holder[0]

    @property
    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        return revision.missing(TORCHAO) if self.library == TORCHAO else None


def integers(bits: int, group: int) -> Build:
    """Symmetric integers in groups."""
    return lambda: ao_lab.IntxWeightOnlyConfig(f"int{bits}", ao_lab.PerGroup(group))


def float8_dynamic(*granularity: Any) -> Build:
    """FP8 for weight and inputs; one granularity, or the inputs' and the weight's."""
    given = granularity[0] if len(granularity) == 1 else granularity
    return lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=given)


def int8_integers(bits: int, group: int) -> Build:
    """INT8 inputs with zero points, integers in groups for the weight."""
    return lambda: ao_lab.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=f"int{bits}", weight_granularity=ao_lab.PerGroup(group)
    )


def mx_dynamic(element: str) -> Build:
    """An MX format for both."""
    return lambda: ao_lab.MXDynamicActivationMXWeightConfig(activation_dtype=element, weight_dtype=element)


def theirs(name: str, build: Build, *, compiled: bool = True) -> Method:
    """One of torchao's."""
    return Method(f"{TORCHAO} {name}", build, TORCHAO, compiled)


#: Weights alone are quantized.
WEIGHTS = (
    Method("int4 g128", integers(4, 128)),
    Method("int4 g32", integers(4, 32)),
    Method("int4 g32, zero points", lambda: ao_lab.Int4WeightOnlyConfig(group_size=32)),
    Method("int4 g128, zero points", lambda: ao_lab.Int4WeightOnlyConfig(group_size=128)),
    Method("int8", lambda: ao_lab.Int8WeightOnlyConfig()),
    Method("int8 g128", lambda: ao_lab.Int8WeightOnlyConfig(group_size=128)),
    Method("fp8", lambda: ao_lab.Float8WeightOnlyConfig()),
    Method("mxfp8", lambda: ao_lab.MXWeightOnlyConfig("float8_e4m3fn")),
    Method("mxfp4", lambda: ao_lab.MXWeightOnlyConfig("float4_e2m1fn")),
    Method("nvfp4", lambda: ao_lab.NVFP4WeightOnlyConfig()),
    Method("nf4", lambda: ao_lab.NF4WeightOnlyConfig()),
    Method("int2 g32", integers(2, 32)),
    Method("int3 g32", integers(3, 32)),
    Method("int6 g32", integers(6, 32)),
)
#: Inputs are quantized too, in every call.
ACTIVATIONS = (
    Method("int8 dynamic", lambda: ao_lab.Int8DynamicActivationInt8WeightConfig()),
    Method(
        "int8 dynamic, zero points",
        lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(act_mapping_type=ao_lab.MappingType.ASYMMETRIC),
    ),
    Method("fp8 dynamic, tensor", float8_dynamic(ao_lab.PerTensor())),
    Method("fp8 dynamic, rows", float8_dynamic(ao_lab.PerRow())),
    Method("fp8 dynamic, blocks", float8_dynamic(ao_lab.PerBlock((1, 128)), ao_lab.PerBlock((128, 128)))),
    Method("int8 dynamic, int4 g32 weight", int8_integers(4, 32)),
    Method("fp8 dynamic, int4 g128 weight", lambda: ao_lab.Float8DynamicActivationInt4WeightConfig()),
    Method("mxfp8 dynamic", mx_dynamic("float8_e4m3fn")),
    Method("mxfp4 dynamic", mx_dynamic("float4_e2m1fn")),
    Method("nvfp4 dynamic", lambda: ao_lab.NVFP4DynamicActivationNVFP4WeightConfig()),
)
BASE = Method("bfloat16", library=TORCH)
#: torchao's, each with ours of the same weights and inputs.
PEERS = {
    theirs(
        "int4wo",
        torchao_config("Int4WeightOnlyConfig", group_size=128, int4_packing_format="tile_packed_to_4d"),
        compiled=False,
    ): "int4 g128, zero points",
    theirs("int8wo", torchao_config("Int8WeightOnlyConfig")): "int8",
    theirs("int8dq", torchao_config(INT8_DYNAMIC)): "int8 dynamic",
    theirs("fp8wo", torchao_config("Float8WeightOnlyConfig")): "fp8",
    theirs("fp8dq, rows", torchao_config(FLOAT8_DYNAMIC, granularity="PerRow")): "fp8 dynamic, rows",
}
#: Of experts: weights alone, one of each kind.
OF_EXPERTS = ("int4 g128", "int4 g128, zero points", "int8", "fp8", "mxfp8", "mxfp4", "nvfp4")
OF_OURS = {method.name: method for method in (*WEIGHTS, *ACTIVATIONS)}
#: By part, which is a kind of table too: what is timed in turn, bfloat16 first.
PARTS: dict[str, tuple[Method, ...]] = {
    "weights": (BASE, *WEIGHTS),
    "activations": (BASE, *ACTIVATIONS),
    EXPERTS: (BASE, *(OF_OURS[name] for name in OF_EXPERTS)),
    TORCHAO: (BASE, *(one for peer, ours in PEERS.items() for one in (OF_OURS[ours], peer))),
}


# Layers of one shape, as many of each method as it takes that none is found in the L2 cache, and the check before they are
# timed.

#: Outputs, inputs.
Shape = tuple[int, int]
#: Largest difference of outputs to the product in float32 of what is stored, relative to its norm: weights, inputs and outputs
#: that are rounded to bfloat16 (0.17% each), and sums of float8 that a tensor core cuts. Of torchao's to the dense layer, whose
#: rounding to 4 bits is in it (12%).
LIMIT, FOREIGN_LIMIT = 1e-2, 0.25
#: Rows of outputs that are compared, and the most layers of a method.
COMPARED, MOST = 64, 64
#: Bytes of an element of bfloat16.
WIDE = 2


@dataclass
class Layers:
    """Layers of a shape by method, made when they are first asked for; those of a number have the same random weights in every
    method."""

    shape: Shape
    device: str
    seed: int
    made: dict[str, list[nn.Linear]] = field(default_factory=dict)

    @property
    def data(self) -> str:
        """How rows call the shape: outputs x inputs."""
        return "x".join(map(str, self.shape))

    def share_read(self, rows: int) -> float:
        """The part of a weight that these rows need: all of it."""
        return 1.0

    @torch.no_grad()
    def of(self, method: Method, rows: int) -> list[nn.Linear]:
        """As many as exceed three times the cache, together with inputs and outputs; one on a CPU."""
        found = self.made.setdefault(method.name, [])
        if not found:
            found.append(self._layer(method, 0))
        moved = stored_bytes(found[0]) + WIDE * rows * sum(self.shape)
        count = input_sets(moved, cache_bytes(), MOST) if self.device == "cuda" else 1
        found += [self._layer(method, number) for number in range(len(found), count)]
        return found[:count]

    def inputs(self, rows: int, count: int) -> list[Tensor]:
        """As many inputs, random normal."""
        generator = self._generator(-1 - rows)
        k = self.shape[1]
        return [
            torch.randn(rows, k, generator=generator, device=self.device, dtype=torch.bfloat16)
            for _ in range(count)
        ]

    def _layer(self, method: Method, number: int) -> nn.Linear:
        n, k = self.shape
        layer = nn.Linear(k, n, bias=False, device=self.device, dtype=torch.bfloat16).requires_grad_(False)
        layer.weight.normal_(std=k**-0.5, generator=self._generator(number))
        return method.quantize(layer)

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1_000_003 * (self.seed + 1) + number)


def stored_bytes(layer: nn.Linear) -> float:
    """Bytes of a layer's weight as it is stored; of another library's tensor those of 4 bits an element, the fewest."""
    weight = layer.weight
    if isinstance(weight, ao_lab.QuantizedTensor):
        return float(sum(part.nbytes for part in weight.parts.values() if part is not None))
    return weight.numel() / 2 if type(weight.data) is not Tensor else float(weight.nbytes)


@torch.no_grad()
def checked(method: Method, layer: nn.Linear, y: Tensor, x: Tensor, dense: Tensor) -> float:
    """The relative error of outputs; `Wrong` for one that is too large, or for outputs that are not finite."""
    if not bool(torch.isfinite(y).all()):
        raise Wrong("outputs are not finite")
    picked = torch.cat([torch.arange(len(x))[:COMPARED], torch.arange(len(x))[COMPARED:][-COMPARED:]])
    exact = expected(method, layer, x, dense, picked)
    error = float((y[picked].float() - exact).norm() / exact.norm())
    limit = FOREIGN_LIMIT if method.library == TORCHAO else LIMIT
    if not error <= limit:
        raise Wrong(f"outputs differ by {error:.1e} of their size, more than {limit}")
    return error


def expected(method: Method, layer: nn.Linear, x: Tensor, dense: Tensor, picked: Tensor) -> Tensor:
    """The product in float32 of the values of inputs and weight as they are stored, of some rows; of torchao's, and of the
    dense layer, the dense weight's."""
    weight: Any = layer.weight
    if method.library == OURS:
        dense, scheme = weight.dequantize(torch.float32), weight.recipe.activation
        if scheme is not None:
            # Scales may be of all rows.
            x = ao_lab.dequantize(ao_lab.quantize(x, scheme), "float32")
    if not isinstance(layer, nn.Linear):
        return layer.product(x, dense)[picked]
    return x[picked].float() @ dense.float().t()


def kernel_of(method: Method, layer: nn.Linear, rows: int) -> str:
    """What computes a layer of ours for so many rows, as `ao_lab.explain` has it; the library's name for others."""
    if method.library != OURS or method == BASE:
        return method.library
    weight: Any = layer.weight.transposed()
    if not isinstance(layer, nn.Linear):
        if groups_reason(weight, torch.bfloat16) is not None:
            return "dequantize"
        average = rows / len(layer.weight)
        return "fused" if average <= average_rows_as_stored(weight.stored, torch.bfloat16) else "dequantize"
    name = select_kernel(weight, torch.bfloat16, rows)
    return "dequantize" if name == "fused" and rows > most_fused_rows(weight, torch.bfloat16) else name


#: Experts, and those of a token.
EXPERT_COUNT, EACH = 8, 2


class Experts(nn.Module):
    """One projection of each expert. Rows are sorted by expert; how many each has their number says."""

    #: Weights are (experts, outputs, inputs): what `quantize_` asks.
    is_transposed = False

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x (rows, inputs) to (rows, outputs)."""
        ends = ends_of(len(x), len(self.weight), x.device)
        y: Tensor = torch._grouped_mm(x, self.weight.transpose(-2, -1), offs=ends)
        return y

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows of x times a dense weight (experts, outputs, inputs), in float32."""
        ends = [0, *ends_of(len(x), len(weight), x.device).tolist()]
        parts = [x[a:b].float() @ one.float().t() for a, b, one in zip(ends, ends[1:], weight, strict=False)]
        return torch.cat(parts)


@lru_cache(maxsize=64)
def ends_of(rows: int, experts: int, device: torch.device) -> Tensor:
    """Where the rows of each expert end: int32 (experts)."""
    tokens = -(-rows // EACH)
    draw = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    chosen = draw.topk(EACH, 1).indices.flatten()[:rows]
    return torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32).to(device)


@dataclass
class ExpertLayers(Layers):
    """As many `Experts` of each method; `shape` is that of one expert."""

    experts: int = EXPERT_COUNT

    @property
    def data(self) -> str:
        """How rows call it: experts x outputs x inputs."""
        return f"{self.experts}x{super().data}"

    def share_read(self, rows: int) -> float:
        """The part of the weights that these rows need."""
        counts = ends_of(rows, self.experts, torch.device("cpu")).diff(
            prepend=torch.zeros(1, dtype=torch.int32)
        )
        return int((counts > 0).sum()) / self.experts

    def _layer(self, method: Method, number: int) -> Any:
        n, k = self.shape
        weight = torch.empty(self.experts, n, k, device=self.device, dtype=torch.bfloat16)
        weight.normal_(std=k**-0.5, generator=self._generator(number))
        return method.quantize(Experts(weight))


EXPERIMENT = "linear"
#: Up and down of Llama-3.1-8B, its queries, and its keys; time may not reach the last.
SHAPES: tuple[Shape, ...] = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096))
#: Of experts, up and down of Mixtral-8x7B; rows are two a token: of 1, 8, 64, 256 and 2048 tokens.
EXPERT_SHAPES, EXPERT_ROWS = SHAPES[:2], (2, 16, 128, 512, 4096)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
#: torchao's layers are compiled for every number of rows, which takes seconds, so they have fewer tables.
COMPILED_ROWS, COMPILED_SHAPES = (1, 16, 64, 256, 1024), SHAPES[:2]
STAND_INS: tuple[Shape, ...] = ((256, 512), (512, 256))
STAND_IN_ROWS = (1, 4, 33)
EXPERT_STAND_IN, STAND_IN_EXPERTS, EXPERT_STAND_IN_ROWS = (256, 512), 4, (2, 32)
#: What is measured, which ends a row's setting.
TIMES, OUTPUTS = "CUDA graph", "outputs"
#: About how many seconds a table takes on an H200, kernels compiled; it is not begun where fewer are left.
NEEDED, NEEDED_COMPILED = 8.0, 16.0
OK = "status: ok"
NO_TIMES = "not run: torchao's layers are timed on a GPU at full scale"


@dataclass(frozen=True)
class Table:
    """The methods of a part. measured: TIMES or OUTPUTS."""

    part: str
    layers: Layers
    rows: int
    measured: str

    @property
    def methods(self) -> tuple[Method, ...]:
        """Those that are measured here, bfloat16 first; of outputs ours alone, and none of those in two parts."""
        if self.measured == OUTPUTS:
            return tuple(one for one in PARTS[self.part] if one.library == OURS and self.part != TORCHAO)
        return tuple(one for one in PARTS[self.part] if one.name not in self.absent)

    @property
    def absent(self) -> dict[str, str]:
        """Methods that cannot be measured here, each with the reason."""
        timed = self.measured == TIMES
        reasons = {
            one.name: one.missing or (None if timed else NO_TIMES)
            for one in PARTS[self.part]
            if one.library == TORCHAO
        }
        return {name: reason for name, reason in reasons.items() if reason}

    @property
    def kind(self) -> str:
        """The kind of its rows' table: the part."""
        return self.part

    @property
    def data(self) -> str:
        """The shape, before it the number of experts."""
        return self.layers.data

    @property
    def setting(self) -> str:
        """Rows, and what is measured."""
        return setting_of(self.rows, self.measured)

    @property
    def needed(self) -> float:
        """Seconds that must be left."""
        return NEEDED_COMPILED if self.part == TORCHAO else NEEDED


def setting_of(rows: int, measured: str = TIMES) -> str:
    """How rows call a number of rows."""
    return f"{rows} row{'s' * (rows > 1)}, {measured}"


Measure = Callable[[Table], Mapping[str, Values]]


def data_of(shape: Shape) -> str:
    """How rows call a shape: outputs x inputs."""
    return "x".join(map(str, shape))


def tables_of(parts: Sequence[str], device: str, seed: int) -> Iterator[Table]:
    """Those with times: all of a shape before the next."""
    for shape in SHAPES:
        layers = Layers(shape, device, seed)
        for part in parts:
            if part != EXPERTS and (part != TORCHAO or shape in COMPILED_SHAPES):
                for rows in COMPILED_ROWS if part == TORCHAO else ROWS:
                    yield Table(part, layers, rows, TIMES)
    for shape in EXPERT_SHAPES if EXPERTS in parts else ():
        experts = ExpertLayers(shape, device, seed)
        for rows in EXPERT_ROWS:
            yield Table(EXPERTS, experts, rows, TIMES)


def stand_ins(parts: Sequence[str], device: str, seed: int) -> Iterator[Table]:
    """Small ones, with outputs; one that says of torchao that it has none."""
    for shape in STAND_INS:
        layers = Layers(shape, device, seed)
        for part in parts:
            if part not in (TORCHAO, EXPERTS):
                for rows in STAND_IN_ROWS:
                    yield Table(part, layers, rows, OUTPUTS)
            elif part == TORCHAO and shape == STAND_INS[0]:
                yield Table(part, layers, STAND_IN_ROWS[0], OUTPUTS)
    experts = ExpertLayers(EXPERT_STAND_IN, device, seed, experts=STAND_IN_EXPERTS)
    for rows in EXPERT_STAND_IN_ROWS if EXPERTS in parts else ():
        yield Table(EXPERTS, experts, rows, OUTPUTS)


def run_tables(
    tables: Iterable[Table], measure: Measure, settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline
) -> None:  # fmt: skip
    """Measure those that miss a method; rows of what went well go into the journal, others to `failed`. What was never measured
    comes first: a method that fails wherever it is tried keeps nothing else waiting."""
    todo = []
    for table in tables:
        for name, reason in table.absent.items():
            failed += settings.rows(EXPERIMENT, table.kind, table.data, table.setting, name, status(reason))
        if not is_whole(settings, journal, table):
            todo.append(table)
    todo.sort(key=lambda one: is_begun(settings, journal, one))
    with bar("linear layers", len(todo)) as step:
        for table in todo:
            reason = deadline.reason(table.needed)
            late = {method.name: status(reason or "") for method in table.methods}
            put_table(EXPERIMENT, table, late if reason else measure(table), settings, journal, failed)
            step(f"{table.data}, {table.setting}")


def is_whole(settings: Settings, journal: Journal, table: Table) -> bool:
    """Whether nothing is missing that can be measured here; what torchao refused is not asked for again."""
    own = [one for one in table.methods if one.library != TORCHAO]
    return all(journal.finished(*where_of(settings, table), one.name) for one in own)


def is_begun(settings: Settings, journal: Journal, table: Table) -> bool:
    """Whether some of it was measured."""
    return any(journal.finished(*where_of(settings, table), one.name) for one in table.methods)
