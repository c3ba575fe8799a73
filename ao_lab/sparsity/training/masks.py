"""Masks of weights in training, and weights that are set to zero by them; whole weights and shards of FSDP2.

A mask is stored as bool, or as bits (`fast.kernels.sm90_sparse24_gemm.arrange`) where the products read these: an eighth of the
memory.

A mask is found from the whole weight, gathered where ranks have a shard each: rows of a shard would do for N:M along the last
axis, but not for tiles of a transposable mask, and with the whole weight no rank can have another mask than the next.

Counts of steps: a buffer of each layer, which checkpoints have, and the same number on the host, so that no step waits.

The host's number holds as long as the buffer is the same tensor, at the same address, that nothing else has written to: torch
counts writes in place (`Tensor._version`). After loading, copying or moving, and at first, the buffer is read, once. Writes
through `.data` or another tensor's memory are not seen; replays of a CUDA graph are: of a buffer that was counted in one the
host's number says nothing any more. Collectives write past torch's count, and ranks that disagreed would wait for each other
for ever: where there are process groups the buffer is read in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ao_lab.sparsity.plan import mask_of, most_kept, pruned_pattern
from ao_lab.sparsity.training.config import SparseTrainingConfig
from fast.kernels.sm90_sparse24_gemm.arrange import pack_bits, unpack_bits
from fast.sparsity.compress import masked


class Known(NamedTuple):
    """A number, and the state of its buffer that it was that of. captured: whether a CUDA graph adds to the buffer."""

    number: int
    version: int
    address: int
    captured: bool


_known: MutableMapping[torch.Tensor, Known] = WeakTensorKeyDictionary()


def count(steps: Sequence[torch.Tensor]) -> list[int]:
    """Add one to every buffer, once where some are the same memory; their numbers.

    Raises RuntimeError in the capture of a CUDA graph where the host has no number: nothing may be read there.
    """
    groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for step in steps:
        groups.setdefault((step.device, step.data_ptr() or id(step)), []).append(step)
    capturing = is_capturing(steps)
    numbers = [_number(group, capturing) for group in groups.values()]
    if capturing and None in numbers:
        raise RuntimeError(
            "step_sparsity_: in the capture of a CUDA graph the number of steps cannot be read; call it once before, as it was "
            "loaded, copied or moved"
        )
    torch._foreach_add_([group[0] for group in groups.values()], 1)
    unknown = [group[0] for group, number in zip(groups.values(), numbers, strict=True) if number is None]
    read = iter(_read(unknown))
    counts: dict[int, int] = {}
    for group, number in zip(groups.values(), numbers, strict=True):
        now = next(read) if number is None else number + 1
        for step in group:
            _remember(step, now, capturing)
            counts[id(step)] = now
    return [counts[id(step)] for step in steps]


def is_capturing(steps: Sequence[torch.Tensor]) -> bool:
    """Whether a CUDA graph is captured from the current stream."""
    return steps[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _number(group: Iterable[torch.Tensor], capturing: bool) -> int | None:
    """What the host knows of a buffer by all tensors that are its memory; None where that is nothing, or not the same."""
    numbers = {_of_tensor(step, capturing) for step in group}
    return numbers.pop() if len(numbers) == 1 else None


def _of_tensor(step: torch.Tensor, capturing: bool) -> int | None:
    known = _known.get(step)
    # A graph that is captured once more repeats one step, whose number is that of its first capture.
    if known is None or (known.captured and not capturing) or (_has_ranks() and not capturing):
        return None
    return known.number if (known.version, known.address) == (step._version, step.data_ptr()) else None


def _has_ranks() -> bool:
    """Whether another rank may write to a buffer."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def counted_in_graph(step: torch.Tensor) -> bool:
    """Whether a CUDA graph adds to a buffer, so that its replays count steps that the host does not see."""
    known = _known.get(step)
    return known is not None and known.captured


def _remember(step: torch.Tensor, number: int, capturing: bool) -> None:
    if step.is_inference():  # writes to it are not counted
        return
    before = _known.get(step)
    captured = capturing or (before is not None and before.captured)
    _known[step] = Known(number, step._version, step.data_ptr(), captured)


