"""The state of autocast where a block is called, for calls of it outside of the model's forward.

A model may enter autocast in its own forward, or a caller around it: a block that is called again without it would multiply in
other dtypes than in the model, or fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """Whether autocast is on and to which dtype, of the kinds of devices that a block may multiply on."""

    states: tuple[tuple[str, bool, torch.dtype], ...]

    @staticmethod
    def now(device: torch.device) -> Autocast:
        """The state of the moment. A block may move its input, which waits on a host, to a GPU by itself."""
        kinds = dict.fromkeys((device.type, "cpu", *(["cuda"] if torch.cuda.is_available() else [])))
        return Autocast(
            tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in kinds
                if torch.amp.is_autocast_available(kind)
            )
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same state inside. Casts of weights are not kept, since weights change between two calls."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self.states:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


__all__ = ["Autocast"]
