"""Compile the kernels: python -m tests.gpu.candidates.blockwise.build OUT.cubin [--nvcc PATH] (CUDA 12.8 or newer)."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("blockwise.cu")
OPTIONS = ("-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-cubin", "-Xptxas", "-v")
#: A line of the assembler's report on bytes in local memory.
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


def build(out: Path, nvcc: str | None = None) -> str:
    """Compile into `out` and return the assembler's report. nvcc: by default the one on PATH; FileNotFoundError without one."""
    compiler = nvcc or shutil.which("nvcc")
    if compiler is None:
        raise FileNotFoundError("there is no nvcc on PATH; give one by --nvcc")
    command = [compiler, *OPTIONS, "-o", str(out), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{report}")
    return report


def complaints(report: str) -> list[str]:
    """What of a report makes a kernel slow: spilled registers, serialized wgmma, ignored register counts."""
    spilled = [found.group() for found in SPILLS.finditer(report) if any(map(int, found.groups()))]
    return spilled + [line for line in report.splitlines() if "(C75" in line]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nvcc")
    given = parser.parse_args()
    for line in complaints(build(given.out, given.nvcc)):
        sys.stdout.write(line + "\n")

__all__ = ["build", "complaints"]
