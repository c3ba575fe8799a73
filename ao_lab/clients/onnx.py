"""`export_onnx`: a model with quantized linear layers as an ONNX file.

torch's own exporter writes the model; while it runs, each quantized linear layer is a module that stands for operators of ONNX
(`onnx_layer`). The model is as it was afterwards, after an error too.

A quantized linear layer becomes:

* Integers by float inputs: `MatMulNBits` of com.microsoft, 4 or 8 bits, the codes and zero points as they are. Its block of 16
  to 256 elements is the scheme's, or a part of it with the scale repeated: (code - zero point) * scale, float32 sums.
* float8 and MXFP8 by float inputs: `DequantizeLinear` of FLOAT8E4M3FN or FLOAT8E5M2 in blocks, then `MatMul`.
* NF4 by float inputs: `MatMulBnb4` of com.microsoft, which onnxruntime has and OpenVINO has not; one scale a block.
* int8 by int8 inputs, one scale a token: scale, integers and `MatMulInteger` by standard operators, in the order of the scheme:
  integers are the layer's own; the float32 products with both scales follow as they do here.
* Integers by int8 inputs with a zero point a token: inputs rounded by standard operators, then `MatMulNBits`.
* int8 by int8 inputs with a static scale: `QuantizeLinear` and `DequantizeLinear` (QDQ), which runtimes fuse. QuantizeLinear
  divides where `quantize` multiplies by a reciprocal: an input close to the middle of two integers may get the other.

Source: onnx 1.23, docs/Operators.md; onnxruntime, docs/ContribOperators.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import reference
from ao_lab.checkpoint.io.files import file_to_write, staged
from ao_lab.clients.examples import example_of
from ao_lab.clients.integers import (
    block_size,
    by_block,
    check_integers,
    nibbles,
    one_scale_a_row,
    scales_of,
    signed_codes,
)
from ao_lab.clients.programs import check_exported, without_cache
from ao_lab.config.recipe import numerics
from ao_lab.install.extras import needed
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.layers import check_model, full_name
from reference import SCHEMES, Quantized
from reference.quantize.quantize import unpacked

#: DequantizeLinear has blocks since 21.
OPSET = 21


class OnnxFile(NamedTuple):
    """What `export_onnx` wrote: the file, its bytes with those of its data file, and how many nodes of quantization it has."""

    path: Path
    bytes: int
    operators: dict[str, int]


def export_onnx(
    model: nn.Module,
    args: Sequence[Any],
    path: str | Path,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> OnnxFile:
    """Export a model as an ONNX file (opset 21) for onnxruntime, and for OpenVINO if it has the operators.

    model: float32, in evaluation mode, the weights of its linear layers (N, K) quantized, all or some. A language model of
    transformers is exported without its cache. args, kwargs: inputs of one call, of any shape and dtype: the file takes exactly
    these shapes but along dynamic_shapes, of which an input of size 1 is repeated to 2 (`ao_lab.clients.examples`).
    dynamic_shapes, input_names, output_names: as for `torch.onnx.export`. Weights over 2 GB are stored in a second file.

    Integers become MatMulNBits with the same values, scales and zero points, NF4 MatMulBnb4, float8 DequantizeLinear, int8 by
    int8 MatMulInteger or QDQ. Outputs are those of the model up to the order of float32 sums. TypeError for anything but a
    module; ValueError for another scheme, with the layer and what would work, for quantized weights elsewhere, for other
    dtypes, for a model in training or without quantized weights, and for a path in no folder.
    """
    check_model(model)
    path = file_to_write(path)
    check_exported(model, "torch.onnx.export writes")
    onnx, _ = needed("onnx"), needed("onnxscript")
    names = {"input_names": input_names, "output_names": output_names}
    options: dict[str, Any] = {key: value for key, value in names.items() if value is not None}
    with _as_operators(model) as exported, without_cache(model), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        example = example_of(exported, args, kwargs or {}, dynamic_shapes)
        with example.named():
            program: Any = torch.onnx.export(
                exported, example.args, kwargs=example.kwargs, dynamo=True, opset_version=OPSET, verbose=False,
                dynamic_shapes=dynamic_shapes, **options,
            )  # fmt: skip
    with staged(path.parent) as place:
        program.save(str(place / path.name))
        written = onnx.load(str(place / path.name), load_external_data=False)
        sizes = sum(file.stat().st_size for file in place.iterdir())
    kinds = [node.op_type for node in written.graph.node if node.op_type in KINDS]
    return OnnxFile(path, sizes, {kind: kinds.count(kind) for kind in sorted(set(kinds))})


#: Operators of quantized layers.
KINDS = ("MatMulNBits", "MatMulBnb4", "DequantizeLinear", "QuantizeLinear", "MatMulInteger")


@contextmanager
def _as_operators(model: nn.Module) -> Iterator[nn.Module]:
    """The model with modules for ONNX in the places of its quantized linear layers; such a module where the model is one."""
    layers = {
        module: name
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }
    _check(model, {full_name(name, "weight") for name in layers.values()})
    made: dict[nn.Module, nn.Module] = {}
    for module, name in layers.items():
        try:
            made[module] = _replacement(module)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if name else str(error)) from error
    # A layer may stand at several places, of one owner too.
    places = [
        (owner, leaf, module)
        for owner in model.modules()
        for leaf, module in owner._modules.items()
        if module in made
    ]
    try:
        for owner, leaf, module in places:
            setattr(owner, leaf, made[module])
        yield made.get(model, model)
    finally:
        for owner, leaf, module in places:
            setattr(owner, leaf, module)


def _replacement(module: nn.Module) -> nn.Module:
    """The module that stands for a quantized layer; ValueError where the layer computes more than it does."""
    if not isinstance(module, nn.Linear):
        raise ValueError(f"quantized weights of {type(module).__name__} are not exported; leave them dense")
    own = type(module).forward is not nn.Linear.forward or "forward" in vars(module)
    if own or module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(
            f"{type(module).__name__} has {'a forward' if own else 'hooks'} of its own, which the file would not have; "
            f"remove them, or leave the layer dense"
        )
    weight: Any = module.weight
    return onnx_layer(weight.detach(), module.bias)


def _check(model: nn.Module, weights: set[str]) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedTensor) and name not in weights:
            raise ValueError(
                f"{name}: quantized weights are exported in nn.Linear alone; leave this one dense"
            )


#: Blocks of MatMulNBits that are tried, the largest first.
BLOCKS = (256, 128, 64, 32, 16)
DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: onnx.TensorProto.INT8.
INT8 = 3
WAY_OUT = (
    "export_onnx writes integers of 1 to 8 bits, float8 (MXFP8 too) and nf4 as weights alone, and int8 by int8 inputs "
    "(int8_rowwise, or static); integers by int8_rowwise_asymmetric"
)


def _of_microsoft(
    name: str, inputs: Sequence[torch.Tensor], attributes: dict[str, Any], bias: torch.Tensor | None
) -> torch.Tensor:
    """An operator of com.microsoft that multiplies its first input by a stored weight (N, K), and a bias."""
    x = inputs[0]
    y: torch.Tensor = torch.onnx.ops.symbolic(
        f"com.microsoft::{name}", inputs, attributes, dtype=x.dtype, shape=(*x.shape[:-1], attributes["N"]), version=1
    )  # fmt: skip
    return y if bias is None else y + bias


class NBitsLinear(nn.Module):
    """`MatMulNBits`: integers in blocks along K."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def __init__(self, q: Quantized, bias: torch.Tensor | None) -> None:
        super().__init__()
        (self.rows, self.length), fmt = q.shape, q.scheme.format
        self.size = block_size(q, BLOCKS, "ONNX")
        self.bits = 4 if fmt.bits <= 4 else 8
        middle = 1 << (self.bits - 1)
        codes = signed_codes(q) + middle
        grid = codes.reshape(self.rows, -1, self.size)
        self.register_buffer("codes", nibbles(grid) if self.bits == 4 else grid.to(torch.uint8))
        self.register_buffer("scale", scales_of(q, self.size))
        zero = None
        if q.zero is not None:
            steps = by_block(q, q.zero.to(torch.int16), self.size) + middle
            zero = nibbles(steps) if self.bits == 4 else steps.to(torch.uint8)
        self.register_buffer("zero", zero)
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) float32 to (..., N)."""
        attributes: Any = {"K": self.length, "N": self.rows, "bits": self.bits, "block_size": self.size}
        inputs = [x, self.codes, self.scale, *([] if self.zero is None else [self.zero])]
        return _of_microsoft("MatMulNBits", inputs, attributes, self.bias)


class Float8Linear(nn.Module):
    """`DequantizeLinear` of float8 codes, then a product."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, q: Quantized, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.size = block_size(q, (q.shape[1], *BLOCKS), "ONNX")
        self.register_buffer("codes", q.codes.view(DTYPES[q.scheme.element]))
        self.register_buffer("scale", scales_of(q, self.size))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) float32 to (..., N)."""
        attributes: Any = {"axis": 1, "block_size": self.size}
        w = torch.onnx.ops.symbolic(
            "DequantizeLinear", (self.codes, self.scale), attributes, dtype=x.dtype, shape=self.codes.shape
        )
        return nn.functional.linear(x, w, self.bias)


class Nf4Linear(nn.Module):
    """`MatMulBnb4` of com.microsoft: NF4 in blocks of 64 of the flattened weight, the first of two codes in the high half."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, q: Quantized, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.rows, self.length = q.shape
        self.size = q.scheme.scale.flat_size
        if q.codes.numel() % self.size:
            raise ValueError(
                f"{q.scheme.name} of shape {q.shape}: the last block of {self.size} is not whole; {WAY_OUT}"
            )
        flat = q.codes.reshape(-1)
        self.register_buffer("codes", (flat[0::2] << 4) | flat[1::2])
        # Scales of both levels in one float32: the values of the code of 1.
        ones = replace(q, codes=torch.full_like(q.codes, int(np.flatnonzero(q.scheme.format.values == 1)[0])))
        self.register_buffer("scale", reference.dequantize(ones).reshape(-1)[:: self.size].contiguous())
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) float32 to (..., N)."""
        attributes: Any = {"K": self.length, "N": self.rows, "block_size": self.size, "quant_type": 1}
        return _of_microsoft("MatMulBnb4", (x, self.codes, self.scale), attributes, self.bias)


class DynamicInt8Linear(nn.Module):
    """int8 by int8, a scale for each token: the integers of `quantize(x, "int8_rowwise")`, and exact integer sums."""

    codes: torch.Tensor
    scale: torch.Tensor

    def __init__(self, q: Quantized, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("codes", signed_codes(q).to(torch.int8).t().contiguous())
        self.register_buffer("scale", one_scale_a_row(q).reshape(-1))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) float32 to (..., N)."""
        scale = (x.abs().amax(-1, keepdim=True) / 127.0).clamp(min=2.0**-126)
        integers = torch.round(x * (1.0 / scale)).clamp(-128, 127).to(torch.int8)
        shape = (*x.shape[:-1], self.codes.shape[1])
        sums = torch.onnx.ops.symbolic(
            "MatMulInteger", (integers, self.codes), dtype=torch.int32, shape=shape
        )
        y: torch.Tensor = sums.to(torch.float32) * scale * self.scale
        return y if self.bias is None else y + self.bias


