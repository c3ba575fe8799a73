"""Which tokens of a calibration set count: padding does not, and a tenth is held out to judge what was made of the rest.

Held out is every tenth sequence, counted over all batches. Where there are fewer than ten sequences it is the last tenth of
the tokens of each, rounded down. Padding is what a batch's attention_mask says (`ao_lab.transforms.data.mask_of`).

A sequence is one entry of the first axis of the first block's input, (sequences, tokens, channels); where that is
(tokens, channels) every token is one. A layer's input is matched with that by its leading axes, as they are or flattened. Of
one that fits neither way the rows count by the first axis where all tokens of a sequence are alike, and else all of them, none
held out; the layer's record says so. Tokens that were sent to experts are told by their values (`ao_lab.calibration.experts`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch

import fast
from ao_lab.calibration.statistics import Hessian, Sums
from ao_lab.transforms.walk import Capture
from fast.calibration.hessian import STRIP, add_products
from fast.layers.hadamard import hadamard

#: One of so many sequences, or tokens, is held out.
SHARE = 10
#: What a token is.
PADDING, TRAIN, HELD_OUT = 0, 1, 2


def roles(shapes: list[tuple[int, ...]], masks: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """What each token of each batch is, int8 of the shape of the batch's tokens."""
    counted = [_counted(shape, mask) for shape, mask in zip(shapes, masks, strict=True)]
    sequences = sum(shape[0] for shape in shapes if shape)
    result, first = [], 0
    for one in counted:
        if sequences >= SHARE:
            numbers = torch.arange(first, first + len(one)) % SHARE == SHARE - 1
            held = numbers.reshape(-1, *(1,) * (one.dim() - 1)).expand(one.shape)
            first += len(one)
        else:
            held = _last_tokens(one)
        result.append(torch.where(one, 1 + held.to(torch.int8), 0).to(torch.int8))
    return result


def _counted(shape: tuple[int, ...], mask: torch.Tensor | None) -> torch.Tensor:
    """Which tokens are no padding."""
    fits = mask is not None and tuple(mask.shape) == shape
    return mask.cpu() if fits and mask is not None else torch.ones(shape, dtype=torch.bool)


