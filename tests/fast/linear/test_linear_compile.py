"""The kernels of `linear` compile for Hopper as they are meant to: in registers, wide loads, no detour of the weights.

`PRODUCTS` are launches that layers of an 8-billion-parameter model make, and those that take other branches.
"""

import platform
import re
from dataclasses import replace
from functools import lru_cache, partial

import pytest

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from ao_lab.config.recipe import named
from fast.kernels.triton_gemv.select import C
from tests.fast.kernels.compiling.kernel_calls import case, codes, gated, linear, pair
from tests.fast.kernels.compiling.kernel_compiler import launched, launched_together
from tests.fast.kernels.compiling.kernel_samples import features_of, in_parts

W4A16, W8A16, W8A8, ANY, SMALL_M = (
    (f"triton_{name}_kernel",)
    for name in ("gemv_w4a16", "gemv_w8a16", "gemv_w8a8", "gemv_any", "gemm_small_m")
)
W4A16_PAIR, W8A16_PAIR = ("triton_gemv_w4a16_pair_kernel",), ("triton_gemv_w8a16_pair_kernel",)
TILES = ("triton_scaled_mm_kernel",)
IN_PARTS = (*TILES, "add_parts_kernel")
INT_TILES = ("triton_int_scaled_mm_kernel",)
INT_PARTS = (*INT_TILES, "add_parts_kernel")
GATED = W4A16_GATED, W8A16_GATED = ("triton_gemv_w4a16_swiglu_kernel",), ("triton_gemv_w8a16_swiglu_kernel",)
UP, DOWN, KEYS = (14336, 4096), (4096, 14336), (1024, 4096)
# Scales in float16, as AutoGPTQ and AutoAWQ write them.
HALVES = [replace(named(n), name=f"{n}_f16", scale=replace(named(n).scale, storage="float16", floor=None))
          for n in ("int4_g128", "int4_g128_asymmetric", "int8_g128_asymmetric")]  # fmt: skip
