"""`ao-lab doctor`: true codes pass, wrong ones are found, and what is missing is no fault."""

import importlib.util
import json

import ml_dtypes
import numpy as np
import pytest
import torch

import reference
from ao_lab.cli import doctor
from ao_lab.cli.app import main
from fast.cpu import capability


@pytest.fixture(scope="module")
def findings():
    return {finding.name: finding for finding in doctor.examine()}


def test_probe_codes_are_those_of_ml_dtypes():
    """The codes that probes compare with, by an encoder that we did not write (which has NaN where we saturate)."""
    inputs = np.clip(np.asarray(doctor.PROBE_INPUT, np.float32), -448, 448)
    codes = inputs.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert codes.tolist() == list(doctor.PROBE_CODES)
    block = np.asarray(doctor.BLOCK_CODES, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = np.asarray(doctor.BLOCK_SCALE, np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert (block * scale).tolist() == list(doctor.BLOCK_INPUT)


def test_this_machine_is_healthy(findings):
    assert [f for f in findings.values() if f.status == "failed" or (f.required and f.status != "ok")] == []


def test_installed_peers_are_probed(findings):
    assert findings["reference, jax"].status == findings["reference, jax under jit"].status == "ok"
    assert findings["torchao"].status == "ok"


def test_everything_missing_has_reason_and_remedy(findings):
    for finding in findings.values():
        assert finding.detail or (finding.reason and finding.remedy), finding


def test_wrong_codes_are_found(monkeypatch, capsys):
    """A rule that is off by one code fails the probe, and the exit code says so."""
    encode = reference.encode
    monkeypatch.setattr(reference, "encode", lambda x, fmt: encode(x, fmt) ^ 1)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (found,) = [finding for finding in report["findings"] if finding["name"] == "reference, numpy"]
    assert found["status"] == "failed"
    assert "01 81 39" in found["reason"]
    assert "00 80 38" in found["reason"]


def test_missing_library_is_no_fault(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax" else find_spec(name))
    findings = {finding.name: finding for finding in doctor.examine()}
    assert findings["jax"].status == findings["reference, jax"].status == "missing"
    assert findings["reference, jax"].reason == "jax is not installed"
    assert doctor.healthy(list(findings.values()))


def test_broken_part_is_a_fault():
    def broken():
        raise RuntimeError("first line\nsecond line")

    finding = doctor.part("x", broken)
    assert (finding.status, finding.reason) == ("failed", "RuntimeError: first line")
    assert not doctor.healthy([finding])


def test_required_part_that_is_missing_is_a_fault():
    assert not doctor.healthy([doctor.Finding(name="x", status="missing", required=True)])
    assert doctor.healthy([doctor.Finding(name="x", status="missing")])


@pytest.mark.parametrize(("capability", "word"), [((8, 0), "FP8"), ((9, 0), "block-scaled"), ((10, 0), "")])
def test_limits_of_generations(capability, word):
    assert word in doctor.limits(capability)


def test_table_is_printed(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "reference, numpy" in out
    assert "FAILED" not in out


@pytest.mark.parametrize("bfloat16", [True, False])
def test_it_says_what_the_cpu_has(monkeypatch, bfloat16):
    found = capability.CpuCapability(
        instructions="AVX2", bfloat16=bfloat16, float16=False, int8=False, amx=False
    )
    monkeypatch.setattr(capability, "cpu_capability", lambda: found)
    finding = doctor.cpu()
    assert finding.status == "ok"
    assert str(found) in finding.detail
    assert f"{torch.get_num_threads()} threads" in finding.detail
    assert ("no bfloat16 instructions" in finding.reason) == (not bfloat16)
    assert bool(finding.remedy) == (not bfloat16)