def _last_tokens(counted: torch.Tensor) -> torch.Tensor:
    """The last tenth of the tokens of each sequence that are no padding."""
    rows = counted.reshape(len(counted), -1) if counted.dim() > 1 else counted[:, None]
    places, totals = rows.cumsum(-1), rows.sum(-1, keepdim=True)
    return (rows & (places > totals - totals // SHARE)).reshape(counted.shape)


class Rows(NamedTuple):
    """Rows of an input (tokens, channels): those that statistics are made of, and those that are held out."""

    train: torch.Tensor
    held_out: torch.Tensor
    #: Whether the input fitted the tokens of its batch in no way, so that padding and held-out tokens are among the first.
    unmatched: bool = False


@dataclass
class Tokens:
    """The tokens of a capture."""

    capture: Capture
    roles: list[torch.Tensor]
    moved: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)
    #: Of the running batch: which rows methods read, and which are held out.
    places: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    #: What a module around experts was given (`ao_lab.calibration.experts.Source`), and what the rows are that came of it last.
    source: Any = None
    routed: torch.Tensor | None = None
    #: The processes that calibrate together (`ao_lab.calibration.ranks.Ranks`), or None.
    ranks: Any = None

    @staticmethod
    def of(capture: Capture, ranks: Any = None) -> Tokens:
        """Roles of the tokens of all batches; sequences are counted over all ranks."""
        if ranks is None:
            return Tokens(capture, roles(capture.shapes, capture.masks))
        shapes = ranks.gathered(capture.shapes)
        before = sum(map(len, shapes[: ranks.rank]))
        masks: list[torch.Tensor | None] = [None] * sum(map(len, shapes))
        masks[before : before + len(capture.masks)] = capture.masks
        all_roles = roles([shape for one in shapes for shape in one], masks)
        return Tokens(capture, all_roles[before : before + len(capture.shapes)], ranks=ranks)

    @property
    def counted(self) -> int:
        """Tokens that are no padding, held-out ones included, of all ranks."""
        own = sum(int((one != PADDING).sum()) for one in self.roles)
        return own if self.ranks is None else sum(self.ranks.gathered(own))

    @property
    def share(self) -> int:
        """Of which share of this rank's batches the running one is."""
        return 0 if self.ranks is None else self.ranks.share_of(self.capture.running, len(self.roles))

    def of_input(self, x: torch.Tensor) -> torch.Tensor | None:
        """What each row of an input is, flat; None where that cannot be told and all count."""
        routed = self.of_routed(x) if x.dim() == 2 else None
        return self.by_shape(x) if routed is None else routed

    def of_routed(self, x: torch.Tensor) -> torch.Tensor | None:
        """What rows are that a router has sent on, or that were made of the last such rows; None for other rows."""
        if self.source is None:
            return None
        routed: torch.Tensor | None = self.source.roles_of(x)
        if routed is not None:
            self.routed = routed
        elif self.routed is not None and len(self.routed) == len(x):
            routed = self.routed
        return routed

    def is_part(self, rows: torch.Tensor) -> bool:
        """Whether these are not all tokens of the batch."""
        return len(rows) != self.roles[self.capture.running].numel()

    def by_shape(self, x: torch.Tensor) -> torch.Tensor | None:
        """What each row of an input is by its leading axes."""
        mine = self._here(x.device)
        lead = tuple(x.shape[:-1])
        if lead == tuple(mine.shape) or prod(lead) == mine.numel():
            return mine.reshape(-1)
        first = mine.reshape(len(mine), -1)
        if lead and lead[0] == len(first) and bool((first == first[:, :1]).all()):
            return first[:, 0].repeat_interleave(prod(lead[1:]))
        return None

    def _here(self, device: torch.device) -> torch.Tensor:
        key = self.capture.running, device
        if key not in self.moved:
            self.moved = {key: self.roles[key[0]].to(device)}
        return self.moved[key]

    def _places_here(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows of the running batch are of either kind: found on the host, so that it waits for no device."""
        key = self.capture.running, device
        if key not in self.places:
            flat = self.roles[key[0]].reshape(-1)
            train, held_out = ((flat == kind).nonzero()[:, 0].to(device) for kind in (TRAIN, HELD_OUT))
            self.places = {key: (train, held_out)}
        return self.places[key]

    def split(self, x: torch.Tensor, role: torch.Tensor | None = None) -> Rows:
        """The rows of an input by what they are for. role: what each is, where that is known."""
        rows, kinds = x.reshape(-1, x.shape[-1]), self.roles[self.capture.running]
        if bool((kinds == TRAIN).all()):
            return Rows(rows, rows[:0])
        role = self.of_input(x) if role is None else role
        if role is None:
            return Rows(rows, rows[:0], unmatched=True)
        if bool((kinds == HELD_OUT).all()):
            return Rows(rows[:0], rows)
        mine = self._here(x.device)
        if role.data_ptr() == mine.data_ptr() and len(role) == mine.numel():
            train, held_out = self._places_here(x.device)
            return Rows(rows.index_select(0, train), rows.index_select(0, held_out))
        return Rows(rows[role == TRAIN], rows[role == HELD_OUT])


@dataclass
class Moments(Hessian):
    """Sums over tokens: of x x^T (`fast.calibration.hessian.add_products`), of x and of |x| by channel, the largest |x|, in
    float64, and how many there were."""

    count: int = 0
    total: torch.Tensor | None = None
    magnitude: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    #: Of `count` those that were not seen but lent by others (`ao_lab.calibration.experts`).
    borrowed: int = 0
    #: Sums of shares of the data that are over, and how many shares each has.
    closed: list[tuple[int, Moments]] = field(default_factory=list)
    #: Whether `value` is the mean already, so that no second matrix of its size is made of it.
    finished: bool = False

    def is_usable(self) -> bool:
        """By the diagonal of the products; where there are none, by the sums of |x|."""
        return super().is_usable() and (self.magnitude is None or bool(self.magnitude.isfinite().all()))

    def is_zero(self) -> bool:
        """Whether all inputs are 0."""
        return self.largest is None or not bool(self.largest.any())

    def finish(self) -> None:
        """Make the sum of x x^T its mean, in place; nothing can be added any more."""
        if self.value is not None and self.count and not self.finished:
            self.value /= self.count
            self.finished = True

    def close(self) -> None:
        """End a share: what was added so far becomes a leaf of the tree of sums, `closed`, whose equal subtrees are joined."""
        names = ("value", "total", "magnitude", "largest", "count")
        node = 1, Moments(**{name: getattr(self, name) for name in names})
        self.value, self.total, self.magnitude, self.largest, self.count = None, None, None, None, 0
        while self.closed and self.closed[-1][0] == node[0]:
            size, left = self.closed.pop()
            left.add(node[1])
            node = 2 * size, left
        self.closed.append(node)

    def add(self, other: Moments) -> None:
        """The sums of two, in place."""
        for name in ("value", "total", "magnitude"):
            own, its = getattr(self, name), getattr(other, name)
            if its is not None:
                setattr(self, name, its if own is None else own.add_(its.to(own.device)))
        if other.largest is not None:
            own = self.largest
            self.largest = other.largest if own is None else torch.maximum(own, other.largest.to(own.device))
        self.count += other.count

    def borrow(self, mean: Moments) -> None:
        """Add as many tokens as there are channels, with these means of x x^T, x and |x|."""
        if mean.value is None or mean.total is None or mean.magnitude is None:
            raise ValueError("no token was seen; run data through the layer")
        count = len(mean.total)
        for name in ("value", "total", "magnitude"):
            own, other = getattr(self, name), getattr(mean, name)
            setattr(self, name, other * count if own is None else own.add_(other.to(own.device), alpha=count))
        self.largest = mean.largest if self.largest is None else self.largest
        self.count, self.borrowed = self.count + count, self.borrowed + count

    def update(self, x: torch.Tensor, products: bool = True) -> None:
        """Add the tokens of one call, (tokens, channels), one at least. products: whether to add x x^T, too."""
        if self.finished:
            raise ValueError("these moments are finished; create new ones for more inputs")
        channels, double = x.shape[-1], torch.float64
        if products:
            if self.value is None:
                self.value = torch.zeros(channels, channels, dtype=double, device=x.device)
            add_products(self.value, x)
        size = x.abs()
        sums = x.sum(0, dtype=double), size.sum(0, dtype=double), size.amax(0).to(double)
        if self.total is None or self.magnitude is None or self.largest is None:
            self.total, self.magnitude, self.largest = sums
        else:
            device = self.total.device
            self.total = self.total + sums[0].to(device)
            self.magnitude = self.magnitude + sums[1].to(device)
            self.largest = torch.maximum(self.largest, sums[2].to(device))
        self.count += len(x)

    def scaled(self, factors: torch.Tensor) -> Moments:
        """The moments of x times factors (channels,), positive."""
        result = Moments(count=self.count, borrowed=self.borrowed, finished=self.finished)
        if self.value is not None and self.total is not None:
            f = factors.to(self.value.device, torch.float64)
            result.value = (self.value * f).mul_(f[:, None])
        for name in ("total", "magnitude", "largest"):
            value = getattr(self, name)
            if value is not None:
                setattr(result, name, value * factors.to(value.device, torch.float64))
        return result

    def rotated(self, length: int, last: bool = False) -> Moments:
        """The moments of hadamard(x, length): sums of x x^T and x alone. last: these are not needed any more, and give their
        memory.
        """
        result = Moments(count=self.count, borrowed=self.borrowed, finished=self.finished)
        if self.value is not None and self.total is not None:
            result.value = rotated_twice(self.value, length, self.value if last else None)
            result.total = fast.rotate(self.total, length)
        self.value = None if last else self.value
        return result

    @property
    def seen(self) -> int:
        """How many tokens of its own there were."""
        return self.count - self.borrowed

    @property
    def hessian(self) -> torch.Tensor:
        """The mean of x x^T, (channels, channels) in float64; ValueError where no token was seen."""
        return self._mean_of_products(self.value)

    @property
    def mean_squares(self) -> torch.Tensor:
        """The diagonal of that, without the rest."""
        return self._mean_of_products(None if self.value is None else self.value.diagonal())

    @property
    def mean(self) -> torch.Tensor:
        """The mean of x."""
        return self._mean(self.total)

    @property
    def mean_magnitude(self) -> torch.Tensor:
        """The mean of |x|."""
        return self._mean(self.magnitude)

    def _mean(self, value: torch.Tensor | None) -> torch.Tensor:
        if value is None or not self.count:
            raise ValueError("no token was seen; run data through the layer")
        return value / self.count

    def _mean_of_products(self, value: torch.Tensor | None) -> torch.Tensor:
        return value if self.finished and value is not None else self._mean(value)


def rotated_twice(h: torch.Tensor, length: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """R^T H R of a symmetric matrix: some rows at a time, then some columns. out: where it goes, h itself or another."""
    result = torch.empty_like(h) if out is None else out
    strips = [slice(start, start + STRIP) for start in range(0, len(h), STRIP)]
    for strip in strips:
        result[strip] = fast.rotate(h[strip], length)
    for strip in strips:
        result[:, strip] = fast.rotate(result[:, strip], length, axis=0)
    return result


#: Tokens of which inputs themselves are held, where errors are judged with quantized inputs.
SAMPLE = 1024


@dataclass
class SplitMoments(Sums):
    """Moments of the tokens that methods read, and of those that judge what they made."""

    tokens: Tokens | None = None
    #: Whether to hold some inputs as they are, too.
    sampling: bool = False
    train: Moments = field(default_factory=Moments)
    held_out: Moments = field(default_factory=Moments)
    #: The first inputs of either kind, (tokens, channels).
    samples: list[torch.Tensor] = field(default_factory=list)
    held_samples: list[torch.Tensor] = field(default_factory=list)
    #: Whether there were inputs whose padding and held-out tokens could not be told.
    unmatched: bool = False
    #: Whether there were inputs of some of a batch's tokens alone.
    routed: bool = False
    #: The share of the data that is being added (`ao_lab.calibration.ranks`).
    share: int = 0
    #: Whether tokens that methods read have sums of x x^T; else those that judge have them alone.
    products: bool = True

    def update(self, x: torch.Tensor, role: torch.Tensor | None = None) -> None:
        """Add the tokens of one call. role: what each row is, where that is known."""
        self.close_to(0 if self.tokens is None else self.tokens.share)
        flat = x.reshape(-1, x.shape[-1])
        rows = Rows(flat, flat[:0]) if self.tokens is None else self.tokens.split(x, role)
        self.unmatched = self.unmatched or rows.unmatched
        self.routed = self.routed or (self.tokens is not None and self.tokens.is_part(flat))
        for moments, samples, some in (
            (self.train, self.samples, rows.train),
            (self.held_out, self.held_samples, rows.held_out),
        ):
            if len(some):
                moments.update(some, self.products or moments is self.held_out)
            if self.sampling:
                add_sample(samples, some)

    def is_usable(self) -> bool:
        """Both."""
        return self.train.is_usable() and self.held_out.is_usable()

    def lacks_products(self) -> bool:
        """Whether no token was held out after all, and so those have to judge whose sums were left out."""
        return not self.products and bool(self.train.count) and not self.held_out.count

    def close_to(self, share: int) -> None:
        """End the shares before this one."""
        while self.share < share:
            self.train.close()
            self.held_out.close()
            self.share += 1

    def close(self, shares: int) -> None:
        """End all shares of this rank; the sums of all are in place."""
        if shares == 1:
            return
        self.close_to(shares)
        for kind in ("train", "held_out"):
            ((_, whole),) = getattr(self, kind).closed
            setattr(self, kind, whole)

    def finish(self) -> None:
        """Make means of sums, in place."""
        self.train.finish()
        self.held_out.finish()

    def for_judging(self) -> SplitMoments:
        """What comparing errors needs, without the products that methods read where tokens are held out."""
        train = replace(self.train, value=None) if self.held_out.count else self.train
        return replace(self, tokens=None, train=train)

    def judge_on(self, device: torch.device | str) -> None:
        """Move the products by which errors are compared, in place: for all that share them."""
        if self.judge.value is not None:
            self.judge.value = self.judge.value.to(device)

    @property
    def judge(self) -> Moments:
        """Those by which errors are compared: of held-out tokens where there are any."""
        return self.held_out if self.held_out.count else self.train

    @property
    def sample(self) -> torch.Tensor:
        """Inputs by which errors are compared that quantized inputs are part of."""
        return torch.cat(self.held_samples if self.held_out.count else self.samples)

    def scaled(self, factors: torch.Tensor) -> SplitMoments:
        """The same of inputs times factors (channels,)."""
        result = SplitMoments(
            None, None, self.sampling, self.train.scaled(factors), self.held_out.scaled(factors)
        )
        for name in ("samples", "held_samples"):
            values: list[torch.Tensor] = getattr(self, name)
            setattr(result, name, [(x.to(torch.float64) * factors.to(x.device)).to(x.dtype) for x in values])
        return result

    def rotated(self, length: int, last: bool = False) -> SplitMoments:
        """The same of hadamard(x, length). last: these are not needed any more."""
        parts = self.train.rotated(length, last), self.held_out.rotated(length, last)
        result = SplitMoments(None, None, self.sampling, *parts)
        result.samples = [hadamard(x, length) for x in self.samples]
        result.held_samples = [hadamard(x, length) for x in self.held_samples]
        return result


def add_sample(samples: list[torch.Tensor], rows: torch.Tensor) -> None:
    """Add the first of these rows, as many as are missing from `SAMPLE`."""
    missing = SAMPLE - sum(map(len, samples))
    if missing > 0 and len(rows):
        samples.append(rows[:missing].clone())
