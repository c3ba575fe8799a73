"""Which code a measurement ran: the definitions that its functions reach, found by reading source, without importing it.

The graph's nodes are the top-level definitions (functions, classes, constants) of some packages; its edges are the names that
they use, wherever the import stands: at the top, inside a function, relative, or by text (names of modules, in a module that
calls `import_module`). A `Closure` is what some roots reach, and its hash. The rules:

* Names are followed to their definition. `fast.quantize` and ``from fast import quantize`` both mean the function in the module
  that defines it, however many ``__init__.py`` pass it on; a stub (``__init__.pyi``) is read like them. So a package's
  ``__init__`` counts only for what it defines itself. A module that is used as a value, where its attributes cannot be
  read, counts as a whole.
* What runs on import counts where it matters. A statement that defines nothing (a call that fills a table) or a
  definition under a decorator of ours (which enters it into a table) counts if its module is imported and something of its
  module, or of a module that the statement names, is used; one in a package's ``__init__`` that names nothing of ours (a
  setting of another library, of the environment) counts wherever the package is imported.
* Comments, docstrings, annotations of functions, messages of exceptions and `if TYPE_CHECKING` run nothing: they are left out.
* Names are not meaning. Definitions are numbered in the order in which they are met and local variables in the order in
  which they appear; import statements leave only the names that they stand for. So moving a definition, splitting a module,
  renaming a function, a module or a local variable changes no hash, while a changed constant anywhere below does. Parameters,
  methods and attributes keep their names, as callers spell them.
* `opaque` modules keep books about a measurement (rows, folders, progress) and make no number: a use of them is a use,
  whatever they contain.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from experiments.source.definitions import Definition, FileDefinitions, Ref, definitions_of

#: What a name leads to: a module and its definition, or "" for the whole module.
Node = tuple[str, str]


#: A call that says which classes saved files may hold; it changes no number.
SAFE_GLOBALS = ("torch", "serialization", "add_safe_globals")


class SourceTree:
    """The packages below a folder, as their files are when it is made; each is parsed when it is first asked for.

    opaque: packages, modules or definitions that are used without being looked into.
    stubs: names that a package finds when it runs, by its name: each with the module and the attribute that it stands for.
    registrars: functions that fill no table of ours: those that enter operators into torch's, and decorators that only wrap. A
    call of one on import counts where something of the module that calls it is used, and not wherever the function is used.
    """

    def __init__(
        self,
        root: Path,
        packages: Iterable[str],
        opaque: Iterable[str] = (),
        stubs: Mapping[str, Mapping[str, Node]] | None = None,
        registrars: Iterable[str] = (),
    ) -> None:
        self.root, self.opaque = root, tuple(opaque)
        self.registrars = frozenset(registrars)
        self._stubs = {name: dict(names) for name, names in (stubs or {}).items()}
        self._texts: dict[str, str] = {}
        self.packages: set[str] = set()
        for package in packages:
            for path in (root / package).rglob("*.py*"):
                self._read(path)
        self._modules: dict[str, FileDefinitions | None] = {}
        self._is_opaque: dict[str, bool] = {}
        self._resolved: dict[tuple[str, tuple[str, ...]], tuple[Node | None, tuple[str, ...]]] = {}

    def _read(self, path: Path) -> None:
        if path.suffix not in (".py", ".pyi"):
            return
        parts = path.relative_to(self.root).with_suffix("").parts
        self.packages.update(".".join(parts[:count]) for count in range(1, len(parts)))
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            self._texts[name] = text
        else:
            self._stubs[name] = definitions_of(text, name, parts[-1] == "__init__").imports

    def module(self, name: str) -> FileDefinitions | None:
        """A module by its dotted name; None where the tree has none."""
        if name not in self._modules:
            known = name in self._texts or name in self.packages
            text = self._texts.get(name, "")  # a folder without __init__.py is a package all the same
            made = definitions_of(text, name, name in self.packages) if known else None
            # The first one stays: closures of other threads tell its definitions by identity.
            self._modules.setdefault(name, made)
        return self._modules[name]

    def is_opaque(self, name: str) -> bool:
        """Whether a module or definition, or a package around it, is not looked into."""
        if name not in self._is_opaque:
            self._is_opaque[name] = any(name == one or name.startswith(f"{one}.") for one in self.opaque)
        return self._is_opaque[name]

    def exports(self, name: str) -> list[str]:
        """Names of other modules that a package hands out."""
        module = self.module(name)
        imported = list(module.imports) if module and name in self.packages else []
        return [*imported, *self._stubs.get(name, ())]

    def resolve(self, module: str, attributes: tuple[str, ...]) -> tuple[Node | None, tuple[str, ...]]:
        """The node that attributes of a module lead to, and the attributes that are left; None outside of the tree."""
        key = module, attributes
        if key not in self._resolved:
            self._resolved[key] = self._resolve(module, attributes, frozenset())
        return self._resolved[key]

    def _resolve(
        self, name: str, attributes: tuple[str, ...], above: frozenset[tuple[str, tuple[str, ...]]]
    ) -> tuple[Node | None, tuple[str, ...]]:
        """above: what is being resolved; a circle of imports leads nowhere. It is no state of the tree: threads share that."""
        module = self.module(name)
        if module is None or (name, attributes) in above:
            return None, attributes
        if not attributes:
            return (name, ""), ()
        first, rest = attributes[0], attributes[1:]
        above |= {(name, attributes)}
        if first in module.definitions:
            return (name, first), rest
        if first in module.imports:
            source, attribute = module.imports[first]
            return self._resolve(source, ((attribute,) if attribute else ()) + rest, above)
        source, attribute = self._stubs.get(name, {}).get(first, (name, first))
        if (source, attribute) != (name, first):
            return self._resolve(source, ((attribute,) if attribute else ()) + rest, above)
        if self.module(f"{name}.{first}") is not None:
            return self._resolve(f"{name}.{first}", rest, above)
        # Found when it runs (`__getattr__`), or not a name of this module: the module as a whole.
        return (name, ""), attributes


class Closure:
    """Everything that some roots reach. A root is a module's dotted name, or that of a definition or re-export."""

    def __init__(self, tree: SourceTree, roots: Iterable[str]) -> None:
        self.tree = tree
        self.roots = tuple(roots)
        self.numbers: dict[Node, int] = {}
        self._queue: deque[Node] = deque()
        self._loaded: set[str] = set()
        self._used: set[str] = set()
        self._counted: set[int] = set()
        self._pieces: list[str] = []
        self._taken: list[Definition] = []
        for root in self.roots:
            self._pieces.append(self._root(root))
        self._follow()

    def _root(self, name: str) -> str:
        parts = name.split(".")
        for count in (
            1,
            *range(len(parts), 1, -1),
        ):  # as an attribute of the package, else in the module that it names
            node, rest = self.tree.resolve(".".join(parts[:count]), tuple(parts[count:]))
            if node and not rest:
                return self._number(node)
        raise ValueError(f"no definition is called {name!r} below {self.tree.root}")

    def _follow(self) -> None:
        """Reach what is named until nothing new is, then what runs on import and matters, and again."""
        while True:
            while self._queue:
                self._visit(self._queue.popleft())
            effects = sorted(self._new_effects(), key=lambda one: one.text(lambda ref: "?"))
            if not effects:
                return
            for effect in effects:
                self._counted.add(id(effect))
                self._take(effect)

    def _visit(self, node: Node) -> None:
        name, definition = node
        module = self.tree.module(name)
        if module is None:
            return
        self._load(name)
        self._used.add(name)
        if definition:
            self._pieces.append(f"#{self.numbers[node]}=")
            self._take(module.definitions[definition])
            return
        for one in sorted(module.definitions):
            self._number((name, one))
        for one in sorted(self.tree.exports(name)):
            self._reference(name, (one,))

    def _take(self, definition: Definition) -> None:
        """The text of a definition with numbers for what it uses, which is reached thereby."""
        for name in definition.loads:
            self._load(name)
        self._pieces.append(definition.text(lambda ref: self._reference(ref.module, ref.attributes)))
        self._taken.append(definition)

    def _reference(self, module: str, attributes: tuple[str, ...]) -> str:
        node, rest = self.tree.resolve(module, attributes)
        if node is None:
            return ".".join((module, *attributes))
        return ".".join((self._number(node), *rest))

    def _named(self, ref: Ref) -> str:
        node, rest = self.tree.resolve(ref.module, ref.attributes)
        return ".".join((*(node or (ref.module, *ref.attributes)), *rest))

    def _number(self, node: Node) -> str:
        if self.tree.is_opaque(".".join(node)):
            return "#opaque"
        if node not in self.numbers:
            self.numbers[node] = len(self.numbers)
            self._queue.append(node)
        return f"#{self.numbers[node]}"

    def _load(self, name: str) -> None:
        """Import a module: the packages around it first, then what it imports itself."""
        pending = [name]
        while pending:
            one = pending.pop()
            if one in self._loaded or self.tree.is_opaque(one):
                continue
            self._loaded.add(one)
            parts = one.split(".")
            pending += [".".join(parts[:count]) for count in range(1, len(parts))]
            module = self.tree.module(one)
            if module is not None:
                pending += [load for load in module.loads if self.tree.module(load) is not None]

    def _new_effects(self) -> Iterator[Definition]:
        for name in sorted(self._loaded):
            module = self.tree.module(name)
            for effect in module.effects if module else ():
                if id(effect) not in self._counted and not is_for_files(effect) and self._matters(effect):
                    yield effect

    def _matters(self, effect: Definition) -> bool:
        """Whether something is used of a module that a statement names, or of its own; for a definition its decorators
        count."""
        refs = effect.decorators or effect.refs
        if effect.module in self.tree.packages and not any(self._home(ref) for ref in refs):
            return True  # settings of the process or of another library, made for all of a package, which was loaded
        if any(self._named(ref) in self.tree.registrars for ref in refs):
            return not effect.decorators and effect.module in self._used
        named = {self._home(ref) for ref in refs}
        return bool(self._used & (named if effect.decorators else named | {effect.module}))

    def _home(self, ref: Ref) -> str:
        node, _ = self.tree.resolve(ref.module, ref.attributes)
        return node[0] if node else ""

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all of it, in hexadecimal."""
        return hashlib.sha256("\n".join(self._pieces).encode()).hexdigest()

    @cached_property
    def modules(self) -> dict[str, str]:
        """For each module the first digits of a hash of what is reached of it, to say what changed between two closures."""
        texts: dict[str, list[str]] = {}
        for definition in self._taken:
            texts.setdefault(definition.module, []).append(definition.text(self._named))
        return {
            name: hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:8]
            for name, found in sorted(texts.items())
        }


def is_for_files(effect: Definition) -> bool:
    """Whether a statement only says what saved files may hold."""
    return any((ref.module, *ref.attributes) == SAFE_GLOBALS for ref in effect.refs)


__all__ = ["Closure", "SourceTree"]
