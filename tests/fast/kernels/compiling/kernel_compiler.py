"""What the functions of `fast.kernels` launch, compiled for Hopper (sm_90) on a machine without a GPU.

`launched` calls a function on CPU tensors. Triton's driver is replaced by one that only names a target, and a launch by its
compilation: plans, constants, alignments and numbers of warps are those of the same call on a GPU, and no memory is touched.
The compiled code is read back with the cuobjdump and the nvdisasm that come with Triton. The GPU's own driver compiles
nothing: the machine code here is what runs there.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fast import dispatch
from fast.kernels import exact_inputs as small_dynamic
from fast.kernels.triton_gemv import select as linear
from fast.kernels.triton_scaled_mm import host as code_rows
from fast.kernels.triton_small_m import dense as dense_small
from fast.kernels.triton_small_m import grouped as grouped_linear
from fast.kernels.triton_small_m import host as small_linear
from fast.kernels.triton_small_m import pair as small_pair
from fast.launch import cuda
from reference import SCHEMES
from reference.formats.storage import storage_dtype

# Kernels compiled for Hopper without a GPU, and what their machine code says.

POINTERS = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8", "int8": "*i8", "uint16": "*u16"
}  # fmt: skip
# Issue slots of a warp's instruction where it is not one: these units take 16 lanes a clock, not 32.
HALF_RATE = ("FMNMX", "FSEL", "FSETP", "ISETP", "IADD3", "IMNMX", "VIMNMX", "LEA", "LOP3", "PRMT", "SEL", "SHF", "HMNMX2",
             "IMAD", "F2FP", "VIADD", "PLOP3", "VIMNMX3")  # fmt: skip
SLOTS = {"SHFL": 4, "MUFU": 1} | dict.fromkeys(HALF_RATE, 2)


@dataclass(frozen=True)
class OneMachine:
    """What a compiled kernel does: instructions by name, registers, bytes of local memory, and its PTX."""

    instructions: Counter[str]
    registers: int
    local: int
    ptx: str
    sass: str

    def slots(self) -> int:
        """Issue slots of one pass through the whole code."""
        return sum(count * SLOTS.get(name.split(".")[0], 1) for name, count in self.instructions.items())

    def widths(self, name: str) -> set[str]:
        """Widths of the loads or stores (LDG, STG) that the code has."""
        found = [instruction for instruction in self.instructions if instruction.startswith(name)]
        return {(re.findall(r"\.(128|64|U8|U16)\b", text) or ["32"])[0] for text in found}


def compiled(kernel: Any, arguments: dict[str, Any], warps: int) -> OneMachine:
    """A Triton kernel for sm_90. arguments: a dtype's name for an aligned pointer, a number, None or a constant."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from fast.launch.launcher import UNFUSED

    signature, constants, attributes = {}, {}, {}
    annotated = {p.name for p in kernel.params if p.is_constexpr}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name not in annotated and isinstance(value, str):
            signature[name] = POINTERS[value]
        elif name not in annotated and isinstance(value, float):
            signature[name] = "fp32"
        elif name not in annotated and isinstance(value, int) and value != 1:
            signature[name] = "i32"
        else:
            signature[name], constants[(index,)] = "constexpr", value
        if signature[name].startswith("*") or (signature[name] == "i32" and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    made = compile(
        ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, **UNFUSED},
    )  # fmt: skip
    fits(kernel.__name__, made)
    sass, usage = (_dumped(made.asm["cubin"], flag) for flag in ("--dump-sass", "--dump-resource-usage"))
    numbers = {key: int(value) for key, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", usage)}
    local = numbers["LOCAL"] + numbers["STACK"]
    return OneMachine(Counter(INSTRUCTION.findall(sass)), numbers["REG"], local, made.asm["ptx"], sass)


def fits(name: str, made: Any) -> None:
    """AssertionError for more shared memory than a block of a Hopper GPU has: its first launch there would fail."""
    shared = made.metadata.shared
    assert shared <= cuda.MOST_SHARED, (
        f"{name} takes {shared} bytes of shared memory, a block has {cuda.MOST_SHARED}"
    )


def output_arguments(name: str | None, dtype: str) -> dict[str, Any]:
    """What a kernel that makes a tensor takes for its outputs: a scheme's codes and scales, or the tensor itself."""
    from fast.kernels.scheme.constants import block_op, constants_of

    common = {"DTYPE": dtype, "HAS_PTX": True}
    if name is None:
        return {"y": dtype, "codes": None, "scale": None, "zero": None, "SCHEME": None, "OP": None, **common}
    scheme = SCHEMES[name]
    zero = None if scheme.zero is None else storage_dtype(scheme.zero.storage)
    scale, do = storage_dtype(scheme.scale.storage), block_op(codes=True, scales=True)
    return {
        "y": None,
        "codes": "uint8",
        "scale": scale,
        "zero": zero,
        "SCHEME": constants_of(scheme, dtype),
        "OP": do,
        **common,
    }


def _dumped(cubin: bytes, flag: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool), flag, file.name], capture_output=True, text=True, check=True).stdout


