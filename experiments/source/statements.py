"""Statements of a file: which run on import, which are text alone, and the names that they bind."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Syntax that binds a name which is no `ast.Name`.
NAMING = (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


def top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: no docstrings, nothing that only type checkers read."""
    for node in body:
        if isinstance(node, ast.If) and is_type_checking(node.test):
            yield from top_level(node.orelse)
        elif not is_text(node):
            yield node


def is_type_checking(test: ast.expr) -> bool:
    """Whether a condition is TYPE_CHECKING."""
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a text alone, as docstrings are."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_main(node: ast.stmt) -> bool:
    """Whether a statement is what a module does as a program."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def bound_at_top(node: ast.AST) -> Iterator[str]:
    """Names that a top-level statement defines, but for those that it imports."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield node.name
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if not isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        for child in ast.iter_child_nodes(node):
            yield from bound_at_top(child)


def local_names(function: ast.AST) -> tuple[set[str], list[ast.Import | ast.ImportFrom]]:
    """Variables of a function, and of those inside it, that no caller can name (neither parameters nor members of classes);
    and the imports inside."""
    bound: set[str] = set()
    named: set[str] = set()
    imports: list[ast.Import | ast.ImportFrom] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Load):
                bound.add(node.id)
        elif isinstance(node, ast.arg):
            named.add(node.arg)
        elif isinstance(node, NAMING):
            if node is not function and node.name:
                bound.add(node.name)
            if isinstance(node, ast.ClassDef):
                named.update(name for one in node.body for name in bound_at_top(one))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.Global):
            named.update(node.names)
    return bound - named, imports
