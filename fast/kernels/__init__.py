"""Triton kernels of the functions in `fast`, written once for every record.

`rule` digests a record into what a kernel needs at compile time; `bits`, `rounding`, `statistics`, `scales` and `elements` are
device functions that mirror the modules of the same names in `reference`; `blocks` is the kernel that runs them over any
blocked tensor. Importing this package needs triton; `fast` imports it when the first CUDA tensor arrives.
"""
