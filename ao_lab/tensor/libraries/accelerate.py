"""accelerate's sizes of modules: bytes of quantized weights as they are stored, by which `infer_auto_device_map` fills devices.

accelerate multiplies a parameter's elements by the bytes of its dtype, which is that of the dense weight.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ao_lab.tensor.quantized_tensor import QuantizedTensor

MODULE, NAME = "accelerate.utils.modeling", "compute_module_sizes"


def register() -> None:
    """Put stored sizes in place; a second call does nothing."""
    plain: Any = getattr(sys.modules[MODULE], NAME)
    if getattr(plain, "of_ao_lab", False):
        return

    @functools.wraps(plain)
    def compute_module_sizes(
        model: nn.Module,
        dtype: Any = None,
        special_dtypes: dict[str, Any] | None = None,
        buffers_only: bool = False,
    ) -> Any:
        sizes = plain(model, dtype, special_dtypes, buffers_only)
        if not buffers_only:
            for name, weight in _quantized(model, special_dtypes or {}):
                more = weight.nbytes - _assumed(weight, dtype)
                parts = name.split(".")
                for end in range(len(parts) + 1):
                    sizes[".".join(parts[:end])] += more
        return sizes

    compute_module_sizes.of_ao_lab = True  # type: ignore[attr-defined]
    for module in (sys.modules[MODULE], sys.modules.get("accelerate.utils")):
        if hasattr(module, NAME):
            setattr(module, NAME, compute_module_sizes)


def _quantized(model: nn.Module, left_out: dict[str, Any]) -> Iterator[tuple[str, QuantizedTensor]]:
    """Quantized weights, each once, but for those whose size a caller says."""
    for name, weight in model.named_parameters():
        if isinstance(weight, QuantizedTensor) and name not in left_out:
            yield name, weight


def _assumed(weight: QuantizedTensor, dtype: Any) -> int:
    """The bytes that accelerate reckons with: of the dense weight, or of a smaller dtype that was asked for."""
    modeling: Any = sys.modules[MODULE]
    size = modeling.dtype_byte_size(weight.dtype)
    if dtype is not None:
        size = min(size, modeling.dtype_byte_size(modeling._get_proper_dtype(dtype)))
    return int(weight.numel() * size)


__all__ = ["register"]
