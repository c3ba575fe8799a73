"""A folder in our layout, as transformers reads it: checked before a tensor is read, put together weight by weight.

transformers renames and casts what it reads and puts it where it belongs; `Stored` says which tensors are one weight, and makes
it of them. Names in the folder are those of the model that was saved; of a model with more or less around the same trunk (a
headless one, another head) they differ by the trunk's name, which transformers adds or takes off, and so does this.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ao_lab.checkpoint.api import check_configuration
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.checkpoint.io.strict_json import shown
from ao_lab.checkpoint.native_layout import saved_dtype
from ao_lab.checkpoint.records import KEY, Weight, check_quantized_tensor, read_records


def _check_places(model: Any, files: Iterable[str]) -> None:
    """ValueError for files of weights outside of the folder that a model is read from, which an index may name.

    Paths are compared as they are written: what links lead to is another check's.
    """
    named = os.path.abspath(getattr(model.config, "_name_or_path", "") or ".")
    if not os.path.isdir(named):
        return  # a name of a hub, whose cache transformers fills itself
    outside = [file for file in map(os.path.abspath, files) if os.path.commonpath((named, file)) != named]
    if outside:
        raise ValueError(
            f"{named}: its weights are said to be in {shown(outside[0])}, outside of the folder; fetch the folder again"
        )


@dataclass
class Stored:
    """The quantized weights of a folder, by their names in the model, and names of one tensor."""

    folder: Path
    weights: Mapping[str, Weight]
    shared: Mapping[str, str]
    #: Of all that it stores, dense tensors too.
    names: Collection[str]
    #: What weights compute in; None: as they were saved.
    dtype: torch.dtype | None
    errors: list[Exception] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any, files: list[str] | None) -> Stored:
        """What a model's files hold; ValueError for a folder that is damaged, or made for another model."""
        if not files:
            raise ValueError(
                "a state_dict holds no records of quantized weights; give from_pretrained the folder"
            )
        _check_places(model, files)
        found = look_at(Path(files[0]).parent)
        if KEY not in found.metadata:
            raise ValueError(
                f"{found.path} holds no records of ao_lab, which config.json announces; fetch it again"
            )
        records = read_records(found)
        check_configuration(found.path, records)
        expected = model.state_dict(keep_vars=True)
        names = Names(expected, model.base_model_prefix)
        weights = {names.of(name): weight for name, weight in records.weights.items()}
        check_shapes({name: weight.shape for name, weight in weights.items()}, expected, found.path)
        shared = {names.of(name): names.of(other) for name, other in records.shared.items()}
        # The model is one of meta tensors in the dtype that was asked for.
        dtype: torch.dtype = model.dtype
        same = str(dtype).removeprefix("torch.") == saved_dtype(found.path)
        stored = {*weights, *(names.of(name) for name in records.dense)}
        return cls(found.path, weights, shared, stored, None if same else dtype)

    def ties(self, given: Mapping[str, str]) -> dict[str, str]:
        """Which names have the weight of another: those that the folder stores once, and of the model's those that it lacks."""
        own = {
            name: other for name, other in given.items() if name not in self.names or other not in self.names
        }
        return {**own, **self.shared}

    @property
    def parts(self) -> dict[str, list[str]]:
        """The last words of the weights' names, and what the names of their parts add."""
        result: dict[str, dict[str, None]] = {}
        for name, weight in self.weights.items():
            result.setdefault(name.rpartition(".")[2], {}).update(dict.fromkeys(weight.specs))
        return {leaf: list(parts) for leaf, parts in result.items()}

    def build(self, name: str, parts: Mapping[str, torch.Tensor]) -> nn.Parameter | None:
        """A weight of its tensors. None where these are wrong: transformers goes on after an error, `finish` does not."""
        weight = self.weights[name]
        try:
            result = weight.build(dict(parts))
            check_quantized_tensor(result)
        except (ValueError, TypeError) as error:
            told = ValueError(
                f"weight {shown(name)} of {self.folder}: {error}; fetch or write the folder again"
            )
            told.__cause__ = error
            self.errors.append(told)
            return None
        return nn.Parameter(result if self.dtype is None else result.to(self.dtype), requires_grad=False)

    def finish(self) -> None:
        """Raise the first error that there was."""
        if self.errors:
            raise self.errors[0]


class Names:
    """What transformers makes of a name: the model's own, or that without or with the name of its trunk."""

    def __init__(self, expected: Mapping[str, Any], prefix: str) -> None:
        self.expected, self.prefix = expected, prefix

    def of(self, name: str) -> str:
        """The name in the model; the folder's where the model has none."""
        without = re.sub(f"^{re.escape(self.prefix)}\\.", "", name)
        tried = [name] if not self.prefix else [name, without, f"{self.prefix}.{name}"]
        return next((one for one in tried if one in self.expected), name)


def check_shapes(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, Any], folder: Path) -> None:
    """ValueError where a quantized weight has another shape than the model's."""
    for name, shape in shapes.items():
        wanted = expected.get(name)
        if wanted is not None and tuple(wanted.shape) != shape:
            raise ValueError(
                f"{shown(name)} of {folder} has shape {shape}, the model's {tuple(wanted.shape)}; give the configuration of "
                "the model that was saved"
            )


__all__ = ["Stored"]
