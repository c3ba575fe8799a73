"""The shape of the repository: names that mirror each other, and nothing that only works on one machine."""

import ast
import inspect
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import ao_lab
import fast
import reference

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ao_lab", "reference", "fast", "experiments")

#: Public functions of fast without a reference of that name, each with its reason.
FAST_ALONE = {
    "arrange_sparse_metadata": "the order of `linear_sparse`'s kernel; other layouts: `reference.arrange_metadata`",
    "linear_of_codes": "the integer product that a layer with dynamic activations runs; `linear` states its value",
    "linear_pair": "two calls of `linear` in one launch",
    "linear_swiglu": "`linear` twice and `swiglu` in one launch",
}
#: Prefixes that three siblings may share, as no folder would say more.
SHARED_PREFIXES = {
    "ao_lab/checkpoint/model_": "what a folder is to other programs: its model, its classes, its card",
    "fast/kernels/triton_gemv/gemv_": "the field's name of a kernel: gemv_w4a16",
    "fast/matmul/linear_": "public functions, a module each, and what is below their signatures",
    "fast/sparsity/linear_": "the same of 2:4 weights",
    "fast/sparsity/linear_sparse_": "the same of 2:4 weights",
    "tests/fast/linear/linear_": "the tests of these, by function or subject",
    "tests/gpu/validate_": "commands that a person starts",
    "tests/emulator/ptx_": "the parts of one interpreter",
    "tests/fast/kernels/sm90/w4a16_": "names of families of kernels, and a subject of one",
    "tests/fast/kernels/sm90/w4a16_gemm_": "the same",
    "tests/fast/kernels/sm90/sparse24_": "the same",
    "tests/fast/kernels/compiling/kernel_": "what compiles kernels, calls them and knows their limits",
}
#: Modules of the specification whose tests do not stand in tests/reference/<folder>/test_<module>.py, and where they do.
TESTED_BY = {
    "layers.hadamard": "training/test_linear.py",
    "lazy": "../repo/test_public_names.py",
    "layers.rotary": "layers/test_gradients.py",
    "matmul.operands": "matmul/test_matmul.py",
    "schemes.in_files": "schemes/test_schemes.py",
    "sparsity.activation": "sparsity/test_prune.py",
    "sparsity.linear_sparse_int4": "sparsity/test_linear_sparse.py",
}
#: Tests of a folder of a package that stand in a folder of another name.
TEST_FOLDERS = {
    "fast/formats": "fast/kernels",
    "fast/layers": "fast/kernels",
    "fast/matmul": "fast/linear",
    "fast/quantize": "fast/kernels",
}
#: Public functions that tests call through another one alone.
TESTED_THROUGH = {"llama32_configs": "llama32_qat"}

#: Lines of a file of the packages.
LONGEST = 600

# Paths of one machine, and hosts of package or model registries.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|root|home|Users|opt|mnt)/")
REGISTRY = re.compile(
    "|".join(["pypi" + r"\.org", "python" + r"hosted\.org", "hugging" + r"face\.co", "ana" + r"conda\.org"])
)
TEXT = {".py", ".pyi", ".toml", ".txt", ".md", ".html", ".csv", ".json", ".yaml", ".yml", ".cfg", ".svg", ""}


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


def modules_by_folder():
    """Names of the modules in each folder of the packages and of the tests, without `test_`."""
    folders = {}
    for package in (*PACKAGES, "tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py":
                folder = path.parent.relative_to(ROOT).as_posix()
                folders.setdefault(folder, []).append(path.stem.removeprefix("test_"))
    return folders


def test_prefixes_are_folders():
    """Three or more siblings that share a prefix belong in a folder of that name."""
    shared = set()
    for folder, modules in modules_by_folder().items():
        prefixes = Counter(
            f"{folder}/{name[: end.end()]}" for name in modules for end in re.finditer("_", name)
        )
        shared |= {prefix for prefix, count in prefixes.items() if count >= 3}
    assert sorted(shared - set(SHARED_PREFIXES)) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_files_can_be_read_in_one_go(package):
    """One idea a file, and none longer than LONGEST lines."""
    lengths = {path: path.read_text("utf-8").count("\n") for path in (ROOT / package).rglob("*.py")}
    assert [str(path.relative_to(ROOT)) for path, lines in lengths.items() if lines > LONGEST] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package):
    assert (ROOT / package / "py.typed").is_file()


