"""`quantize_compressed` for torch tensors; see `reference.quantize_compressed`."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.launch.cache import scale_parts
from fast.sparsity.ops import QUANTIZE_COMPRESSED
from reference import Compressed, Scales, Scheme


def quantize_compressed(
    w: torch.Tensor,
    scheme: str | Scheme,
    scales: Scales | torch.Tensor,
    mask: torch.Tensor | str | None = "2:4",
) -> Compressed:
    """Codes and metadata of w on its device, as in `reference.quantize_compressed`. No gradient flows through.

    One kernel reads bfloat16 and float16 once for the 8-bit float schemes with a scale for each row, or one scale, where it
    prunes ("2:4"); other schemes and given masks are quantized and compressed one after the other.
    """
    pattern, given = (mask, None) if isinstance(mask, str) else (None, mask)
    made: Compressed = run(QUANTIZE_COMPRESSED, scheme, (pattern,), (w, given, *scale_parts(scales)))
    return made
