"""What a release needs: one version everywhere, a package's page whose links work, and a consumer that type checkers accept."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ao_lab

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".ci"
HOST = "https://forge.example/group/ao_lab"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(CI))
    spec = importlib.util.spec_from_file_location(f"ci_{name}", CI / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release(monkeypatch):
    return load("release", monkeypatch)


@pytest.fixture
def metadata(monkeypatch):
    pytest.importorskip("hatchling")
    return load("metadata", monkeypatch)


@pytest.fixture
def clone(tmp_path):
    """The files that hold a version, of a version that is dated."""
    for name in ("ao_lab/install/versions.py", "CITATION.cff"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    with (tmp_path / "CITATION.cff").open("a") as file:
        file.write("date-released: 2026-12-01\n")
    heading = (
        f"# Changelog\n\n## {ao_lab.__version__} (2026-12-01)\n\nNew.\n\n## 0.0.1 (2026-01-01)\n\nOld.\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(heading)
    return tmp_path


def change(clone, name, old, new):
    text = (clone / name).read_text()
    assert old in text
    (clone / name).write_text(text.replace(old, new))


def test_this_commit_has_one_version(release):
    assert release.version() == ao_lab.__version__
    assert release.problems(None) == []
    assert "### quantize_ and quantized tensors" in release.notes(ao_lab.__version__)


def test_a_tag_that_agrees(release, clone):
    assert release.problems(f"v{ao_lab.__version__}", clone) == []
    assert release.notes(ao_lab.__version__, clone) == "New.\n"
    with pytest.raises(ValueError, match=r"no section of version 9\.9"):
        release.notes("9.9", clone)


def test_notes_of_a_release_lead_to_its_files(release, metadata, monkeypatch, capsys):
    """A release's page has no folder that relative links could start from."""
    monkeypatch.setitem(sys.modules, "metadata", metadata)
    for address, wanted in (
        ("", "](docs/SECURITY.md)"),
        (HOST, f"]({HOST}/blob/v{ao_lab.__version__}/docs/SECURITY.md)"),
    ):
        monkeypatch.setenv("AO_LAB_REPOSITORY", address)
        assert release.main(["notes"]) == 0
        assert wanted in capsys.readouterr().out


def test_a_missing_section_is_said(release, monkeypatch, capsys):
    """In a line, with the exit code that ends a workflow."""
    monkeypatch.setattr(release, "version", lambda: "9.9")
    assert release.main(["notes"]) == 1
    assert capsys.readouterr() == ("", "release: CHANGELOG.md has no section of version 9.9\n")


def test_what_stands_against_a_tag(release, clone):
    tag = f"v{ao_lab.__version__}"
    assert "the tag of a version is" in release.problems("v9.9.9", clone)[0]
    change(clone, "CITATION.cff", "2026-12-01", "2026-12-02")
    assert "says date-released 2026-12-02" in release.problems(tag, clone)[0]
    change(clone, "CHANGELOG.md", "2026-12-01", "unreleased")
    assert "write the date" in release.problems(tag, clone)[0]
    change(clone, "CITATION.cff", f"version: {ao_lab.__version__}", "version: 9.9.9")
    change(clone, "CHANGELOG.md", f"## {ao_lab.__version__}", "## 8.8.8")
    assert len(release.problems(None, clone)) == 2


def test_links_of_the_packages_page(metadata):
    text = "![a](f.svg) [b `c`](docs/D.md#e) [f](https://g.example) [h](#i)\n```\n[j](k)\n```\n"
    there = metadata.absolute(text, HOST, "v1")
    assert there.startswith(
        f"![a]({HOST}/raw/v1/f.svg) [b `c`]({HOST}/blob/v1/docs/D.md#e) [f](https://g.example) [h](#i)"
    )
    assert metadata.absolute(text, "", "v1").startswith(" b `c` [f](https://g.example) [h](#i)")
    assert there.endswith("```\n[j](k)\n```\n")
    for repository in (HOST, ""):
        page = metadata.FENCE.sub("", metadata.absolute((ROOT / "README.md").read_text(), repository, "v1"))
        assert re.findall(r'\]\((?!https?:|#)|(?:src|href)="(?!https?:|#)', page) == []
    with pytest.raises(ValueError, match="is no address"):
        metadata.urls("git@forge.example:group/ao_lab.git")


def test_the_release_workflow_runs_what_people_run():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", workflow)) == {"release-check"} <= targets
    assert set(re.findall(r"release\.py (\w+)", workflow)) == {"tag", "notes"}


@pytest.mark.nightly
def test_type_checkers_see_the_names_of_a_wheel(tmp_path):
    """mypy --strict in a project that has it installed: py.typed, the stub, and what a name does not take. `make lint` checks
    the same consumer beside the clone."""
    pytest.importorskip("mypy")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    shutil.copyfile(ROOT / "tests" / "support" / "consumer.py", tmp_path / "right.py")
    (tmp_path / "wrong.py").write_text("import ao_lab\nao_lab.Int4WeightOnlyConfig(group_size='32')\n")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\n")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "right.py", "wrong.py"]
    environment = {**os.environ, "MYPYPATH": str(tmp_path / "site")}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert "right.py" not in done.stdout, done.stdout
    assert re.findall(r"^wrong\.py:2: error: .* \[(.*)\]$", done.stdout, re.MULTILINE) == ["arg-type"]
