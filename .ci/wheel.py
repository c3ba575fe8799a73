"""The wheel holds one top-level name: `reference`, `fast` and `experiments` are put inside `ao_lab`.

In a clone the four are ordinary top-level packages. Installed as such they would stand in the way of other people's folders
(a project's own `experiments/` loses to a package in site-packages), and other people's `fast.py` in the way of ours. So the
build writes `from reference.formats import ...` as `from ao_lab.reference.formats import ...`, and nothing else: imports are
found by the parser, at module level and inside functions alike. Tried instead: a finder at run time that knows the bare names
(breaks where a user has them, since `sys.modules` has one place for both), and `ao_lab.reference` in the clone as well (two
names for one module there: outside code calls `reference.encode`).
"""

from __future__ import annotations

import ast
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES = ("reference", "fast", "experiments")
OWNER = "ao_lab"


class Inside(BuildHookInterface):  # type: ignore[type-arg]
    """Gives hatchling the rewritten files; an editable installation keeps the clone as it is."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write all four packages into a folder of their own, and have the wheel made of that."""
        if version == "editable":
            return
        self.place = Path(tempfile.mkdtemp(prefix="ao_lab-wheel-"))
        root = Path(self.root)
        for package in (OWNER, *PACKAGES):
            target = self.place / (OWNER if package == OWNER else f"{OWNER}/{package}")
            for path in sorted((root / package).rglob("*")):
                if path.is_file() and path.parent.name != "__pycache__" and not path.name.startswith("."):
                    copy(path, target / path.relative_to(root / package))
        build_data["force_include"][str(self.place / OWNER)] = OWNER

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave the wheel alone behind."""
        if version != "editable":
            shutil.rmtree(self.place, ignore_errors=True)


def copy(source: Path, target: Path) -> None:
    """A file as it is, Python with its imports rewritten."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix in (".py", ".pyi"):
        target.write_text(rewritten(source.read_text("utf-8")), "utf-8")
    else:
        shutil.copyfile(source, target)


def rewritten(source: str) -> str:
    """The source with its imports of PACKAGES led into OWNER; lines stay where they are."""
    lines = source.splitlines(keepends=True)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(found, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        new = statement(node)
        if new is None:
            continue
        if isinstance(node, ast.ImportFrom):  # the names, which may take several lines, stay as they are
            line = lines[node.lineno - 1].encode()
            head = line[node.col_offset :].replace(f"from {node.module}".encode(), new.encode(), 1)
            lines[node.lineno - 1] = (line[: node.col_offset] + head).decode()
        elif node.end_lineno == node.lineno:
            line = lines[node.lineno - 1].encode()
            lines[node.lineno - 1] = (
                line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
            ).decode()
        else:
            raise ValueError(f"an import over several lines: {ast.unparse(node)}")
    return "".join(lines)


def statement(node: ast.Import | ast.ImportFrom) -> str | None:
    """What an import becomes (of ``from a import b`` the part before the names); None where it is none of ours."""
    if isinstance(node, ast.ImportFrom):
        ours = node.level == 0 and node.module is not None and is_ours(node.module)
        return f"from {OWNER}.{node.module}" if ours else None
    if not any(is_ours(alias.name) for alias in node.names):
        return None
    return "; ".join(one for alias in node.names for one in imports(alias))


def imports(alias: ast.alias) -> list[str]:
    """The statements that bind what ``import name [as asname]`` binds."""
    if not is_ours(alias.name):
        return [f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")]
    if alias.asname:
        return [f"import {OWNER}.{alias.name} as {alias.asname}"]
    top = alias.name.partition(".")[0]
    bind = f"from {OWNER} import {top}"
    return [bind] if alias.name == top else [f"import {OWNER}.{alias.name}", bind]


def is_ours(name: str) -> bool:
    """Whether a dotted name begins with one of PACKAGES."""
    return name.partition(".")[0] in PACKAGES
