"""The launch and the rows that `fast.gemm.choose` gives of a weight in the plain layout, on a GPU that is played or not."""

from fast.gemm.choose import choose, rows_stored
from fast.gemm.families import TORCH_DEQUANTIZE
from fast.gemm.problem import HOPPER, of_stored

#: A Hopper GPU on which nothing compiles CUDA C++.
WITHOUT_NVRTC = HOPPER._replace(nvrtc=False)


def launch_for(w, rows, dtype, device=WITHOUT_NVRTC):
    """The launch of the first family that has one; None where torch multiplies."""
    from fast.kernels.triton_gemv import select

    for family in choose(of_stored(w, rows, dtype)._replace(device=device)):
        if family is not TORCH_DEQUANTIZE and (launch := select.launch_for(w, rows, dtype, family.name)):
            return launch
    return None


def rows_fused(w, dtype, device=WITHOUT_NVRTC):
    """The most rows that a kernel multiplies."""
    return rows_stored(of_stored(w, 1, dtype)._replace(device=device))


def linear(x, w, bias=None, device=WITHOUT_NVRTC):
    """`fast.linear` by the first family that takes the product; None where torch multiplies. device: None for the weight's."""
    from fast.kernels.triton_gemv import select

    p = of_stored(w, x.numel() // x.shape[-1], x.dtype)
    for family in choose(p if device is None else p._replace(device=device)):
        y = None if family is TORCH_DEQUANTIZE else select.linear(x, w, bias, family.name)
        if y is not None:
            return y
    return None
