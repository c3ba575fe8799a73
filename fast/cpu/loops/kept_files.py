"""Numba's files of compiled kernels are pickles: they are read only where nobody else can have written them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from numba.core.caching import FunctionCache

from fast.user_cache import UntrustedFile, refuse_foreign, warn_once


def is_own_cache(kernel: Callable[..., None]) -> bool:
    """Whether nobody else can have written the files of a kernel; one warning where somebody can.

    A folder beside the source is as trustworthy as the source. Raises what Numba does where it has no place for files.
    """
    folder = Path(FunctionCache(kernel).cache_path)
    if folder.parent == Path(kernel.__code__.co_filename).parent:
        return True
    try:
        refuse_foreign(folder)
        for file in folder.glob(f"*{kernel.__qualname__}*"):
            refuse_foreign(file)
    except UntrustedFile as error:
        warn_once(f"{error}; Numba's compiled kernels there are not used, each process compiles its own")
        return False
    return True


__all__ = ["is_own_cache"]
