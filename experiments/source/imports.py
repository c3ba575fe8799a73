"""Import statements: which run with a module, the names that they bind, and the modules that they load."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from experiments.source.statements import SCOPES, is_type_checking


def imports_of(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run with the module, those of its compound statements too."""
    pending: list[ast.AST] = list(body)[::-1]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            pending += node.orelse[::-1]
        elif not isinstance(node, SCOPES):
            pending += list(ast.iter_child_nodes(node))[::-1]


def source_of(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that ``from ... import`` names, dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def bound_by(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> dict[str, tuple[str, str]]:
    """Names that an import binds, with the module and its attribute ("" for a module itself)."""
    if isinstance(node, ast.ImportFrom):
        source = source_of(node, module, is_package)
        return {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return {
        alias.asname or alias.name.partition(".")[0]: (
            alias.name if alias.asname else alias.name.partition(".")[0],
            "",
        )
        for alias in node.names
    }


def loaded_by(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> set[str]:
    """Modules that an import may run; names that are no modules among them do no harm."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    source = source_of(node, module, is_package)
    return {source, *(f"{source}.{alias.name}" for alias in node.names)}
