"""Changes of torch that quantized weights need, each made once, as soon as the module is there that it changes.

Nothing is imported for them: `import ao_lab` stays quick, and who has neither DTensors nor compiled programs pays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from ao_lab.tensor.torch_changes import dtensor_cache, unwrapping, weight_guards

#: By the module that it changes: what makes a change, given the class of quantized weights. Those that are still to be made.
PENDING: dict[str, Callable[[type], None]] = {
    dtensor_cache.MODULE: dtensor_cache.hash_local_tensors,
    unwrapping.MODULE: unwrapping.unwrap_by_names,
    weight_guards.MODULE: weight_guards.guard_by_form,
}


def make_changes(kind: type) -> None:
    """Make those whose modules have been imported."""
    for name in [name for name in PENDING if name in sys.modules]:
        PENDING.pop(name)(kind)


__all__ = ["PENDING", "make_changes"]
