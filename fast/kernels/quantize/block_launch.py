"""Plans for torch tensors: buffers allocated, each pass of the block kernel launched."""

from __future__ import annotations

from fast.kernels.quantize.geometry import LARGEST_TILE
from fast.kernels.quantize.kernel import blocks_kernel
from fast.kernels.quantize.plan import Pass, Plan
from fast.launch.call import Call
from fast.launch.launcher import ALIGNMENT, CompiledLaunch

# In every pass what is read comes before what is written, as XLA hands arrays over.
POINTERS = tuple(blocks_kernel.arg_names[:10])
# Registers a lane where rows of 14336 are rounded, or quantized by a sequence or the general rules: three programs on a
# multiprocessor, where the compiler's 128 leave room for two: faster in spite of a spill of two words (rates: reports/LOG.md).
ROUNDING_REGISTERS = 80
# The same of pairs under corrected quotients or the general rules, which spill where the compiler gives all 96.
QUOTIENT_REGISTERS = 72
# And of codebooks, whose general rules take 121 (packed or of float16 they would spill): five warps for four.
CODEBOOK_REGISTERS = 96


def run_plan(call: Call, plan: Plan) -> None:
    """Allocate the buffers of a plan, and launch its passes."""
    for name, buffer in plan.buffers.items():
        call.allocate(name, *buffer)
    for step in plan.passes:
        call.launch(*block_launch(step))


def block_launch(step: Pass) -> tuple[CompiledLaunch, list[str | None]]:
    """The launch of a pass of the block kernel, and the names of the tensors that are its pointers."""
    place = step.place
    used = {*step.reads, *step.writes, *step.updates}
    tail = (
        *place.integers, place.blocks, step.rule, step.block_op, place.shape, place.chunked, place.masked, place.wide,
        place.size, place.inner, place.p,
    )  # fmt: skip
    launch = CompiledLaunch(blocks_kernel, place.programs, tail, place.warps, **_registers(step))
    return launch, [step.array(argument) if argument in used else None for argument in POINTERS]


def _registers(step: Pass) -> dict[str, int]:
    """A limit where one path of two has to fit, and where the largest tile is rounded under masks: rows of 14336 numbers."""
    place, do, rule = step.place, step.block_op, step.rule
    if do.pairs and rule.has_same and rule.has_outer and rule.apply.value == "divide":
        return {"maxnreg": QUOTIENT_REGISTERS}
    codebook = rule.kind.value == "codebook" and rule.dtype.value == "bfloat16" and not do.packed
    if do.codes and do.source.value == "tile" and rule.has_same and codebook:
        return {"maxnreg": CODEBOOK_REGISTERS}
    large = place.shape == "flat" and place.masked and not place.chunked and place.size == LARGEST_TILE
    # Masks of single numbers, other paths and random words need more, and would spill.
    plain = place.integers[3] % ALIGNMENT == 0 and "words" not in step.reads and place.warps == 8
    rounded = do.output in ("bfloat16", "float16") and not do.dequantize and rule.fast_path.value != ""
    # Here the general rules spill some words, and the sequence, which runs, two or three.
    quantized = do.codes and do.source.value == "tile" and rule.has_same and rule.dtype.value != "float32"
    return {"maxnreg": ROUNDING_REGISTERS} if large and plain and (rounded or quantized) else {}
