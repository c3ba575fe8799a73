"""Builders of cases around a quantizer: dequantization, and activations fused with quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reference
from experiments.kernels.cases import floors
from experiments.kernels.cases.case import HUGE, LARGE, Case, Compared, Inputs, Sample, at_least
from experiments.kernels.cases.floors import Shape
from experiments.kernels.cases.inputs import EPS, compare_quantized, normal, quantized_piece
from experiments.report.targets import Target
from reference import SCHEMES

#: Fused into one kernel against its two halves, one after the other.
FUSED_SPEEDUP = at_least("speedup over unfused", 1.8)


def dequantize(name: str, *, packed: bool = False, target: float | None = None, huge: bool = False) -> Case:
    """Stored tensor to bfloat16. It is quantized by `fast`, and whatever it holds is dequantized by the reference as well."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        options = {"packed": True} if packed else {}
        return {"q": fast.quantize(normal(shape, device, seed), name, **options)}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        if isinstance(SCHEMES[name].scale.block, str):
            # Blocks of the flattened tensor: rows are no tensors of their own, so a small tensor is compared as a whole.
            part = fast.quantize(normal((32, got.shape[1]), str(got.device), 1), name)
            got, sample = fast.dequantize(part, "bfloat16"), Sample(0, 32)
        else:
            part = inputs["q"]
        expected = reference.dequantize(quantized_piece(part, sample), "bfloat16")
        return [("values", sample.rows(got), expected)]

    return Case(
        name=".".join(["dequantize", name] + ["packed"] * packed),
        operation="dequantize",
        scheme=name,
        needs=("dequantize", "quantize:packed" if packed else "quantize"),
        read=lambda shape: floors.stored_bytes(name, shape, packed=packed),
        moved=lambda shape: floors.stored_bytes(name, shape, packed=packed) + floors.wide_bytes(shape),
        make=make,
        call=lambda fast, inputs: fast.dequantize(inputs["q"], "bfloat16"),
        compare=compare,
        targets=(at_least("fraction", target),) if target is not None else (),
        shapes=(*LARGE, HUGE) if huge else LARGE,
        options={"packed": packed},
    )


def rms_norm(name: str, *, residual: bool = False, targets: tuple[Target, ...] = ()) -> Case:
    """RMS norm and quantization in one kernel; with a residual, which is added first and written back."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        inputs = {"x": normal(shape, device, seed), "weight": normal((shape[1],), device, seed + 1)}
        return {**inputs, "residual": normal(shape, device, seed + 2) if residual else None}

    def rest(inputs: Inputs) -> Mapping[str, Any]:
        return {"eps": EPS, **({"residual": inputs["residual"]} if residual else {})}

    def call(fast: Any, inputs: Inputs) -> Any:
        return fast.rms_norm_quantize(inputs["x"], inputs["weight"], name, **rest(inputs))

    def unfused(fast: Any, inputs: Inputs) -> Any:
        normed, sums = fast.rms_norm(inputs["x"], inputs["weight"], **rest(inputs))
        return fast.quantize(normed, name), sums

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        options = {"residual": sample.rows(inputs["residual"])} if residual else {}
        expected, sums = reference.rms_norm_quantize(
            sample.rows(inputs["x"]), inputs["weight"].cpu(), name, eps=EPS, **options
        )
        pairs = compare_quantized(got[0], expected, sample)
        return [*pairs, ("new residual", sample.rows(got[1]), sums)] if residual else pairs

    def moved(shape: Shape) -> float:
        wide = floors.wide_bytes(shape)
        return wide * (3 if residual else 1) + 2.0 * shape[1] + floors.stored_bytes(name, shape)

    return Case(
        name=".".join(["rms_norm", name] + ["residual"] * residual),
        operation="rms_norm",
        scheme=name,
        needs=("rms_norm_quantize", "rms_norm", "quantize"),
        read=lambda shape: floors.wide_bytes(shape) * (2 if residual else 1),
        moved=moved,
        make=make,
        call=call,
        compare=compare,
        targets=targets,
        beside={"unfused": unfused},
        options={"residual": residual},
    )


def swiglu(name: str, *, targets: tuple[Target, ...] = ()) -> Case:
    """silu(gate) * up and quantization in one kernel."""

    def make(fast: Any, shape: Shape, device: str, seed: int) -> Inputs:
        return {"gate": normal(shape, device, seed), "up": normal(shape, device, seed + 1)}

    def compare(fast: Any, inputs: Inputs, got: Any, sample: Sample) -> list[Compared]:
        parts = [sample.rows(inputs[key]) for key in ("gate", "up")]
        return compare_quantized(got, reference.swiglu_quantize(*parts, name), sample)

    def unfused(fast: Any, inputs: Inputs) -> Any:
        return fast.quantize(fast.swiglu(inputs["gate"], inputs["up"]), name)

    return Case(
        name=f"swiglu.{name}",
        operation="swiglu",
        scheme=name,
        needs=("swiglu_quantize", "swiglu", "quantize"),
        read=lambda shape: 2 * floors.wide_bytes(shape),
        moved=lambda shape: 2 * floors.wide_bytes(shape) + floors.stored_bytes(SCHEMES[name], shape),
        make=make,
        call=lambda fast, inputs: fast.swiglu_quantize(inputs["gate"], inputs["up"], name),
        compare=compare,
        targets=targets,
        beside={"unfused": unfused},
    )
