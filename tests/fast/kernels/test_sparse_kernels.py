"""Kernels of 2:4: the bits of the reference under an emulator of their instructions, and what they compile to for Hopper."""

import platform

import pytest
import torch

from tests.emulator.interpreter_process import lines_of

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import fast
from fast import dispatch
from fast.kernels.sparsity import host
from tests.fast.kernels.compiling.kernel_compiler import launched

SHAPE = (1024, 1024)
FP8 = torch.float8_e4m3fn


def dense(dtype, shape=SHAPE):
    return torch.zeros(shape, dtype=torch.uint8).to(dtype)


def compressed(dtype, rule):
    mask = dense(torch.bool) if rule == "mask" else None
    return lambda: host.compress(dense(dtype), mask, "2:4" if rule == "largest" else None)


def decompressed(dtype):
    values, metadata = dense(dtype, (1024, 512)), dense(torch.uint8, (1024, 128))
    return lambda: host.decompress(values, metadata, None)


def pruned(dtype, pattern="2:4"):
    return lambda: host.prune(dense(dtype), None, pattern)


def rounded(dtype, scheme="fp8_rowwise", shape=SHAPE):
    scale = torch.ones(shape[0], 1) if "row" in scheme else torch.ones(())
    return lambda: host.quantize_compressed(scheme, "2:4", dense(dtype, shape), None, scale, None, None)


#: Calls, bytes of an octet that are read and written 16 and 8 at a time, and the most instructions of an octet.
HOT = {
    "fp8 as it is": (compressed(FP8, "nonzero"), 8, 4, 56),
    "fp8 by a mask": (compressed(FP8, "mask"), 16, 4, 57),
    "int8 2:4": (compressed(torch.int8, "largest"), 8, 4, 60),
    "bf16 2:4": (compressed(torch.bfloat16, "largest"), 16, 8, 68),
    "bf16 as it is": (compressed(torch.bfloat16, "nonzero"), 16, 8, 67),
    "float32 2:4": (compressed(torch.float32, "largest"), 32, 0, 116),
    "mask of bf16": (pruned(torch.bfloat16), 16, 8, 45),
    # A quotient and a division by rows' length, once in a thread, are a third of these; their slow paths do not run.
    "bf16 to e4m3": (rounded(torch.bfloat16), 16, 0, 118),
    "fp16 to e5m2": (rounded(torch.float16, "fp8_tensorwise_e5m2"), 16, 0, 118),
    "float32 as it is": (compressed(torch.float32, "nonzero"), 32, 0, 117),
    "fp16 by a mask": (compressed(torch.float16, "mask"), 16, 8, 68),
}


@pytest.mark.parametrize("part", ["day", pytest.param("", marks=pytest.mark.nightly)])
def test_bits_are_those_of_the_reference(part):
    lines = lines_of("sparsity", "storage", *part.split())
    assert len(lines) == len(host.SCORES) + len(host.STORED) + 2


@pytest.mark.parametrize("name", HOT)
def test_nothing_leaves_a_thread(name):
    """Loads of 16 bytes, no stack, no shared memory, no exchange of lanes, no barrier."""
    call, reads, writes, most = HOT[name]
    (machine,) = launched(call)
    assert (machine.local, machine.stack) == (0, 0)
    assert machine.named("STS", "LDS", "STSM", "LDSM", "SHFL", "BAR") == 0
    octets = machine.elements / 8
    assert machine.accesses("LDG").get(16, 0) * 16 == reads * octets
    assert machine.accesses("STG").get(8, 0) * 8 == writes * octets
    assert machine.count() <= most * octets


@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16, torch.float32])
def test_dense_tensors_are_written_16_bytes_at_a_time(dtype):
    (machine,) = launched(decompressed(dtype))
    assert (machine.local, machine.stack, machine.named("STS", "LDS", "SHFL", "BAR")) == (0, 0, 0)
    assert machine.accesses("STG") == {16: machine.elements * dtype.itemsize / 16}


