"""What work cannot do without is looked at before the work."""

import resource
import sys
import tempfile

import pytest
import torch

from ao_lab.cli import app
from ao_lab.cli.terminal import requirements as requirements
from ao_lab.cli.terminal.output import WrongInput
from tests.support.models.small_llama import save_llama


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "base"
    save_llama(folder)
    return folder


def refused(capsys, monkeypatch, *arguments):
    """The line about wrong input, before a model is read."""
    for name in ("ao_lab.cli.quantize.loaded", "ao_lab.cli.evaluate.loaded"):
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
    assert "nothing has no config.json" in err
    assert "is no file" in refused(capsys, monkeypatch, "eval", base, "--text", tmp_path / "nothing")


def test_an_output_folder_that_is_a_link_to_nowhere(base, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").symlink_to("nowhere")
    line = refused(capsys, monkeypatch, "quantize", base, tmp_path / "out", "--config", "mxfp4")
    assert "is a link that leads nowhere" in line
