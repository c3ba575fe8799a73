"""Quantization-aware training. Importing any of it registers what `quantize_` does for a `QATConfig`, and what
`convert_for_training_` and `sparsify_` do for prepared layers."""

from ao_lab.qat import api as api
from ao_lab.qat import layers as layers
