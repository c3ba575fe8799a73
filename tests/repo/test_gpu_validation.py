"""The programs of tests/gpu on a CPU: they pass what is right and see what is wrong."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from threading import Event
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import fast
import reference
from tests.gpu import host_time, validate, validate_kernels, validate_reference
from tests.gpu.harness import pool
from tests.gpu.harness import subject as harness
from tests.gpu.harness.poison import WroteBeyond, poisoned
from tests.gpu.harness.pool import Job, perform, run_jobs
from tests.gpu.harness.run import Run, Settings
from tests.gpu.harness.subject import Asked, Subject, beyond, differs, told
from tests.gpu.kernels import layouts as kernel_errors
from tests.gpu.kernels import schemes as kernel_formats
from tests.gpu.kernels import schemes as kernel_schemes
from tests.gpu.kernels import torch_calls as kernel_races
from tests.support.runs import fresh_processes

SETTINGS = Settings(device="cpu", fraction=0.05)
EVERY = [
    job for job in validate_kernels.all_jobs(SETTINGS) if job.family not in ("compile", "sweep", "encode")
]
#: The first job of every family.
FIRST = {job.family: job for job in reversed(EVERY)}
#: Of JAX's programs, which XLA compiles for a minute, those of a scheme whose scales are powers of two.
QUICK = {job.family: job for job in EVERY if job.family in ("jax", "jax shapes") and job.label == "mxfp4"}


def stand_in(**functions):
    """`fast` with some functions replaced."""
    return SimpleNamespace(**{**{name: getattr(fast, name) for name in fast.__all__}, **functions})


def checks(call, *arguments, fast, function=None):
    """Checks of one job on CPU."""
    done = perform(Job("family", "label", "quantize", call, arguments), SETTINGS, fast)
    return [check for check in done.checks if function in (None, check.function)]


def statuses(found):
    return {check.status for check in found}


def text(found):
    return "\n".join(line for check in found for line in check.detail)


@pytest.mark.parametrize(
    "job",
    [
        *(job for family, job in FIRST.items() if family not in QUICK),
        # XLA compiles these for ten seconds; `tests/ao_lab/jax` runs the same programs by day.
        *(pytest.param(job, marks=pytest.mark.nightly) for job in QUICK.values()),
        *(pytest.param(FIRST[family], marks=pytest.mark.nightly) for family in QUICK),
    ],
    ids=lambda job: f"{job.family}-{job.label}".replace(" ", "_"),
)
def test_the_reference_passes(job):
    done = perform(job, SETTINGS, fast)
    bad = [check for check in done.checks if check.status not in ("ok", "skipped", "missing")]
    assert bad == []
    assert done.checks


def test_one_wrong_code():
    def quantize(x, scheme, **keywords):
        q = fast.quantize(x, scheme, **keywords)
        codes = q.codes.clone()
        codes[3, 40] ^= 1
        return replace(q, codes=codes)

    found = checks(kernel_schemes.scheme_case, "mxfp4", "bfloat16", fast=stand_in(quantize=quantize))
    wrong = [check for check in found if check.status != "ok"]
    assert {check.function for check in wrong} == {"quantize"}
    assert all(check.different == 1 for check in wrong)
    assert "block 25" in text(wrong)
    assert "codes[3, 40]: got 0x" in text(wrong)
    assert "scale got 0x" in text(wrong)


def test_one_wrong_scale_bit():
    def choose_scales(x, scheme, **keywords):
        scales = fast.choose_scales(x, scheme, **keywords)
        scale = scales.scale.clone()
        scale.view(torch.int32)[0, 0] += 1
        return replace(scales, scale=scale)

    found = checks(
        kernel_schemes.scheme_case, "int4_g32", "float16", fast=stand_in(choose_scales=choose_scales)
    )
    assert {check.function for check in found if check.different} == {"choose_scales"}


def test_payload_of_nan():
    """NaN is not equal to NaN where its bits differ."""

    def dequantize(q, dtype="float32"):
        y = fast.dequantize(q, dtype)
        return torch.where(torch.isnan(y), torch.full_like(y, torch.nan) * -1, y)

    found = checks(kernel_schemes.scheme_case, "fp8_rowwise", "float32", fast=stand_in(dequantize=dequantize))
    assert {check.function for check in found if check.different} == {"dequantize"}


@pytest.mark.parametrize(
    "change", [lambda y: y.double(), lambda y: y[None], lambda y: y.to("meta"), lambda y: None]
)
def test_dtype_shape_device_and_nothing(change):
    found = checks(
        kernel_formats.decode_case, "int4", fast=stand_in(decode=lambda *a: change(fast.decode(*a)))
    )
    assert statuses(found) <= {"different", "error"}


def partly_written(x, fmt, **keywords):
    """A kernel whose mask leaves the last element out."""
    codes = fast.encode(x, fmt, **keywords)
    out = torch.empty(x.shape, dtype=torch.uint8)
    out.view(-1)[:-1] = codes.view(-1)[:-1]
    return out


def test_unwritten_output():
    found = checks(
        kernel_formats.encode_case, "float8_e5m2", "nearest_even", fast=stand_in(encode=partly_written)
    )
    made = [check for check in found if "inf" not in check.label or check.count > 1]
    assert statuses(made) == {"different"}
    assert all(check.different == 1 for check in made)


def test_write_beyond_the_output():
    def unpack(packed, fmt, shape):
        out = torch.empty(packed.shape[0] * 2 if packed.ndim == 1 else shape, dtype=torch.uint8)
        out.as_strided((out.numel() + 3,), (1,))[-3:] = 0
        return fast.unpack(packed, fmt, shape)

    found = checks(kernel_formats.pack_case, "int4", fast=stand_in(unpack=unpack), function="unpack")
    assert "WroteBeyond" in text(found)


def write_around():
    """One byte before and one after an output of 12."""
    with poisoned(7):
        out = torch.empty_like(torch.ones(3))
        wide = out.as_strided((5,), (1,), out.storage_offset() - 1).view(torch.uint8)
        wide[3], wide[16] = 1, 1


def test_guards_of_every_kind_of_output():
    with pytest.raises(WroteBeyond, match="at -1, 12"):
        write_around()
    with poisoned(7):
        odd = torch.empty((3, 5), dtype=torch.bfloat16).t()
        flat = torch.ones(4).new_empty((0,))
        assert (odd.contiguous().view(torch.uint8) == 7).all()
        assert flat.numel() == 0
    assert torch.empty.__module__ != "tests.gpu.harness.poison"


def test_race():
    """One element that changes in one call of many."""
    calls = []

    def encode(x, fmt, **keywords):
        codes = fast.encode(x, fmt, **keywords)
        calls.append(0)
        if len(calls) % 4 == 3:
            codes[1, 1] ^= 1
        return codes

    found = checks(kernel_races.code_race, fast=stand_in(encode=encode), function="encode")
    assert "different" in statuses(found)
    assert "repetition" in text(found)
    assert statuses(checks(kernel_races.code_race, fast=fast)) == {"ok"}


def test_errors_in_other_words():
    def quantize(x, scheme, **keywords):
        try:
            return fast.quantize(x, scheme, **keywords)
        except ValueError as error:
            raise ValueError(f"{error}!") from error

    found = checks(kernel_errors.error_case, fast=stand_in(quantize=quantize), function="quantize")
    assert any(check.different for check in found)
    assert not all(check.different for check in found)  # TypeErrors are untouched
    lenient = stand_in(quantize=lambda *args, **keywords: None)
    assert all(
        check.different for check in checks(kernel_errors.error_case, fast=lenient, function="quantize")
    )
    assert any(check.different for check in checks(kernel_errors.foreign_case, fast=lenient))


def test_calls_handed_to_the_reference_are_counted():
    run = Run(SETTINGS, fast)
    run.same("encode", "", np.ones(3, np.float32), "float8_e4m3fn")
    kernel = torch.from_numpy(reference.encode(np.ones(3, np.float32), "float8_e4m3fn"))
    other = Run(SETTINGS, SimpleNamespace(encode=lambda x, fmt: kernel.clone()))
    other.same("encode", "", np.ones(3, np.float32), "float8_e4m3fn")
    assert [run.checks[0].handed_on, other.checks[0].handed_on] == [True, False]


def test_missing_function():
    run = Run(SETTINGS, SimpleNamespace())
    assert run.missing("quantize_both")
    assert run.checks[0].status == "missing"


def test_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert validate_kernels.main([]) == 2
    assert capsys.readouterr().out.count("\n") == 1


def test_program(tmp_path, capsys, monkeypatch):
    """Exit codes, lines and the file, with the right functions and with a wrong one under another name."""
    arguments = ["--device", "cpu", "--quick", "--workers", "0", "--only", "decode int", "--json"]
    assert validate_kernels.main([*arguments, str(tmp_path / "right.json")]) == 0
    right = json.loads((tmp_path / "right.json").read_text())
    (row,) = right["tests"]
    assert (row["name"], row["status"]) == ("decode/decode", "ok")
    assert row["count"] > 65536
    assert right["versions"]["torch"] == torch.__version__
    wrong = ModuleType("wrong_fast")
    wrong.__dict__.update(vars(stand_in(decode=lambda c, f: fast.decode(c, f) + 1)))
    monkeypatch.setitem(sys.modules, "wrong_fast", wrong)
    assert validate_kernels.main([*arguments, str(tmp_path / "wrong.json"), "--fast", "wrong_fast"]) == 1
    (row,) = json.loads((tmp_path / "wrong.json").read_text())["tests"]
    assert row["status"] == "different"
    assert "expected 0x" in capsys.readouterr().out
    assert validate_kernels.main([*arguments[:-2], "no such job"]) == 1


def dying(run):
    os._exit(3)


def living(run):
    run.same("decode", "0-d", np.array(1, np.uint8), "int4")


@pytest.mark.parametrize("method", fresh_processes.CONTEXTS)
def test_a_process_that_dies(method, monkeypatch):
    """Its job has failed; the other one is done by a fresh process."""
    monkeypatch.setattr(pool, "CONTEXT", fresh_processes.context(method))
    jobs = [Job("f", "dying", "quantize", dying, weight=2.0), Job("f", "living", "decode", living)]
    results = {done.job.label: done for done in run_jobs(jobs, SETTINGS, workers=1)}
    assert "exit code 3" in text(results["dying"].checks)
    assert [check.status for check in results["living"].checks] == ["ok"]


def test_time_that_is_over(monkeypatch):
    monkeypatch.setattr(pool, "CONTEXT", fresh_processes.context())
    jobs = [Job("f", str(i), "decode", living) for i in range(3)]
    results = list(run_jobs(jobs, SETTINGS, workers=1, seconds=0.0))
    assert len(results) == 3
    assert "not started" in text([check for done in results for check in done.checks])


def test_a_test_that_raises_is_an_error():
    found = checks(lambda run: 1 / 0, fast=fast)
    assert statuses(found) == {"error"}
    assert "ZeroDivisionError" in text(found)


@pytest.mark.parametrize("module", validate.MODULES)
def test_subjects_are_where_they_are_looked_for(module):
    """And say what they are about in a line."""
    names = validate.MODULES[module]
    found = [validate.subject(name) for name in names]
    assert [one.name for one in found] == [*names]
    assert all(one.about and "\n" not in one.about for one in found)


@pytest.mark.parametrize("name", ["sparsegpt", "sparse_training"])
def test_subjects_agree_on_a_cpu(name, capsys):
    asked = ["--device", "cpu", "--only", {"sparsegpt": "exact", "sparse_training": "(1, 16, 16)"}[name]]
    assert validate.main([name, *asked]) == 0
    assert "0 wrong" in capsys.readouterr().out


def checked(*lines, seconds=60.0, times=None, out=None):
    """The exit code of a subject with one check a line: "" is right, a word is wrong, an exception is raised."""

    def call(line):
        if isinstance(line, Exception):
            raise line
        return [line] if line else []

    checks = [(f"check {at}", lambda line=line: call(line)) for at, line in enumerate(lines)]
    asked = Asked(device="cpu" if times is None else "there", seconds=seconds, out=out)
    return harness.perform(Subject("subject", "about", lambda asked: checks, times), asked)


def test_what_is_wrong_is_said(capsys):
    assert checked("", "") == 0
    assert checked("", "bits differ", ValueError("no such tile")) == 1
    text = capsys.readouterr().out
    assert "check 1: 1 WRONG" in text
    assert "bits differ" in text
    assert "ValueError: no such tile (call:" in text
    assert "3 checks, 2 wrong" in text


def test_what_no_time_is_left_for_has_not_passed(capsys):
    assert checked("", "", seconds=-1.0) == 2
    assert "NOT REACHED, no time: check 0; check 1" in capsys.readouterr().out


def test_a_check_without_its_library_was_not_reached(tmp_path, capsys):
    """A module of this project that is missing is wrong, and so is one that an installed library no longer has."""
    absent = ModuleNotFoundError("No module named 'nowhere_found'", name="nowhere_found.sinks")
    assert checked("", absent, absent, out=tmp_path) == 2
    assert "NOT REACHED, pip install nowhere_found: check 1; check 2" in capsys.readouterr().out
    found = json.loads((tmp_path / "subject.json").read_text())
    assert (found["checks"], found["left out"], found["missing"]) == (
        1,
        ["check 1", "check 2"],
        ["nowhere_found"],
    )
    assert checked(ModuleNotFoundError("No module named 'fast.gem'", name="fast.gem")) == 1
    assert checked(ModuleNotFoundError("No module named 'torch.gone'", name="torch.gone")) == 1
    assert checked(ModuleNotFoundError("nothing says which")) == 1


def test_processes_fit_into_cores_and_memory(monkeypatch):
    """The longest first; what does not fit waits for room, not those behind it; the worst exit code counts."""
    assert {*validate.COSTS} == {*validate.NAMES}
    wide, small = (
        [validate.Share(name, at, 3) for at in range(3)] for name in ("calibration_memory", "gptq")
    )
    monkeypatch.setattr(validate, "MEMORY", 43)
    assert validate.beside([], [*wide, *small], 8) == [*wide[:2], small[0]]
    assert validate.beside(wide[:1], [*wide[1:], *small], 2) == [wide[1]]
    monkeypatch.setattr(validate, "MEMORY", 1)
    assert validate.beside([], wide, 8) == wide[:1]
    begun = []

    def one_share(share, *_):
        begun.append(share.name)
        return {"gptq": (2, 0, 1, 2), "sparsegpt": (0,), "cusparselt": (0, 2, 0)}[share.name][share.at]

    monkeypatch.setattr(validate, "one_share", one_share)
    codes = validate.in_shards(["sparsegpt", "gptq", "cusparselt"], SimpleNamespace(workers=1), 0.0)
    assert codes == {"sparsegpt": 0, "gptq": 1, "cusparselt": 2}
    assert begun == ["cusparselt"] * 3 + ["gptq"] * 4 + ["sparsegpt"]


def test_a_process_is_killed_at_its_time_with_what_it_started():
    program = "import subprocess; subprocess.run('echo begun; sleep 60', shell=True)"
    command, begin = [sys.executable, "-c", program], time.time()
    assert validate.run_until(command, begin + 1.0, Event()) == ("begun\n", None)
    stop = Event()
    stop.set()
    assert validate.run_until(command, begin + 60, stop)[1] is None
    assert time.time() - begin < 20
    assert validate.run_until([sys.executable, "-c", "exit(2)"], begin + 60, Event()) == ("", 2)


def test_sigterm_ends_the_processes_of_shares(monkeypatch, capsys):
    """They are in sessions of their own, so nothing else would."""
    ended = []

    def one_share(share, options, end, stop):
        time.sleep(0.3)  # until the main thread waits
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(stop.wait(20))
        return 2

    monkeypatch.setattr(validate, "one_share", one_share)
    assert validate.main(["sparsegpt", "--part", "bits", "--device", "cpu", "--workers", "2"]) == 143
    assert ended == [True]
    assert "stopped" in capsys.readouterr().out


def test_rows_of_times_are_written(tmp_path, monkeypatch, capsys):
    """Until the time is over."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    row = {
        "shape": (2, 3),
        "rows": 1,
        "rule": "ours",
        "us": {"bf16": 3.0, "ours": 2.0},
        "failed": {"other": "no"},
    }
    assert checked(times=lambda asked: iter([row, row]), out=tmp_path) == 0
    found = json.loads((tmp_path / "subject.json").read_text())
    assert (found["device"], len(found["times"]), found["wrong"]) == ("a GPU", 2, [])
    assert told(row) == "shape (2, 3) rows 1 rule ours: bf16 3.00  ours 2.00  (rule x1.500)  FAILED other: no"
    assert checked(times=lambda asked: iter([row, row]), out=tmp_path, seconds=-1.0) == 0
    assert len(json.loads((tmp_path / "subject.json").read_text())["times"]) == 1
    assert "the time is over" in capsys.readouterr().out


