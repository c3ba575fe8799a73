"""The part on two ranks: bytes of the stand-in, what is said without GPUs, and where ranks fail."""

from dataclasses import replace

import pytest

from experiments.fp8_training import fsdp
from experiments.fp8_training.convergence_page import of_fsdp
from experiments.harness.measuring import status
from experiments.report.results import Results, Where

OK = next(iter(status("ok")))


def test_float8_halves_what_is_gathered():
    """Codes of a byte, and a scale for each weight or row; gradients are reduced as they were."""
    case = replace(fsdp.STAND_IN, rounds=1)
    found = {side: values for (_, side), values in fsdp.measure(case, 0).items()}
    assert list(found) == [side.name for side in fsdp.SIDES]
    assert all(OK in values for values in found.values()), found
    gathered = {name: values["all-gather"][0] for name, values in found.items()}
    reduced = {values["reduce-scatter"][0] for values in found.values()}
    assert len(reduced) == 1
    for side in fsdp.SIDES:
        part = gathered[side.name] / gathered["bfloat16"]
        assert 0.5 < part < 0.52 if side.codes else part == 1
        assert ("speed over bfloat16 all-gather" in found[side.name]) == side.codes


def test_ranks_that_fail_are_said_to(capfd):
    """Every side has the status, and nothing else."""
    case = replace(fsdp.STAND_IN, length=-1)
    found = fsdp.measure(case, 0)
    assert len(found) == len(fsdp.SIDES)
    for values in found.values():
        (name,) = values
        assert name.startswith("status: error: ProcessRaisedException")


@pytest.mark.parametrize(("count", "reason"), [(0, "found 0"), (1, "found 1"), (2, None)])
def test_one_gpu_is_not_enough(count, reason, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    missing = fsdp.TWO_GPUS.missing()
    assert missing is None if reason is None else reason in missing
    assert fsdp.STAND_IN.missing() is None


def test_targets():
    """Speed and bytes of each recipe on GPUs; a CPU has none."""
    data = fsdp.TWO_GPUS.shape.name
    names = [target.name for target in of_fsdp(Where("full", "NVIDIA H200", data), Results([]))]
    assert len(names) == 4
    assert not of_fsdp(Where("quick", "cpu", data), Results([]))
