"""The text of one definition: `ast.dump` without comments, docstrings, messages, and names that mean nothing to others."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from experiments.source.imports import bound_by, loaded_by
from experiments.source.records import Definition, FileDefinitions, Ref
from experiments.source.statements import FUNCTIONS, is_text, local_names

#: Decorators under which annotations say nothing that runs.
PLAIN_DECORATORS = {
    *("cache", "cached_property", "classmethod", "contextmanager", "inference_mode", "lru_cache"),
    *("no_grad", "overload", "override", "property", "staticmethod", "wraps"),
}
#: Fields of syntax nodes that run nothing.
UNREAD = frozenset(("ctx", "kind", "type_comment", "type_ignores", "type_params", "lineno"))


class Writer:
    """Writes the text of one top-level statement."""

    def __init__(
        self,
        module: str,
        is_package: bool,
        names: set[str],
        found: FileDefinitions,
        by_text: bool,
    ) -> None:
        self.module, self.is_package, self.by_text = module, is_package, by_text
        self.names, self.imports, self.alternatives = names, found.imports, found.alternatives
        self.locals: dict[str, str] = {}
        self.local: set[str] = set()
        self.depth, self.annotated = 0, True
        self.result = Definition(module)

    def definition(self, node: ast.stmt) -> Definition:
        """The text of a statement, its imports, and the decorators that take it in."""
        self.write(node)
        self.result.pieces = list(merged(self.result.pieces))
        for decorator in getattr(node, "decorator_list", ()):
            ref, _ = self.lookup(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if ref is None:
                continue
            if ref.module == "torch" and "library" in ref.attributes:
                self.result.decorators.append(Ref(self.module))
            else:
                self.result.decorators.append(ref)
        return self.result

    def put(self, piece: str | Ref) -> None:
        """One more piece."""
        self.result.pieces.append(piece)

    def lookup(self, node: ast.AST) -> tuple[Ref | None, ast.AST]:
        """What a chain of attributes starts from, if that is a name from outside; else None."""
        attributes: list[str] = []
        base = node
        while isinstance(base, ast.Attribute):
            attributes.append(base.attr)
            base = base.value
        if not isinstance(base, ast.Name) or base.id in self.local:
            return None, node
        rest = tuple(reversed(attributes))
        if base.id in self.imports:
            module, attribute = self.imports[base.id]
            return Ref(module, ((attribute,) if attribute else ()) + rest), base
        if base.id in self.names:
            return Ref(self.module, (base.id, *rest)), base
        return None, node

    def write(self, node: object) -> None:
        """Any part of the syntax."""
        if isinstance(node, ast.AST):
            special = getattr(self, f"write_{type(node).__name__}", None)
            if special:
                special(node)
            else:
                self.fields(node)
        elif isinstance(node, list):
            self.put("[")
            for one in node:
                if not (isinstance(one, ast.stmt) and (is_text(one) or isinstance(one, ast.Pass))):
                    self.write(one)
            self.put("]")
        else:
            self.put(f"{node!r},")

    def fields(self, node: ast.AST, **other: object) -> None:
        """A node's type and fields; `other` has values that stand for a field's own."""
        self.put(f"{type(node).__name__}(")
        for name in node._fields:
            if name not in UNREAD:
                self.write(other[name] if name in other else getattr(node, name, None))
        self.put(")")

    def name(self, name: str) -> str:
        """How a bound name is called here."""
        if name in self.local:
            return self.locals.setdefault(name, f"%{len(self.locals)}")
        return name

    def bind(self, imports: Iterable[ast.Import | ast.ImportFrom]) -> None:
        """Names that a function imports; one that several imports bind means each."""
        inside: dict[str, list[tuple[str, str]]] = {}
        for one in imports:
            for name, target in bound_by(one, self.module, self.is_package).items():
                inside.setdefault(name, []).append(target)
        self.imports = {**self.imports, **{name: targets[0] for name, targets in inside.items()}}
        self.alternatives = {**self.alternatives, **{name: targets[1:] for name, targets in inside.items()}}

    def use(self, ref: Ref, base: ast.AST) -> None:
        """A name from outside, and what else it may mean."""
        self.put(ref)
        name = base.id if isinstance(base, ast.Name) else ""
        source, attribute = self.imports.get(name, ("", ""))
        rest = ref.attributes[bool(attribute) :]
        for module, other in self.alternatives.get(name, ()) if source else ():
            self.put(Ref(module, ((other,) if other else ()) + rest))

    def write_Name(self, node: ast.Name) -> None:
        """A variable: numbered where it is local, a reference where it is the module's."""
        ref, base = self.lookup(node)
        if ref:
            self.use(ref, base)
        else:
            self.put(f"{self.name(node.id)},")

    def write_Attribute(self, node: ast.Attribute) -> None:
        """A chain that starts from a module is one reference."""
        ref, base = self.lookup(node)
        if ref:
            self.use(ref, base)
        else:
            self.fields(node)

    def write_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Without the empty texts that some versions of Python leave beside a nested format."""
        parts = [one for one in node.values if not (isinstance(one, ast.Constant) and one.value == "")]
        self.fields(node, values=parts)

    def write_Constant(self, node: ast.Constant) -> None:
        """A value; the name of a module, where modules are imported by text, is a use of it."""
        value = node.value
        if self.by_text and isinstance(value, str) and is_dotted(value):
            self.result.loads.add(value)
            self.put(Ref(value))
        else:
            self.put(f"{type(value).__name__} {value!r},")

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """The outermost function decides which names are local."""
        before = self.locals, self.local, self.imports, self.alternatives, self.annotated
        if not self.depth:
            local, imports = local_names(node)
            self.bind(imports)
            self.local, self.locals = local - self.names - set(self.imports), {}
        self.depth += 1
        if isinstance(node, ast.Lambda):
            self.fields(node)
        else:
            self.annotated = any(last_name(one) not in PLAIN_DECORATORS for one in node.decorator_list)
            returns = node.returns if self.annotated else None
            self.fields(node, name=self.name(node.name) if node.name in self.local else "", returns=returns)
        self.depth -= 1
        self.locals, self.local, self.imports, self.alternatives, self.annotated = before

    write_FunctionDef = write_AsyncFunctionDef = write_Lambda = function

    def write_ClassDef(self, node: ast.ClassDef) -> None:
        """Members keep their names: they are called as attributes."""
        self.put("ClassDef(")
        self.write([*node.bases, *node.keywords, *node.decorator_list])
        for one in node.body:
            if isinstance(one, FUNCTIONS):
                self.put(f"def {one.name}:")
            if not is_text(one) and not isinstance(one, ast.Pass):
                self.write(one)
        self.put(")")

    def write_arg(self, node: ast.arg) -> None:
        """A parameter, which callers may name; its annotation where a decorator may read it."""
        self.put(f"{node.arg}:")
        if self.annotated and node.annotation:
            self.write(node.annotation)

    def write_AnnAssign(self, node: ast.AnnAssign) -> None:
        """In a function, an assignment without annotation; elsewhere the annotation may be a dataclass's."""
        if not self.depth:
            self.fields(node)
        elif node.value is not None:
            self.put("Assign([")
            self.write(node.target)
            self.put("]")
            self.write(node.value)
            self.put(")")

    def write_Assign(self, node: ast.Assign) -> None:
        """Targets, then the value."""
        self.put("Assign(")
        self.write(node.targets)
        self.write(node.value)
        self.put(")")

    def write_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """The name of the exception is a local variable."""
        self.fields(node, name=self.name(node.name) if node.name else None)

    def write_MatchAs(self, node: ast.MatchAs) -> None:
        """A captured name is a local variable."""
        self.fields(node, name=self.name(node.name) if node.name else None)

    def write_MatchStar(self, node: ast.MatchStar) -> None:
        """Likewise."""
        self.fields(node, name=self.name(node.name) if node.name else None)

    def write_Nonlocal(self, node: ast.Nonlocal) -> None:
        """Local variables of the function around."""
        self.put("Nonlocal(" + ",".join(self.name(name) for name in node.names) + ")")

    def write_Raise(self, node: ast.Raise) -> None:
        """What is raised; what it says is left out."""
        error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        self.put("Raise(")
        self.write(error)
        self.put(")")

    def write_Assert(self, node: ast.Assert) -> None:
        """What is asserted, without the message."""
        self.put("Assert(")
        self.write(node.test)
        self.put(")")

    def write_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        """Nothing: the names stand for what they mean. The modules run."""
        self.result.loads |= loaded_by(node, self.module, self.is_package)

    write_ImportFrom = write_Import


def is_dotted(text: str) -> bool:
    """Whether a text could be the name of a module."""
    return all(part.isidentifier() for part in text.split("."))


def last_name(decorator: ast.expr) -> str:
    """`no_grad` of `torch.no_grad()`."""
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def merged(pieces: Iterable[str | Ref]) -> Iterator[str | Ref]:
    """Neighbouring texts as one."""
    text: list[str] = []
    for piece in pieces:
        if isinstance(piece, str):
            text.append(piece)
            continue
        if text:
            yield "".join(text)
            text = []
        yield piece
    if text:
        yield "".join(text)
