"""Operations on the values that a `QuantizedTensor` stands for: arithmetic whose results are dense, and changes in place.

Reads are what other libraries do with a layer's weight beside multiplying by it: a sum with an adapter's update, norms of rows,
singular values, statistics that new rows of a table are drawn from. The weight is dequantized whole in each call, and the
result is dense, in its dtype: `copy_` quantizes it again. Activation functions, and products in which a weight would be an
input, are not among them: a user has to ask for the dense copy that each step would make.

A change in place is `w.copy_(w.dequantize() + delta)`, which is how adapters are merged into weights: scales and zero points
are chosen anew by the rule of the scheme, the recipe and static scales of the layer's input stay. Where rounding takes more
than half of a change, a UserWarning says so. A weight in 2:4 storage takes a change that leaves it 2:4. A weight that requires
a gradient is refused: an optimizer's steps are smaller than those of the scheme, and would be lost without a word. A factor
that is a power of two changes scales alone and rounds nothing: RWKV of transformers divides weights so when it is first
evaluated.

Averages (`torch.optim.swa_utils.AveragedModel`) of a weight with itself stay as they are, bit for bit; of two that differ the
average is quantized again. Towards dense numbers an optimizer moves its moments: refused.
"""

from __future__ import annotations

import sys
import warnings
from math import frexp
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.tensor.torch_changes import refuse_array
from fast.formats import times_power_of_two
from reference.formats.storage import SCALED
from reference.schemes.schemes import Scheme
from reference.sparsity.compress import is_plain

aten = torch.ops.aten

#: Elementwise arithmetic, comparisons and tests.
ELEMENTWISE = (
    aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar,
    aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.addcmul.default, aten.lerp.Scalar,
    aten.lerp.Tensor, aten.neg.default, aten.abs.default, aten.pow.Tensor_Scalar, aten.sqrt.default,
    aten.isnan.default, aten.isinf.default, aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar,
    aten.gt.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.le.Scalar, aten.where.self, aten.sign.default,
)  # fmt: skip
#: Statistics.
REDUCTIONS = (
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
    aten.max.default, aten.min.default, aten.any.default, aten.all.default, aten.std.correction, aten.var.correction,
    aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.dot.default,
)  # fmt: skip
#: Decompositions, and rows put in another place.
MATRICES = (
    aten._linalg_svd.default, aten.linalg_qr.default, aten.index_copy.default, aten.index_add.default,
    aten.index_put.default, aten.scatter.src, aten.scatter_add.default, aten.flip.default, aten.roll.default,
    aten.repeat.default, aten.tril.default, aten.triu.default, aten.diagonal_copy.default,
)  # fmt: skip
#: All of these.
READS = (*ELEMENTWISE, *REDUCTIONS, *MATRICES)
#: Changes in place, beside products with a factor.
CHANGES = (aten.add_.Tensor, aten.add_.Scalar, aten.sub_.Tensor, aten.sub_.Scalar)
AVERAGES = (aten.lerp_.Scalar, aten.lerp_.Tensor)
LISTS = (aten._foreach_lerp_.Scalar, aten._foreach_lerp_.List, aten._foreach_lerp_.ScalarList)
#: Beginnings of names of modules between a user's line and a change in place.
MERGING = ("ao_lab.", "torch.", "peft.")
#: The part of a change that rounding may take before a warning tells of it.
TOLD = 0.5


def dense(value: Any) -> Any:
    """Arguments with each QuantizedTensor among them dequantized."""
    return tree_map_only(QuantizedTensor, QuantizedTensor.dequantize, value)


@operation(aten.view.dtype)
def _as_dtype(func: Any, args: Any, kwargs: Any) -> Any:
    """The bits of another dtype, as NumPy is given bfloat16 ones: there are none of the whole weight."""
    refuse_array(args[0])


@operation(*READS)
def _read(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*dense(args), **dense(kwargs))


