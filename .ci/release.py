"""What a release needs: one version everywhere, a changelog section, and a package that installs alone.

    python .ci/release.py check [--full]      build sdist and wheel, install the wheel in a fresh environment, use it
    python .ci/release.py tag v0.1.0          whether version, changelog and citation agree with a tag
    python .ci/release.py notes               the changelog's section of the version; links as AO_LAB_REPOSITORY says

`check` is `make release-check`. The wheel is made of the sdist, so that the sdist is complete; it is installed with the pinned
versions of what NumPy users and the command line need, or with --full of everything, torch included. Files for GitHub and
CITATION.cff are compared with their public schemas, which check-jsonschema brings. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from install import make_environment

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "release"
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
#: What `import ao_lab` for NumPy arrays, and `ao-lab formats`, need.
LIGHT = ("numpy", "ml_dtypes", "typer", "rich", "safetensors")
TOOLS = ("hatchling", "check-jsonschema")
SCHEMAS = {
    "CITATION.cff": "vendor.citation-file-format",
    ".github/workflows/*.yml": "vendor.github-workflows",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
}
#: Run where nothing of the clone can be found: the package's own names, a round trip, one top-level name.
USE = """
import sys, ao_lab, numpy as np
from importlib.metadata import distribution
assert "site-packages" in ao_lab.__file__, ao_lab.__file__
assert ao_lab.__version__ == distribution("ao_lab").version == sys.argv[1]
tops = {str(file).split("/")[0] for file in distribution("ao_lab").files}
assert {top for top in tops if not top.endswith(".dist-info") and top != ".."} == {"ao_lab"}, tops
x = np.linspace(-4, 4, 64, dtype=np.float32).reshape(2, 32)
assert np.abs(ao_lab.dequantize(ao_lab.quantize(x, "mxfp8_e4m3")) - x).max() < 0.25
"""


def main(argv: list[str] | None = None) -> int:
    """One of the three; 0 on success."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("check").add_argument("--full", action="store_true", help="install torch too")
    steps.add_parser("tag").add_argument("name")
    steps.add_parser("notes")
    arguments = parser.parse_args(argv)
    try:
        if arguments.step == "notes":
            print(linked(notes(version()), f"v{version()}"), end="")
            return 0
        found = problems(arguments.name if arguments.step == "tag" else None)
    except ValueError as error:
        found = [str(error)]
    for problem in found:
        print(f"release: {problem}", file=sys.stderr)
    if found:
        return 1
    if arguments.step == "tag":
        return 0
    try:
        check(arguments.full)
    except subprocess.CalledProcessError as error:
        print(f"release: stopped at: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


def version(root: Path = ROOT) -> str:
    """The version that the package says it has."""
    found = VERSION.search((root / "ao_lab" / "install" / "versions.py").read_text("utf-8"))
    if found is None:
        raise ValueError('ao_lab/install/versions.py has no line __version__ = "..."')
    return found[1]


def problems(tag: str | None, root: Path = ROOT) -> list[str]:
    """What stands against a release: of any commit, and where a tag is given, of that tag."""
    now = version(root)
    heading = re.search(rf"^## {re.escape(now)} \((.*)\)$", (root / "CHANGELOG.md").read_text("utf-8"), re.M)
    cited = dict(
        re.findall(r"^([\w-]+): *\"?([^\"\n]+)\"?$", (root / "CITATION.cff").read_text("utf-8"), re.M)
    )
    found = []
    if heading is None:
        found.append(f"CHANGELOG.md has no heading '## {now} (DATE)'; write what the version changes")
    if cited.get("version") != now:
        found.append(f"CITATION.cff says version {cited.get('version')}, the package {now}; make them one")
    if tag is None or heading is None:
        return found
    if tag != f"v{now}":
        found.append(f"the tag is {tag}, the version {now}; the tag of a version is v{now}")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        found.append(f"CHANGELOG.md calls {now} '{heading[1]}'; write the date, YYYY-MM-DD")
    elif cited.get("date-released") != heading[1]:
        found.append(
            f"CITATION.cff says date-released {cited.get('date-released')}, CHANGELOG.md {heading[1]}"
        )
    return found


def notes(wanted: str, root: Path = ROOT) -> str:
    """The changelog's section of a version, without its heading; ValueError where there is none."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    found = re.search(rf"^## {re.escape(wanted)} \(.*?\)\n+(.*?)(?=^## |\Z)", text, re.M | re.S)
    if found is None:
        raise ValueError(f"CHANGELOG.md has no section of version {wanted}")
    return found[1].rstrip() + "\n"


def linked(text: str, tag: str) -> str:
    """Text whose relative links lead to the files of a tag, where AO_LAB_REPOSITORY names the repository; else as it is."""
    repository = os.environ.get("AO_LAB_REPOSITORY", "").rstrip("/")
    if not repository:
        return text
    from metadata import absolute  # it imports hatchling, which `check` has installed for its own Python

    return absolute(text, repository, tag)


def check(full: bool) -> None:
    """Build, validate, install and use; raises CalledProcessError where a step fails."""
    shutil.rmtree(PLACE, ignore_errors=True)
    tools = environment("tools", TOOLS)
    for pattern, schema in SCHEMAS.items():
        files: list[str | Path] = sorted(ROOT.glob(pattern))
        run([tools / "check-jsonschema", "--builtin-schema", schema, *files])
    run([tools / "python", "-m", "hatchling", "build", "--target", "sdist", "--directory", PLACE / "dist"])
    (sdist,) = (PLACE / "dist").glob("*.tar.gz")
    wheel_of: list[str | Path] = [
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        PLACE / "dist",
    ]
    run([tools / "python", "-m", "pip", "wheel", *wheel_of, sdist])
    (wheel,) = (PLACE / "dist").glob("*.whl")
    run([tools / "python", "-c", VALID, wheel])
    user = environment("user", (f"{wheel}[hf]",) if full else LIGHT)
    if not full:
        run([user / "python", "-m", "pip", "install", "--quiet", "--no-deps", wheel])
    use(user, full)
    print(f"release: {sdist.name} and {wheel.name} are in {PLACE / 'dist'}", file=sys.stderr)


#: Every field of the metadata obeys its specification.
VALID = """
import sys, zipfile
from packaging.metadata import Metadata
with zipfile.ZipFile(sys.argv[1]) as wheel:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    Metadata.from_email(wheel.read(name), validate=True)
"""


def use(binaries: Path, full: bool) -> None:
    """Import it and start its commands, in an empty folder."""
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with tempfile.TemporaryDirectory() as folder:
        commands: list[list[str | Path]] = [
            [binaries / "python", "-c", USE, version()],
            [binaries / "ao-lab", "--version"],
            [binaries / "ao-lab", "formats", "float8_e4m3fn", "--json"],
        ]
        if full:
            commands.append([binaries / "ao-lab", "doctor"])
        for command in commands:
            subprocess.run(command, check=True, cwd=folder, env=outside, stdout=subprocess.DEVNULL)


def environment(name: str, wanted: tuple[str, ...]) -> Path:
    """A fresh environment with these packages in their pinned versions; the folder of its programs."""
    place = PLACE / name
    make_environment(place)
    binaries = place / ("Scripts" if os.name == "nt" else "bin")
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    run([binaries / "python", "-m", "pip", "install", "--quiet", *pins, *wanted])
    return binaries


def run(command: list[str | Path]) -> None:
    """Run a command in the clone, its output on ours."""
    subprocess.run(command, check=True, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
