"""What the CPU has, as torch was left it: the environment decides in a fresh process."""

import os
import subprocess
import sys

import pytest

from fast.cpu.capability import CpuCapability, cpu_capability

CODE = "from fast.cpu.capability import cpu_capability; print(cpu_capability())"


def printed(**environment):
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.nightly
def test_this_machine():
    assert printed() == str(cpu_capability())


def test_instructions_that_users_take_away_are_not_there():
    found = printed(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
    assert found.startswith(("DEFAULT", "NO AVX"))
    if not cpu_capability().instructions.startswith("SVE"):
        assert found.endswith("none in bfloat16, float16, int8, AMX")


def test_a_line_for_people():
    have = CpuCapability(instructions="AVX512", bfloat16=True, float16=False, int8=True, amx=False)
    assert str(have) == "AVX512; fast matmuls in bfloat16, int8; none in float16, AMX"
