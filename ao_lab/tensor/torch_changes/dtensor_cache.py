"""torch.compile's cache of programs, where a `DTensor` holds a `QuantizedTensor`.

torch asks every tensor subclass for a hash of what a compiled program may depend on, and a DTensor answers with its own shape,
dtype and placements alone (torch 2.13; pytorch issue 188390 is the same for devices). Two models of equal shapes in two schemes
would share a program: numbers of one read as the other's. So here a DTensor's hash gets that of a QuantizedTensor inside it.
"""

from __future__ import annotations

from typing import Any

HASH = "_stable_hash_for_caching"
MODULE = "torch.distributed.tensor"


def hash_local_tensors(kind: type) -> None:
    """Let DTensors of quantized weights (`kind`) answer with their weights' hash too; once, however often it is called."""
    from torch.distributed.tensor import DTensor

    plain = getattr(DTensor, HASH, None)
    if plain is None or hasattr(plain, "of_the_wrapper"):  # torch 2.11 hashes by __reduce_ex__, which has all
        return

    def whole(tensor: Any) -> str:
        local, text = tensor._local_tensor, str(plain(tensor))
        return text + getattr(local, HASH)() if isinstance(local, kind) else text

    whole.of_the_wrapper = plain  # type: ignore[attr-defined]
    setattr(DTensor, HASH, whole)


__all__ = ["MODULE", "hash_local_tensors"]
