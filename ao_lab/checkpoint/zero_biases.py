"""Biases of layers that have none: AutoGPTQ wrote zeros for every layer that it packed, whether it had a bias or not."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ao_lab.checkpoint.io.shards import Folder
from ao_lab.checkpoint.records import Records

REASON = "zeros in place of a bias that the layer does not have"


def without_spare_biases(records: Records, folder: Folder, model: nn.Module) -> Records:
    """The records without the biases of quantized layers that the model lacks, where all of their elements are 0.

    Other tensors that the model lacks stay: who fills it compares names. Of the files only such biases are read.
    """
    state = model.state_dict(keep_vars=True)
    stored = {name: name for name in records.dense}
    stored |= {name: one.names[""] for name, one in records.computed.items() if set(one.names) == {""}}
    unknown = {name: full for name, full in stored.items() if name not in state and name.endswith(".bias")}
    beside = {n: full for n, full in unknown.items() if n.removesuffix("bias") + "weight" in records.weights}
    spare = {name: full for name, full in beside.items() if not folder.read([full])[full].any()}
    if not spare:
        return records
    return replace(
        records,
        dense=tuple(name for name in records.dense if name not in spare),
        computed={name: one for name, one in records.computed.items() if name not in spare},
        left_out={**records.left_out, **dict.fromkeys(spare.values(), REASON)},
    )


__all__ = ["without_spare_biases"]