PRODUCTS = (
    case(linear, HALVES[0], dtype="float16", shape=UP, kernels=W4A16),
    case(linear, HALVES[1], dtype="float16", kernels=W4A16),
    case(linear, HALVES[2], dtype="float16", shape=UP, kernels=W8A16),
    case(pair, HALVES[1], dtype="float16", kernels=W4A16_PAIR),
    case(gated, HALVES[1], dtype="float16", shape=UP, kernels=W4A16_GATED),
    case(linear, "int4_g32", shape=UP, kernels=W4A16),
    case(linear, "int4_g64", shape=UP, kernels=W4A16),
    case(linear, "int4_g64_asymmetric", shape=DOWN, bias=True, kernels=W4A16),
    case(linear, "int4_g64_asymmetric_bf16", kernels=W4A16),
    case(linear, "int4_g128", dtype="float16", shape=UP, kernels=W4A16),
    case(linear, "int4_g32_asymmetric_bf16", shape=KEYS, kernels=W4A16),
    case(linear, "int8_rowwise", shape=UP, kernels=W8A16),
    case(linear, "int8_rowwise", shape=KEYS, bias=True, kernels=W8A16),
    case(linear, "int8_rowwise_asymmetric", dtype="float32", kernels=W8A16),
    case(linear, "fp8_rowwise", shape=DOWN, kernels=W8A16),
    case(linear, "fp8_tensorwise_e5m2", dtype="float16", kernels=W8A16),
    case(linear, "fp8_128x128", kernels=W8A16),
    case(linear, "mxfp8_e4m3", shape=UP, kernels=W8A16),
    case(codes, "int8_rowwise", "int8_rowwise", shape=UP, kernels=W8A8),
    case(codes, "int8_tensorwise", "int8_rowwise", shape=KEYS, bias=True, kernels=W8A8),
    case(codes, "int8_rowwise_asymmetric", "int8_tensorwise", dtype="float32", kernels=W8A8),
    case(codes, "int8_rowwise", "int8_rowwise", shape=(4096, 11008), kernels=W8A8),
    case(codes, "fp8_rowwise", "fp8_rowwise", shape=DOWN, kernels=W8A8),
    case(codes, "fp8_tensorwise", "fp8_tensorwise_e5m2", dtype="float16", shape=UP, kernels=W8A8),
    case(codes, "fp8_rowwise_e5m2", "fp8_rowwise", shape=(4096, 2768), bias=True, kernels=W8A8),
    case(codes, "fp8_rowwise", "fp8_rowwise", 16, fast_sums=True, shape=UP, kernels=TILES),
    case(codes, "fp8_rowwise", "fp8_rowwise", 64, dtype="float32", bias=True, shape=UP, kernels=TILES),
    case(codes, "fp8_tensorwise_e5m2", "fp8_tensorwise", 48, shape=DOWN, kernels=TILES),
    case(
        codes,
        "fp8_rowwise",
        "fp8_rowwise",
        128,
        fast_sums=True,
        dtype="float16",
        shape=DOWN,
        kernels=IN_PARTS,
    ),
    case(codes, "fp8_rowwise", "fp8_rowwise", 1024, shape=KEYS, kernels=TILES),
    case(codes, "fp8_rowwise", "fp8_rowwise", 1024, shape=(1024, 2048), kernels=TILES),
    case(
        codes, "fp8_rowwise", "fp8_rowwise", 4096, dtype="float16", bias=True, fast_sums=True, kernels=TILES
    ),
    case(codes, "int8_rowwise", "int8_rowwise", 16, shape=UP, kernels=INT_TILES),
    case(codes, "int8_rowwise_asymmetric", "int8_rowwise", 64, bias=True, shape=UP, kernels=INT_TILES),
    case(
        codes,
        "int8_rowwise_asymmetric",
        "int8_tensorwise",
        128,
        dtype="float16",
        shape=DOWN,
        kernels=INT_PARTS,
    ),
    case(codes, "int8_tensorwise", "int8_rowwise", 200, dtype="float32", shape=DOWN, kernels=INT_TILES),
    case(codes, "int8_rowwise", "int8_rowwise", 8192, bias=True, shape=UP, kernels=INT_TILES),
    case(codes, "int8_rowwise_asymmetric", "int8_rowwise", 8192, shape=UP, kernels=INT_TILES),
    case(pair, "int4_g64", shape=UP, kernels=W4A16_PAIR),
    case(pair, "int4_g64_asymmetric_bf16", dtype="float16", kernels=W4A16_PAIR),
    case(pair, "int8_rowwise", shape=UP, kernels=W8A16_PAIR),
    case(pair, "fp8_rowwise", shape=KEYS, kernels=W8A16_PAIR),
    case(pair, "mxfp8_e4m3", kernels=W8A16_PAIR),
    case(gated, "int4_g64", shape=UP, kernels=W4A16_GATED),
    case(gated, "int4_g64_asymmetric_bf16", shape=UP, kernels=W4A16_GATED),
    case(gated, "int4_g32_asymmetric", dtype="float16", kernels=W4A16_GATED),
    case(gated, "int8_rowwise", shape=UP, kernels=W8A16_GATED),
    case(gated, "int8_g128_asymmetric", dtype="float16", shape=UP, kernels=W8A16_GATED),
    case(gated, "fp8_rowwise", shape=KEYS, kernels=W8A16_GATED),
    case(gated, "mxfp8_e4m3", kernels=W8A16_GATED),
    case(linear, "mxfp4", kernels=ANY),
    case(linear, "nvfp4", shape=UP, bias=True, kernels=ANY),
    case(linear, "nf4", kernels=ANY),
    case(linear, "mxfp6_e3m2", dtype="float16", kernels=ANY),
    case(linear, "int3_g64_asymmetric", kernels=ANY),
    case(linear, "int2_g32", dtype="float32", kernels=ANY),
    case(linear, "int4_g64_asymmetric", 16, kernels=SMALL_M),
    case(linear, "int8_rowwise", 17, kernels=SMALL_M),
    case(linear, "mxfp4", 17, dtype="float16", kernels=SMALL_M),
    case(linear, "nvfp4", 32, bias=True, kernels=SMALL_M),
    case(linear, "int4_g64", 24, kernels=SMALL_M),
    case(linear, "int8_rowwise", 64, bias=True, kernels=SMALL_M),
    case(linear, "fp8_rowwise", 128, dtype="float16", kernels=SMALL_M),
    case(linear, "mxfp8_e4m3", 32, kernels=SMALL_M),
    case(linear, "int4_g128_asymmetric", 32, dtype="float16", kernels=SMALL_M),
)
WGMMA = re.compile(r"wgmma\.mma_async\S*\s+\{[^}]*\},\s*(\S+?),\s*(\S+?),")