TARGET = GPUTarget("cuda", 90, 32)
#: What remembers launches.
LAUNCHES = (
    linear._launch, linear._pair_launch, linear._w8a8_launch, code_rows._launches, small_linear._launch, grouped_linear._launch,
    dense_small._launch, small_pair._launch, small_dynamic._launch,
)  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION_BYTES = 16
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)")
WIDTH = re.compile(r"\.(128|64|[US]8|[US]16)\b")


@dataclass(frozen=True)
class Machine:
    """The machine code of a launch: registers, bytes of local memory and stack, elements of a thread, and its PTX."""

    kernel: str
    cubin: bytes
    registers: int
    local: int
    stack: int
    elements: float
    ptx: str = ""
    #: What Triton made before PTX, with the layout of each tensor.
    ttgir: str = ""

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Instructions in the order of the code; reading them back takes as long as compiling, so only who asks pays."""
        return disassembled([self.cubin])[0]

    @cached_property
    def instructions(self) -> Counter[str]:
        """How often each instruction stands in the code."""
        return Counter(self.order)

    def count(self) -> int:
        """How many instructions there are, each once, without the padding at the end."""
        return sum(count for name, count in self.instructions.items() if name != "NOP")

    def named(self, *names: str) -> int:
        """How many instructions have one of these names, whatever their options."""
        return sum(count for name, count in self.instructions.items() if name.split(".")[0] in names)

    def accesses(self, name: str) -> dict[int, int]:
        """How many loads or stores (LDG, STG, LDL, STL) have each width in bytes."""
        found: Counter[int] = Counter()
        for instruction, count in self.instructions.items():
            if instruction.split(".")[0] == name:
                width = WIDTH.search(instruction)
                bits = int(width.group(1).lstrip("US")) if width else 32
                found[bits // 8] += count
        return dict(found)


class OnlyTarget:
    """A driver that says what to compile for; it has its own place in every kernel's cache."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> str:
        return "compiled only"

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def compiling(found: list[Machine]) -> Iterator[None]:
    """Launches compile and are noted in `found`; plans and kernels made here are forgotten afterwards."""
    run, active = JITFunction.run, driver._active
    kept = dict(dispatch.CALLS)

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        arguments = {**dict(zip(kernel.arg_names, args, strict=False)), **options}
        fits(kernel.__name__, made)
        found.append(machine(kernel.__name__, made.asm, tile(arguments) / (32 * options["num_warps"])))
        return made

    JITFunction.run = compile_only
    driver.set_active(OnlyTarget())
    dispatch.CALLS.clear()
    for remembered in LAUNCHES:
        remembered.cache_clear()
    try:
        yield
    finally:
        JITFunction.run = run
        driver._active = active
        for remembered in LAUNCHES:
            remembered.cache_clear()
        dispatch.CALLS.clear()
        dispatch.CALLS.update(kept)


def launched(call: Callable[[], Any]) -> list[Machine]:
    """The kernels that a call launches, in order; its result, unwritten memory, is dropped."""
    found: list[Machine] = []
    with compiling(found):
        assert call() is not None, "no kernel covers this call"
    assert found, "nothing was launched"
    return found


