"""One builder per operation: from a scheme to the case that measures it.

The expected result always comes from `reference` on the host, on rows whose result depends on nothing outside them (given a
tensor-wide scale, which is compared as well).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

import fast.quantize.saturation  # noqa: F401  `function_of` finds imported modules, and `fast` does not import it
import reference
from experiments.kernels.cases import floors
from experiments.kernels.cases.case import Case, Compared, Inputs, Sample, at_least, function_of
from experiments.kernels.cases.floors import Shape
from experiments.kernels.cases.inputs import (
    codes,
    compare_columns,
    compare_quantized,
    moved_to,
    normal,
    tensor_scales,
    words,
)
from experiments.report.targets import Target
from reference import FORMATS, SCHEMES, Scheme
from reference.schemes.schemes import scheme_of


def fraction_target(fraction: float | None) -> tuple[Target, ...]:
    """The target of the fraction of the copy rate, where there is one."""
    return (at_least("fraction", fraction),) if fraction is not None else ()


def tensor_wide(scheme: Scheme) -> bool:
    """Whether a scale over the whole tensor has to be known before the first code."""
    return scheme.scale.block == "tensor" or (
        scheme.outer is not None and scheme.outer.statistic == "absmax_elements"
    )


def quantize(
    record: str | Scheme,
    *,
    packed: bool = False,
    axis: int = -1,
    given: bool = False,
    target: float | None = None,
    **more: Any,
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
        read=floors.wide_bytes,
        moved=lambda shape: (
            (2 if twice else 1) * floors.wide_bytes(shape)
            + floors.stored_bytes(scheme, shape, packed=packed, axis=axis)
        ),
        make=make,
        call=call,
        compare=compare,
        targets=more.pop("targets", None) or fraction_target(target),
        options={"packed": packed, "axis": axis, "given": given},
        **more,
    )


def small(name: str, targets: tuple[Target, ...] = ()) -> Case:
    """The same on 16 rows, where launches and not bytes decide, beside the cheapest kernel that torch has."""

    def elementwise(fast: Any, inputs: Inputs) -> Any:
        return inputs["x"] * 2

    case = quantize(
        name, targets=targets, shapes=("16x4096",), beside={"elementwise": elementwise}, host=True
    )
    return replace(case, name=f"small.{name}", operation="small")


def whole(name: str, *, target: float | None = None) -> Case:
    """A scheme whose second level spans the tensor in ways that rows do not show: compared on a tensor of its own."""
    case = quantize(name, target=target)

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
        read=floors.wide_bytes,
        moved=lambda shape: floors.wide_bytes(shape) + 4.0 * prod(shape) + floors.stored_bytes(scheme, shape),
        make=make,
        call=lambda fast, inputs: fast.quantize(inputs["x"], scheme, random_bits=inputs["words"]),
        compare=compare,
    )


def saturation_mask(name: str) -> Case:
    """Fake quantization and a mask of the blocks that saturate, so that backward reads x only there."""
    function = "quantize.saturation.fake_quantize_with_mask"

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        x = sample.rows(inputs["x"])
        return [("values", sample.rows(got[0]), reference.fake_quantize(x, name))]

    return Case(
        name=f"saturation_mask.{name}",
        operation="saturation_mask",
        scheme=name,
        needs=(function,),
        read=floors.wide_bytes,
        moved=lambda shape: 2 * floors.wide_bytes(shape),
        make=lambda fast, shape, device, seed: {"x": normal(shape, device, seed)},
        call=lambda fast, inputs: function_of(fast, function)(inputs["x"], name),
        compare=compare,
    )


def fake_quantize(name: str, *, target: float | None = None, gradient: bool = False) -> Case:
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
        read=lambda shape: floors.wide_bytes(shape) * (2 if gradient else 1),
        moved=lambda shape: floors.wide_bytes(shape) * (3 if gradient else 2),
        make=make,
        call=backward if gradient else forward,
        compare=compare,
        targets=fraction_target(target),
    )


def both(name: str, *, given: bool = False, target: float | None = None) -> Case:
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
        read=floors.wide_bytes,
        moved=lambda shape: (
            floors.wide_bytes(shape)
            + floors.stored_bytes(scheme, shape)
            + floors.stored_bytes(scheme, shape[::-1])
        ),
        make=make,
        call=call,
        compare=compare,
        targets=fraction_target(target),
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
