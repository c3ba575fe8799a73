"""Which files are kernels, and what their text depends on: found by reading source, without importing it.

A kernel file is one under `fast/` that defines a Triton function (`@triton.jit`, plain or called), launches one
(``kernel[grid](...)``), helps to (every module of `fast.kernels`) or imports what does. Its digest covers its own text and
that of every file of `fast` that it imports, directly or through others. Line ends count as one.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "fast"
KERNELS = "fast/kernels/"


def kernel_files(root: Path) -> list[str]:
    """Kernel files below `root`, as paths from there with forward slashes, sorted."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    names = [path.relative_to(root).as_posix() for path in paths if path.name != "__init__.py"]
    return [name for name in names if concerns_kernels(root, name)]


def concerns_kernels(root: Path, name: str) -> bool:
    """Whether a file is a part of `fast.kernels`, defines or launches kernels, or imports a part of `fast.kernels`."""
    inside = (name, *imported(root, name))
    return any(one.startswith(KERNELS) for one in inside) or is_kernel(parsed(root / name))


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=path.name)


def is_kernel(tree: ast.Module) -> bool:
    """Whether a file defines or launches kernels."""
    return any(defines(node) or launches(node) for node in ast.walk(tree))


def defines(node: ast.AST) -> bool:
    """A function under a decorator called jit: `triton.jit`, `jit`, `gluon.jit`, each perhaps called."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    found = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
    return any(
        (isinstance(one, ast.Attribute) and one.attr == "jit")
        or (isinstance(one, ast.Name) and one.id == "jit")
        for one in found
    )


def launches(node: ast.AST) -> bool:
    """A call of something subscripted by a grid: a tuple, a lambda or a name; not a generic such as dict[str, int]()."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
        return False
    target, grid = node.func.value, node.func.slice
    generic = isinstance(target, ast.Name) and target.id in ("dict", "list", "tuple", "set")
    return not generic and isinstance(grid, (ast.Tuple, ast.Lambda, ast.Name))


def dependencies(root: Path, name: str) -> list[str]:
    """Files of `fast` that a file imports, directly or through others, without itself; sorted."""
    found: set[str] = set()
    queue = [name]
    while queue:
        for target in imported(root, queue.pop()):
            if target not in found and target != name:
                found.add(target)
                queue.append(target)
    return sorted(found)


def imported(root: Path, name: str) -> Iterator[str]:
    """Files of `fast` that one file imports, wherever in it the import stands."""
    for node in ast.walk(parsed(root / name)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, name)
            # A name may be a module of its own; what is none belongs to the module that it is taken from.
            inner = [f"{base}.{alias.name}" for alias in node.names]
            modules = [one if file_of(root, one) else base for one in inner]
        else:
            continue
        yield from {found for module in modules if (found := file_of(root, module))}


def absolute(node: ast.ImportFrom, name: str) -> str:
    """The module that `from ... import` names, dots resolved from the file that it stands in."""
    if not node.level:
        return node.module or ""
    package = Path(name).with_suffix("").parts[: -node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def file_of(root: Path, module: str) -> str | None:
    """The file of a module of `fast`, or None for other modules and for names in one."""
    if module.split(".")[0] != PACKAGE:
        return None
    stem = module.replace(".", "/")
    return next((name for name in (f"{stem}.py", f"{stem}/__init__.py") if (root / name).is_file()), None)


def digest(root: Path, name: str) -> str:
    """SHA-256 over the names and texts of a file and of its dependencies."""
    made = hashlib.sha256()
    for one in (name, *dependencies(root, name)):
        made.update(one.encode() + b"\0" + (root / one).read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return made.hexdigest()


def public_functions(root: Path) -> dict[str, list[str]]:
    """For each public function of `fast`: the file that defines it, and that file's dependencies.

    What a module names in ``__all__`` has its name there too, behind the module's: ``clipped.noted``.
    """
    made = {}
    for node in ast.walk(parsed(root / PACKAGE / "__init__.py")):
        if isinstance(node, ast.ImportFrom):
            home = file_of(root, absolute(node, f"{PACKAGE}/__init__.py"))
            if home:
                files = [home, *dependencies(root, home)]
                made.update({alias.asname or alias.name: files for alias in node.names})
    for path in sorted((root / PACKAGE).glob("*.py")):
        home = path.relative_to(root).as_posix()
        files = [home, *dependencies(root, home)]
        made.update({f"{path.stem}.{name}": files for name in named_by(path)})
    return made


def named_by(path: Path) -> list[str]:
    """What a module lists in ``__all__``, as long as that is a list of texts."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and [ast.unparse(one) for one in node.targets] == ["__all__"]:
            listed = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else []
            return [
                one.value for one in listed if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
    return []
