"""`ao-lab doctor`: what this machine can run, and why not.

Two kinds of findings. *Libraries and devices* are looked up without judgement: most are optional. *Parts of ao_lab* are
probed by running them: every probe encodes and quantizes a few chosen numbers and compares the codes, bit for bit, with
codes written down here from the definition of the format. A part that cannot run here is `missing` and says what would
help; a part that runs and gives other bits has `failed`, which is always a fault.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np

from ao_lab.cli import plugins
from ao_lab.cli.terminal import print_json, print_table
from ao_lab.install.extras import is_clone, pip_install
from ao_lab.install.packages import module_name
from ao_lab.install.revision import processor
from ao_lab.install.versions import TESTED, outside

# What `ao-lab doctor` says of processors: the CPU and the first GPU that torch sees.

# First compute capability with FP8 matrix instructions, and with block-scaled ones.
FP8_CAPABILITY = (8, 9)
MX_CAPABILITY = (10, 0)


def cpu_found(torch: ModuleType) -> tuple[str, str]:
    """What the CPU is and multiplies quickly, as torch uses it; and its limit, or nothing."""
    found = importlib.import_module(f"{module_name('fast')}.cpu.capability").cpu_capability()
    detail = f"{processor()}, {cores()} cores, torch uses {torch.get_num_threads()} thread(s): {found}"
    return detail, "" if found.bfloat16 else "no bfloat16 instructions: bfloat16 matmuls are slow"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpu_found(torch: ModuleType) -> str:
    """The first GPU in words."""
    capability = torch.cuda.get_device_capability()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return (
        f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}, {memory:.0f} GiB, "
        f"CUDA {torch.version.cuda}"
    )


def limits(capability: tuple[int, int]) -> str:
    """What the matrix units of this generation lack."""
    if capability < FP8_CAPABILITY:
        return "no FP8 matrix instructions before compute capability 8.9"
    return "no block-scaled (MX, NVFP4) matrix instructions before 10.0" if capability < MX_CAPABILITY else ""


def torch_of() -> ModuleType:
    """torch, imported when it is asked for."""
    return importlib.import_module("torch")


# What a broken or half-installed library raises when it is first used.
PROBE_ERRORS = (ImportError, RuntimeError, ValueError, TypeError, AttributeError, OSError)

# float8_e4m3fn: zeros, one, a tie to even, the largest value, saturation, the smallest subnormal, NaN.
PROBE_FORMAT = "float8_e4m3fn"
PROBE_INPUT = (0.0, -0.0, 1.0, 1.0625, 448.0, 1e6, -(2.0**-9), float("nan"))
PROBE_CODES = (0x00, 0x80, 0x38, 0x38, 0x7E, 0x7E, 0x81, 0x7F)
# mxfp8_e4m3 over one block of 32 with maximum 448 * 2**3: scale 2**3, and every element is exact.
PROBE_SCHEME = "mxfp8_e4m3"
BLOCK_INPUT = (448.0 * 8, 8.0, -4.0, 0.0) * 8
BLOCK_CODES = (0x7E, 0x38, 0xB0, 0x00) * 8
BLOCK_SCALE = 127 + 3

Status = Literal["ok", "missing", "failed"]


@dataclass(frozen=True)
class Finding:
    """One line of the report; `reason` and `remedy` are empty where all is well."""

    name: str
    status: Status
    detail: str = ""
    reason: str = ""
    remedy: str = ""
    #: Whether ao_lab is of no use without it.
    required: bool = False


class WrongBits(Exception):
    """A probe ran and its answer was not the specified one."""


def examine() -> list[Finding]:
    """All findings: libraries and devices first, then the parts of ao_lab."""
    jax = pip_install("jax")
    return [
        Finding(
            "python",
            "ok",
            detail=f"{platform.python_version()}, {platform.system()} {platform.machine()}",
            required=True,
        ),
        library("numpy", required=True),
        library("ml_dtypes", required=True),
        library("torch", required=True),
        library(
            "numba",
            remedy="pip install numba (without it decoding with quantized layers on a CPU is several times slower)",
        ),
        library("transformers", remedy=f"{pip_install('hf')} (models of transformers)"),
        library("compressed_tensors", remedy=f"{pip_install('hf')} (checkpoints of compressed-tensors)"),
        library("lm_eval", remedy=f"{pip_install('eval')} (tasks of lm-evaluation-harness)"),
        library("gguf", remedy=f"{pip_install('clients')} (GGUF files)"),
        library("onnx", remedy=f"{pip_install('clients')} (ONNX files)"),
        library("onnxruntime", remedy=f"{pip_install('clients')} (runs ONNX files)"),
        library("matplotlib", remedy=f"{pip_install('plot')} (figures)"),
        library("accelerate", remedy=f"{pip_install('train')} (transformers' Trainer and device_map)"),
        library("peft", remedy=f"{pip_install('train')} (LoRA adapters beside quantized weights)"),
        library("jax", remedy=jax),
        library("torchao", remedy=f"{pip_install('ao')} (only tests and comparisons use it)"),
        library("triton", remedy=cuda_torch("comes with the CUDA build of torch")),
        cpu(),
        gpu(),
        part("reference, numpy", lambda: probe("reference", np.asarray), required=True),
        part("reference, jax", lambda: probe("reference", jax_array), remedy=jax),
        part("reference, jax under jit", probe_jit, remedy=jax),
        part("reference, torch", lambda: probe("reference", torch_array("cpu")), required=True),
        part("fast, cpu", lambda: probe("fast", torch_array("cpu")), required=True),
        part(
            "fast, cuda",
            lambda: probe("fast", torch_array("cuda")),
            remedy=cuda_torch("needs an NVIDIA GPU and the CUDA build of torch"),
        ),
        part("experiments", probe_experiments, remedy=pip_install("experiments"), required=is_clone()),
    ]


def cuda_torch(words: str) -> str:
    """Advice that ends in the CUDA build of torch: in a clone there is a command for it."""
    return f"{words}: make install TORCH=cuda" if is_clone() else f"{words}; see pytorch.org"


def library(name: str, *, remedy: str = "", required: bool = False) -> Finding:
    """Whether a library is installed, and its version, without importing it."""
    if importlib.util.find_spec(name) is None:
        return Finding(
            name, "missing", reason="not installed", remedy=remedy or pip_install(), required=required
        )
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = "version unknown"
    if name in TESTED and outside(name, version):
        version += f" (tested: {' to '.join(dict.fromkeys(TESTED[name]))})"
    return Finding(name, "ok", detail=version, required=required)


def cpu() -> Finding:
    """The processor, and the instructions that torch uses there."""
    try:
        detail, reason = cpu_found(torch_of())
    except PROBE_ERRORS as error:
        return Finding("cpu", "missing", reason=one_line(error), remedy="see torch")
    # Training and quantized layers of ao_lab choose what the CPU has.
    return Finding("cpu", "ok", detail=detail, reason=reason, remedy=reason and "models in float32")


def gpu() -> Finding:
    """The first GPU that torch sees, and what its generation can multiply."""
    try:
        torch = torch_of()
    except PROBE_ERRORS as error:
        return Finding(
            "gpu", "missing", reason=f"torch does not import: {one_line(error)}", remedy="see torch"
        )
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        return Finding("gpu", "ok", detail=gpu_found(torch), reason=limits(capability))
    if torch.version.cuda is None:
        reason, remedy = "torch is the CPU build", cuda_torch("with an NVIDIA GPU, the CUDA build")
    else:
        reason, remedy = "torch has CUDA and sees no GPU", "check the driver with nvidia-smi"
    return Finding("gpu", "missing", reason=reason, remedy=remedy)


def part(name: str, run: Callable[[], str], *, remedy: str = "", required: bool = False) -> Finding:
    """Run a probe. What it cannot import or reach is missing; any other answer than the right one has failed."""
    remedy = remedy or pip_install()
    try:
        return Finding(name, "ok", detail=run(), required=required)
    except WrongBits as error:
        return Finding(name, "failed", reason=one_line(error), remedy="report this", required=required)
    except Unavailable as error:
        return Finding(name, "missing", reason=str(error), remedy=remedy, required=required)
    except PROBE_ERRORS as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        return Finding(name, "failed", reason=reason, remedy=remedy, required=required)


class Unavailable(Exception):
    """A probe cannot run here, and that is no fault."""


def probe(package: str, array: Callable[[Any], Any]) -> str:
    """Encode and quantize the chosen numbers with a package on one array library."""
    module = importlib.import_module(module_name(package))
    expect(
        f"{package}.encode",
        PROBE_CODES,
        module.encode(array(np.asarray(PROBE_INPUT, np.float32)), PROBE_FORMAT),
    )
    quantized = module.quantize(array(np.asarray(BLOCK_INPUT, np.float32)), PROBE_SCHEME)
    expect(f"{package}.quantize, quantized values", BLOCK_CODES, quantized.codes)
    expect(f"{package}.quantize, scale", (BLOCK_SCALE,), quantized.scale)
    expect_values(f"{package}.dequantize", BLOCK_INPUT, module.dequantize(quantized))
    return f"{PROBE_FORMAT} and {PROBE_SCHEME}: bitwise as specified"


def expect(what: str, codes: tuple[int, ...], got: Any) -> None:
    """Compare codes; WrongBits shows both in hexadecimal."""
    found = tuple(int(code) for code in host(got).reshape(-1))
    if found != codes:
        raise WrongBits(f"{what} gave {hexadecimal(found)} instead of {hexadecimal(codes)}")


def expect_values(what: str, values: tuple[float, ...], got: Any) -> None:
    """Compare float32 values by their bit patterns."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    expect(what, tuple(int(pattern) for pattern in bits), host(got).view(np.uint32))


