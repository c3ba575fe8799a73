"""Calibration by several processes: each runs its part of the data, all have the same sums, and quantize the same weights.

    calibration=DistributedBatches(batches_of_this_rank, shares=8)

Floating-point sums depend on their order, so that order is fixed: the batches of all ranks, in the order of ranks, are `shares`
equal runs of batches. Sums of a share go batch by batch, sums of shares by a binary tree over their numbers. A rank has a whole
subtree, whatever the number of ranks, so that one rank with the same shares has the same bits as eight. Between ranks the tree
goes on by pairs, whose members add what both have: a + b is b + a, and all end with the root.

Every rank has the whole model (or streams it) and ends with the same weights; a folder of finished blocks is written by the
first rank, and all have to see it. `AutoRound`, which learns from batches, runs in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ao_lab.calibration.statistics import MinMax, MovingAverage, Percentile
from ao_lab.calibration.tokens import Moments, SplitMoments, add_sample
from ao_lab.transforms.data import holds_batches

CHANGED_NOTHING = "quantize_ changed nothing"


@dataclass(frozen=True)
class DistributedBatches:
    """The batches of this rank, as `calibration=` of `quantize_`.

    shares: runs of batches whose sums are a tree, a power of two that the number of ranks divides; None: one for each rank.
    They decide bits, the number of ranks does not. group: of processes; None: all. Without initialized processes there is one
    rank.
    """

    batches: Iterable[Any]
    shares: int | None = None
    group: Any = None

    def __post_init__(self) -> None:
        if not holds_batches(self.batches):
            raise TypeError(
                f"DistributedBatches holds an iterable of batches, such as a list or a DataLoader, got "
                f"{type(self.batches).__name__}; put a single batch into a list"
            )

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@dataclass
class Ranks:
    """The processes of a call."""

    shares: int
    rank: int = 0
    size: int = 1
    group: Any = None
    #: Bytes that were sent to others.
    sent: int = field(default=0, compare=False)

    @staticmethod
    def of(batches: Any) -> Ranks | None:
        """Those of distributed batches; None for others. ValueError for shares that do not fit the ranks."""
        if not isinstance(batches, DistributedBatches):
            return None
        running = dist.is_available() and dist.is_initialized()
        size = dist.get_world_size(batches.group) if running else 1
        rank = dist.get_rank(batches.group) if running else 0
        shares = size if batches.shares is None else batches.shares
        if type(shares) is not int or shares < 1 or shares & (shares - 1) or shares % size:
            raise ValueError(
                f"DistributedBatches: shares is a power of two that the number of ranks, {size}, divides; got {shares!r}. "
                f"{CHANGED_NOTHING}"
            )
        return Ranks(shares, rank, size, batches.group)

    @property
    def mine(self) -> int:
        """Shares of this rank."""
        return self.shares // self.size

    def share_of(self, batch: int, count: int) -> int:
        """The share, of this rank's, that a batch of so many is in."""
        return batch * self.mine // max(count, 1)

    def gathered(self, value: Any) -> list[Any]:
        """What every rank has, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """An error of one rank inside is an error of all, afterwards: none waits for one that has stopped."""
        mine: BaseException | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised below, after the others know of it
            mine = error
        errors = self.gathered(None if mine is None else f"{type(mine).__name__}: {mine}")
        if mine is not None:
            raise mine
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(errors) if one is not None]
        if failed:
            raise RuntimeError(f"calibration stopped on another rank, {failed[0]}")

    def check_batches(self, count: int) -> None:
        """ValueError where batches do not divide into the shares of this rank, or ranks have other numbers of them."""
        counts = self.gathered(count)
        if len(set(counts)) > 1 or count % self.mine:
            raise ValueError(
                f"DistributedBatches: every rank has the same number of batches, a multiple of its {self.mine} shares; got "
                f"{counts}. {CHANGED_NOTHING}"
            )

    def collect(self, moments: dict[str, SplitMoments], make: Any) -> None:
        """Sums of all ranks in place of those of this one. make: of a layer that no data of this rank reached."""
        names: dict[str, str] = {}
        for one in self.gathered(_first_names(moments)):
            for name, first in one.items():
                names.setdefault(name, first)
        for name, first in names.items():
            if name not in moments:
                moments[name] = moments[first] if first in moments else make()
        distinct = {id(moments[name]): moments[name] for name in sorted(names)}
        self.collect_all(list(distinct.values()))

    def collect_all(self, moments: Sequence[SplitMoments]) -> None:
        """The same of moments that all ranks have in the same order."""
        for one in moments:
            one.close(self.mine)
        self._samples(moments)
        every = [part for one in moments for part in (one.train, one.held_out)]
        facts = self.gathered([(part.count, 0 if part.total is None else len(part.total)) for part in every])
        for i, part in enumerate(every):
            width = max(one[i][1] for one in facts)
            if width:
                self._added(part, width)
            part.count = sum(one[i][0] for one in facts)

    def _samples(self, moments: Sequence[SplitMoments]) -> None:
        """The first inputs of all ranks; and whether anything is not what it was on one of them."""
        if self.size == 1:
            return
        flags = self.gathered([(one.unmatched, one.routed) for one in moments])
        for i, one in enumerate(moments):
            one.unmatched, one.routed = (any(flag[i][j] for flag in flags) for j in (0, 1))
            for name in ("samples", "held_samples") if one.sampling else ():
                own: list[torch.Tensor] = getattr(one, name)
                all_of_them = [x for part in self.gathered([x.cpu() for x in own]) for x in part]
                first: list[torch.Tensor] = []
                for x in all_of_them:
                    add_sample(first, x.to(own[0].device) if own else x)
                setattr(one, name, first)

    def _added(self, part: Moments, width: int) -> None:
        """One sum over all ranks, by pairs."""
        if self.size == 1:
            return
        device = torch.device("cpu") if part.value is None else part.value.device
        if part.value is None and dist.get_backend(self.group) != "gloo":
            device = torch.device("cuda", torch.cuda.current_device())
        if part.value is None:
            part.value = torch.zeros(width, width, dtype=torch.float64, device=device)
            part.total, part.magnitude, part.largest = part.value.new_zeros(3, width).unbind()
        assert part.total is not None
        assert part.magnitude is not None
        assert part.largest is not None
        step = 1
        while step < self.size:
            other = torch.stack([part.total, part.magnitude, part.largest])
            other = self._swapped(other, step)
            part.value += self._swapped(part.value, step)
            part.total, part.magnitude = part.total + other[0], part.magnitude + other[1]
            part.largest = torch.maximum(part.largest, other[2])
            step *= 2

    def _swapped(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """What the rank at this distance has in place of x."""
        partner = self.rank ^ step
        peer = partner if self.group is None else dist.get_global_rank(self.group, partner)
        x, received = x.contiguous(), torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, peer, self.group), dist.P2POp(dist.irecv, received, peer, self.group)]
        )
        for work in works:
            work.wait()
        self.sent += x.numel() * x.dtype.itemsize
        return received

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest values of all ranks."""
        return torch.stack([one.to(x.device) for one in self.gathered(x.cpu())]).amax(0)

    def merge(self, statistic: Any) -> None:
        """A static scale's range over all ranks; ValueError for one that depends on the order of tensors."""
        if self.size == 1:
            return
        if isinstance(statistic, Percentile):
            counts = [one for one in self.gathered(_host(statistic.counts)) if one is not None]
            statistic.counts = torch.stack(counts).sum(0) if counts else None
        elif isinstance(statistic, MinMax) and not isinstance(statistic, MovingAverage):
            ends = [
                one
                for one in self.gathered((_host(statistic.low), _host(statistic.high)))
                if one[0] is not None
            ]
            if ends:
                statistic.low, statistic.high = (
                    torch.stack([e[0] for e in ends]).amin(0),
                    torch.stack([e[1] for e in ends]).amax(0),
                )
        else:
            raise ValueError(
                f"{type(statistic).__name__} of several ranks depends on the order of their data; use statistic='minmax', "
                f"'absmax' or 'percentile'. {CHANGED_NOTHING}"
            )

    def wait(self) -> None:
        """Until all ranks are here."""
        self.gathered(None)


def _host(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.cpu()


def _first_names(moments: Mapping[str, SplitMoments]) -> dict[str, str]:
    """For each name the first one that has the same moments."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(one), name) for name, one in moments.items()}


__all__ = ["DistributedBatches"]
