"""
Errors of schemes
=================

Formats alone say little: what counts is how large the elements of a block are beside its largest one, which sets the scale.
This example quantizes the same tensors in several schemes.
"""

import numpy as np

import ao_lab

rng = np.random.default_rng(0)
normal = rng.standard_normal((256, 1024), dtype=np.float32)
outliers = normal.copy()
outliers[:, ::128] *= 30  # a few channels with large values, as activations of language models have them

# %%
# **Signal-to-noise ratio**: 6 dB are one bit. On normal data integers and floats of as many bits are close; with outliers small
# blocks and formats with exponents lose less.


def decibels(x, scheme):
    error = x - ao_lab.dequantize(ao_lab.quantize(x, scheme))
    return 10 * np.log10((x**2).sum() / (error**2).sum())


schemes = ("int8_rowwise", "fp8_rowwise", "mxfp8_e4m3_rceil", "int4_g32", "nvfp4", "nf4", "mxfp4_rceil")
print(f"{'':18}normal  outliers")
for scheme in schemes:
    print(f"{scheme:18}{decibels(normal, scheme):5.1f}  {decibels(outliers, scheme):8.1f}")

# %%
# **Why**: the relative error by the size of a number within its block.

figure = ao_lab.plot.error("int8_rowwise", "fp8_rowwise", "int4_g32", "nvfp4", "mxfp4_rceil")

# %%
# **Where the quantized values are**: histogram of quantized values and of scales.

figure = ao_lab.plot.tensor(outliers, "int4_g32")

# %%
# **Error against bits** on your own tensors:

figure = ao_lab.plot.schemes({"normal": normal, "outliers": outliers}, schemes)
