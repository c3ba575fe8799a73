"""What is known of one source file: its definitions, and what it runs, imports and loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ref:
    """A name from outside of a definition: attributes of a module, by its dotted name."""

    module: str
    attributes: tuple[str, ...] = ()


@dataclass
class Definition:
    """The text of one top-level definition in pieces, and the modules that it imports when it runs.

    decorators: what its decorators are; the module itself for torch's table of operators. Other statements have none.
    """

    module: str
    pieces: list[str | Ref] = field(default_factory=list)
    loads: set[str] = field(default_factory=set)
    decorators: list[Ref] = field(default_factory=list)

    @property
    def refs(self) -> list[Ref]:
        """What it uses, in order."""
        return [piece for piece in self.pieces if isinstance(piece, Ref)]

    def text(self, name: Callable[[Ref], str]) -> str:
        """The text, with what `name` says for each use."""
        return "".join(piece if isinstance(piece, str) else f"<{name(piece)}>" for piece in self.pieces)


@dataclass
class FileDefinitions:
    """What a file defines, runs, imports and loads."""

    definitions: dict[str, Definition] = field(default_factory=dict)
    effects: list[Definition] = field(default_factory=list)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: What an imported name means otherwise, where several imports bind it.
    alternatives: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    loads: frozenset[str] = frozenset()
