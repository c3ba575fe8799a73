"""
Formats
=======

A format says which number each pattern of bits is. This example looks at the values of some 8-bit and 4-bit formats, rounds
numbers to them, and defines a new one.
"""

import numpy as np

import ao_lab

# %%
# **Values.** A format is a record; its limits are derived from its fields.

for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4", "nf4"):
    fmt = ao_lab.FORMATS[name]
    print(f"{name:14} {fmt.bits} bits, from {fmt.min:g} to {fmt.max:g}")

# %%
# 4-bit formats have 16 values at most. Each is drawn relative to its largest: integers are evenly spaced, floats are denser
# near zero, and NF4 has as many values as a normal distribution has numbers there.

figure = ao_lab.plot.values("float4_e2m1fn", "int4", "nf4")

# %%
# **Rounding.** ``encode`` rounds to nearest, ties to even, and saturates; ``decode`` gives the number back.

x = np.array([0.1, 1.25, 2.5, 3.5, 100.0, np.nan], np.float32)
codes = ao_lab.encode(x, "float4_e2m1fn")
print(codes, ao_lab.decode(codes, "float4_e2m1fn"))

# %%
# The relative error of a float format is about constant down to its smallest normal number; that of an integer grows as numbers
# get smaller.

figure = ao_lab.plot.error("float8_e4m3fn", "float8_e5m2", "int8", "float4_e2m1fn", "int4")

# %%
# **A format of your own** is one record: 8 bits with 3 for the exponent.

e3m4 = ao_lab.Format(
    name="float8_e3m4", kind="float", bits=8, exponent_bits=3, mantissa_bits=4, bias=3, specials="ieee"
)
print(e3m4.max, e3m4.smallest_normal)
print(ao_lab.decode(ao_lab.encode(x, e3m4), e3m4))
