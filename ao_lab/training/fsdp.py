"""FSDP2 that gathers codes of 8 bits: layers whose weight travels so, the shard, its hooks, and scales over ranks.

**The shard** (`ao_lab.training.shard.CastOnGather`) stays in its own dtype. FSDP2 slices the parameter and keeps a shard;
optimizers update that shard as they do any other. Before a layer runs FSDP2 asks the shard what to send; what arrives is a
`QuantizedTensor`, which the layer multiplies with as it is. Operations run on the tensor inside. Views (rows and the transpose
among them, so that what is written to these is counted too), and copies that FSDP2 and `module.to` make, are of this class
again; all other results are plain tensors, so that the state of optimizers, gradients and checkpoints is plain.

**What is sent** are codes and scales of `fast.quantize` of the whole weight. The shard is cast to the dtype that FSDP2 would
gather in (`MixedPrecisionPolicy.param_dtype`) and then quantized, so that gathering codes instead of values changes no bit of
what follows. It is quantized once until it is written to: forward and backward of a step, and all its micro-batches, send the
same codes. Scales along rows lie beside their rows and are sent with them; one scale for the tensor is reduced over the
ranks. How codes and scales travel, and what happens where ranks do not divide the rows, is that of quantized weights:
`ao_lab.tensor.fsdp`. There a rowwise weight takes two bytes an element, as the bytes of its scales need a second tensor.

**Scales** are those of the whole weight, bit for bit: the magnitude of the largest element does not depend on the order in
which it is found, and its bit pattern is what ranks compare, as an integer, so that NaN stays NaN.

**Layers**: `gather_as_codes` makes them of layers that train by a recipe, in place. The parameter stays the same object under
the same name; inside of it is a `CastOnGather`. What files hold is the plain weight.

What equals one process bit for bit, and what does not:

* FSDP2, HSDP and DDP: operands, outputs and losses of each rank are those of one process that is given the rank's batch;
  gradients those of one process that runs the ranks' batches one after another and averages, as two ranks add in either order
  alike. With more ranks the order of the sum is the library's. One process that runs them as one batch has other bits: one
  scale for the tensor, and scales of g.T and x.T along tokens, then span all batches.
* Codes gathered instead of values: the same bits for the same recipe. What differs is the recipe (`gather_recipe`): with a
  scale for each row w.T is made of w's codes.
* Optimizers, recomputation, accumulation, compiled blocks: as without.
* Tensor parallelism (`ao_lab.training.tensor_parallel`): all six operands are parts of those of one process. Outputs split
  along N have sums over the same K, in an order that the library chooses by shape; sums that ranks add (outputs over K, the
  input's gradient over N) are rounded before, so they are equal where these sums are exact. Stochastic rounding draws by each
  rank's own generator.
"""

from __future__ import annotations

import inspect
import itertools
import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fast
from ao_lab.config.recipe import Recipe as Storage
from ao_lab.tensor.fsdp import gathered_parts, refill, sent, whole_weight
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from ao_lab.training.layers import LowPrecisionLinear
from ao_lab.training.products import is_captured
from ao_lab.training.scales_over_ranks import amax_over, apart, magnitudes, missing_ranks, scales_of
from ao_lab.training.shard import CastOnGather, Gathered, Sent
from ao_lab.transforms.layers import check_model
from reference import Quantized, Scales, Scheme
from reference.training.recipe import Recipe

_numbers = itertools.count()
#: Numbers of weights by the name of their group of ranks.
_places: dict[str, Any] = {}
#: Where a gathered weight has the number of the codes that it was made of.
MADE_OF = "_made_of"


def sent_again(
    shard: CastOnGather, mesh: Any, whole: Any, stride: Any, module: nn.Module, mp_policy: Any
) -> Gathered:
    """The tensors to gather, and what stays on this rank; those of before as long as the weight has not changed.

    So forward and backward of a step, and all micro-batches until the optimizer writes, send what was quantized once. It takes
    a byte an element of the shard from the first gather of a step until then.
    """
    known, dtype = shard.known, mp_policy.param_dtype or shard.dtype
    key = (version_of(shard, module), dtype, whole, mesh, shard.dense.data_ptr(), shard.shape)
    if known.sent is not None and known.sent[0] == key:
        return known.sent[1]
    with torch.no_grad():
        found = quantized_shard(shard, mesh, tuple(whole), module, dtype)
    # Where some rank has no rows, ranks would not agree whose codes are old, and reduce scales at different times.
    agreed = shard.scheme.scale.block != "tensor" or weight_rows_everywhere(whole[0], mesh.size())
    if agreed:
        known.sent = key, found
    return found


