"""What can be said of methods before anything changes: whether the schemes, weights and tokens of a call allow them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.groups import Stack, Target
from ao_lab.calibration.layers import Part, Work, quantized
from ao_lab.calibration.methods import Method
from ao_lab.calibration.tokens import SplitMoments, Tokens
from ao_lab.config.base import Config, SchemeConfig
from ao_lab.config.recipe import Recipe
from ao_lab.transforms.layers import contraction_axis, shorten
from ao_lab.transforms.plan import Device
from reference import Scheme
from reference.schemes.schemes import flat_size

#: Fewer tokens tell nothing of a layer.
LEAST_TOKENS = 32
CHANGED_NOTHING = "quantize_ changed nothing"


def check_targets(targets: Sequence[Target], methods: tuple[Method, ...], device: Device = None) -> None:
    """ValueError for a weight that methods cannot quantize, by its scheme, storage or values. device: where these are read."""
    names = " and ".join(method.name for method in methods)
    for target in targets:
        if target.config.sparsity is not None:
            raise ValueError(
                f"{target.name}: {names} would overwrite the zeros of weights in {target.config.sparsity} storage; "
                f"{CHANGED_NOTHING}. Leave methods out: sparsify_ with score 'sparsegpt' compensates what it prunes"
            )  # fmt: skip
        if not along_inputs(target):
            raise ValueError(
                f"{target.name}: {names} need blocks along the inputs of a layer, and axis={target.axis} runs them along its "
                f"outputs; {CHANGED_NOTHING}. Leave axis out, or methods"
            )
        if (reason := unsupported_reason(target.recipe, methods)) is not None:
            raise ValueError(f"{target.name}: {reason}; {CHANGED_NOTHING}")
    wrong = [t.name for t in targets if not t.parameter.is_meta and not _is_finite(t.parameter, device)]
    if wrong:
        raise ValueError(
            f"{shorten(wrong)}: weights hold NaN or infinity, which {names} would spread; {CHANGED_NOTHING}. Replace them, or "
            f"exclude these layers with filter_fn"
        )
    if targets and any(t.parameter.is_meta for t in targets):
        raise ValueError(
            f"on the meta device there are no values for {names} to read; load the weights first"
        )


def along_inputs(target: Target) -> bool:
    """Whether blocks run along the axis that the layer's product sums over, as far as its module says it."""
    weight, dims = target.parameter, target.parameter.dim()
    module, _ = next(iter(target.places.values()))
    axis = contraction_axis(module, weight)
    return axis is None or target.axis % dims == axis % dims


def _is_finite(x: torch.Tensor, device: Device) -> bool:
    return bool((x if device is None else x.to(device)).isfinite().all())


@dataclass
class _Trial:
    """A weight of a few blocks, to try methods on."""

    recipe: Recipe
    parameter: torch.Tensor
    config: Config
    layers: dict[str, nn.Module] = field(default_factory=dict)
    name: str = "a trial weight"
    transposed: bool = False
    axis: int = -1


@lru_cache(maxsize=256)
def unsupported_reason(recipe: Recipe, methods: tuple[Method, ...]) -> str | None:
    """Why methods cannot quantize to a scheme; None where they can. Found by trying them on a few blocks."""
    rows, columns = _least_shape(recipe.weight)
    values = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns).mul(0.7).sin()
    trial: Any = _Trial(recipe, values, SchemeConfig(scheme=recipe.weight))
    moments = SplitMoments(sampling=recipe.activation is not None)
    moments.update(torch.arange(LEAST_TOKENS * columns, dtype=torch.float32).reshape(-1, columns).sin())
    try:
        quantized(Work(Stack([trial]), moments, [Part()], methods))
    except ValueError as error:
        return str(error)
    return None


def _least_shape(scheme: Scheme) -> tuple[int, int]:
    """The smallest matrix that a scheme's blocks divide, of two rows and eight columns at least."""
    block = scheme.scale.block
    if flat := flat_size(block):
        return 2, max(flat, 8)
    if isinstance(block, tuple):
        return max(block[0], 2), max(block[1], 8)
    return 2, max(block, 8) if isinstance(block, int) else 8


def check_tokens(tokens: Tokens) -> None:
    """ValueError for too few tokens."""
    if tokens.counted < LEAST_TOKENS:
        raise ValueError(
            f"calibration has {tokens.counted} tokens that are no padding; {LEAST_TOKENS} is the least that tells anything of "
            f"a layer, 128 sequences of 512 are usual. {CHANGED_NOTHING}"
        )


def useless_reason(inputs: SplitMoments | None) -> str | None:
    """Why a layer's inputs tell nothing that methods could use; None where they do."""
    count = 0 if inputs is None else inputs.train.count
    if inputs is None or count < LEAST_TOKENS:
        return f"it saw {count} tokens, {LEAST_TOKENS} is the minimum for methods"
    return "all its inputs are 0" if inputs.train.is_zero() else None


def check_usable(inputs: Mapping[str, SplitMoments]) -> None:
    """ValueError where sums over inputs hold NaN or overflow, before a weight of their block changes; else finish them."""
    if names := [name for name, one in inputs.items() if not one.is_usable()]:
        raise ValueError(
            f"{shorten(names)}: sums of squared inputs hold NaN or overflow float32; leave out batches of huge values, "
            f"look for the weights that make them, or exclude these layers with filter_fn"
        )
    for one in inputs.values():
        one.finish()
