"""Experts: inputs of those that a router sends few tokens to, and of those that are one batched weight.

A router gives each expert some of the tokens. Which these are, and so which are padding or held out, is found by their values:
a row that an expert reads is bit for bit one that the module around the experts was given (`Source`). What experts make inside
themselves follows in the same order.

An expert of few tokens has a Hessian of few directions. All experts of a module that have the same place lend it the average of
theirs, as if it had seen c more tokens, c its number of inputs: (n_e H_e + c H_all) / (n_e + c). One that no token reached has
H_all. Reports have the counts.

Batched experts, (experts, out, in) or (experts, in, out), are multiplied inside their module: one after the other by `linear`
or `matmul`, by `grouped_mm`, or by `bmm` of all of them or of those that tokens ask for. No layer is called, so `ExpertWatch`
sees these products by the weight's memory. Each expert is quantized as a matrix (out, in) by itself; the parts of all are
stored as rounding stores those of the whole weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import fast
from ao_lab.calibration.checks import check_usable
from ao_lab.calibration.groups import Target, with_packed_codes
from ao_lab.calibration.layers import Calibrated
from ao_lab.calibration.result import LayerResult
from ao_lab.calibration.tokens import Moments, SplitMoments, Tokens
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from ao_lab.transforms.walk import is_inside
from reference import Quantized
from reference.quantize.blocks import Blocks

#: What multiplies rows, sorted by expert, with a batch of matrices: torch's operators, and transformers' where torch has none.
GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
#: What multiplies with matrices as they are stored, one or a batch of them.
MATMUL = ("matmul", "__matmul__", "mm", "bmm")


def lists_of_experts(model: nn.Module, blocks: Iterable[str]) -> tuple[str, ...]:
    """Names of the lists of modules inside of blocks."""
    return tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and path not in blocks and is_inside(path, blocks)
    )


def place_of_expert(name: str, lists: Iterable[str]) -> str | None:
    """A name without the number of its expert ("model.layers.3.mlp.experts.*.up.weight"); None where it is in no list."""
    for path in lists:
        if name.startswith(f"{path}."):
            return f"{path}.*.{name.removeprefix(path + '.').partition('.')[2]}"
    return None


def expert_of(name: str, lists: Iterable[str]) -> str | None:
    """The expert that a name is of ("model.layers.3.mlp.experts.7"); None where it is in no list."""
    for path in lists:
        if name.startswith(f"{path}."):
            return f"{path}.{name.removeprefix(path + '.').partition('.')[0]}"
    return None


def siblings(names: Iterable[str], lists: Iterable[str]) -> list[list[str]]:
    """Names that have the same place in several experts."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if (place := place_of_expert(name, lists)) is not None:
            groups.setdefault(place, []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def reached_by_siblings(names: Sequence[str], lists: Iterable[str], reached: Iterable[str]) -> set[str]:
    """Of names those that no data reached, while others of the same place were reached."""
    known = set(reached)
    return {
        name for group in siblings(names, lists) if known & set(group) for name in group if name not in known
    }


def owners(model: nn.Module, block: str, lists: Iterable[str]) -> dict[str, nn.Module]:
    """The modules of a block around lists of experts: their inputs are what is routed."""
    paths = [path.rpartition(".")[0] for path in lists if is_inside(path, [block])]
    return {path: model.get_submodule(path) for path in paths}


def lend(group: Sequence[SplitMoments]) -> None:
    """Add the average of all experts to the moments of each, before they are finished."""
    for kind in ("train", "held_out"):
        lent_to([getattr(one, kind) for one in group])
    for one in group:
        for name in ("samples", "held_samples"):
            if not getattr(one, name):
                setattr(one, name, next(filter(None, (getattr(other, name) for other in group)), []))


def lent_to(moments: Sequence[Moments]) -> None:
    """The same of moments of one kind. In their order, one more matrix in memory."""
    seen = [one for one in moments if one.count]
    count = sum(one.count for one in seen)
    if not count:
        return
    mean = Moments(count=count)
    for name in ("value", "total", "magnitude"):
        values = [getattr(one, name) for one in seen]
        total = values[0].clone()
        for value in values[1:]:
            total += value.to(total.device)
        setattr(mean, name, total.div_(count))
    mean.largest = torch.stack([one.largest.to(mean.total.device) for one in seen]).amax(0)  # type: ignore[union-attr]
    for one in moments:
        one.borrow(mean)


@dataclass
class Source:
    """The rows that a module around experts was given in a batch, by fingerprints of their bits, and what each token is."""

    prints: torch.Tensor
    roles: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, roles: torch.Tensor) -> Source:
        """Of rows (tokens, channels), of two alike the first."""
        prints, order = fingerprints(x).sort(stable=True)
        return Source(prints, roles[order])

    def roles_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """What each of these rows is; None where one of them is none of the source."""
        wanted = fingerprints(x)
        at = torch.searchsorted(self.prints, wanted).clamp(max=len(self.prints) - 1)
        return self.roles[at] if bool((self.prints[at] == wanted).all()) else None


