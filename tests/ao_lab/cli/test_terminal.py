"""What is shown is shown whole: brackets and colons of names and commands are no markup."""

import io
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from ao_lab import progress
from ao_lab.cli import app, terminal
from ao_lab.cli import doctor as checks
from ao_lab.cli import terminal as cli_stop
from ao_lab.cli import terminal as requirements
from ao_lab.cli.terminal import WrongInput, console, print_table
from ao_lab.install.extras import is_clone
from experiments.harness.measuring import bar as bar_of_experiments
from tests.support.models.hf_models import save_llama

# What work cannot do without is looked at before the work.


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "base"
    save_llama(folder)
    return folder


def refused(capsys, monkeypatch, *arguments):
    """The line about wrong input, before a model is read."""
    for name in ("ao_lab.cli.quantize.loaded", "ao_lab.measure.evaluate.loaded"):
        monkeypatch.setattr(name, lambda *_: pytest.fail("the work began"))
    assert app.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def full(*_, **__):
    raise OSError(28, "No space left on device")


def test_targets_below_a_file_are_refused(base, capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    target = tmp_path / "file" / "out"
    err = refused(capsys, monkeypatch, "quantize", base, target, "--config", "int8_rowwise")
    assert f"OUT_DIR {target}: {tmp_path / 'file'} is a file" in err
    err = refused(capsys, monkeypatch, "reproduce", "--reports", target)
    assert "is a file, and a folder is needed there" in err


def test_folders_that_cannot_be_written_are_refused(base, capsys, monkeypatch, tmp_path):
    """Read-only, full: whatever the system says when a file is made there."""
    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    for arguments in (
        ["quantize", base, tmp_path / "out", "--config", "int8_rowwise"],
        ["eval", base, "--save"],
        ["reproduce", "--reports", tmp_path],
    ):
        assert "cannot be written: No space left on device" in refused(capsys, monkeypatch, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_disks_without_room_are_refused(base, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    err = refused(capsys, monkeypatch, "quantize", base, tmp_path / "out", "--config", "int8_rowwise")
    assert "10 bytes are free on its disk and the result takes at least" in err


def test_a_check_leaves_nothing_behind(tmp_path):
    requirements.check_writable(tmp_path / "a" / "b", "X")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(WrongInput, match="is a file"):
        requirements.check_writable(tmp_path / "file", "X")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are POSIX's")
def test_a_disk_that_fills_up_meanwhile_is_one_line(base, capsys, tmp_path):
    """A limit on the size of files stands for the full disk; nothing half-written stays."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code = app.main(["quantize", str(base), str(tmp_path / "out"), "--config", "int8_rowwise"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (1, 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["eval", "{}"], ["reproduce"]])
def test_cuda_without_a_gpu_is_refused(base, capsys, monkeypatch, command):
    err = refused(capsys, monkeypatch, *(text.format(base) for text in command), "--device", "cuda")
    assert "--device cuda: torch sees no GPU here" in err
    err = refused(capsys, monkeypatch, *(text.format(base) for text in command), "--device", "tpu")
    assert "tpu" in err


def test_what_eval_is_given_is_there(base, capsys, monkeypatch, tmp_path):
    err = refused(capsys, monkeypatch, "eval", base, "--against", tmp_path / "nothing")
    assert "nothing; give a folder" in err
    assert "is no file" in refused(capsys, monkeypatch, "eval", base, "--text", tmp_path / "nothing")


def test_an_output_folder_that_is_a_link_to_nowhere(base, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").symlink_to("nowhere")
    line = refused(capsys, monkeypatch, "quantize", base, tmp_path / "out", "--config", "mxfp4")
    assert "is a link that leads nowhere" in line


# Progress: bars on terminals that can show them, a line every few seconds elsewhere, nothing of quick work.


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.05)


def wait_for(capsys, words):
    """What stderr has said when it has said this."""
    said = ""
    until = time.monotonic() + 30
    while words not in said and time.monotonic() < until:
        time.sleep(0.02)
        said += capsys.readouterr().err
    return said


def test_lines_come_every_ten_seconds():
    """As it is where nobody sets another interval."""
    code = "from ao_lab import progress; print(progress.INTERVAL)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= 10.0


def test_one_long_step_is_not_silent(capsys, often):
    """Lines go on while nothing is stepped; they say how far the work is."""
    with terminal.track_progress("quantize", 7) as work:
        work.at(2, "layers[0].weight")
        said = wait_for(capsys, "quantize 2 of 7")
        said += wait_for(capsys, "quantize 2 of 7")
    lines = said.splitlines()
    assert len(lines) >= 2
    assert all(re.fullmatch(r"ao-lab: quantize 2 of 7, layers\[0\]\.weight, \d+ s", line) for line in lines)


def test_one_clock_runs_through_works_and_an_estimate_counts_from_the_first_step_that_was_finished(
    monkeypatch,
):
    """What an earlier run had done already is no pace, nor is the first step, which compiles."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    outer, clock[0] = terminal.Work("quantize", started=0.0), 100.0
    inner = terminal.Work("blocks", 30, started=100.0)
    assert inner.line(outer.started) == "blocks 0 of 30, 100 s"
    inner.at(6)
    assert inner.line(outer.started) == "blocks 6 of 30, 100 s"
    clock[0] = 160.0
    inner.at(7)
    assert inner.line(outer.started) == "blocks 7 of 30, 160 s"
    clock[0] = 170.0
    inner.at(9, "gptq")
    assert inner.line(outer.started) == "blocks 9 of 30, gptq, 170 s, about 105 s left"
    clock[0] = 180.0
    inner.at(9)
    assert inner.line(outer.started) == "blocks 9 of 30, gptq, 180 s, about 95 s left"
    clock[0] = 220.0  # a slow one: the estimate stays, and at the end nothing is said of it
    assert inner.line(outer.started) == "blocks 9 of 30, gptq, 220 s, about 95 s left"
    inner.at(29)
    clock[0] = 999.0
    assert inner.line(outer.started) == "blocks 29 of 30, gptq, 999 s"


def test_a_first_step_that_is_the_least_says_how_long_the_rest_takes_at_least(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    work = terminal.Work("compare", started=0.0)
    work.at(0, "baseline", 4)
    clock[0] = 20.0
    work.at(1, "nf4, quantizing", 4)
    assert work.line(0.0) == "compare 1 of 4, nf4, quantizing, 20 s"
    work.first_is_least = True
    clock[0] = 25.0
    work.at(1, "nf4, sequence 1 of 4", 4)
    clock[0] = 30.0
    assert work.line(0.0) == "compare 1 of 4, nf4, sequence 1 of 4, 30 s, at least 55 s left"
    clock[0] = 80.0
    work.at(2, "int8", 4)
    assert work.line(0.0) == "compare 2 of 4, int8, 80 s, about 110 s left"


def test_an_estimate_of_blocks_counts_the_passes_before_their_weights(monkeypatch):
    """Seven weights come at once after 12 seconds of data; the first block, which compiles, takes 30."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    work = terminal.Work("quantize", started=0.0)
    for block, seconds in enumerate((30.0, 12.0, 12.0)):
        work.at(7 * block, f"layers.{block}: statistics of its inputs", 70)
        if block == 2:
            clock[0] += 5.0
            assert work.line(0.0).endswith("47 s, about 91 s left")
            clock[0] -= 5.0
        clock[0] += seconds
        for weight in range(7):
            work.at(7 * block + weight + 1, f"layers.{block}.{weight}", 70)
    assert work.line(0.0) == "quantize 21 of 70, layers.2.6, 54 s, about 84 s left"


def write_and_fail(folder, error):
    """A command that has written its result when it fails."""
    with terminal.whole_or_nothing(folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"x")
        raise error


def test_a_console_says_that_its_reader_has_gone(tmp_path, monkeypatch):
    """Rich raises SystemExit otherwise, behind which a finished folder would be deleted."""

    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    def write_and_print():
        with terminal.whole_or_nothing(tmp_path / "out"):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "model.safetensors").write_bytes(b"x")
            terminal.console().print("done")

    monkeypatch.setattr("sys.stdout", Gone())
    with pytest.raises(BrokenPipeError):
        write_and_print()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_reader_that_goes_away_takes_no_result_along(tmp_path):
    """`ao-lab quantize ... | head`: the folder is whole before the first line about it."""
    with pytest.raises(BrokenPipeError):
        write_and_fail(tmp_path / "out", BrokenPipeError())
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(RuntimeError):
        write_and_fail(tmp_path / "other", RuntimeError())
    assert not (tmp_path / "other").exists()


def stopped(folder, model=None):
    """What a calibration that keeps blocks in a folder says when it is stopped."""
    with terminal.work("quantize", "nothing was written to out", False, folder, model):
        raise KeyboardInterrupt


def test_a_stopped_calibration_says_which_blocks_are_kept(capsys, tmp_path):
    with pytest.raises(terminal.Stopped, match=r"nothing was written to out; the same command starts again"):
        stopped(tmp_path / "kept")
    assert capsys.readouterr().err == ""
    (tmp_path / "block-0000.pt").write_bytes(b"")
    with pytest.raises(terminal.Stopped, match=r"1 finished blocks are in .*, the same command continues"):
        stopped(tmp_path)
    assert capsys.readouterr().err == f"ao-lab: resuming: 1 finished blocks in {tmp_path}\n"
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30}')
    with pytest.raises(
        terminal.Stopped, match=r"1 of 30 finished blocks are in .*, the same command continues"
    ):
        stopped(tmp_path, tmp_path)
    with pytest.raises(
        terminal.Stopped, match=r"starts again from the beginning; with --resume FOLDER finished"
    ):
        stopped(None, tmp_path)


def test_the_innermost_work_is_told_of(capsys, often):
    with terminal.lines("reproduce"):
        assert "ao-lab: reproduce, " in wait_for(capsys, "reproduce, ")
        with bar_of_experiments("training", 650) as step:
            step("2.31 bits per byte")
            step()
            assert "training 2 of 650, 2.31 bits per byte, " in wait_for(capsys, "training 2 of 650")
        assert "ao-lab: reproduce, " in wait_for(capsys, "reproduce, ")
    time.sleep(0.2)
    capsys.readouterr()
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_quick_work_says_nothing(capsys):
    with terminal.track_progress("quantize", 2) as work:
        work.step()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("tty", "term", "live"),
    [
        (True, "xterm-256color", True),
        (True, "", True),
        (True, "dumb", False),
        (True, "unknown", False),
        (False, "xterm", False),
    ],
)
def test_which_terminals_show_bars(monkeypatch, tty, term, live):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty, raising=False)
    assert terminal.is_live() == live


def test_names_with_brackets_are_no_markup(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with terminal.track_progress("decode", 1) as work:
        work.step("[bold]layers[0][/x]")
    assert "[bold]layers[0][/x]" in capsys.readouterr().err


def test_a_stderr_that_is_closed_ends_no_work(monkeypatch, tmp_path):
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr("sys.stderr", log)
    terminal.say("nobody hears this")


# Ctrl-C and SIGTERM: one line, what was kept, how to go on; nothing half-written stays.

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]

#: A command whose work, a tiny stand-in for minutes, says that it started and goes on in threads that nothing can interrupt.
BUSY = """
import signal, sys, time
# A shell's background jobs ignore SIGINT, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from experiments.runs import run as runs
from experiments.harness import measuring
from ao_lab.cli.app import entry

def run_one(name, settings, places):
    def work(task):
        end = time.monotonic() + 60
        while time.monotonic() < end: pass
    print("started", flush=True)
    for _ in measuring.measure_all([1, 2, 3], work, "cpu"): pass

runs.run_one = run_one
sys.argv = ["ao-lab", "reproduce", "formats", "--device", "cpu", "--reports", sys.argv[1]]
entry()
"""


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_reproduce_says_what_was_kept(tmp_path, number, code):
    """At once, though threads compute."""
    environment = {**os.environ, "AO_LAB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BUSY, str(tmp_path / "reports")]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "started\n"
    time.sleep(0.5)
    sent = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=50)
    assert time.monotonic() - sent < 40
    assert (process.returncode, out) == (code, "")
    last = err.splitlines()[-1]
    assert last == (
        f"ao-lab: stopped; what was measured is kept in {tmp_path / 'cache'}; the same command goes on from there"
    )
    assert "Traceback" not in err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (cli_stop.Terminated, 143)])
@pytest.mark.parametrize("existed", [True, False])
def test_quantize_leaves_nothing_half_written(tmp_path, monkeypatch, capsys, error, code, existed):
    """Stopped when the weights are written already; a folder that was there stays, empty."""
    save_llama(tmp_path / "base")
    out = tmp_path / "out"
    if existed:
        out.mkdir()

    def stop(*_):
        assert any(out.iterdir())
        raise error

    monkeypatch.setattr("ao_lab.cli.quantize.copy_the_rest", stop)
    assert app.main(["quantize", str(tmp_path / "base"), str(out), "--config", "int8_rowwise"]) == code
    assert f"stopped; nothing was written to {out}; the same command starts again" in capsys.readouterr().err
    assert list(out.iterdir()) == [] if existed else not out.exists()


def test_a_folder_with_other_files_is_not_touched(tmp_path, capsys):
    save_llama(tmp_path / "base")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert (
        app.main(["quantize", str(tmp_path / "base"), str(tmp_path / "out"), "--config", "int8_rowwise"]) == 2
    )
    assert "choose another" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_the_signal_is_as_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    assert app.main(["--version"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


ROOT = Path(__file__).resolve().parents[3]
TRICKY = ("pip install -e '.[hf]'", "layers[0]", "[red]x[/red]", "[/]", ":smile:", "a\\[b]")


def test_tables_show_brackets(capsys):
    print_table("of [hf]", ["[name]", "v"], [[text, text] for text in TRICKY])
    out = capsys.readouterr().out
    assert "of [hf]" in out
    assert "[name]" in out
    assert [text for text in TRICKY if out.count(text) != 2] == []


def test_errors_show_brackets(monkeypatch, capsys):
    def refuse(*_):
        raise WrongInput("'[hf]' [/] :smile:")

    monkeypatch.setattr("ao_lab.cli.listings.show_formats", refuse)
    assert app.main(["formats", "int4"]) == 2
    assert capsys.readouterr().err == "ao-lab: '[hf]' [/] :smile:\n"
    assert app.main(["formats", "[hf]"]) == 2


@pytest.mark.parametrize("clone", [True, False])
def test_the_doctor_gives_commands_that_work(monkeypatch, capsys, clone):
    """From a wheel there is no clone to install, and no make."""
    assert is_clone()
    monkeypatch.setattr("ao_lab.install.extras.is_clone", lambda root=None: clone)
    monkeypatch.setattr("ao_lab.cli.doctor.is_clone", lambda: clone)
    find_spec = checks.importlib.util.find_spec
    absent = ("jax", "torchao", "transformers", "compressed_tensors", "lm_eval", "triton")
    monkeypatch.setattr(
        checks.importlib.util, "find_spec", lambda name: None if name in absent else find_spec(name)
    )
    assert app.main(["doctor"]) == 0
    # Cells wrap: lines are put together by dropping what wraps them.
    out = capsys.readouterr().out
    for extra in ("hf", "jax", "ao", "eval"):
        assert (f"pip install -e '.[{extra}]'" in out) == clone
        assert (f"pip install 'ao_lab[{extra}]'" in out) == (not clone)
    assert ("make install" in out) == clone


def test_without_arguments_there_is_help_and_nothing_else():
    done = subprocess.run([sys.executable, "-m", "ao_lab"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "reproduce" in done.stdout + done.stderr
    assert "ao-lab: " not in done.stderr


def test_a_reader_that_leaves_is_no_error():
    """As in `ao-lab schemes | head -1`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "ao_lab", "schemes"], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_nothing_on_a_terminal_is_a_command_to_it(monkeypatch, capsys):
    """Names of layers and files are anybody's: no colours, titles, links or half surrogates."""
    name = "a\x1b]8;;http://evil\x07\x9b31m\u202e\udcff"
    told = "a\\x1b]8;;http://evil\\x07\\x9b31m\\u202e\\udcff"
    print_table(name, ["name"], [[name]])
    console().print(f"layout: {name}\nnext")

    def refuse(*_):
        raise WrongInput(name)

    monkeypatch.setattr(checks, "report", refuse)
    assert app.main(["doctor"]) == 2
    out, err = capsys.readouterr()
    assert (out.count(told), err) == (3, f"ao-lab: {told}\n")
    assert (out + err).replace("\n", "").isprintable()


def test_tables_of_narrow_terminals_are_paragraphs(capsys, monkeypatch):
    """Where words would be cut; cells that say nothing are left out."""
    rows = [["a" * 30, "word " * 9, "b" * 40, "-"]]
    print_table("Title", ["name", "what", "which", "none"], rows)
    assert "name " in capsys.readouterr().out
    monkeypatch.setattr(terminal, "PIPE_WIDTH", 70)
    print_table("Title", ["name", "what", "which", "none"], rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["Title", "", "a" * 30]
    assert lines[3].startswith("    what: word word")
    assert all(len(line) <= 70 for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quantize", "a", "b", "--groupsize", "32"], "write --config 'NAME group_size=VALUE'"),
        (["info"], "No such command 'info'; ao-lab doctor does that"),
        (["schemes", "int4_g48_cost"], "unknown scheme 'int4_g48_cost'"),
    ],
)
def test_wrong_words_have_a_way_out(capsys, arguments, said):
    assert app.main(arguments) == 2
    assert said in capsys.readouterr().err


def test_schemes_that_are_made_by_name_are_shown(capsys):
    assert app.main(["schemes", "int4_g48_cast"]) == 0
    assert "4.333 in compressed-tensors' files" in " ".join(capsys.readouterr().out.split())