def host(array: Any) -> np.ndarray[Any, Any]:
    """The array in NumPy, wherever it lives."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)


def jax_array(values: Any) -> Any:
    """The values in JAX."""
    return require("jax.numpy").asarray(values)


def torch_array(device: str) -> Callable[[Any], Any]:
    """A function that puts values on a torch device."""

    def make(values: Any) -> Any:
        torch = require("torch")
        if device == "cuda" and not torch.cuda.is_available():
            raise Unavailable("torch sees no GPU")
        return torch.tensor(values, device=device)

    return make


def probe_jit() -> str:
    """The same codes when XLA compiles the rule."""
    jax, reference = require("jax"), importlib.import_module(module_name("reference"))
    compiled = jax.jit(lambda x: reference.encode(x, PROBE_FORMAT))
    expect("encode under jit", PROBE_CODES, compiled(jax_array(np.asarray(PROBE_INPUT, np.float32))))
    return f"{PROBE_FORMAT}: bitwise as specified, {jax.default_backend()} backend"


def probe_experiments() -> str:
    """The commands of the experiments import, and the text that they train on is here."""
    for target in plugins.registered().values():
        try:
            plugins.load(target)
        except ModuleNotFoundError as error:
            raise Unavailable(f"{error.name} is not installed") from None
    if importlib.util.find_spec("sympy") is None:
        raise Unavailable("sympy, whose source is the text to train on, is not installed")
    return "importable, the text to train on is here"


def require(name: str) -> ModuleType:
    """Import an optional library, or say that it is not there."""
    if importlib.util.find_spec(name.split(".")[0]) is None:
        raise Unavailable(f"{name.split('.')[0]} is not installed")
    return importlib.import_module(name)


def hexadecimal(codes: tuple[int, ...]) -> str:
    """Codes as people compare them, eight at most."""
    return " ".join(f"{code:02x}" for code in codes[:8]) + (" ..." if len(codes) > 8 else "")


def one_line(error: Exception) -> str:
    """The first line of a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def healthy(findings: list[Finding]) -> bool:
    """Nothing has failed and everything required is there."""
    return not any(
        finding.status == "failed" or (finding.required and finding.status != "ok") for finding in findings
    )


def report(as_json: bool) -> bool:
    """Print the findings; whether this machine is healthy."""
    findings = examine()
    ok = healthy(findings)
    if as_json:
        print_json(
            {"ok": ok, "executable": sys.executable, "findings": [asdict(finding) for finding in findings]}
        )
        return ok
    marks = {"ok": "yes", "missing": "no", "failed": "FAILED"}
    rows = [[f.name, marks[f.status], f.detail, f.reason, f.remedy] for f in findings]
    print_table(
        "What this machine can run", ["part", "runs", "detail", "why not, or limit", "what helps"], rows
    )
    return ok