def folder_of(function):
    """The folder of a package in which a function or class is defined: `quantize` of `fast.quantize.quantize`."""
    return inspect.unwrap(function).__module__.split(".")[1]


def positional(function):
    """Names and defaults of the parameters that may be given by position."""
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", fast.__all__)
def test_fast_mirrors_reference(name):
    """It has a reference of that name, in the folder of that name, with the same positional parameters."""
    if name in FAST_ALONE:
        assert name not in reference.__all__
        return
    ours, specified = getattr(fast, name), getattr(reference, name)
    assert folder_of(ours) == folder_of(specified)
    assert positional(ours) == positional(specified)


def test_reference_is_tested():
    """Every reference/x/y.py has tests/reference/x/test_y.py, or a stated other file; a stand-in only where there is none."""
    tests = ROOT / "tests" / "reference"
    modules = [
        path.relative_to(ROOT / "reference") for path in sorted((ROOT / "reference").rglob("[!_]*.py"))
    ]
    names = {".".join(path.with_suffix("").parts): path for path in modules}
    own = {name for name, path in names.items() if (tests / path.with_name(f"test_{path.name}")).is_file()}
    assert sorted(set(names) - own - set(TESTED_BY)) == []
    assert sorted(set(TESTED_BY) - (set(names) - own)) == []
    assert [path for path in TESTED_BY.values() if not (tests / path).is_file()] == []


def mirrored(folder):
    """The tests of a folder of a package, or of the module of that name."""
    path = ROOT / "tests" / folder
    return [*path.rglob("*.py"), *path.parent.glob(f"test_{path.name}.py")]


def public_names():
    """(package, name, folder that defines it) of every public function of reference, fast and ao_lab."""
    for package in (reference, fast):
        for name in package.__all__:
            if inspect.isfunction(getattr(package, name)):
                yield package.__name__, name, folder_of(getattr(package, name))
    for name, module in ao_lab.HOMES.items():
        if module.startswith("ao_lab.") and inspect.isfunction(getattr(ao_lab, name)):
            yield "ao_lab", name, module.split(".")[1]


def test_public_functions_are_tested():
    """Some test in the folder that mirrors that of a public function mentions it."""
    missing, texts = [], {}
    for package, name, folder in public_names():
        tests = TEST_FOLDERS.get(f"{package}/{folder}", f"{package}/{folder}")
        if tests not in texts:
            texts[tests] = "\n".join(path.read_text() for path in mirrored(tests))
        if not re.search(rf"\b{TESTED_THROUGH.get(name, name)}\b", texts[tests]):
            missing.append(f"{package}.{name}: tests/{tests}")
    assert missing == []


def test_no_machine_paths_and_no_registry_hosts():
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line) or REGISTRY.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


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


def test_no_argument_of_a_kernel_has_a_string_for_a_default():
    """Triton 3.6, torch 2.11's, compiles no call that leaves such an argument out, where 3.7 does."""
    wrong = [
        f"{path.relative_to(ROOT)}: {function.name}"
        for path in sorted((ROOT / "fast").rglob("*.py"))
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        and any(ast.unparse(one).startswith("triton.jit") for one in function.decorator_list)
        and any(
            isinstance(default, ast.Constant) and isinstance(default.value, str)
            for default in (*function.args.defaults, *function.args.kw_defaults)
        )
    ]
    assert not wrong, wrong