class RoundedInputs(nn.Module):
    """Inputs to int8 with a zero point for each token and back, as `int8_rowwise_asymmetric` has them; then a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) float32 to (..., N)."""
        low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
        scale = ((high - low) / 255.0).clamp(min=2.0**-126)
        zero = (-128.0 - torch.round(low / scale)).clamp(-128, 127)
        integers = (torch.round(x * (1.0 / scale)) + zero).clamp(-128, 127)
        y: torch.Tensor = self.layer((integers - zero) * scale)
        return y


class StaticInt8Linear(nn.Module):
    """int8 by int8 with a scale that is known: QuantizeLinear, DequantizeLinear, MatMul."""

    codes: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor
    input_zero: torch.Tensor | None

    def __init__(
        self, q: Quantized, bias: torch.Tensor | None, scale: torch.Tensor, zero: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.register_buffer("input_scale", scale.reshape(()).float())
        self.register_buffer("input_zero", None if zero is None else zero.reshape(()).to(torch.int8))
        self.register_buffer("codes", signed_codes(q).to(torch.int8))
        self.register_buffer("scale", one_scale_a_row(q).reshape(-1))
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., K) float32 to (..., N)."""
        make = torch.onnx.ops.symbolic
        # The zero point says the type, or the attribute does: onnxruntime 1.32 turns zero points into uint8, the attribute not,
        # and loses the type of a zero point of 0 where it moves the operator before a reshape.
        zero = self.input_zero
        parts = (self.input_scale,) if zero is None else (self.input_scale, zero)
        says: Any = {"output_dtype": INT8} if zero is None else {}
        integers = make("QuantizeLinear", (x, *parts), says, dtype=torch.int8, shape=x.shape)
        values = make("DequantizeLinear", (integers, *parts), dtype=x.dtype, shape=x.shape)
        w = make(
            "DequantizeLinear", (self.codes, self.scale), {"axis": 0}, dtype=x.dtype, shape=self.codes.shape
        )
        return nn.functional.linear(values, w, self.bias)


def onnx_layer(weight: QuantizedTensor, bias: torch.Tensor | None) -> nn.Module:
    """The module whose export computes what a linear layer with this weight (N, K) does.

    ValueError, with the scheme and what would work, where ONNX has no operators for it.
    """
    recipe, weight = weight.recipe, weight.plain
    if (
        isinstance(weight, SparseQuantizedTensor)
        or weight.meta.transposed
        or weight.ndim != 2
        or weight.block_axis != -1
    ):
        raise ValueError(
            f"{weight!r}: only plain matrices (N, K) with blocks along K are exported; {WAY_OUT}"
        )
    if recipe.rotation:
        raise ValueError(f"{recipe} rotates inputs; {WAY_OUT}")
    q = unpacked(weight.quantized)
    if recipe.activation is not None:
        return _by_int8(weight, q, bias)
    if q.scheme.element in DTYPES and q.outer is None and q.scheme.scale.stored == "decode":
        return Float8Linear(q, bias)
    if q.scheme.element == "nf4" and q.scheme.scale.flat_size:
        return Nf4Linear(q, bias)
    check_integers(q, WAY_OUT)
    return NBitsLinear(q, bias)


def _by_int8(weight: QuantizedTensor, q: Quantized, bias: torch.Tensor | None) -> nn.Module:
    """Layers with quantized inputs."""
    check_integers(q, WAY_OUT)
    inputs: Any = weight.recipe.activation
    if weight.input_scale is None and numerics(inputs) == numerics(SCHEMES["int8_rowwise_asymmetric"]):
        return RoundedInputs(NBitsLinear(q, bias))
    one_scale = q.scheme.scale.block == -1 or q.scheme.scale.block == "tensor"
    if q.scheme.zero is not None or not one_scale or q.scheme.format.bits != 8:
        raise ValueError(
            f"{q.scheme.name} by {inputs.name}: weights are int8_rowwise or int8_tensorwise there; {WAY_OUT}"
        )
    if weight.input_scale is not None and inputs.format.kind == "int" and inputs.format.bits == 8:
        return StaticInt8Linear(q, bias, weight.input_scale, weight.input_zero)
    if numerics(inputs) != numerics(SCHEMES["int8_rowwise"]):
        raise ValueError(f"inputs in {inputs.name} have no operators of ONNX here; {WAY_OUT}")
    return DynamicInt8Linear(q, bias)


__all__ = ["OnnxFile", "export_onnx", "onnx_layer"]