def quantized_shard(
    shard: CastOnGather, mesh: Any, whole: tuple[int, ...], module: nn.Module, dtype: torch.dtype
) -> Gathered:
    """The same, quantized now."""
    if shard.shape[1:] != whole[1:]:
        raise ValueError(
            f"weights that are gathered quantized are split along axis 0, got a shard {tuple(shard.shape)} of {whole}; leave "
            "out shard_placement_fn, or the FP8 all-gather"
        )
    x, scales = shard.dense.to(dtype), None
    if shard.scheme.scale.block == "tensor":
        scales = Scales(scale_of(shard, whole[0], mesh.get_group(), module, dtype))
    q = fast.quantize(x, shard.scheme, scales=scales)
    if not x.numel() and scales is None:  # without strides of 0, so that its bytes can be seen
        q = replace(q, scale=q.scale.new_empty(q.scale.shape))
    known, kind = shard.known, (dtype, whole, mesh, shard.shape)
    if known.form is not None and known.form[0] == kind:
        metadata = known.form[1]
        parts = tuple([sent(getattr(q, name)) for name in metadata[0]])
    else:
        parts, metadata = gathered_parts(stored_shard(q, dtype), mesh, whole)
        known.form = None if metadata[2] else (kind, metadata)
    return parts, (q, dtype, metadata, next(_numbers))


def stored_shard(q: Quantized, dtype: torch.dtype) -> QuantizedTensor:
    """Codes and scales as a weight of a dtype."""
    return from_quantized(q, Storage(weight=q.scheme), dtype)


class PreAllGather:
    """The method of a shard that FSDP2 asks what to send: `sent_again`. FSDP2 reads its signature at each call, which takes as
    long as the call: here it lies ready."""

    __slots__ = ("shard",)
    __signature__ = inspect.Signature(list(inspect.signature(sent_again).parameters.values())[1:])

    def __init__(self, shard: CastOnGather) -> None:
        self.shard = shard

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Gathered:
        return sent_again(self.shard, mesh, outer_size, outer_stride, module, mp_policy)


@torch.no_grad()
def fsdp_post_all_gather(
    self: CastOnGather,
    outputs: tuple[torch.Tensor, ...],
    kept: Sent,
    param_dtype: torch.dtype,
    *,
    out: Any = None,
) -> Any:
    """The whole weight and the tensors of which FSDP2 takes the memory back; or `out` brought up to date, and None: a method of
    `CastOnGather`."""
    q, dtype, metadata, number = kept
    own = out if out is None or isinstance(out, QuantizedTensor) else out.to_local()
    scale_is_new = "scale" not in metadata[0] and (own is None or own.__dict__.get(MADE_OF) != number)
    if scale_is_new and q.scale.is_cuda:  # made on the stream that sends, and read on this one
        q.scale.record_stream(torch.cuda.current_stream())
    if own is None:
        # The scale of the shard may be one of many that were found together; the weight has one of its own.
        shard = stored_shard(replace(q, scale=q.scale.clone()), dtype)
        return whole_weight(shard, outputs, metadata, param_dtype)
    refill(own, outputs, metadata)
    if scale_is_new:
        own.scale.copy_(q.scale)
        own.__dict__[MADE_OF] = number
    return None


# FSDP2 asks a shard for these two methods.
CastOnGather.fsdp_pre_all_gather = property(PreAllGather)  # type: ignore[attr-defined]
CastOnGather.fsdp_post_all_gather = fsdp_post_all_gather  # type: ignore[attr-defined]