def launched_together(calls: Sequence[Callable[[], Any]]) -> list[list[Machine]]:
    """`launched` of each call, all read back at once: the disassembler takes longer to begin than for twenty kernels."""
    made = [launched(call) for call in calls]
    machines = [machine for each in made for machine in each]
    orders = disassembled([machine.cubin for machine in machines])
    for machine, order in zip(machines, orders, strict=True):
        vars(machine)["order"] = order
    return made


def disassembled(cubins: Sequence[bytes]) -> list[tuple[str, ...]]:
    """The instructions of each compiled kernel, in the order of the code."""
    codes = [code_of(cubin) for cubin in cubins]
    with NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [str(TOOLS / "nvdisasm"), "--binary", "SM90", file.name]
        found = INSTRUCTION.findall(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout
        )
    ends = [0, *accumulate(len(code) // INSTRUCTION_BYTES for code in codes)]
    assert len(found) == ends[-1], "what is read back has another length"
    return [tuple(found[first:end]) for first, end in pairwise(ends)]


def code_of(cubin: bytes) -> bytes:
    """The machine code of a kernel: the one section of a 64-bit ELF file whose name begins with .text."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    # Name, type, flags, address, place, length.
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
    text = [one for one in sections if cubin.startswith(b".text.", sections[names][4] + one[0])]
    ((*_, place, length),) = text
    assert length % INSTRUCTION_BYTES == 0
    return cubin[place : place + length]


def tile(arguments: dict[str, Any]) -> int:
    """Elements of a program, by the names that the kernels give them."""
    if "TILE" in arguments:
        return int(arguments["TILE"])
    if "Q_BLOCK" in arguments:
        # Scores of a tile of attention.
        return int(arguments["M"] * arguments["N"])
    if "QK" in arguments:
        # Scores of a tile of attention without a softmax.
        return int(arguments["ROWS"] * arguments["KEYS"])
    if "K_WIDTH" in arguments:
        return int(arguments["TOKENS"] * arguments["K_WIDTH"])
    if "CHANNELS" in arguments:
        return int(arguments["CHANNELS"] * arguments["GROUP"])
    if "WIDTH" in arguments and "SPLITS" in arguments:
        # Sums of attention.
        return int(arguments.get("ROWS", 1) * arguments["WIDTH"])
    if "TURNS" in arguments and "USE_PDL" in arguments:
        # Words of a column tile of a turn, of `arrange_kernel`.
        return 512
    if "WARPS_K" in arguments:
        # A turn along K of the kernels in Gluon: sixteen rows of a unit a warp, or some of 512.
        return int(
            arguments["WARPS_K"]
            * (arguments["ROWS"] * 512 if "ROWS" in arguments else linear.W4A16_ROWS * linear.W4A16_UNIT)
        )
    if "BLOCK_K" in arguments:
        # Sums of the tensor core; of `arranged_dense_kernel` elements of the weight.
        return int(arguments.get("BLOCK_M", arguments["BLOCK_K"]) * arguments["BLOCK_N"])
    if "DOWN" in arguments:
        return int(2048 * arguments["DOWN"] * arguments["ACROSS"])
    if "WORDS" in arguments:
        return int(4 * arguments["P"] * arguments["WORDS"])
    if "C" in arguments and "LENGTH" in arguments:
        return int(arguments["C"] * arguments["LENGTH"])
    if "C" in arguments:
        return int(arguments["A"] + arguments["B"] + arguments["C"])
    if "P" in arguments:
        return int(arguments["P"] * arguments["SIZE"])
    if "SPLITS" in arguments or "LENGTH" in arguments:
        return int(arguments["SIZE"])
    rows = arguments["ROWS"] if "ROWS" in arguments else 32 * arguments["WARPS"]
    return int(rows * arguments.get("COLUMNS", arguments.get("SIZE")))


def machine(kernel: str, made: Any, elements: float) -> Machine:
    """What compiled code does; elements: how many a thread has."""
    usage = dumped(made["cubin"], "--dump-resource-usage")
    numbers = {name: int(value) for name, value in re.findall(r"(REG|LOCAL|STACK):(\d+)", usage)}
    return Machine(
        kernel, made["cubin"], numbers["REG"], numbers["LOCAL"], numbers["STACK"], elements, made["ptx"],
        made["ttgir"],
    )  # fmt: skip


def dumped(cubin: bytes, option: str) -> str:
    """What cuobjdump says of compiled code."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