#: Integers as wide as a float.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Rows whose fingerprints are made at a time.
ROWS = 1024


def fingerprints(x: torch.Tensor) -> torch.Tensor:
    """A 64-bit integer of each row (tokens, channels): the sum of its elements' bits times fixed integers, modulo 2^64."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (x.shape[-1],), generator=generator).to(x.device)
    parts = [
        (part.contiguous().view(BITS[x.dtype.itemsize]).to(torch.int64) * factors).sum(-1)
        for part in torch.split(x, ROWS)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=x.device)


@dataclass
class Sources:
    """An observer of the modules around experts."""

    tokens: Tokens

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Note what is routed."""
        roles = self.tokens.by_shape(x)
        rows = x.reshape(-1, x.shape[-1])
        self.tokens.source = Source.of(rows, roles) if roles is not None and len(roles) == len(rows) else None
        self.tokens.routed = None


# Batched experts.


@dataclass
class ExpertTarget:
    """One expert of a batched weight, as a weight by itself."""

    whole: Target
    expert: int
    axis: int = -1
    #: No layer multiplies with it alone.
    layers: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def transposed(self) -> bool:
        """Whether it is stored (in, out)."""
        return is_in_out(self.whole)

    @property
    def name(self) -> str:
        """That of the whole, with a number."""
        return f"{self.whole.name}[{self.expert}]"

    @property
    def places(self) -> dict[str, tuple[nn.Module, str]]:
        """Those of the whole."""
        return self.whole.places

    @property
    def config(self) -> Any:
        """That of the whole."""
        return self.whole.config

    @property
    def recipe(self) -> Any:
        """That of the whole."""
        return self.whole.recipe

    @property
    def parameter(self) -> torch.Tensor:
        """The expert's matrix as it is now."""
        return self.whole.parameter[self.expert]

    def put(self, parameter: nn.Parameter) -> None:
        """An expert is put with all others."""
        raise TypeError("experts of one weight are put in place together")


def is_batched(target: Target) -> bool:
    """Whether a weight is that of batched experts."""
    return target.parameter.dim() == 3


def is_in_out(target: Target) -> bool:
    """Whether a batched weight is (experts, in, out)."""
    return target.axis % 3 == 1


def takes_methods(target: Target) -> bool:
    """Whether a weight is a matrix, or experts that are quantized one by one."""
    return target.parameter.dim() == 2 or (is_batched(target) and left_reason(target) is None)


def left_reason(target: Target) -> str | None:
    """Why batched experts cannot be quantized one by one; None where they can."""
    scheme, shape = target.recipe.weight, tuple(target.parameter.shape)
    if isinstance(scheme.scale.block, str):
        return "its scales span experts"
    if is_in_out(target):
        experts, k, n = shape
        turned = Blocks.of((experts, n, k), scheme.scale, -1).scale_shape
        if Blocks.of(shape, scheme.scale, -2).scale_shape != (turned[0], turned[2], turned[1]):
            return "its experts are stored (experts, in, out), by which its blocks are other ones"
    return None