@operation(*CHANGES)
def requantized(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """An operator in place on the dequantized first argument, which is then quantized into it.

    A dense first argument is changed as ever. ValueError for a weight that requires a gradient; nothing has changed then.
    """
    target: torch.Tensor = args[0]
    if not isinstance(target, QuantizedTensor):
        func(target, *dense(args[1:]), **dense(kwargs))
        return target
    if target.requires_grad:
        raise ValueError(
            f"{func} of {target!r}, which requires a gradient: an optimizer's steps would be rounded away. A quantized weight "
            f"does not train: requires_grad_(False) it and train adapters, dequantize() it, or prepare the model with QATConfig"
        )
    before = target.dequantize()
    wanted = func(before.clone(), *dense(args[1:]), **dense(kwargs))
    target.copy_(wanted)
    if type(target.codes) is torch.Tensor and not torch.compiler.is_compiling():
        _tell(func, target, before, wanted)
    return target


def _callers_level() -> int:
    """The stack level, of a warning in the function that asks, of the first frame above the libraries that merge adapters."""
    level, frame = 1, sys._getframe(1)
    while (above := frame.f_back) is not None and frame.f_globals.get("__name__", "").startswith(MERGING):
        level, frame = level + 1, above
    return level


def _tell(func: Any, target: QuantizedTensor, before: torch.Tensor, wanted: torch.Tensor) -> None:
    """A UserWarning where rounding has taken more than `TOLD` of a change, once for a scheme."""
    asked = (wanted - before).norm()
    if (target.dequantize() - wanted).norm() > TOLD * asked > 0:
        warnings.warn(
            f"{func} of a weight in {target.scheme.name}: more than half of the change is smaller than its steps and was "
            f"rounded away. Keep an adapter next to the weight instead of merging it, or merge it into the dense model and "
            f"quantize that",
            UserWarning,
            stacklevel=_callers_level(),
        )


@operation(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _multiplied(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """By its scales where the factor is a power of two; other factors, and elements without scales, quantize it again."""
    t = args[0]
    has_scales = not (isinstance(t, SparseQuantizedTensor) and is_plain(t.scheme))
    exponent = _exponent(args[1]) if isinstance(t, QuantizedTensor) and has_scales else None
    if exponent is None:
        result: torch.Tensor = requantized(func, args, kwargs)
        return result
    return _scaled(t, exponent if func._schema.name == "aten::mul_" else -exponent)


def _scaled(t: QuantizedTensor, exponent: int) -> QuantizedTensor:
    """t, its scales times 2**exponent; nothing has changed where that is refused."""
    plain = t.plain
    changed = {name: _moved(plain, name, exponent * way) for name, way in _magnitude_parts(t.scheme).items()}
    for name, part in changed.items():
        getattr(plain, name).copy_(part)
    if plain is not t:
        t.copy_(plain)
    return t


def _exponent(factor: Any) -> int | None:
    """e of a factor 2**e; None for any other."""
    if isinstance(factor, torch.Tensor) and (factor.numel() != 1 or isinstance(factor, QuantizedTensor)):
        return None
    fraction, exponent = frexp(float(factor))
    return exponent - 1 if fraction == 0.5 else None


def _magnitude_parts(scheme: Scheme) -> dict[str, int]:
    """The parts that hold the weight's magnitude, and whether they grow with it (1) or fall (-1)."""
    outer = scheme.outer
    if outer is not None:
        way = 1 if outer.stored == "decode" else -1
        # A mean that was subtracted from the scales stands beside their factor.
        return {"outer": way, "zero": 1} if outer.center == "mean" else {"outer": way}
    parts = {"scale": 1 if scheme.scale.stored == "decode" else -1}
    return {**parts, "zero": 1} if scheme.zero is not None and scheme.zero.rule == "value" else parts


def _moved(t: QuantizedTensor, name: str, exponent: int) -> torch.Tensor:
    """A part times 2**exponent; ValueError where that is no number that the part can hold."""
    part = getattr(t, name)
    scheme = t.scheme
    storage = scheme.scale.storage if name == "scale" else "float32"
    if name == "zero" and scheme.zero is not None:
        storage = scheme.zero.storage
    if storage not in SCALED:
        raise ValueError(
            f"scales of {scheme.name} are stored as {storage}, which powers of two do not leave exact; dequantize() it"
        )
    moved, exact = times_power_of_two(part, storage, exponent)
    if not bool(exact.all()):
        raise ValueError(
            f"scales of {t!r} times 2**{exponent} leave the range of their storage; dequantize() it"
        )
    return moved


@operation(*AVERAGES)
def _average(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """`target.lerp_(end, weight)`; a dense target takes the values of a quantized end, as ever."""
    target: torch.Tensor = args[0]
    end = args[1]
    if isinstance(target, QuantizedTensor) and not isinstance(end, QuantizedTensor):
        raise NotImplementedError(
            f"{func} of {target!r} towards dense numbers: it takes the average with another quantized weight, and no "
            f"optimizer's steps, which would be rounded away: freeze it, and train adapters, its dequantize()d copy, or a "
            f"model prepared with QATConfig"
        )
    if isinstance(target, QuantizedTensor) and not torch.compiler.is_compiling() and torch.equal(target, end):
        return target
    result: torch.Tensor = requantized(func, args, kwargs)
    return result


@operation(*LISTS)
def _averages(func: Any, args: Any, kwargs: Any) -> None:
    """Pair by pair: those without a quantized weight in one call, as ever."""
    targets, ends, weights = args
    each = weights if isinstance(weights, (list, tuple)) else [weights] * len(targets)
    pairs = list(zip(targets, ends, each, strict=True))
    plain = [pair for pair in pairs if not any(isinstance(t, QuantizedTensor) for t in pair[:2])]
    for target, end, weight in pairs:
        if any(isinstance(t, QuantizedTensor) for t in (target, end)):
            target.lerp_(end, weight)
    if plain:
        dense_targets, dense_ends, own_weights = (list(column) for column in zip(*plain, strict=True))
        func(dense_targets, dense_ends, own_weights if each is weights else weights)


__all__ = ["AVERAGES", "CHANGES", "LISTS", "READS", "dense", "requantized"]
