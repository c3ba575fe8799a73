"""Finished blocks of a calibration on disk, so that a killed call goes on where it was and ends with the same bits.

Each block that is finished becomes one file: its quantized weights, its other parameters (gains and biases that were changed),
what was won, and the pairs of layers that were found. A new call of the same kind, on the dense model as it was, reads them in
place of quantizing those blocks; what later blocks are given is computed anew, by the same operations.

A file holds a key: a digest of what decides bits. A folder of another key is an error, not something to mix with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.equivalence import Pair
from ao_lab.calibration.groups import Target
from ao_lab.calibration.ranks import Ranks
from ao_lab.calibration.result import LayerResult
from ao_lab.config.base import Observer
from ao_lab.install.versions import __version__
from ao_lab.kv_cache.static_scales import CacheScales
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.data import tensors
from ao_lab.transforms.low_rank import give_residuals
from ao_lab.transforms.walk import Capture

#: Values of a tensor that its digest reads at most.
SAMPLE = 1 << 16


def key_of(
    targets: Sequence[Target],
    methods: Sequence[object],
    capture: Capture,
    ranks: Ranks | None = None,
    observers: Mapping[str, Observer] | None = None,
) -> dict[str, str]:
    """What decides bits, each part as a digest or as text. observers: what finds static scales, by names of weights."""
    data = [_digest([_sampled(x) for x in _given(capture, batch)]) for batch in range(len(capture.calls))]
    shared: dict[str, str] = {}
    if ranks is not None:
        data = [x for one in ranks.gathered(data) for x in one]
        shared = {"shares of the data": str(ranks.shares)}
    return {
        "versions": f"ao_lab {__version__}, torch {torch.__version__}",
        "methods": repr(tuple(methods)),
        "weights to be quantized, and their schemes": _digest(
            [f"{_described(target)} {_statistic((observers or {}).get(target.name))}" for target in targets]
        ),
        "weights": _digest([_sampled(x) for block in capture.blocks.values() for x in _values(block)]),
        "blocks": " ".join(capture.blocks),
        "data": _digest(data),
        **shared,
    }


def _described(target: Target) -> str:
    """A weight's name, and how it and its inputs are quantized."""
    recipe, scales = target.recipe, target.config.input_scales()
    activation = "" if recipe.activation is None else recipe.activation.key
    static = [None if x is None else x.tolist() for x in (scales.scale, scales.zero)] if scales else ""
    how = f"{recipe.kernel} {recipe.accumulation} {recipe.rotation} {static}"
    return f"{target.name} {recipe.weight.key} {activation} {target.axis} {how}"


def _statistic(observer: Observer | None) -> str:
    """What finds static scales: its class, and its numbers."""
    statistic = getattr(observer, "statistic", None)
    fields = {k: v for k, v in getattr(statistic, "__dict__", {}).items() if isinstance(v, (int, float, str))}
    return "" if observer is None else f"{type(observer).__name__} {type(statistic).__name__} {fields}"