class ExpertWatch(TorchFunctionMode):
    """Moments of the inputs of each expert of batched weights, while their modules run."""

    def __init__(self, targets: Iterable[Target], tokens: Tokens, sampling: bool) -> None:
        super().__init__()
        self.moments: dict[str, list[SplitMoments]] = {}
        self.weights: dict[int, tuple[torch.Tensor, list[SplitMoments]]] = {}
        #: Copies of the matrices that tokens ask for, by their memory: the copy, the moments, and the experts' numbers.
        self.copies: dict[int, tuple[ref[torch.Tensor], list[SplitMoments], torch.Tensor]] = {}
        for target in targets:
            weight = target.parameter.detach()
            moments = [SplitMoments(None, tokens, sampling) for _ in range(len(weight))]
            self.moments[target.name] = moments
            self.weights[weight.untyped_storage().data_ptr()] = weight, moments

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        name = getattr(function, "__name__", "").partition(".")[0]
        if function is F.linear and len(args) > 1:
            self.see(args[0], args[1])
        elif name in GROUPED and "offs" in keywords and len(args) > 1:
            self.see(args[0], args[1], keywords["offs"])
        elif name in MATMUL and len(args) > 1:
            self.see_either(args[0], args[1])
        result = function(*args, **keywords)
        if name == "__getitem__":
            self.note_copy(args, result)
        return result

    def note_copy(self, args: Any, result: Any) -> None:
        """Remember a copy of the matrices of experts by number, (tokens,), of a batched weight."""
        weight, numbers = args
        known = isinstance(weight, torch.Tensor) and self.weights.get(_memory(weight))
        if (
            known
            and isinstance(numbers, torch.Tensor)
            and numbers.dim() == 1
            and not numbers.is_floating_point()
        ):
            self.copies = {key: one for key, one in self.copies.items() if one[0]() is not None}
            self.copies[_memory(result)] = ref(result), known[1], numbers

    def see_either(self, a: Any, b: Any) -> None:
        """Take in the rows of x w, or the columns of w x."""
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if _memory(a) in self.weights or self.copy_of(a) is not None:
                a, b = b.mT if b.dim() > 1 else b, a
            self.see(a, b)

    def copy_of(self, w: torch.Tensor) -> tuple[list[SplitMoments], torch.Tensor] | None:
        """The moments and the experts' numbers of a copy that is still held: its memory may be another tensor's by now."""
        copied, moments, numbers = self.copies.get(_memory(w), (lambda: None, [], w))
        return None if copied() is None else (moments, numbers)

    def see(self, x: torch.Tensor, w: Any, ends: torch.Tensor | None = None) -> None:
        """Take in the rows that are multiplied with a matrix, or with each matrix of a batch up to its end."""
        if not isinstance(w, torch.Tensor) or isinstance(w, QuantizedTensor) or w.is_meta:
            return
        x, copied = x.detach() if x.dim() > 1 else x.detach()[None], self.copy_of(w)
        if copied is not None and x.dim() == 3 and len(x) == len(copied[1]):
            moments, numbers = copied
            self.update(moments, [(e, x[numbers == e].flatten(0, 1)) for e in range(len(moments))])
            return
        known = self.weights.get(_memory(w))
        if known is None:
            return
        weight, moments = known
        if ends is not None and w.numel() == weight.numel():
            self.update(moments, list(enumerate(x[a:b] for a, b in pairwise([0, *ends.tolist()]))))
        elif w.numel() == weight.numel():
            # Rows of each expert, or the same for all of them.
            parts = x.expand(len(w), *x.shape[-2:]) if w.dim() == 3 >= x.dim() else ()
            self.update(moments, list(enumerate(parts)))
        elif ends is None:
            expert, rest = divmod(int(w.storage_offset() - weight.storage_offset()), weight[0].numel())
            if not rest and w.numel() == weight[0].numel():
                self.update(moments, [(expert, x.reshape(-1, x.shape[-1]))])

    def update(self, moments: list[SplitMoments], parts: list[tuple[int, torch.Tensor]]) -> None:
        """Take in the rows of experts, one after the other."""
        if not parts:
            return
        tokens = moments[0].tokens
        rows = torch.cat([x for _, x in parts])
        # All rows at once, so that those of the product that follows can be told by their number.
        roles = None if tokens is None else tokens.of_routed(rows)
        for (expert, x), mine in zip(parts, _cut(roles, parts), strict=True):
            if len(x):
                moments[expert].update(x, mine)

    def finished(self) -> dict[str, list[SplitMoments]]:
        """By weight the moments of each expert, those that saw few tokens with the average of all."""
        for group in self.moments.values():
            lend(group)
            for one in group:
                one.tokens = None
        check_usable(
            {f"{name}[{i}]": one for name, group in self.moments.items() for i, one in enumerate(group)}
        )
        return self.moments


