"""Tensors of 2**31 elements and more: kernels count what they read and write in 64 bits."""

import platform
import re
from dataclasses import replace

import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

import torch
from triton.runtime.jit import JITFunction

from fast.kernels import encode
from fast.kernels.quantize import plan as passes
from tests.fast.kernels.compiling.kernel_calls import case, dequantize, quantize
from tests.fast.kernels.compiling.kernel_compiler import compiling

# Whatever places elements itself: pairs packed and a byte each, segments, groups, words.
CASES = (
    case(quantize, "mxfp4"),
    case(quantize, "mxfp4", packed=True),
    case(quantize, "nvfp4", given="outer"),
    case(quantize, "nvfp4", given="outer", packed=True),
    case(quantize, "mxfp6_e2m3", packed=True),
    case(quantize, "int4_g128_asymmetric", packed=True),
    case(quantize, "int3_g128", packed=True),
    case(quantize, "int8_g64_asymmetric"),
    case(quantize, "mxfp4", stochastic=True, packed=True),
    case(dequantize, "int3_g128", packed=True),
    case(dequantize, "int4_g32", packed=True),
    case(dequantize, "mxfp6_e2m3", packed=True),
)
MOVED = re.compile(r"tt\.addptr %\S+, (%\S+) : tensor<([0-9x]+)x!tt\.ptr<\w+>>, tensor<[0-9x]+xi32>")
DEFINED = re.compile(r"^\s*(%\w+)\S* = (.*)$", re.MULTILINE)


def narrow_moves(text):
    """Offsets of 32 bits that depend on the program, but for one number a block, as scales are."""
    made = dict(DEFINED.findall(text))
    ends = [offset for offset, shape in MOVED.findall(text) if not shape.endswith("x1")]
    return [end for end in ends if any("tt.get_program_id" in made[name] for name in reached(made, end))]


def reached(made, end):
    """What a value is made of."""
    found, left = set(), [end]
    while left:
        name = left.pop().split("#")[0]
        if name in made and name not in found:
            found.add(name)
            left += re.findall(r"%\w+", made[name])
    return found


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_elements_are_counted_in_64_bits(one, monkeypatch):
    geometry = passes.geometry
    monkeypatch.setattr(passes, "geometry", lambda blocks: replace(geometry(blocks), wide=True))
    made = []
    with compiling([]):
        run = JITFunction.run
        monkeypatch.setattr(JITFunction, "run", lambda *args, **options: made.append(run(*args, **options)))
        one.call()
        # Before the driver is back.
        monkeypatch.undo()
    (kernel,) = made
    assert "xi64>" in kernel.asm["ttir"]
    assert not narrow_moves(kernel.asm["ttir"])


@pytest.mark.parametrize(("function", "kernel"), [("pack", "pack_kernel"), ("unpack", "unpack_kernel")])
def test_bits_of_long_rows_are_counted_in_64_bits(function, kernel, monkeypatch):
    """A row of 600 million codes from an odd address: the number of a bit does not fit 32."""
    many, made = 600_000_000, []
    memory = torch.empty((many if function == "pack" else many // 2) + 1, dtype=torch.uint8)[1:]
    with compiling([]):
        run = JITFunction.run
        monkeypatch.setattr(JITFunction, "run", lambda *args, **options: made.append(run(*args, **options)))
        encode.pack(memory, "int4") if function == "pack" else encode.unpack(memory, "int4", (many,))
        monkeypatch.undo()
    (compiled,) = made
    assert compiled.metadata.name == kernel
    # The number of a code or byte in its row is the remainder of a 64-bit division, and stays one.
    assert re.search(r"arith\.muli .*: tensor<4096xi64>", compiled.asm["ttir"])
    assert not re.search(r"arith\.(muli|divsi|remsi) .*: tensor<4096xi32>", compiled.asm["ttir"])


@pytest.mark.parametrize("bits", [1, 3, 4, 6])
def test_rows_are_long_where_their_bits_leave_32(bits):
    assert encode.width_of(2**20, 2**20, bits) is False
    assert encode.width_of(2**31, 1024, bits) is True
    assert encode.width_of(2**31 // bits, 2**31 // bits, bits) == 2
    assert 2 * encode.width_of(2**31 // bits - 64, 2**31 // bits - 64, bits) < 4