PARTS, CASES = in_parts(PRODUCTS, lambda one: one, features_of)


def of_one_weight(call):
    """The case of one weight with as many rows as a pair has."""
    dtype = call.keywords.get("dtype", "bfloat16")
    rows, length = call.keywords.get("shape", (4096, 4096))
    return case(linear, *call.args, dtype=dtype, shape=(2 * rows, length))


@lru_cache(maxsize=2)
def product_machines(part):
    """Machines of so many products side by side, by name, and for pairs those of one weight, by (name, "alone")."""
    calls = {}
    for one in PARTS[part]:
        calls[one.name] = one.call
        if one.kernels in (W4A16_PAIR, W8A16_PAIR, *GATED):
            calls[one.name, "alone"] = of_one_weight(one.call).call
    return dict(zip(calls, launched_together([*calls.values()]), strict=True))


@pytest.mark.parametrize(("part", "one"), CASES)
def test_products_compile_as_they_are_meant_to(part, one):
    made = product_machines(part)
    machine, *others = machines = made[one.name]
    assert tuple(m.kernel for m in machines) == one.kernels
    for m in machines:
        assert (m.local, m.stack) == (0, 0)
        assert m.accesses("LDL") == m.accesses("STL") == {}
    check = {
        W4A16: w4a16,
        W8A16: w8a16,
        **dict.fromkeys((W4A16_PAIR, W8A16_PAIR), partial(w16_pair, made.get((one.name, "alone")))),
        **dict.fromkeys(GATED, partial(w16_swiglu, made.get((one.name, "alone")))),
        W8A8: w8a8,
        ANY: any_element,
        SMALL_M: small_m,
        TILES: tiles,
        IN_PARTS: tiles,
        INT_TILES: int_tiles,
        INT_PARTS: int_tiles,
    }
    check[one.kernels](machine, one.call)
    for added in others:
        # Parts, scales and results are read and written 16 bytes at a time.
        assert added.accesses("LDG").get(16, 0) >= 2


def tiles(machine, call):
    """Both operands go from memory to the tensor core past registers; sums stay in registers, where those of 128 products are
    added once."""
    operands = WGMMA.findall(machine.ptx)
    assert operands
    assert all(operand.startswith("%rd") for pair in operands for operand in pair)
    assert "cp.async.bulk.tensor" in machine.ptx
    assert machine.accesses("LDGSTS") == {}
    adds = len(re.findall(r"add\.rn\.f32", machine.ptx))
    biased = call.keywords.get("bias", False)
    assert adds == machine.elements * ((not call.keywords.get("fast_sums", False)) + biased)


def int_tiles(machine, call):
    """Both operands go from memory to the tensor core past registers, which adds integers; the sums of the weight's rows are
    products with ones, where there are zero points."""
    operands = WGMMA.findall(machine.ptx)
    assert len(operands) == machine.ptx.count(".s32.s8.s8")
    assert all(operand.startswith("%rd") for pair in operands for operand in pair)
    assert "cp.async.bulk.tensor" in machine.ptx
    assert machine.accesses("LDGSTS") == {}
    of_ones = len(re.findall(r"m64n16k32\.s32", machine.ptx))
    assert (of_ones > 0) == (call.args[0].endswith("asymmetric") or call.args[2] <= 16)


def w4a16(machine, call):
    """The tensor core multiplies; 32 codes of a row are a load, eight inputs another; 28 warps fit a multiprocessor."""
    loads = int(machine.elements) // 32
    inputs = 4
    assert machine.accesses("LDG")[16] == loads + inputs
    # A product for each word; for the sums, which serve all rows, two for each load of inputs.
    assert machine.named("HMMA") == machine.elements // 8 + 2 * inputs
    assert machine.registers <= 65536 // (28 * 32)
    late_and_alone(machine)