def _read(steps: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of buffers, which the host waits for once."""
    if not steps:
        return []
    return [int(n) for n in torch.stack([step.to(steps[0].device) for step in steps]).tolist()]


def is_distributed(w: torch.Tensor) -> bool:
    """Whether each rank has a part of it: a DTensor."""
    return hasattr(w, "device_mesh")


def whole(w: torch.Tensor) -> torch.Tensor:
    """The values of a weight, without history; of a DTensor gathered, which every rank has to call."""
    gathered: Any = w.detach()
    values: torch.Tensor = gathered.full_tensor() if is_distributed(w) else gathered
    # On a CPU a copy: the reference reads NumPy arrays, and memory that NumPy has seen torch does not give back.
    return values.clone() if values.device.type == "cpu" else values


@torch.no_grad()
def find_mask(w: torch.Tensor, config: SparseTrainingConfig, out: torch.Tensor | None = None) -> torch.Tensor:
    """Bool (out, in), True where a weight (out, in) stays. out: a stored mask that is written; by default a new bool tensor.

    Fixed masks are the weight's own zeros where it has the pattern already (and is not zero altogether): for these the host
    waits for two numbers of a GPU. Others are found without any wait. Whoever asks has refused weights with the zeros of
    another pattern (`other_pattern_reason`), which a fixed mask would prune again.
    """
    values = whole(w)
    if config.masks == "fixed":
        own = values != 0
        if has_pattern(own, config):
            return own if out is None else out.copy_(stored_as(own, out.dtype))
    return mask_of(values, config.scoring(), None, out)


def has_pattern(mask: torch.Tensor, config: SparseTrainingConfig) -> bool:
    """Whether a bool matrix keeps at most N of every M, in rows (of columns too where masks are transposable), not nothing."""
    most, group = config.scoring().kept_of
    sides = (mask, mask.T) if config.transposable else (mask,)
    counts = [most_kept(side, group) for side in sides]
    return counts[0] > 0 and max(counts) <= most


@torch.no_grad()
def other_pattern_reason(w: torch.Tensor, config: SparseTrainingConfig) -> str | None:
    """Why a fixed mask may not be found for a weight (out, in), and the way out: it was pruned, and not as `config` says."""
    mask, scoring = whole(w) != 0, config.scoring()
    if config.masks != "fixed" or has_pattern(mask, config):
        return None
    if (pattern := pruned_pattern(mask, scoring.kept_of[1])) is None:
        return None
    if most_kept(mask, scoring.kept_of[1]) <= scoring.kept_of[0]:
        asked, first = (
            "masks that are 2:4 in both directions",
            "prune the dense weights by SparsityConfig(transposable=True)",
        )
    else:
        more = ", transposable=True" if config.transposable else ""
        asked, first = (
            f"{config.pattern} masks",
            f"prune by SparsityConfig({config.pattern!r}{more}) first if that is meant",
        )
    return (
        f"it is {pattern} sparse already, and fixed masks keep the existing zeros: {asked} would prune it again. "
        f"Train with SparseTrainingConfig({pattern!r}), or {first}"
    )


@torch.no_grad()
def zero_pruned_(w: torch.Tensor, mask: torch.Tensor) -> None:
    """Set what a stored mask (of the whole weight) drops to +0, in place; of a DTensor the part that this rank has."""
    part: Any = w
    if is_distributed(w):
        from torch.distributed.tensor import distribute_tensor

        # No rank is asked for it: each has the whole mask. Axes may be split within a byte of bits.
        kept = bool_mask(mask, w.shape[-1])
        split: Any = distribute_tensor(kept, part.device_mesh, part.placements, src_data_rank=None)
        part, mask = part.to_local(), split.to_local()
    masked(part, mask, part)


@torch.no_grad()
def share_of_zeros(w: torch.Tensor, mask: torch.Tensor) -> float:
    """The share of a weight that products take as zero: what a bool mask drops, and zeros among what it keeps.

    Of a DTensor what the mask drops: no rank is asked for its part.
    """
    kept = mask if is_distributed(w) or w.is_meta else mask & (w.detach() != 0)
    return 1 - float(kept.float().mean())


def stored_dtype(config: SparseTrainingConfig) -> torch.dtype:
    """As what masks are stored: torch.uint8, bits, for the kernels that read these, torch.bool for torch's operators."""
    return torch.uint8 if config.products == "sparse_wgmma" else torch.bool


def stored_as(mask: torch.Tensor, dtype: torch.dtype, length: int = 0) -> torch.Tensor:
    """A stored mask as `stored_dtype` says. length: of its rows, read where it is bits and is to be bool."""
    if mask.dtype == dtype:
        return mask
    return pack_bits(mask) if dtype == torch.uint8 else bool_mask(mask, length)


def bool_mask(mask: torch.Tensor, length: int) -> torch.Tensor:
    """A stored mask of rows of this length as bool; the tensor itself where it is."""
    return mask if mask.dtype == torch.bool else unpack_bits(mask, length)