def gather_recipe(recipe: Recipe) -> Recipe:
    """The recipe where the weight arrives as codes of its output's product: w.T for the input's gradient is made of these.

    One scale for the tensor: the codes of w.T are those of w. Blocks along rows: w.T is quantized from what the codes stand
    for, which is exact for powers of two as scales but where a second rounding underflows. ValueError for a recipe whose
    weights cannot travel so.
    """
    reason = unsupported_reason(recipe)
    if reason is not None:
        raise ValueError(
            f"recipe {recipe.name!r} gathers weights in their own dtype, not quantized: {reason}; leave out the FP8 all-gather"
        )
    operand = recipe.input_grad.b
    if operand.scheme == recipe.output.b.scheme and operand.scheme and operand.scheme.scale.block == "tensor":
        return recipe
    product = replace(recipe.input_grad, b=replace(operand, source="output"))
    return replace(recipe, name=f"{recipe.name}_gathered", input_grad=product)


def unsupported_reason(recipe: Recipe) -> str | None:
    """Why a recipe's weights cannot be gathered as codes; None where they can."""
    operand = recipe.output.b
    scheme = operand.scheme
    if scheme is None:
        return "they are not quantized"
    if operand.hadamard or scheme.rounding == "stochastic" or scheme.outer is not None:
        return f"the scheme {scheme.name} needs more than its own block of the weight"
    if scheme.format.bits != 8:
        return f"{scheme.element} is no format of 8 bits"
    block = scheme.scale.block
    if block == "tensor":
        return (
            None
            if recipe.input_grad.b.scheme == scheme
            else "the input's gradient uses other quantized values"
        )
    if not isinstance(block, int):
        return f"blocks of {block} span rows, which lie on several ranks"
    return None if has_powers_of_two(scheme) else f"scales of {scheme.name} are no powers of two"


def has_powers_of_two(scheme: Scheme) -> bool:
    """Whether every scale is a power of two."""
    return scheme.scale.power_of_two or scheme.scale.rule == "ratio_pow2"


class GatheredLinear(LowPrecisionLinear):
    """`LowPrecisionLinear` whose weight FSDP2 gathers as codes. state_dict has plain tensors, and loads such ones."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[prefix + "weight"] = plain(self.weight)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        name = prefix + "weight"
        if metadata.get("assign_to_params_buffers") and name in state_dict:
            # The given tensor becomes the parameter: it has to be one that is gathered as codes.
            state_dict[name] = wrapped(state_dict[name], self.scheme)
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # of a file, where the weight is plain
        if type(self.weight) is nn.Parameter:
            swap(self.weight, CastOnGather(self.weight.detach(), self.scheme))

    def operands(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs and the weight; ValueError where FSDP1 has sharded it, which gathers no codes, and with `use_orig_params`
        would leave what the optimizer writes out of what it gathers."""
        x, weight = super().operands(input)
        if type(weight) is torch.Tensor and getattr(weight._base, "_is_flat_param", False):
            raise ValueError(
                "FullyShardedDataParallel (FSDP1) cannot gather quantized weights: convert without fsdp_float8_all_gather, "
                "or shard by fully_shard"
            )
        return x, weight

    @property
    def scheme(self) -> Any:
        """What the weight is gathered in."""
        return self.low_precision.recipe.output.b.scheme

    def restore_weight(self) -> None:
        """The plain weight again; ValueError where FSDP2 holds the shard."""
        if hasattr(self.weight, "_local_tensor"):
            raise ValueError(
                "the weight is sharded, and FSDP2 gathers it quantized: convert the layers back before fully_shard, or load "
                "the state_dict, which is unquantized, into a model that is not converted"
            )
        # A parametrization holds the weight under another name.
        for parameter in self.parameters():
            if isinstance(parameter, CastOnGather):
                swap(parameter, parameter.dense)


def gather_as_codes(modules: Iterable[LowPrecisionLinear]) -> None:
    """Let FSDP2 gather the layers' weights as codes. ValueError, and nothing has changed, where a graph holds a weight."""
    modules = list(modules)
    for module in modules:
        if module.weight._use_count() > 1 or weakref.getweakrefs(module.weight):  # type: ignore[attr-defined]
            raise ValueError(
                "a weight is held by the graph of an output or by a weak reference; convert before the first forward pass, or "
                "delete its output"
            )
    for module in modules:
        if not isinstance(module.weight, CastOnGather):  # tied layers have one weight
            scheme: Any = module.low_precision.recipe.output.b.scheme
            swap(module.weight, CastOnGather(module.weight.detach(), scheme))
        module.__class__ = GatheredLinear