def w8a16(machine, call):
    """Sixteen codes are a load."""
    assert machine.accesses("LDG").get(16, 0) * 16 >= machine.elements
    assert machine.named("HMMA", "HGMMA") == 0
    late_and_alone(machine)


def w16_pair(alone, machine, call):
    """Twice the kernel of one weight of as many rows, in as many registers; each part waits for the kernel in front."""
    (one,) = alone
    assert machine.accesses("LDG")[16] == 2 * one.accesses("LDG")[16]
    for name in ("HMMA", "FFMA"):
        assert machine.named(name) == 2 * one.named(name)
    assert machine.registers <= max(one.registers, C.w8a16_registers)
    assert machine.order.count("ACQBULK") == 2
    waits_first(machine, 2)


def waits_first(machine, times):
    """A kernel that let the next one begin before it has waited itself would break what lies two kernels further."""
    wanted = ["wait", "launch_dependents"] * times
    assert re.findall(r"griddepcontrol\.(\w+)", machine.ptx) == wanted


def w16_swiglu(alone, machine, call):
    """What the kernel of one weight of as many rows reads and multiplies, in as many registers; silu comes after."""
    (one,) = alone
    assert machine.accesses("LDG") == one.accesses("LDG")
    assert machine.named("HMMA") == one.named("HMMA")
    assert machine.registers <= max(one.registers, C.w8a16_registers)
    late_and_alone(machine)


def w8a8(machine, call):
    """Sixteen codes are a load, of the inputs as well; integers by fours, and no product meets a sum after the last one."""
    loads = machine.accesses("LDG")
    assert loads[16] * 16 > machine.elements
    assert set(loads) <= {1, 2, 4, 16}
    integers = call.args[0].startswith("int8")
    assert (machine.named("IDP") > 0, machine.named("FFMA") > 0) == (integers, not integers)
    assert machine.named("IDP") % (machine.elements // 4) == 0
    late_and_alone(machine)


def late_and_alone(machine):
    """Nothing is read or written before the kernel in front has ended, nor does the one behind begin; warps meet once, for the
    last sum."""
    waits_first(machine, 1)
    wait = machine.order.index("ACQBULK")
    assert machine.order.count("ACQBULK") == machine.ptx.count("griddepcontrol.wait") == 1
    memory = [at for at, name in enumerate(machine.order) if name.split(".")[0] in ("LDG", "STG", "LDGSTS")]
    assert memory
    assert wait < min(memory)
    alone = re.search(r"\.reqntid (\d+)", machine.ptx).group(1) == "32"
    shared = machine.named("BAR", "LDS", "STS", "LDSM", "STSM")
    assert (shared == 0) == alone
    assert shared <= 12
    assert machine.named("SHFL") <= 40


def any_element(machine, call):
    """Weights in loads of 4 bytes or more; what is added across warps is at the end."""
    found = machine.accesses("LDG")
    assert machine.named("HMMA", "HGMMA") == 0
    assert found.get(16, 0) + found.get(8, 0) + found.get(4, 0) >= 2


def small_m(machine, call):
    """Both operands of Hopper's product lie in shared memory: from registers sums came out wrong."""
    operands = WGMMA.findall(machine.ptx)
    assert machine.ptx.count("wgmma.mma_async") == len(operands)
    assert all(a.startswith("%rd") and b.startswith("%rd") for a, b in operands)
    assert (len(operands) > 0) == (call.args[1] > 32)
    assert machine.named("HMMA", "HGMMA") > 0


@pytest.mark.parametrize("name", ["int8_rowwise", "fp8_rowwise", "fp8_tensorwise"])
@pytest.mark.parametrize("shape", [(16384, 4096), DOWN])
def test_long_or_many_rows_of_bytes_leave_room_for_more_warps(name, shape):
    """At most 64 registers, and nothing is spilled for it."""
    (machine,) = launched(case(linear, name, shape=shape, kernels=W8A16).call)
    assert machine.registers <= C.w8a16_registers
    assert (machine.local, machine.stack) == (0, 0)
