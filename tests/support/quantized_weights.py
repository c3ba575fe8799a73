"""Weights for tests of `QuantizedTensor`, and what the specification makes of them."""

from contextlib import contextmanager

import torch
import torch.distributed._functional_collectives  # enters _wrap_tensor_autograd

import fast
import reference
from ao_lab import quantized, quantized_compressed
from ao_lab.tensor.op_registry import OPERATIONS

# One of each kind: groups, rows, tensor, two-dimensional blocks, zero points, two levels, flat blocks, odd bits.
KINDS = (
    "int8_rowwise",
    "int4_g32",
    "int4_g32_asymmetric",
    "int3_g32",
    "fp8_tensorwise",
    "fp8_128x128",
    "mxfp8_e4m3",
    "mxfp6_e2m3",
    "mxfp4",
    "nvfp4",
    "nf4",
)


#: On a machine with a GPU the tests of operations and products run there too.
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def weight(*shape, seed=0, dtype=torch.float32):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def specified(dense, scheme, axis=-1):
    """What the specification makes of a weight, as torch's tensor of its dtype."""
    name = str(dense.dtype).removeprefix("torch.")
    return reference.dequantize(reference.quantize(dense, scheme, axis=axis), name)


def same(a, b):
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


aten = torch.ops.aten
#: The operations of `ao_lab.tensor.matmul_ops`, and the test file that has them; test_tensor_ops has the others.
LAYERS = {
    aten._grouped_mm.default,
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.linear.default,
    aten.embedding.default,
}
functional, c10d = torch.ops._c10d_functional, torch.ops.c10d
#: Those of `ao_lab.tensor.collectives`; `support.distributed.tensor_parallel` has them.
COLLECTIVES = {
    functional.all_gather_into_tensor.default,
    functional.broadcast.default,
    functional.wait_tensor.default,
    functional._wrap_tensor_autograd.default,
    torch.ops._dtensor.shard_dim_alltoall.default,
    c10d.broadcast_.default,
    c10d.scatter_.default,
    c10d.allgather_.default,
}


@contextmanager
def recorded_operations(monkeypatch, used):
    """Adds to `used` every operation that is looked up in the table."""

    class Recorded(dict):
        def get(self, op, default=None):
            used.add(op)
            return super().get(op, default)

    recorded = Recorded(OPERATIONS)
    monkeypatch.setattr("ao_lab.tensor.quantized_tensor.OPERATIONS", recorded)
    yield


#: Schemes of 2:4 tensors, one of each kind: groups, rows, tensor, two-dimensional blocks, zero points, two levels, odd bits,
#: elements as they are.
SPARSE_KINDS = (
    "int8_rowwise", "int8_rowwise_asymmetric", "int4_g32", "int4_g32_asymmetric", "int3_g32", "fp8_tensorwise", "fp8_rowwise",
    "fp8_128x128", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4", "bfloat16",
)  # fmt: skip


def pruned(*shape, seed=0, dtype=torch.bfloat16):
    w = weight(*shape, seed=seed, dtype=dtype)
    return w.masked_fill(~fast.prune(w), 0)


def pair(scheme, *shape, seed=0):
    """A 2:4 tensor, and the dense tensor that it must equal bit for bit."""
    w = pruned(*shape, seed=seed)
    return quantized_compressed(w, scheme), w if scheme == "bfloat16" else quantized(w, scheme).dequantize()


#: Weights of every kind of scheme in every storage; those of 2:4 have its name behind their scheme's.
STORED = (*KINDS, *(f"{scheme}_2:4" for scheme in SPARSE_KINDS))


def numbers(name, *shape, seed=0):
    """A dense weight that a kind of STORED holds: 2:4, and of the dtype of the elements that are stored as they are."""
    if not name.endswith("_2:4"):
        return weight(*shape, seed=seed)
    return pruned(*shape, seed=seed, dtype=torch.bfloat16 if name == "bfloat16_2:4" else torch.float32)


def stored(name, *shape, seed=0):
    """A weight of a kind of STORED, of `numbers`."""
    dense = numbers(name, *shape, seed=seed)
    return quantized_compressed(dense, name[:-4]) if name.endswith("_2:4") else quantized(dense, name)
