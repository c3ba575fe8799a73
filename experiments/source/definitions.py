"""One source file as its top-level definitions, each a text without names of its own; `closure` puts them together.

A text is `ast.dump` in spirit: comments, docstrings, messages of exceptions, annotations of functions and import statements
are left out, local variables are numbered, and every name from outside is a `Ref` that the reader of the text resolves.
"""

from __future__ import annotations

import ast
import threading
from contextlib import suppress

from experiments.source.imports import bound_by, imports_of, loaded_by
from experiments.source.records import Definition, FileDefinitions, Ref
from experiments.source.statements import bound_at_top, is_main, top_level
from experiments.source.writer import Writer

_PARSING = threading.Lock()
#: Another thread's parse, of a library that knows nothing of the lock, can spoil one or two of ours in a row, hardly more.
_ATTEMPTS = 20


def parse(source: str) -> ast.Module:
    """`ast.parse` that threads may call at once.

    CPython 3.11 counts the depth of a tree under construction in one place for all threads, and raises SystemError where one
    interrupts another (python/cpython issue 106905). The lock keeps our own threads apart; against those of libraries, which
    parse too (Triton, torch.compile), the parse is repeated.
    """
    with _PARSING:
        for _ in range(_ATTEMPTS - 1):
            with suppress(SystemError):
                return ast.parse(source)
        return ast.parse(source)


def definitions_of(source: str, module: str, is_package: bool) -> FileDefinitions:
    """Read one file. `module` is its dotted name, which relative imports start from."""
    body = list(top_level(parse(source).body))
    file = FileDefinitions()
    loads: set[str] = set()
    for node in imports_of(body):
        for name, target in bound_by(node, module, is_package).items():
            if file.imports.setdefault(name, target) != target:
                file.alternatives.setdefault(name, []).append(target)
        loads.update(loaded_by(node, module, is_package))
    file.loads = frozenset(loads)
    by_text = "import_module" in source
    names = {name for node in body for name in bound_at_top(node)}
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Pass)):
            continue
        bound = list(bound_at_top(node))
        if "__all__" in bound or is_main(node):
            continue
        writer = Writer(module, is_package, names, file, by_text)
        definition = writer.definition(node)
        for name in bound:
            known = file.definitions.get(name)
            file.definitions[name] = concatenate(known, definition) if known else definition
        if not bound or definition.decorators:
            file.effects.append(definition)
    return file


def concatenate(first: Definition, second: Definition) -> Definition:
    """Two statements that define one name."""
    return Definition(first.module, [*first.pieces, ";", *second.pieces], first.loads | second.loads, [])


__all__ = ["Definition", "FileDefinitions", "Ref", "definitions_of"]
