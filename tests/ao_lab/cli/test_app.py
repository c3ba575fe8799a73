"""The command line: what it prints, where it prints it, and how it fails."""

import dataclasses
import errno
import importlib.util
import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from typer.main import get_command

import reference
from ao_lab import __version__
from ao_lab.cli import app, doctor, plugins
from ao_lab.cli.app import main
from ao_lab.cli.listings import WITHOUT_EFFECT, bit_fields, config_classes, options_of
from ao_lab.cli.schemes import bits_per_value, block_text, meaning, told_fields
from ao_lab.cli.shown_help import EXAMPLES
from ao_lab.cli.terminal import number, strict
from fast.cpu import capability
from reference import FORMATS, SCHEMES

ROOT = Path(__file__).resolve().parents[3]
ML_FLOATS = sorted(name for name in FORMATS if FORMATS[name].kind == "float" and hasattr(ml_dtypes, name))


def refuse(name):
    raise ValueError(f"{name} is not JSON")


def printed_json(capsys, *arguments):
    """The document that a command prints; anything else on stdout, or a NaN in it, is an error."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def complaint(capsys, *arguments):
    """Exit code and the one line on stderr of a command that fails; stdout stays empty."""
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ao-lab: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return code, err


def test_formats_lists_every_format(capsys):
    assert main(["formats"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if line.strip() and line.split()[0] in FORMATS]
    assert shown == list(FORMATS)


@pytest.mark.parametrize("name", ML_FLOATS)
def test_limits_are_those_of_ml_dtypes(capsys, name):
    shown, info = printed_json(capsys, "formats", name), ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert (shown["max"], shown["min"]) == (float(info.max), float(info.min))
    assert shown["smallest_normal"] == float(info.smallest_normal)
    assert shown["smallest_subnormal"] == float(info.smallest_subnormal)
    assert shown["epsilon"] == float(info.eps)


@pytest.mark.parametrize("name", [name for name in ML_FLOATS if FORMATS[name].bits <= 8])
def test_value_table_is_that_of_ml_dtypes(capsys, name):
    shown = printed_json(capsys, "formats", name)
    dtype = getattr(ml_dtypes, name)
    codes = np.arange(1 << FORMATS[name].bits, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    assert [row["code"] for row in shown["values"]] == codes.tolist()
    for row, value in zip(shown["values"], values, strict=True):
        assert row["value"] == ("nan" if math.isnan(value) else str(value) if math.isinf(value) else value)
    assert shown["nan_codes"] == int(np.isnan(values).sum())
    assert shown["infinity"] == bool(np.isinf(values).any())
    assert shown["negative_zero"] == bool(((values == 0) & np.signbit(values)).any())


@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_can_be_shown(capsys, name):
    assert main(["formats", name]) == 0
    out = capsys.readouterr().out
    assert name in out
    assert number(FORMATS[name].max) in out


def test_wide_formats_show_landmarks(capsys):
    shown = printed_json(capsys, "formats", "float16")
    values = {row["code"]: row["value"] for row in shown["landmarks"]}
    assert values[0x0001] == 2.0**-24
    assert values[0x0400] == 2.0**-14
    assert values[0x3C00] == 1.0
    assert values[0x7BFF] == 65504.0
    assert values[0xFC00] == "-inf"


@pytest.mark.parametrize(
    ("name", "code", "fields"),
    [
        ("float8_e4m3fn", 0xC5, "1 1000 101"),
        ("float4_e2m1fn", 0x7, "0 11 1"),
        ("int4", 0x9, "1001"),
        ("nf4", 1, "0001"),
    ],
)
def test_bit_fields(name, code, fields):
    assert bit_fields(FORMATS[name], code) == fields


def test_schemes_are_the_records(capsys):
    shown = printed_json(capsys, "schemes")
    assert shown == [strict(dataclasses.asdict(record)) for record in SCHEMES.values()]
    assert main(["schemes", "--all"]) == 0
    out = capsys.readouterr().out
    assert [name for name in SCHEMES if f" {name} " not in out] == []


def test_schemes_of_other_libraries_are_shown_by_their_prefix(capsys):
    assert main(["schemes"]) == 0
    out, err = capsys.readouterr()
    assert [name for name in SCHEMES if (f" {name} " in out) != ("." not in name)] == []
    assert "ao-lab schemes compressed_tensors | hqq | te | torchao; --all lists all" in err
    assert main(["schemes", "te"]) == 0
    out = capsys.readouterr().out
    assert [name for name in SCHEMES if (f" {name} " in out) != name.startswith("te.")] == []


@pytest.mark.parametrize(
    ("name", "shown", "scale"),
    [
        ("mxfp8_e4m3", "2^(floor(log2 absmax) - 8)", lambda amax: math.floor(math.log2(amax)) - 8),
        ("mxfp4_rceil", "2^ceil(log2(absmax / 6))", lambda amax: math.ceil(math.log2(amax / 6))),
        ("mxint8", "2^(floor(log2 absmax))", lambda amax: math.floor(math.log2(amax))),
    ],
)
def test_rules_of_scales_are_formulas_that_hold(capsys, name, shown, scale):
    """floor divides by the power of two below the target: 448 would give amax 256 half of its scale."""
    assert main(["schemes", name]) == 0
    assert shown in capsys.readouterr().out
    for amax in (1.0, 5.0, 6.5, 256.0, 300.0, 448.0):
        assert int(reference.quantize(np.full(32, amax, np.float32), name).scale.item()) - 127 == scale(amax)


def test_a_scheme_is_shown_in_words(capsys):
    """Fields that are as in every scheme are left out; each of the others says what it is."""
    assert main(["schemes", "nvfp4"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "4.5 bits a value; float4_e2m1fn in blocks of 16, one float8_e4m3fn scale each, one float32 outer scale per"
        in out
    )
    assert "scale.target 6.0 what the statistic maps onto" in out
    assert "codes_from" not in out
    assert "scale.rule ratio: absmax / 6" in out
    assert [path for record in SCHEMES.values() for path, _ in told_fields(record) if not meaning(path)] == []


@pytest.mark.parametrize(
    ("name", "bits", "block"),
    [
        ("nvfp4", 4.5, "16"),
        ("int8_rowwise", 8, "row"),
        ("fp8_128x128", 8 + 32 / 2**14, "128 x 128"),
        ("nf4", 4 + 8 / 64 + 32 / (64 * 256), "64 flat"),
    ],
)
def test_bits_of_a_value(name, bits, block):
    assert bits_per_value(SCHEMES[name]) == bits
    assert block_text(SCHEMES[name].scale.block) == block


def test_a_word_lists_the_configurations_that_it_means(capsys):
    def listed(word):
        return [row["name"] for row in printed_json(capsys, "configs", word)]

    assert listed("W4A16") == ["Int4WeightOnlyConfig", "NF4WeightOnlyConfig", "NVFP4WeightOnlyConfig"]
    assert listed("int4") == ["Float8DynamicActivationInt4WeightConfig", "Int4WeightOnlyConfig"]
    assert [name for name in listed("fp8") if "Float8" not in name] == []
    assert main(["configs", "int5x"]) == 2


@pytest.mark.parametrize("name", list(SCHEMES))
def test_every_scheme_can_be_shown(capsys, name):
    assert main(["schemes", name]) == 0
    assert SCHEMES[name].element in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["formats", "float8_e4m3"], ["unknown format", "float8_e4m3fn"]),
        (["schemes", "mxfp8"], ["unknown scheme", "mxfp8_e4m3"]),
        (["format"], ["format", "formats"]),
        (["formats", "--jsn"], ["--jsn"]),
        (["formats", "int4", "int8"], ["int8"]),
        (["reproduce", "--scale", "huge"], ["huge", "quick"]),
    ],
)
def test_wrong_input_is_one_line_and_code_2(capsys, arguments, words):
    code, err = complaint(capsys, *arguments)
    assert code == 2
    assert all(word in err for word in words)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_module_runs_from_the_clone():
    done = subprocess.run(
        [sys.executable, "-m", "ao_lab", "formats", "int4", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["max"] == 7.0


def test_strict_json_has_no_nan():
    assert strict({"a": (math.nan, math.inf, -math.inf, 1.5), 2: [None, True]}) == {
        "a": ["nan", "inf", "-inf", 1.5],
        "2": [None, True],
    }


def fake_experiments(monkeypatch, reproduce):
    """Stand in for the experiments, which take minutes."""
    monkeypatch.setattr("experiments.runs.run.reproduce", reproduce)


def test_reproduce_hands_over(monkeypatch, capsys, tmp_path):
    calls = []

    def reproduce(names, *, scale, device, paths, changed):
        calls.append((names, scale, device, paths.reports, changed))
        print("progress", file=sys.stderr)
        return [("ptq: 12 rows", "reports/data/ptq.csv")]

    fake_experiments(monkeypatch, reproduce)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert main(["reproduce"]) == 0
    more = ["--changed", "--reports", str(tmp_path / "r")]
    assert main(["reproduce", "ptq", "--scale", "full", "--device", "cuda", *more]) == 0
    assert calls == [
        (None, "quick", None, ROOT / "reports", False),
        (["ptq"], "full", "cuda", tmp_path / "r", True),
    ]
    out, err = capsys.readouterr()
    assert "reports/data/ptq.csv" in out
    said = [line.partition(" and keeps")[0] for line in err.splitlines()]
    wrote = [f"ao-lab: reproduce writes to {folder}" for folder in (ROOT / "reports", tmp_path / "r")]
    assert said == [wrote[0], "progress", wrote[1], "progress"]
    made = printed_json(capsys, "reproduce", "formats")
    assert made == {"written": [{"what": "ptq: 12 rows", "where": "reports/data/ptq.csv"}]}


def test_reproduce_fails_clearly(monkeypatch, capsys):
    def reproduce(names, *, scale, device, paths, changed):
        raise OSError("no space left")

    fake_experiments(monkeypatch, reproduce)
    code, err = complaint(capsys, "reproduce", "formts")
    assert code == 2
    assert "formats" in err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, err = complaint(capsys, "reproduce", "--device", "cuda")
    assert code == 2
    assert "ao-lab doctor" in err
    assert main(["reproduce"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[1:] == ["ao-lab: OSError: no space left"]


def test_faults_keep_their_traceback(monkeypatch):
    def reproduce(names, *, scale, device, paths, changed):
        raise ValueError("a fault of ours")

    fake_experiments(monkeypatch, reproduce)
    with pytest.raises(ValueError, match="a fault of ours"):
        main(["reproduce"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nodir", "and no folder with a config.json is there"),
        ("Int4WeightOnlyConfig,group_size=32", "after a space, in quotes: 'Int4WeightOnlyConfig key=value"),
        ("Int4WeightOnlyConfig groupsize=32", "ao-lab: Int4WeightOnlyConfig has no option groupsize"),
    ],
)
def test_compare_says_how_configurations_are_written(capsys, tmp_path, given, said):
    (tmp_path / "config.json").write_text("{}")
    code, err = complaint(capsys, "compare", str(tmp_path), given)
    assert code == 2
    assert said in err


def test_reproduce_of_some_configurations(monkeypatch, capsys):
    calls = []
    fake_experiments(monkeypatch, lambda names, **options: calls.append(options["only"]) or [])
    assert main(["reproduce", "decode", "--device", "cpu", "--only", "int8wo", "--only", "torchao"]) == 0
    assert calls == [["int8wo", "torchao"]]
    capsys.readouterr()
    for arguments, word in (
        (["formats", "--only", "int8wo"], "reproduce decode"),
        (["decode", "--only", "int9"], "int8wo"),
    ):
        code, err = complaint(capsys, "reproduce", *arguments)
        assert code == 2
        assert word in err


def test_commands_that_other_packages_register_are_listed_and_run(tmp_path, monkeypatch, capsys):
    """By their entry points: `ao_lab` names none of them, and a clone needs no installation."""
    assert set(plugins.registered()) >= {"reproduce", "corpus", "pretrain", "bench-kernels", "ledger"}
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("formats", "doctor", "reproduce", "corpus", "pretrain", "bench-kernels", "ledger"):
        assert f" {name} " in out
    (tmp_path / "my_commands.py").write_text(
        'def greet(name: str = "you") -> None:\n    """Say hello."""\n    print("hello", name)\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "registered", lambda: {"greet": "my_commands:greet"})
    assert main(["greet", "--name", "world"]) == 0
    assert capsys.readouterr().out == "hello world\n"
    assert main(["--help"]) == 0
    assert "Say hello." in capsys.readouterr().out


def test_a_command_that_cannot_be_imported_stops_no_other(monkeypatch, capsys):
    monkeypatch.setattr(plugins, "registered", lambda: {"lost": "no_such_package:run"})
    assert main(["--help"]) == 0
    assert "no_such_package" in capsys.readouterr().out
    code, err = complaint(capsys, "lost")
    assert code == 1
    assert "no_such_package" in err


def test_commands_for_developers_stand_apart(capsys):
    assert main(["--help"]) == 0
    users, _, developers = capsys.readouterr().out.partition("Experiments, for developers of ao_lab")
    assert all(f" {name} " in users for name in ("configs", "quantize", "eval", "tune", "doctor"))
    for name in ("bench-kernels", "corpus", "ledger", "merge", "pretrain", "pretrained", "reproduce"):
        assert f" {name} " in developers
        assert f" {name} " not in users


def test_help_says_defaults_in_plain_words(capsys):
    for name in (
        "formats",
        "schemes",
        "configs",
        "quantize",
        "eval",
        "tune",
        "reproduce",
        "pretrain",
        "bench",
    ):
        assert main([name, "--help"]) == 0
        words = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert not re.search(r"(\w |, |; )without[.,]", words)
        assert "Default: " in words


def test_options_stand_whole_in_eighty_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("quantize", "compare", "bench"):
        assert main([name, "--help"]) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert len(out.splitlines()) < 95  # descriptions have more than half of the width
        assert f"ao-lab {name} " in out.partition("Examples:")[2]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_of_the_options_that_there_are(name):
    group = get_command(app.app)
    with group.make_context("ao-lab", [], resilient_parsing=True) as context:
        command = group.get_command(context, name)
    for line in EXAMPLES[name]:
        command.make_context(name, shlex.split(line)[2:], resilient_parsing=True)
        given = [word for word in shlex.split(line) if word.startswith("--")]
        assert {*given} <= {word for one in command.params for word in one.opts}


COMPLETED = {
    "conf": ["configs"],
    "configs Int4W": ["Int4WeightOnlyConfig"],
    "compare m NVFP4W": ["NVFP4WeightOnlyConfig"],
    "bench --configs nf4,mxfp4_r": ["nf4,mxfp4_rceil"],
    "pretrained smollm": ["smollm2-135m"],
    "reproduce fp8": ["fp8_training"],
    "reproduce ptq --model smollm": ["smollm2-135m"],
    "compare smollm": ["smollm2-135m"],
    "bench --model smollm": ["smollm2-135m"],
    "eval m --against smollm": ["smollm2-135m"],
    "quantize m o --method g": ["gptq"],
    "compare m --method smo": ["smooth"],
    "choose m --method gp": ["gptq"],
}


@pytest.mark.parametrize("typed", COMPLETED)
def test_names_are_completed_in_this_process(monkeypatch, capsys, typed):
    """Of configurations, schemes, models and experiments."""
    words = typed.split()
    monkeypatch.setenv("_AO_LAB_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"ao-lab {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit):
        app.app(prog_name="ao-lab", args=[])
    assert capsys.readouterr().out.split() == COMPLETED[typed]


def test_shells_complete_names():
    """What the line that --install-completion writes asks for."""
    given = {"_AO_LAB_COMPLETE": "complete_bash", "COMP_WORDS": "ao-lab conf", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'ao-lab'; from ao_lab.cli.app import entry; entry()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **given}
    )
    assert done.stdout.split() == ["configs"]


def test_verbose_shows_the_logger(capsys):
    logger = logging.getLogger("ao_lab")
    before = logger.handlers[:], logger.level
    try:
        for flag, shown in (("-v", [True, False]), ("-vv", [True, True])):
            assert main([flag, "formats", "int4", "--json"]) == 0
            json.loads(capsys.readouterr().out)
            logging.getLogger("ao_lab.x").info("step %d", 1)
            logging.getLogger("ao_lab.x").debug("detail")
            said = logger.handlers[-1].stream is not None and len(logger.handlers) == 1
            assert said
            assert [logger.isEnabledFor(level) for level in (logging.INFO, logging.DEBUG)] == shown
    finally:
        logger.handlers, logger.level = before
        logger.setLevel(before[1])


@pytest.mark.parametrize("flags", [[], ["-v"]])
def test_what_libraries_warn_of_while_imported_is_quiet(monkeypatch, flags):
    """Of parts that ao_lab does not use; -v shows it, and the levels are those of before afterwards."""
    logger, ours = logging.getLogger("torchao"), logging.getLogger("ao_lab")
    before, seen = (logger.level, ours.handlers[:], ours.level), []
    monkeypatch.setattr("ao_lab.cli.listings.show_formats", lambda *_: seen.append(logger.level))
    try:
        assert main([*flags, "formats"]) == 0
        assert seen == [logging.NOTSET if flags else logging.ERROR]
        assert logger.level == before[0]
    finally:
        ours.handlers = before[1]
        ours.setLevel(before[2])


def test_a_full_disk_is_answered_with_the_way_out():
    full = OSError(errno.ENOSPC, "No space left on device", "out/comparison.json")
    said = "No space left on device (out/comparison.json); make room, or name a folder on another disk"
    assert app.described(full) == (said, 1)
    assert app.described(OSError(errno.EIO, "broken")) == ("OSError: [Errno 5] broken", 1)


def test_help_imports_nothing_heavy():
    """And what lists records, configurations with static scales too, imports NumPy alone."""
    code = "import sys; from ao_lab.cli.app import main; main(['--help'])\n"
    code += "heavy = {'torch', 'jax', 'pandas', 'numpy', 'matplotlib'}\n"
    code += "found = heavy & set(sys.modules); main(['configs'])\n"
    code += "print(sorted(found | (heavy - {'numpy'}) & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


# `ao-lab doctor`: true codes pass, wrong ones are found, and what is missing is no fault.


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


def test_doctor_of_a_healthy_machine(findings, monkeypatch, capsys):
    """The command prints each finding and ends with 0, as a table and as JSON; a fault in either form ends it with 1."""
    found = list(findings.values())
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert "What this machine can run" in told
    assert all(finding.name in told for finding in found)
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    found.append(doctor.Finding(name="broken", status="failed", reason="other codes"))
    assert main(["doctor"]) == 1
    assert "FAILED" in capsys.readouterr().out


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
    assert f"{torch.get_num_threads()} thread(s)" in finding.detail
    assert ("no bfloat16 instructions" in finding.reason) == (not bfloat16)
    assert bool(finding.remedy) == (not bfloat16)


# Configurations by name: what there is, what they take, and the nearest to a wrong name.


def test_every_configuration_is_listed(capsys):
    assert main(["configs", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(config_classes())
    assert rows["NVFP4DynamicActivationNVFP4WeightConfig"]["activation"] == "nvfp4"
    assert main(["configs"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in rows)


@pytest.mark.parametrize("name", config_classes())
def test_options_of_a_configuration_are_those_that_change_something(capsys, name):
    assert main(["configs", name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    options = told["options"]
    # What all configurations have says what it may be.
    assert "dequantize" in told["values"]["kernel"]
    assert told["values"]["axis"]
    assert list(options) == list(options_of(config_classes()[name]))
    assert not {*WITHOUT_EFFECT, "activation_scheme", "sparsity"} & set(options)
    assert main(["configs", name]) == 0
    out = capsys.readouterr().out
    assert all(f" {option} " in out for option in options)


def test_defaults_are_what_the_command_takes(capsys):
    """A granularity by its name, as --option reads it."""
    assert main(["configs", "Int8DynamicActivationIntxWeightConfig", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert options["weight_granularity"] == "PerGroup(32)"
    assert list(options)[-2:] == ["kernel", "axis"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["configs", "Int4WeightOnlyConf1g"], "the nearest are Int4WeightOnlyConfig"),
        (["configs", "int5"], "unknown config 'int5'; the nearest are Int4WeightOnlyConfig"),
        (
            ["quantize", "{folder}", "{out}", "--config", "Int4WeightOnly"],
            "the nearest are Int4WeightOnlyConfig",
        ),
        (["quantize", "{folder}", "{out}", "--config", "mxpf4"], "mxfp4"),
        (["quantize", "{folder}", "{out}", "--config", "qqqq"], "`ao-lab configs` lists them"),
        (
            ["quantize", "{folder}", "{out}", "--config", "Int4WeightOnlyConfig", "--option", "x=1"],
            "no option x; it has group_size, scheme, kernel, axis (ao-lab configs shows",
        ),
        (
            ["quantize", "meta-llama/Llama-3.2-1B", "{out}", "--config", "mxfp4"],
            "not fetched: hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B does",
        ),
        (["eval", "meta-llama/Llama-3.2-1B"], "hf download meta-llama/Llama-3.2-1B"),
        (["tune", "meta-llama/Llama-3.2-1B", "--recipe", "rowwise"], "hf download meta-llama/Llama-3.2-1B"),
        (["eval", "{out}/a"], "/a; give a folder that ao-lab quantize or transformers wrote"),
        (["quantize", "{folder}", "{out}", "--set", "x=1"], "(see ao-lab quantize --help)"),
        (["plot", "errors"], "(see ao-lab plot --help)"),
        (["quantise"], "(see ao-lab --help)"),
        (
            ["quantize", "{folder}", "{out}", "--config", "nf4", "--layout", "compressed-tensors"],
            "compressed-tensors has no format for nf4",
        ),
    ],
)
def test_wrong_names_are_one_line_before_any_work(capsys, tmp_path, monkeypatch, arguments, words):
    """Before transformers is imported, and a line says that work goes on."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("ao_lab.cli.quantize.needed", lambda name: pytest.fail(f"{name} was imported"))
    assert main([one.format(folder=folder, out=tmp_path / "out") for one in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
