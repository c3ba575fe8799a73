"""The set-up behind `make`: the build of torch is chosen from metadata, and a broken installation is redone."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"
CUDA = ["filelock", 'nvidia-cudnn-cu13==9.20; platform_system != "Nowhere"', "sympy>=1.13"]
ELSEWHERE = [
    "filelock",
    'nvidia-cudnn-cu13==9.20; platform_system == "Nowhere"',
    'cuda-bindings; extra == "x"',
]


def load(name):
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def torch_build(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_build", None)
    return load("torch_build")


@pytest.fixture
def install(monkeypatch, tmp_path, torch_build):
    monkeypatch.setitem(sys.modules, "install", None)
    module = load("install")
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "STAMP", tmp_path / ".venv" / "stamp")
    monkeypatch.setattr(module, "BROKEN", tmp_path / ".venv" / "broken")
    return module


@pytest.mark.parametrize(
    ("requirements", "build"), [(CUDA, "cuda"), (ELSEWHERE, "cpu"), ([], "cpu"), (None, None)]
)
def test_build_is_read_from_requirements(torch_build, requirements, build):
    assert torch_build.build_of(requirements) == build


def test_pinned_version(torch_build):
    assert torch_build.pinned_version("torchao==1\ntorch==2.13.0\n") == "2.13.0"
    with pytest.raises(ValueError, match="pins no torch"):
        torch_build.pinned_version("torchao==1\n")


def outcome(torch_build, monkeypatch, build, found, index=""):
    """Exit code, and the pip commands that would install, given what each place holds."""
    commands, version = [], torch_build.pinned_version(torch_build.CONSTRAINTS.read_text())
    answers = dict(
        zip([place.name for place in torch_build.places(build, version, index)], found, strict=True)
    )
    monkeypatch.setattr(torch_build, "installed_build", lambda version: None)
    monkeypatch.setattr(torch_build, "dry_run", lambda place: answers[place.name])

    def record(command, check):
        commands.append(command)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(torch_build.subprocess, "run", record)
    return torch_build.main([build, "--index", index]), commands


def test_cpu_build_of_the_configured_index_is_taken(torch_build, monkeypatch):
    code, (command,) = outcome(torch_build, monkeypatch, "cpu", [[], CUDA])
    assert code == 0
    assert torch_build.CPU_INDEX not in command


def test_cpu_build_comes_from_the_pytorch_index_otherwise(torch_build, monkeypatch):
    code, (command,) = outcome(torch_build, monkeypatch, "cpu", [CUDA, []])
    assert code == 0
    assert command[-3:-1] == ["--index-url", torch_build.CPU_INDEX]
    assert "--no-deps" in command


@pytest.mark.parametrize("second", [CUDA, None])
def test_no_cpu_build_installs_nothing(torch_build, monkeypatch, capsys, second):
    assert outcome(torch_build, monkeypatch, "cpu", [CUDA, second]) == (1, [])
    err = capsys.readouterr().err
    assert "nothing was downloaded" in err
    assert "make test TORCH=cuda" in err
    assert "TORCH_INDEX" in err


def test_cuda_build_beside_a_local_cpu_build(torch_build, monkeypatch):
    code, (command,) = outcome(torch_build, monkeypatch, "cuda", [[], CUDA])
    assert code == 0
    assert command[-1].startswith("torch===")


def test_a_folder_of_wheels_is_an_index(torch_build, monkeypatch, tmp_path):
    _, (command,) = outcome(torch_build, monkeypatch, "cpu", [[]], index=str(tmp_path))
    assert command[-4:-1] == ["--no-index", "--find-links", str(tmp_path)]


def prepare(install, monkeypatch):
    """Replace the steps by a record of them."""
    steps = []
    monkeypatch.setattr(install, "make_environment", lambda: steps.append("venv"))
    monkeypatch.setattr(install, "run", lambda command: steps.append(command[-1]))
    monkeypatch.setattr(install, "compile_modules", lambda python: steps.append("modules"))
    return steps


def test_modules_are_compiled_once_all_are_installed(install, monkeypatch, tmp_path):
    """By the interpreter of the environment; pip leaves them alone, and a template that is no Python stops nothing."""
    steps = prepare(install, monkeypatch)
    assert install.main(["run", "--torch", "cpu"]) == 0
    assert steps[-1] == "modules"
    monkeypatch.undo()
    install.run([sys.executable, "-c", "import os; assert os.environ['PIP_COMPILE'] == '0'"])
    where = tmp_path / "environment"
    install.run([sys.executable, "-m", "venv", "--without-pip", str(where)])
    (modules,) = where.glob("lib/*/site-packages")
    (modules / "template.py").write_text("{{ name }} = ")
    (modules / "module.py").touch()
    install.compile_modules(where / "bin" / "python")
    assert [path.name.split(".")[0] for path in modules.glob("__pycache__/*.pyc")] == ["module"]


def test_second_call_does_nothing_and_levels_nest(install, monkeypatch):
    steps = prepare(install, monkeypatch)
    assert install.main(["test", "--torch", "cpu"]) == 0
    assert steps
    steps.clear()
    assert install.main(["test", "--torch", "cpu"]) == install.main(["run", "--torch", "cpu"]) == 0
    assert steps == []
    assert install.main(["run", "--torch", "cuda"]) == 0
    assert steps


def test_changed_pins_install_again(install, monkeypatch, tmp_path):
    steps = prepare(install, monkeypatch)
    install.main(["run", "--torch", "cpu"])
    steps.clear()
    changed = tmp_path / "changed.txt"
    changed.write_text("torch==0\n")
    monkeypatch.setattr(install, "INPUTS", (*install.INPUTS, str(changed)))
    assert install.main(["run", "--torch", "cpu"]) == 0
    assert steps


def test_interrupted_installation_starts_afresh(install, monkeypatch):
    prepare(install, monkeypatch)

    def interrupted(command):
        raise KeyboardInterrupt

    monkeypatch.setattr(install, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install.main(["run", "--torch", "cpu"])
    leftover = install.VENV / "leftover"
    leftover.touch()
    steps = prepare(install, monkeypatch)
    assert install.main(["run", "--torch", "cpu"]) == 0
    assert steps[0] == "venv"
    assert not leftover.exists()


def test_another_python_starts_afresh(install, monkeypatch):
    prepare(install, monkeypatch)
    install.main(["run", "--torch", "cpu"])
    stamp = json.loads(install.STAMP.read_text())
    install.STAMP.write_text(json.dumps({**stamp, "key": "", "place": "another"}))
    assert "another Python" in install.outlived()


def test_old_python_is_refused(install, monkeypatch, capsys):
    monkeypatch.setattr(install.sys, "version_info", (3, 10, 0))
    assert install.main(["run"]) == 2
    assert "PYTHON=" in capsys.readouterr().err


def test_the_newest_version_comes_before_the_pinned_one(torch_build, monkeypatch):
    """And the pinned one is taken where no place has the newest in the wanted build."""
    asked, commands = [], []

    def dry_run(place):
        asked.append(place.requirement)
        return ELSEWHERE if place.requirement.startswith("torch==") else CUDA

    monkeypatch.setattr(torch_build, "dry_run", dry_run)
    monkeypatch.setattr(
        torch_build.subprocess, "run", lambda command, **_: commands.append(command) or Done()
    )
    assert torch_build.main(["cpu", "--newest"]) == 0
    assert asked[:2] == ["torch", "torch"]
    assert (
        commands[0][-1]
        == asked[2]
        == f"torch=={torch_build.pinned_version(torch_build.CONSTRAINTS.read_text())}"
    )
    assert torch_build.main(["cuda", "--newest"]) == 0
    assert commands[1][-1] == "torch"


class Done:
    returncode = 0


def test_what_the_newest_versions_ran_with_is_said(install, monkeypatch, capsys):
    newest = load("newest")
    assert all((newest.ROOT / path).exists() for path in newest.TESTS)
    found = {"torch": ("9.1", False), "transformers": ("5.23.0", True)}
    ran = []
    monkeypatch.setattr(newest, "install", lambda torch, index: ran.append((torch, index)))
    monkeypatch.setattr(newest, "installed", lambda: found)
    monkeypatch.setattr(newest, "tested", lambda more: ran.append(more) or len(ran) > 2)
    assert newest.main(["--torch", "cpu", "--", "-n", "2"]) == 1
    assert newest.main(["--torch", "cuda"]) == 0
    assert ran == [("cpu", ""), ["-n", "2"], ("cuda", ""), []]
    said = capsys.readouterr().out
    assert "== newest: FAILED with Python" in said
    assert "== newest: passed with Python" in said
    assert "torch 9.1 (outside of the range in ao_lab/install/versions.py)\n   transformers 5.23.0\n" in said
    assert newest.triton_of("0.1") == []
    pinned = newest.pinned_version(newest.CONSTRAINTS.read_text())
    assert newest.triton_of(pinned)[0].startswith("triton==")