def test_a_result_says_what_was_asked_and_that_it_ended(tmp_path, monkeypatch):
    """`ao-lab ledger --add` takes all checks of a subject alone: not some of them, nor those before a GPU was lost."""

    def written():
        return json.loads((tmp_path / "subject.json").read_text())

    assert checked("", "", out=tmp_path) == 0
    assert (written()["checks"], written()["chosen by"], written()["ended"]) == (2, "", True)
    some = Asked(parts=("times",), only="4", rows=(1, 16), shapes=((2, 3),))
    assert harness.choosing(some) == "--only 4 --rows 1 16 --shapes 2x3 --part times"
    monkeypatch.setattr(harness, "is_lost", lambda: True)
    with pytest.raises(SystemExit):
        checked("", ValueError("no context"), "", out=tmp_path)
    assert (written()["checks"], written()["ended"]) == (2, False)


def test_differences_are_lines():
    x = torch.arange(6.0).view(2, 3)
    other = x.clone()
    other[1, 2] = torch.nan
    assert list(differs("x", x, x)) == []
    assert list(differs("x", other, x)) == ["x: 1 of 6 differ, first at [[1, 2]]"]
    assert list(differs("x", None, x)) == ["x: the kernel does not take this"]
    assert "not torch.float64" in next(differs("x", x, x.double()))
    assert list(beyond("x", x, x.double() + 0.5, torch.full_like(x, 0.5).double())) == []
    assert list(beyond("x", other, x.double(), x.double())) == [
        "x: 1 of 6 outside of the bound, first at [[1, 2]]"
    ]


def test_unknown_subjects_are_refused(capsys):
    with pytest.raises(SystemExit):
        validate.main(["sm90_w4a17_gemm"])
    assert "no subject is called sm90_w4a17_gemm" in capsys.readouterr().err


@pytest.mark.parametrize("program", [host_time, validate_reference])
def test_programs_say_what_they_do(program, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [program.__name__, "--help"])
    with pytest.raises(SystemExit) as stopped:
        program.main()
    assert stopped.value.code == 0
    assert program.__doc__.splitlines()[0] in capsys.readouterr().out