def _memory(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory; 0 for one without."""
    has_none = isinstance(tensor, QuantizedTensor) or tensor.is_meta or tensor.layout is not torch.strided
    return 0 if has_none else tensor.untyped_storage().data_ptr()


def _cut(roles: torch.Tensor | None, parts: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor | None]:
    if roles is None:
        return [None] * len(parts)
    return list(torch.split(roles, [len(x) for _, x in parts]))


def joined(target: Target, experts: Sequence[Calibrated], notes: Sequence[str] = ()) -> Calibrated:
    """One weight of all experts, and what was won for them together."""
    parts = [one.weight.plain.quantized for one in experts]
    q = replace(parts[0], **_stacked(parts), shape=(len(parts), *parts[0].shape), axis=2)
    weight = from_quantized(_in_out(q) if is_in_out(target) else q, target.recipe, target.parameter.dtype)
    return Calibrated(weight, _together([one.result for one in experts], notes))


def _stacked(parts: Sequence[Quantized]) -> dict[str, Any]:
    """Codes, scales and zero points of all experts."""
    fields = {name: [getattr(part, name) for part in parts] for name in ("codes", "scale", "zero")}
    return {name: None if values[0] is None else torch.stack(values) for name, values in fields.items()}


def _in_out(q: Quantized) -> Quantized:
    """Experts (experts, out, in) as (experts, in, out), packed along the last axis as rounding has them."""
    scheme = q.scheme
    codes = fast.unpack(q.codes, scheme.format, q.shape) if q.packed else q.codes
    fields: dict[str, Any] = {
        name: None if part is None else part.transpose(1, 2).contiguous()
        for name, part in (("codes", codes), ("scale", q.scale), ("zero", q.zero))
    }
    return with_packed_codes(replace(q, **fields, shape=(q.shape[0], *q.shape[:0:-1]), axis=1, packed=False))


def _together(results: Sequence[LayerResult], notes: Sequence[str]) -> LayerResult:
    """The result of all experts: errors added, the commonest method; counts of each method and of tokens in the notes."""
    counts = Counter(result.method for result in results)
    tokens = [result.tokens for result in results]
    by_method = (
        [f"{count} experts by {name}" for name, count in counts.most_common()] if len(counts) > 1 else []
    )
    return LayerResult(
        counts.most_common(1)[0][0],
        sum(result.error for result in results),
        sum(result.rounding for result in results),
        sum(tokens),
        sum(result.held_out for result in results),
        notes=(*by_method, f"{min(tokens)} to {max(tokens)} tokens were sent to an expert", *notes),
        experts=tuple(results),
    )


def notes_of(moments: Mapping[str, SplitMoments]) -> dict[str, tuple[str, ...]]:
    """By name what is to be said of experts that others have lent to."""
    return {
        name: (
            f"{one.train.seen} tokens were sent to it, {one.train.borrowed} of all experts' average are added",
        )
        for name, one in moments.items()
        if one.train.borrowed
    }