def swap(parameter: torch.Tensor, content: torch.Tensor) -> None:
    """Give a parameter other content; it stays the same object, as optimizers and tied layers hold it."""
    torch.utils.swap_tensors(parameter, nn.Parameter(content, requires_grad=parameter.requires_grad))  # type: ignore[no-untyped-call]


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The tensor of a weight, over the same memory; distributed as the weight is."""
    local = getattr(weight, "_local_tensor", weight)
    if not isinstance(local, CastOnGather):
        return weight.detach()
    if local is weight:
        return local.dense  # itself: what is written to it counts in its version
    # A view of the parameter, whose version it shares: a DTensor writes to its part below the counter of that part.
    view: Any = weight.detach()
    view._local_tensor = local.dense
    return view  # type: ignore[no-any-return]


def wrapped(weight: torch.Tensor, scheme: Any) -> torch.Tensor:
    """A weight that is gathered as codes, over the same memory; distributed as the weight is."""
    local = getattr(weight, "_local_tensor", weight).detach()
    if isinstance(local, CastOnGather):
        return weight
    shard = CastOnGather(local, scheme)
    return _distributed(weight, shard) if hasattr(weight, "_local_tensor") else shard


def _distributed(like: Any, local: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    weight: torch.Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return weight


@torch.no_grad()
def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """The scales of all weights that FSDP2 gathers as tensorwise FP8 codes, in one reduction; torchao's function of this name.

    Call it after every optimizer step, on every rank. Without it each weight reduces its own scale when it is gathered first
    after a step. A scale is used as long as its weight has not changed: after a load, or a step that this did not follow, it is
    found again, by all ranks together. After a write to its shard on one rank alone that rank waits for the others as long as a
    collective would, and raises ValueError: let all of them write, if only to no row (`weight.to_local()[:0].zero_()`), or call
    this after it. Weights of which some rank has no rows are left to that. Codes, of any
    scheme, are made anew at the next gather. TypeError for anything but a model.
    """
    check_model(module)
    groups: dict[Any, list[tuple[nn.Module, CastOnGather]]] = {}
    for one, weight in gathered_weights(module):
        weight.known.sent = None  # whatever wrote to it
        # Shards that FSDP2 holds on the host are reduced on the device, when they are gathered.
        here = weight.device.type == one.weight.device_mesh.device_type
        if weight.scheme.scale.block == "tensor" and here and has_rows_everywhere(one.weight):
            group = one.weight.device_mesh.get_group(one.weight.device_mesh.ndim - 1)
            groups.setdefault(group, []).append((one, weight))
    for group, members in groups.items():
        amaxes = amax_over(magnitudes([weight.dense for _, weight in members]), group)
        for (one, weight), amax in zip(members, amaxes.unbind(), strict=True):
            remember(weight, amax, version_of(weight, one), group)
        _remember_scales([weight for _, weight in members], amaxes)


def gathered_weights(module: nn.Module) -> list[tuple[Any, CastOnGather]]:
    """Modules whose sharded weight is gathered as codes, and their shards; a weight that several share once."""
    weights: dict[int, tuple[Any, CastOnGather]] = {}
    for one in module.modules():
        local = getattr(getattr(one, "weight", None), "_local_tensor", None)
        if isinstance(local, CastOnGather):
            weights.setdefault(id(local), (one, local))
    return list(weights.values())


def has_rows_everywhere(weight: Any) -> bool:
    """Whether every rank has rows of a weight; the same answer on every rank.

    Loading a checkpoint writes to shards that have rows alone, so that ranks would differ about the age of a scale.
    """
    ranks = weight.device_mesh.size(weight.device_mesh.ndim - 1)
    return weight_rows_everywhere(int(weight.shape[0]), ranks)


def weight_rows_everywhere(rows: int, ranks: int) -> bool:
    """Of the number of rows: shards are as long as the first, but for the last ones."""
    return rows > (ranks - 1) * math.ceil(rows / ranks)


def version_of(weight: CastOnGather, module: nn.Module) -> tuple[int, ...]:
    """What changes with the weight: how often it was written to as the module's parameter, as a shard, and as what files hold.
    Where a CUDA graph writes to it, or what is asked here is captured in one, no two are equal.

    Each is counted where torch or the shard sees the write: an optimizer's step, `to_local()`, a load into `state_dict()`, a
    write to one of its values. Writes that torch itself does not count (`.data` of such a value, a foreach operation on it,
    `to_local()` in inference mode; one by a collective, where scales are of the tensor) are not seen:
    `precompute_float8_dynamic_scale_for_fsdp` after them finds scales and codes again. Where scales are of the tensor a write
    that is seen on one rank alone is an error there (`check_all_wrote`).
    """
    parameter: Any = getattr(module, "weight", None)
    own = parameter._version if getattr(parameter, "_local_tensor", None) is weight else -1
    counted = own, weight.known.writes_of_lists, weight.known.writes, weight.dense._version
    return (*counted, next(_numbers)) if weight.known.replayed or is_captured(weight.dense) else counted


def remember(weight: CastOnGather, amax: torch.Tensor, version: tuple[int, ...], group: Any) -> None:
    """Keep the magnitude of a whole weight beside its shard."""
    known = weight.known
    known.amax, known.scale, known.version = amax, None, version
    if known.place is None:  # ranks of a group come to its weights in one order
        known.place = next(_places.setdefault(group.group_name, itertools.count()))


def check_all_wrote(weight: CastOnGather, version: tuple[int, ...], group: Any) -> None:
    """ValueError, before any collective, on a rank that wrote to its shard where others did not.

    A write to the parameter, and one to lists of tensors as optimizers do, is one on every rank. After others ranks meet first,
    which takes the host two messages.
    """
    known = weight.known
    if known.amax is None or known.version is None or known.version[:2] != version[:2] or known.replayed:
        return
    missing = missing_ranks(group, weight.device, f"ao_lab/scale/{known.place}", known.agreed)
    if missing:
        raise ValueError(
            f"a weight's shard {tuple(weight.shape)} was written to on this rank, and not on {missing[0]} of its group, so "
            "that they do not agree whose scale is old: write on every rank, if only to no row "
            "(weight.to_local()[:0].zero_()), or call precompute_float8_dynamic_scale_for_fsdp on every rank after the write"
        )
    known.agreed += 1


def _remember_scales(weights: Sequence[CastOnGather], amaxes: torch.Tensor) -> None:
    """The scales of weights of these magnitudes (n), made together for those of one scheme and dtype."""
    kinds: dict[tuple[Scheme, torch.dtype], list[int]] = {}
    for at, weight in enumerate(weights):
        kinds.setdefault((weight.scheme, weight.known.dtype or weight.dtype), []).append(at)
    for (scheme, dtype), same in kinds.items():
        found = scales_of(amaxes if len(kinds) == 1 else amaxes[same], scheme, dtype)
        for at, scale in zip(same, apart(found), strict=True):
            weights[at].known.scale, weights[at].known.dtype = scale, dtype


def scale_of(
    weight: CastOnGather, rows: int, group: Any, module: nn.Module, dtype: torch.dtype
) -> torch.Tensor:
    """The scale (0-d) of the whole weight, cast to `dtype`: the one that is known, or reduced over the group and kept.

    rows: of the whole weight. All ranks come to the same decision, since they write to their shards at the same places;
    ValueError on one that does not.
    """
    known, version = weight.known, version_of(weight, module)
    everywhere = weight_rows_everywhere(rows, dist.get_world_size(group))
    if known.amax is None or known.version != version or not everywhere:
        if everywhere:
            check_all_wrote(weight, version, group)
        remember(weight, amax_over(magnitudes([weight.dense]), group)[0], version, group)
    if known.scale is None or known.dtype != dtype:
        amax = known.amax
        if amax is None:
            raise ValueError(
                "a weight's magnitude is not known; call precompute_float8_dynamic_scale_for_fsdp"
            )
        known.scale, known.dtype = scales_of(amax.reshape(1), weight.scheme, dtype)[0], dtype
    return known.scale


__all__ = ["precompute_float8_dynamic_scale_for_fsdp"]