#: Patterns by counting: the dtype, and the most instructions of an element; a mask of bfloat16 has time for 10 to 20.
COUNTED = {
    "4:8 bf16": (torch.bfloat16, 9.5), "1:4 bf16": (torch.bfloat16, 6.5), "8:16 bf16": (torch.bfloat16, 18),
    "4:8 float32": (torch.float32, 17), "3:4 float32": (torch.float32, 12.5), "4:8 int8": (torch.int8, 9.5),
    "7:8 fp16": (torch.float16, 10.5),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_other_patterns_are_counted_in_registers(name):
    dtype, most = COUNTED[name]
    (machine,) = launched(pruned(dtype, name.split()[0]))
    assert (machine.kernel, machine.local, machine.stack) == ("groups_kernel", 0, 0)
    assert machine.named("STS", "LDS", "STSM", "LDSM", "SHFL", "BAR") == 0
    assert machine.count() <= most * machine.elements
    assert machine.accesses("LDG") == {16: machine.elements * dtype.itemsize / 16}


@pytest.mark.parametrize(
    ("dtype", "pattern"), [(torch.float32, "1:2"), (torch.int16, "4:8"), (torch.int32, "16:16")]
)
def test_patterns_element_by_element(dtype, pattern):
    (machine,) = launched(pruned(dtype, pattern))
    assert (machine.kernel, machine.local, machine.stack) == ("ranks_kernel", 0, 0)


def test_what_the_reference_does():
    """Octets that are cut, element types without magnitudes or of other widths, patterns of many, wrong masks and scores."""
    w = dense(torch.bfloat16)
    cut = (dense(torch.bfloat16, (8, 12)), None, "2:4")
    for w_, mask, pattern in (
        cut, (dense(torch.float64), None, None), (dense(FP8), None, "2:4"), (w, None, "1:4"), (w, dense(torch.uint8), None),
        (w, dense(torch.bool, (1024,)), None), (dense(torch.bfloat16, (0, 8)), None, None),
        (dense(torch.float8_e8m0fnu), None, None),
    ):  # fmt: skip
        assert host.compress(w_, mask, pattern) is None
    for scores, pattern in ((None, "2:32"), (None, "2:3"), (dense(torch.float64), "2:4"), (w[:1], "2:4")):
        assert host.prune(w, scores, pattern) is None
    values, metadata = dense(FP8, (8, 64)), dense(torch.uint8, (8, 16))
    for given in (
        (values, metadata[:, :8], None),
        (values, metadata, (8, 64)),
        (values, metadata.view(torch.int8), None),
    ):
        assert host.decompress(*given) is None


def test_what_is_quantized_by_the_reference():
    """float32, other schemes, given masks, scales of other shapes, an outer scale."""
    w, scale = dense(torch.bfloat16, (8, 64)), torch.ones(8, 1)
    for given in (
        ("fp8_rowwise", "2:4", w.float(), None, scale, None, None), ("int8_rowwise", "2:4", w, None, scale, None, None),
        ("fp8_rowwise", None, w, dense(torch.bool, (8, 64)), scale, None, None),
        ("fp8_rowwise", "2:4", w, None, scale[0], None, None),
        ("fp8_rowwise", "2:4", w, None, scale, scale, None), ("fp8_rowwise", "2:4", w[:, :12], None, scale, None, None),
    ):  # fmt: skip
        assert host.quantize_compressed(*given) is None


@pytest.mark.parametrize("length", [4096, 14336, 1024])
def test_programs_fill_rows(length):
    (machine,) = launched(rounded(torch.bfloat16, shape=(64, length)))
    assert (machine.elements, machine.accesses("LDG").get(16)) == (32, 4)


def test_calls_are_remembered(monkeypatch):
    """The public functions reach the kernels, and a second call its memory."""
    monkeypatch.setattr(dispatch, "has_kernels", lambda x: True)
    w, mask = dense(torch.bfloat16), dense(torch.bool)

    def both():
        first = fast.compress(w, "2:4"), fast.compress(w, mask), fast.prune(w), fast.prune(w, scores=w)
        made = fast.compress(w)
        assert len(dispatch.CALLS) == 5
        assert made.values.shape == (1024, 512)
        return fast.decompress(*made), first

    assert [machine.kernel for machine in launched(both)] == [
        "compress_kernel", "compress_kernel", "mask_kernel", "mask_kernel", "compress_kernel", "decompress_kernel"
    ]  # fmt: skip