def _values(block: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and buffers of a block, of quantized ones their parts: those that stay decide the inputs of others."""
    for x in (*block.parameters(), *block.buffers()):
        if isinstance(x.data, QuantizedTensor):
            yield from (getattr(x.data, name) for name in x.data.__tensor_flatten__()[0])
        else:
            yield x


def _given(capture: Capture, batch: int) -> list[torch.Tensor]:
    """What blocks are given of a batch (the first one's input, masks, positions), and which tokens are padding."""
    inputs = [one.value for one in capture.held[batch].values()]
    if (mask := capture.masks[batch]) is not None:
        inputs.append(mask)
    arguments = [value for call in capture.calls[batch] for value in (*call[0], *call[1].values())]
    values = [list(one.values()) if isinstance(one, Mapping) else one for one in arguments]
    # Most are the same tensors for all blocks.
    return [*inputs, *{id(x): x for x in tensors(values)}.values()]


def _sampled(x: torch.Tensor) -> bytes:
    """Shape, dtype, and evenly spaced values of a tensor."""
    flat = x.detach().reshape(-1)
    step = max(flat.numel() // SAMPLE, 1)
    values = flat[::step].contiguous().cpu()
    return f"{tuple(x.shape)} {x.dtype} ".encode() + values.view(torch.uint8).numpy().tobytes()


def _digest(parts: Sequence[str | bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@dataclass
class Finished:
    """The folder of finished blocks of one call."""

    folder: Path
    key: dict[str, str]

    @staticmethod
    def of(folder: str | os.PathLike[str], key: dict[str, str]) -> Finished:
        """The folder, made where there is none; ValueError for files of another call, or for what is no folder."""
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise ValueError(f"resume={str(folder)!r} is a file; give the name of a folder")
        path.mkdir(parents=True, exist_ok=True)
        finished = Finished(path, key)
        for file in sorted(path.glob("block-*.pt")):
            finished._check(file, _read(file))
        return finished

    def _check(self, file: Path, content: Mapping[str, Any]) -> None:
        other = [name for name, value in self.key.items() if content.get("key", {}).get(name) != value]
        if other:
            raise ValueError(
                f"{file} belongs to another call: {', '.join(other)} differ; quantize_ changed nothing. Give resume= another "
                f"folder, or remove this one; a call goes on with the model as it was loaded"
            )

    def file(self, index: int) -> Path:
        """Of a block by its number."""
        return self.folder / f"block-{index:04d}.pt"

    def save(
        self,
        index: int,
        module: nn.Module,
        results: Mapping[str, LayerResult],
        pairs: Sequence[Pair],
        scales: Mapping[str, CacheScales] | None = None,
    ) -> None:
        """A finished block, whole or not at all."""
        content = {
            "key": self.key,
            "parameters": {name: parameter.detach() for name, parameter in module.named_parameters()},
            "results": {name: asdict(result) for name, result in results.items()},
            "pairs": [asdict(pair) for pair in pairs],
            "cache scales": {name: asdict(one) for name, one in (scales or {}).items()},
        }
        file, part = self.file(index), self.file(index).with_suffix(".part")
        try:
            torch.save(content, part)
            part.replace(file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def mapped(self, index: int) -> Mapping[str, torch.Tensor] | None:
        """The parameters of a finished block as views of its file, on the host; None where it is not finished."""
        file = self.file(index)
        return _read(file, mmap=True)["parameters"] if file.exists() else None

    def restore(
        self, index: int, module: nn.Module, targets: Sequence[Target]
    ) -> tuple[dict[str, LayerResult], list[Pair], dict[str, CacheScales]] | None:
        """Put a finished block into the model; what was won, its pairs, its cache's scales. None where it is not finished."""
        if not self.file(index).exists():
            return None
        content = _read(self.file(index))
        self._check(self.file(index), content)
        mine = {id(target.parameter): target for target in targets}
        give_residuals(module, content["parameters"])
        device = {name: parameter.device for name, parameter in module.named_parameters()}
        for name, parameter in list(module.named_parameters()):
            value, target = content["parameters"][name].to(device[name]), mine.get(id(parameter))
            if target is not None:
                target.put(nn.Parameter(value, requires_grad=False))
            else:
                parameter.data.copy_(value)
        results = {name: _result(fields) for name, fields in content["results"].items()}
        pairs = [Pair(**{**pair, "consumers": tuple(pair["consumers"])}) for pair in content["pairs"]]
        scales = {name: CacheScales(**fields) for name, fields in content.get("cache scales", {}).items()}
        return results, pairs, scales


def _result(fields: Mapping[str, Any]) -> LayerResult:
    experts = tuple(_result(one) for one in fields["experts"])
    return LayerResult(**{**fields, "notes": tuple(fields["notes"]), "experts": experts})


def _read(file: Path, mmap: bool = False) -> dict[str, Any]:
    """A file's content, on the host; ValueError where it is none of ours. mmap: tensors are views of the file."""
    try:
        content = torch.load(file, weights_only=True, map_location="cpu", mmap=mmap)
    except Exception as error:
        raise ValueError(
            f"{file} cannot be read ({type(error).__name__}: {error!s:.80}); remove it"
        ) from error
    if not isinstance(content, dict) or "key" not in content:
        raise ValueError(f"{file} is not a finished block; remove it, or give resume= another folder")
    return content
