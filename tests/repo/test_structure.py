"""The shape of the repository: names that mirror each other, small files, and nothing that only works on one machine."""

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ao_lab", "reference", "fast", "experiments")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What `make test` installs; the other extras are for clients whom their users choose.
INSTALLED_EXTRAS = ("test", "jax", "ao", "hf", "lint")

# Public functions of fast/ (rooms that mirror those of reference/) that have no counterpart in reference/, each with its reason.
FAST_ALONE = {
    "check_codes": "what linear_of_codes multiplies; a reference multiplies all codes",
    "clip": "gradients in their own memory, where a reference has new arrays",
}
# Installed together with another requirement, which chooses the version.
COMES_WITH = {"jaxlib": "jax"}

LONGEST_FILE = 400
# Paths of one machine, and hosts of package or model registries.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|opt|mnt)/")
REGISTRY = re.compile(
    "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "hugging" + r"face\.co", "ana" + r"conda\.org"])
)
TEXT = {".py", ".toml", ".txt", ".md", ".html", ".csv", ".json", ".yaml", ".yml", ".cfg", ".svg", ""}


def python_files(package):
    return sorted((ROOT / package).rglob("*.py"))


def tracked_files():
    """What git has or would add; everything but caches where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.splitlines()]
    else:
        files = [
            path for package in (*PACKAGES, "tests", "docs", ".ci") for path in (ROOT / package).rglob("*")
        ]
    return [path for path in files if path.is_file() and path.suffix in TEXT]


def public_functions(path):
    """Names of the public functions that a module defines, found without importing it."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def test_packages_share_one_root():
    """The generic names `reference`, `fast` and `experiments` are ours and not another distribution's."""
    roots = {name: Path(importlib.util.find_spec(name).origin).resolve().parent.parent for name in PACKAGES}
    assert set(roots.values()) == {ROOT}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def test_fast_mirrors_reference():
    """Every public function of fast/*.py has a reference of that name, in the file of that name where there is one."""
    specified = {path.stem: public_functions(path) for path in python_files("reference")}
    anywhere = set().union(*specified.values())
    missing = set()
    for path in (ROOT / "fast").glob("*.py"):
        alone = public_functions(path) - specified.get(path.stem, set()) - anywhere
        missing |= (
            {path.stem} if alone and path.stem in FAST_ALONE else {f"{path.stem}.{name}" for name in alone}
        )
    assert sorted(missing - set(FAST_ALONE)) == []
    assert set(FAST_ALONE) <= set(missing)


def test_kernels_of_fast_exist():
    """`fast.KERNEL_OF` names functions of fast, and files that hold kernels."""
    import fast

    assert set(fast.KERNEL_OF) <= set(fast.__all__)
    assert [path for path in fast.KERNEL_OF.values() if ".jit\n" not in (ROOT / path).read_text()] == []


def test_reference_is_tested():
    """Every reference/x.py has tests/test_x.py, or a stated other one."""
    stems = [path.stem for path in python_files("reference") if path.stem != "__init__"]
    tests = {stem: TESTED_BY.get(stem, f"test_{stem}") for stem in stems}
    assert [stem for stem, test in tests.items() if not (ROOT / "tests" / f"{test}.py").is_file()] == []
    assert set(TESTED_BY) <= set(stems)
    # A stand-in is for modules without tests of their own.
    assert [stem for stem in TESTED_BY if (ROOT / "tests" / f"test_{stem}.py").is_file()] == []


def test_files_are_short():
    paths = [path for package in (*PACKAGES, "tests", ".ci") for path in python_files(package)]
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name: lines for name, lines in long.items() if lines > LONGEST_FILE} == {}


def test_no_machine_paths_and_no_registry_hosts():
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def private_imports(path):
    """What a file imports from another one of ours under a name that is private there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            yield from (alias.name for alias in node.names if re.match(r"_[^_]", alias.name))


def test_no_private_names_are_shared():
    """What two files use has a public name."""
    found = {
        str(path.relative_to(ROOT)): names
        for package in PACKAGES
        for path in python_files(package)
        if (names := list(private_imports(path)))
    }
    assert found == {}


def test_links_in_pages_resolve():
    """Relative links and pictures of the Markdown pages lead to files."""
    broken = []
    for path in tracked_files():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
            if "://" not in target and not target.startswith("data:") and not (path.parent / target).exists():
                broken.append(f"{path.relative_to(ROOT)}: {target}")
    assert broken == []


def test_imports_are_declared():
    """Every third-party module that a package imports is a requirement, or an extra."""
    declared = [
        *PROJECT["dependencies"],
        *(r for extra in PROJECT["optional-dependencies"].values() for r in extra),
    ]
    allowed = {canonicalize_name(Requirement(text).name) for text in declared} | set(COMES_WITH)
    undeclared = set()
    for path in (path for package in PACKAGES for path in python_files(package)):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            tops = {name.split(".")[0] for name in names}
            foreign = tops - set(sys.stdlib_module_names) - set(PACKAGES)
            undeclared |= {
                f"{path.relative_to(ROOT)}: {name}"
                for name in foreign
                if canonicalize_name(name) not in allowed
            }
    assert sorted(undeclared) == []


def requirement_closure(texts):
    """Names of everything that these requirements bring along on this machine."""
    closure, queue = set(), [Requirement(text) for text in texts]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        try:
            further = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            further = []
        asked = [{"extra": extra} for extra in ("", *requirement.extras)]
        new = [r for r in map(Requirement, further) if r.marker is None or any(map(r.marker.evaluate, asked))]
        if name not in closure:
            queue += new
        closure.add(name)
    return closure


def test_constraints_pin_everything():
    """What make installs is pinned, indirect requirements included; CUDA packages are pinned by torch itself."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = (r for extra in INSTALLED_EXTRAS for r in PROJECT["optional-dependencies"][extra])
    needed = requirement_closure([*PROJECT["dependencies"], *extras])
    needed = {name for name in needed if name not in COMES_WITH and not re.match("nvidia-|cuda-", name)}
    assert sorted(needed - {canonicalize_name(name) for name in pins}) == []


def test_wheel_holds_the_four_packages(tmp_path):
    """The wheel has all modules and markers of the four packages, and nothing else at the top."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    sources = {str(path.relative_to(ROOT)) for package in PACKAGES for path in python_files(package)}
    assert sources | {f"{package}/py.typed" for package in PACKAGES} <= names
