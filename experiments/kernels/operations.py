"""One builder per operation: from a scheme to the case that measures it.

The expected result always comes from `reference` on the host, on rows whose result depends on nothing outside them (given a
tensor-wide scale, which is compared as well).

A benchmark case: one kernel on one kind of input, with its floor in bytes, its targets, and what its result must equal.

Calls take the module `fast` as an argument, so that a test can pass another object with the same functions.

The fewest bytes that a case moves: every tensor that it needs read once, every result written once.

A kernel's *fraction* is its rate on these bytes over the rate of a plain copy, measured in the same run, of a tensor as large
as the case's input. A kernel that has to read twice (a scale over the whole tensor comes before the first code) has a floor
that says so.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import prod
from types import ModuleType
from typing import Any

import torch

import fast.quantize.fake_quantize  # noqa: F401  `function_of` finds imported modules, and `fast` does not import it
import reference
from experiments.report.targets import Target, limits
from reference import FORMATS, SCHEMES, Quantized, Scales, Scheme
from reference.schemes.schemes import scheme_of

EXPERIMENT = "kernels"
#: Bytes of a bfloat16, in which all inputs of quantizers come.
WIDE = 2
Shape = tuple[int, int]


def storage_bytes(name: str) -> float:
    """Bytes of one scale or zero point as stored: float32, or a whole number of bytes of a format."""
    return 4.0 if name == "float32" else float(-(-FORMATS[name].bits // 8))


def code_bytes(scheme: Scheme, packed: bool) -> float:
    """Bytes of one code: its bits where packed, else a whole number of bytes."""
    bits = scheme.format.bits
    return bits / 8 if packed else float(-(-bits // 8))


def block_count(block: int | tuple[int, int] | str, shape: Shape, axis: int = -1) -> int:
    """How many blocks a record's `block` makes of a matrix, short ones counted."""
    along, across = (shape[1], shape[0]) if axis in (-1, 1) else shape
    if block == "tensor":
        return 1
    if isinstance(block, str):
        return -(-prod(shape) // int(block.partition(":")[2]))
    if isinstance(block, tuple):
        return -(-across // block[0]) * -(-along // block[1])
    return across * (1 if block == -1 else -(-along // block))


def scale_bytes(scheme: Scheme, shape: Shape, axis: int = -1) -> float:
    """Bytes of all scales and zero points of a matrix."""
    blocks = block_count(scheme.scale.block, shape, axis)
    total = blocks * storage_bytes(scheme.scale.storage)
    if scheme.zero is not None:
        total += blocks * storage_bytes(scheme.zero.storage)
    if scheme.outer is not None:
        over_elements = scheme.outer.statistic == "absmax_elements"
        outer = 1 if over_elements else block_count(scheme.outer.block, (1, blocks))
        total += outer * storage_bytes(scheme.outer.storage)
    return total


def stored_bytes(scheme: str | Scheme, shape: Shape, *, packed: bool = False, axis: int = -1) -> float:
    """Bytes of a quantized matrix: codes, scales, zero points."""
    record = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    return prod(shape) * code_bytes(record, packed) + scale_bytes(record, shape, axis)


def wide_bytes(shape: Shape) -> float:
    """Bytes of a bfloat16 matrix."""
    return float(WIDE * prod(shape))


def fraction(moved: float, seconds: float, copy_rate: float) -> float:
    """Rate over the copy's rate (both in bytes a second)."""
    return moved / seconds / copy_rate


Inputs = dict[str, Any]
Work = Callable[[ModuleType, Inputs], Any]
#: What was compared, the result, the reference's result.
Compared = tuple[str, Any, Any]

SHAPES: dict[str, Shape] = {
    "16384x4096": (16384, 4096),
    "16384x14336": (16384, 14336),
    # 2**31 + 4096 elements: offsets that 32 bits do not hold.
    "524289x4096": (524289, 4096),
    "16x4096": (16, 4096),
    # Weights of two layers of Llama-3.1-8B.
    "14336x4096": (14336, 4096),
    "4096x14336": (4096, 14336),
}
LARGE = ("16384x4096", "16384x14336")
HUGE = "524289x4096"
SMALL = "16x4096"


#: How text shows the values and limits of a case's targets.
SHOWN = {"value_format": ".4g", "limit_format": "g"}


@dataclass(frozen=True)
class Sample:
    """Where a result is compared: a range of rows of the tensor (of columns, where blocks run along the first axis)."""

    start: int
    stop: int

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """These rows, on the host."""
        return tensor[self.start : self.stop].detach().cpu().contiguous()

    def columns(self, tensor: torch.Tensor) -> torch.Tensor:
        """These columns, on the host."""
        return tensor[:, self.start : self.stop].detach().cpu().contiguous()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel to measure.

    name: ``operation.scheme`` and perhaps a variant. needs: functions of `fast` that it calls (`function_of` finds them),
    ``function:parameter`` where a parameter may not exist. read, moved: bytes of the input (what a copy of the same size
    reads) and of the floor. make: inputs of a shape, from a seed. call: the kernel. compare: what of a result must
    equal what, at a sample. beside: other calls that are timed in turn with it, by name. host: whether the host's time for a
    launch is measured as well.
    """

    name: str
    operation: str
    scheme: str
    needs: tuple[str, ...]
    read: Callable[[Shape], float]
    moved: Callable[[Shape], float]
    make: Callable[[Any, Shape, str, int], Inputs]
    call: Work
    compare: Callable[[Any, Inputs, Any, Sample], list[Compared]]
    shapes: tuple[str, ...] = LARGE
    beside: Mapping[str, Work] = field(default_factory=dict)
    host: bool = False
    #: The call inside this one, for what this one adds to the host's time.
    wraps: Work | None = None
    #: What of the operation the expressions of baselines need to know: packed, axis, given, residual, both.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def targets(self) -> tuple[Target, ...]:
        """Those of its name, without values."""
        found = (one for one in limits(EXPERIMENT) if fnmatchcase(self.name, one.key))
        return tuple(one.target(one.metric, None, **SHOWN) for one in found)

    def missing(self, fast: Any) -> list[str]:
        """Which of `needs` this `fast` does not have."""
        return [need for need in self.needs if not has(fast, need)]

    def moved_per_element(self, shape: Shape) -> float:
        """Floor in bytes an element."""
        return self.moved(shape) / (shape[0] * shape[1])


def function_of(fast: Any, name: str) -> Any:
    """The function of `fast` called `name`, or of its imported modules (``folder.module.function``); None without one."""
    module, _, attribute = name.rpartition(".")
    if module and isinstance(fast, ModuleType):
        return getattr(sys.modules.get(f"{fast.__name__}.{module}"), attribute, None)
    return getattr(fast, name, None)


def has(fast: Any, need: str) -> bool:
    """Whether `fast` has a function, and the parameter that stands behind a colon."""
    name, _, parameter = need.partition(":")
    function = function_of(fast, name)
    if not callable(function):
        return False
    return not parameter or parameter in inspect.signature(function).parameters


# Inputs of cases, and pieces of them on the host. Values are normal, never constant: every kernel is faster on constants.

EPS = 1e-6


def normal(shape: Shape | tuple[int], device: str, seed: int) -> torch.Tensor:
    """bfloat16, normal; its first row is zero, the edge that every scale has to survive."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    if x.ndim == 2:
        x[0] = 0
    return x


def words(shape: Shape, device: str, seed: int) -> torch.Tensor:
    """Random words for stochastic rounding, one uint32 an element."""
    generator = torch.Generator(device=device).manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, device=device, dtype=torch.int32)
    return bits.view(torch.uint32)


def codes(shape: Shape, below: int, device: str, seed: int) -> torch.Tensor:
    """Random codes, one uint8 an element."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, below, shape, generator=generator, device=device, dtype=torch.uint8)


def peak(x: torch.Tensor, width: int = 16, height: int = 1) -> torch.Tensor:
    """Rows of zeros and the largest element of x: its tensor-wide scale is that of x."""
    # A row at a time, so that no other tensor of x's size is in memory.
    rows = torch.linalg.vector_norm(x, ord=float("inf"), dim=1)
    row = x[int(rows.argmax())]
    found = torch.zeros(height, width, dtype=x.dtype)
    found[0, 0] = row[row.abs().argmax()].cpu()
    return found


def tensor_scales(x: torch.Tensor, scheme: Scheme) -> Scales:
    """The tensor-wide part of x's scales by the reference, on the host: the only scale, or the outer one."""
    block = scheme.scale.block
    whole = peak(x, height=block[0]) if isinstance(block, tuple) else peak(x)
    found = reference.choose_scales(whole, scheme)
    return Scales(outer=found.outer) if scheme.outer is not None else Scales(found.scale)


def moved_to(scales: Scales, device: str | torch.device) -> Scales:
    """The same scales on a device."""
    parts = (None if part is None else part.to(device) for part in (scales.scale, scales.outer, scales.zero))
    return Scales(*parts)


def piece(part: torch.Tensor | None, rows: int, sample: Sample) -> torch.Tensor | None:
    """The part of scales that belongs to a sample of `rows` rows; what is tensor-wide stays whole."""
    if part is None or part.ndim == 0:
        return None if part is None else part.detach().cpu()
    if sample.stop - sample.start == rows:
        return part.detach().cpu().contiguous()
    size = -(-rows // part.shape[0])
    return part[sample.start // size : -(-sample.stop // size)].detach().cpu().contiguous()


def quantized_piece(q: Quantized, sample: Sample) -> Quantized:
    """The rows of a quantized matrix, on the host."""
    rows, columns = q.shape
    scale, outer, zero = (piece(part, rows, sample) for part in (q.scale, q.outer, q.zero))
    shape = (min(sample.stop, rows) - sample.start, columns)
    return replace(q, codes=sample.rows(q.codes), scale=scale, outer=outer, zero=zero, shape=shape)


def compare_quantized(got: Quantized, expected: Quantized, sample: Sample, what: str = "") -> list[Compared]:
    """Codes, scales and zero points of a result's rows against the reference's on these rows."""
    mine = quantized_piece(got, sample)
    parts = ("codes", "scale", "outer", "zero")
    return [(f"{what}{part}", getattr(mine, part), getattr(expected, part)) for part in parts]


def compare_columns(got: Quantized, expected: Quantized, sample: Sample) -> list[Compared]:
    """The same for blocks along the first axis: columns."""
    return [
        ("codes", sample.columns(got.codes), expected.codes),
        ("scale", sample.columns(got.scale), expected.scale),
        ("zero", None if got.zero is None else sample.columns(got.zero), expected.zero),
    ]


def tensor_wide(scheme: Scheme) -> bool:
    """Whether a scale over the whole tensor has to be known before the first code."""
    return scheme.scale.block == "tensor" or (
        scheme.outer is not None and scheme.outer.statistic == "absmax_elements"
    )


def quantize(
    record: str | Scheme, *, packed: bool = False, axis: int = -1, given: bool = False, **more: Any
) -> Case:
    """`fast.quantize` of a bfloat16 matrix; given: with the tensor-wide scale at hand, which saves one reading."""
    scheme = scheme_of(record)
    name = scheme.name
    twice = tensor_wide(scheme) and not given
    parts = ["packed"] * packed + ["axis0"] * (axis == 0) + ["given"] * given

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        x = normal(shape, device, seed)
        host = tensor_scales(x, scheme) if tensor_wide(scheme) else None
        scales = moved_to(host, device) if host is not None and given else None
        return {"x": x, "scales": scales, "host": host}

    def call(fast: Any, inputs: Inputs) -> Any:
        options: dict[str, Any] = {"packed": True} if packed else {}
        if axis != -1:
            options["axis"] = axis
        if given:
            options["scales"] = inputs["scales"]
        return fast.quantize(inputs["x"], scheme, **options)

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        if axis == 0:
            part = sample.columns(inputs["x"])
            return compare_columns(got, reference.quantize(part, scheme, axis=0), sample)
        expected = reference.quantize(sample.rows(inputs["x"]), scheme, scales=inputs["host"], packed=packed)
        return compare_quantized(got, expected, sample)

    return Case(
        name=".".join(["quantize", name, *parts]),
        operation="quantize",
        scheme=name,
        needs=("quantize:packed",) if packed else ("quantize",),
        read=wide_bytes,
        moved=lambda shape: (
            (2 if twice else 1) * wide_bytes(shape) + stored_bytes(scheme, shape, packed=packed, axis=axis)
        ),
        make=make,
        call=call,
        compare=compare,
        options={"packed": packed, "axis": axis, "given": given},
        **more,
    )


def small(name: str) -> Case:
    """The same on 16 rows, where launches and not bytes decide, beside the cheapest kernel that torch has."""

    def elementwise(fast: Any, inputs: Inputs) -> Any:
        return inputs["x"] * 2

    case = quantize(name, shapes=("16x4096",), beside={"elementwise": elementwise}, host=True)
    return replace(case, name=f"small.{name}", operation="small")


def whole(name: str) -> Case:
    """A scheme whose second level spans the tensor in ways that rows do not show: compared on a tensor of its own."""
    case = quantize(name)

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        part = inputs["x"][sample.start : sample.stop].contiguous()
        expected = reference.quantize(part.cpu(), name)
        return compare_quantized(fast.quantize(part, name), expected, Sample(0, part.shape[0]))

    return replace(case, compare=compare)


def stochastic(name: str) -> Case:
    """Quantization with random words, which are read too."""
    scheme = replace(SCHEMES[name], name=f"{name}_stochastic", rounding="stochastic")

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        return {"x": normal(shape, device, seed), "words": words(shape, device, seed + 1)}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        part, bits = sample.rows(inputs["x"]), sample.rows(inputs["words"])
        return compare_quantized(got, reference.quantize(part, scheme, random_bits=bits), sample)

    return Case(
        name=f"quantize.{name}.stochastic",
        operation="stochastic",
        scheme=name,
        needs=("quantize",),
        read=wide_bytes,
        moved=lambda shape: wide_bytes(shape) + 4.0 * prod(shape) + stored_bytes(scheme, shape),
        make=make,
        call=lambda fast, inputs: fast.quantize(inputs["x"], scheme, random_bits=inputs["words"]),
        compare=compare,
    )


def saturation_mask(name: str) -> Case:
    """Fake quantization and a mask of the blocks that saturate, so that backward reads x only there."""
    function = "quantize.fake_quantize.fake_quantize_with_mask"

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        x = sample.rows(inputs["x"])
        return [("values", sample.rows(got[0]), reference.fake_quantize(x, name))]

    return Case(
        name=f"saturation_mask.{name}",
        operation="saturation_mask",
        scheme=name,
        needs=(function,),
        read=wide_bytes,
        moved=lambda shape: 2 * wide_bytes(shape),
        make=lambda fast, shape, device, seed: {"x": normal(shape, device, seed)},
        call=lambda fast, inputs: function_of(fast, function)(inputs["x"], name),
        compare=compare,
    )


def fake_quantize(name: str, *, gradient: bool = False) -> Case:
    """Rounding in place, as training simulates it; gradient: its vector-Jacobian product instead."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        inputs = {"x": normal(shape, device, seed)}
        return {**inputs, "g": normal(shape, device, seed + 1)} if gradient else inputs

    def forward(fast: Any, inputs: Inputs) -> Any:
        with torch.no_grad():
            return fast.fake_quantize(inputs["x"], name)

    def backward(fast: Any, inputs: Inputs) -> Any:
        return fast.fake_quantize_vjp(inputs["g"], inputs["x"], name)[0]

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        x = sample.rows(inputs["x"])
        if gradient:
            expected = reference.fake_quantize_vjp(sample.rows(inputs["g"]), x, name)[0]
        else:
            expected = reference.fake_quantize(x, name)
        return [("gradient" if gradient else "values", sample.rows(got), expected)]

    function = "fake_quantize_vjp" if gradient else "fake_quantize"
    return Case(
        name=f"{function}.{name}",
        operation=function,
        scheme=name,
        needs=(function,),
        read=lambda shape: wide_bytes(shape) * (2 if gradient else 1),
        moved=lambda shape: wide_bytes(shape) * (3 if gradient else 2),
        make=make,
        call=backward if gradient else forward,
        compare=compare,
    )


def both(name: str, *, given: bool = False) -> Case:
    """Row blocks and the transposed copy in column blocks, from one reading."""
    scheme = SCHEMES[name]

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        x = normal(shape, device, seed)
        host = tensor_scales(x, scheme) if given else None
        return {"x": x, "host": host, "scales": moved_to(host, device) if host else None}

    def call(fast: Any, inputs: Inputs) -> Any:
        # One tensor-wide scale for both copies.
        options = {"scales": (inputs["scales"], inputs["scales"])} if given else {}
        return fast.quantize_both(inputs["x"], scheme, **options)

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        rows, columns = sample.rows(inputs["x"]), sample.columns(inputs["x"]).t().contiguous()
        expected = [reference.quantize(part, scheme, scales=inputs["host"]) for part in (rows, columns)]
        return compare_quantized(got[0], expected[0], sample, "rows: ") + compare_quantized(
            got[1], expected[1], sample, "transposed: "
        )

    return Case(
        name=".".join(["both", name] + ["given"] * given),
        operation="both",
        scheme=name,
        needs=("quantize_both",),
        read=wide_bytes,
        moved=lambda shape: (
            wide_bytes(shape) + stored_bytes(scheme, shape) + stored_bytes(scheme, shape[::-1])
        ),
        make=make,
        call=call,
        compare=compare,
        options={"given": given},
    )


def storage(operation: str, element: str) -> Case:
    """`encode`, `decode`, `pack` or `unpack` of a format: no scales."""
    fmt = FORMATS[element]
    narrow = fmt.bits / 8
    input_bytes = {"encode": 2.0, "decode": 1.0, "pack": 1.0, "unpack": narrow}[operation]
    output_bytes = {"encode": 1.0, "decode": 4.0, "pack": narrow, "unpack": 1.0}[operation]

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        if operation == "encode":
            return {"x": normal(shape, device, seed)}
        stored = codes(shape, 2**fmt.bits, device, seed)
        return {"x": fast.pack(stored, element) if operation == "unpack" else stored, "shape": shape}

    def run(module: Any, x: Any, shape: Shape) -> Any:
        extra = (shape,) if operation == "unpack" else ()
        return getattr(module, operation)(x, element, *extra)

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        part = sample.rows(inputs["x"])
        columns = inputs["x"].shape[1] if operation != "unpack" else inputs["shape"][1]
        return [(operation, sample.rows(got), run(reference, part, (part.shape[0], columns)))]

    return Case(
        name=f"{operation}.{element}",
        operation=operation,
        scheme=element,
        needs=(operation, "pack") if operation == "unpack" else (operation,),
        read=lambda shape: prod(shape) * input_bytes,
        moved=lambda shape: prod(shape) * (input_bytes + output_bytes),
        make=make,
        call=lambda fast, inputs: run(fast, inputs["x"], inputs.get("shape", (0, 0))),
        compare=compare,
    )
