"""config_groups of compressed-tensors: which description is that of a module, checked as data from elsewhere.

The fields and their meaning are those of compressed-tensors 0.20 (quantization/quant_args.py, quant_config.py), and a module's
group is found as utils/match.py finds it: a target that is its name, then one that is "re:" and an expression, then one that
names a class. Files know no classes, so a target that is no module's name and no expression is taken for the class of every
module that has quantized tensors. Expressions are followed by `ao_lab.checkpoint.io.patterns`, in bounded time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ao_lab.checkpoint.io.patterns import compiled
from ao_lab.checkpoint.io.plain_values import check_value
from ao_lab.checkpoint.io.strict_json import shown

EXPRESSION = "re:"
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")
#: Fields that decide what values mean, with their types; observers and how groups were ordered while calibrating do not.
ARGUMENTS: dict[str, Any] = {
    "num_bits": int, "type": str, "symmetric": bool, "group_size": int | None, "strategy": str | None,
}  # fmt: skip
#: Groups of a file at most.
MOST_GROUPS = 1000
#: Names of modules of a group at most.
MOST_TARGETS = 200_000
#: Rows or columns of a block at most.
LONGEST_AXIS = 2**31


@dataclass(frozen=True)
class Arguments:
    """QuantizationArgs of a weight."""

    bits: int
    #: "int" or "float".
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True)
class Group:
    """One group: the modules it is for, and how their weights and inputs are stored."""

    name: str
    targets: tuple[str, ...]
    format: str
    weights: Arguments
    #: QuantizationArgs of inputs as the file has them; None: not quantized.
    inputs: Mapping[str, Any] | None


def groups_of(given: Mapping[str, Any], where: str) -> tuple[Group, ...]:
    """The checked groups of a quantization_config; ValueError that names the group and the rule."""
    found = given.get("config_groups")
    if not isinstance(found, dict) or not found or len(found) > MOST_GROUPS:
        raise ValueError(
            f"{where} describes its weights in config_groups, got {shown(found)}; fetch it again"
        )
    result = [_group(name, group, given.get("format"), where) for name, group in found.items()]
    return tuple(group for group in result if group is not None)


def _group(name: str, given: Any, fmt: Any, where: str) -> Group | None:
    """One group; None where it is not about weights (attention, for instance)."""
    place = f"{where}: group {shown(name)}"
    if not isinstance(given, dict):
        raise ValueError(
            f"{place} is an object with targets and weights, got {shown(given)}; names of presets are not read"
        )
    targets = names_in(given.get("targets"), f"{place}: targets")
    if given.get("output_activations") is not None:
        raise ValueError(f"{place} quantizes outputs, which ao_lab does not; load it with transformers")
    if given.get("weights") is None:
        return None
    fmt = given.get("format") or fmt
    if not isinstance(fmt, str):
        raise ValueError(f"{place}: format is the name of one, got {shown(fmt)}; fetch it again")
    inputs = given.get("input_activations")
    if inputs is not None and not isinstance(inputs, dict):
        raise ValueError(f"{place}: input_activations is an object or null, got {shown(inputs)}")
    return Group(name, targets, fmt, arguments(given["weights"], f"{place}: weights"), inputs)


def arguments(given: Any, place: str) -> Arguments:
    """QuantizationArgs of a weight, with the library's defaults; ValueError for what contradicts itself."""
    if not isinstance(given, dict):
        raise ValueError(f"{place} is an object, got {shown(given)}; fetch it again")
    known = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "strategy": None}
    values = {name: given.get(name, default) for name, default in known.items()}
    for name, hint in ARGUMENTS.items():
        check_value(values[name], hint, f"{place}: {name}")
    size, block = values["group_size"], _block(given.get("block_structure"), place)
    strategy = values["strategy"] or ("tensor" if size is None else "channel" if size == -1 else "group")
    grouped = strategy in ("group", "tensor_group")
    if strategy not in STRATEGIES or values["type"] not in ("int", "float"):
        raise ValueError(
            f"{place}: strategy is one of {', '.join(STRATEGIES)}, type int or float; got {shown(strategy)}, "
            f"{shown(values['type'])}"
        )
    if grouped is (size is None or size < 1) or (strategy == "block") is (block is None):
        raise ValueError(
            f"{place}: groups have a group_size, blocks a block_structure, and others neither; got strategy {strategy}, "
            f"group_size {size}, block_structure {block}"
        )
    if given.get("dynamic") not in (False, None):
        raise ValueError(f"{place}: a weight's scales are static, got dynamic {shown(given['dynamic'])}")
    return Arguments(
        values["num_bits"], values["type"], values["symmetric"], strategy, size if grouped else None, block
    )


def _block(given: Any, place: str) -> tuple[int, int] | None:
    """Rows and columns of a block, also as the older text "128x128"."""
    if given is None:
        return None
    sizes: Any = given.split("x") if isinstance(given, str) and len(given) < 20 else given
    sizes = sizes if isinstance(sizes, list) else []
    sizes = [int(n) if isinstance(n, str) and n.isdecimal() else n for n in sizes]
    if len(sizes) != 2 or not all(type(n) is int and 0 < n <= LONGEST_AXIS for n in sizes):
        raise ValueError(f"{place}: block_structure is [rows, columns], got {shown(given)}; fetch it again")
    return sizes[0], sizes[1]


def names_in(given: Any, place: str) -> tuple[str, ...]:
    """A list of names and expressions; None is an empty one."""
    given = [] if given is None else given
    if not isinstance(given, list) or len(given) > MOST_TARGETS or not all(isinstance(n, str) for n in given):
        raise ValueError(f"{place} is a list of names, got {shown(given)}; fetch it again")
    return tuple(given)


class Modules:
    """Which groups a module may be of."""

    def __init__(self, groups: tuple[Group, ...], ignore: tuple[str, ...], modules: Collection[str]) -> None:
        self.named: dict[str, Group] = {}
        self.expressions: dict[str, Group] = {}
        self.classes: list[Group] = []
        names = set(modules)
        for group in groups:
            for target in group.targets:
                if target.startswith(EXPRESSION):
                    self.expressions[target] = group
                elif target in names or not target.isidentifier():
                    self.named[target] = group
                elif group not in self.classes:
                    self.classes.append(group)
        self.ignored = {name for name in ignore if not name.startswith(EXPRESSION)}
        self.left_out = [_expression(name) for name in ignore if name.startswith(EXPRESSION)]

    def groups_for(self, path: str) -> list[Group]:
        """The groups that may be a module's, one where a name or an expression decides; none for an ignored module."""
        if path in self.ignored or any(pattern.matches(path) for pattern in self.left_out):
            return []
        if path in self.named:
            return [self.named[path]]
        for target in sorted(self.expressions):
            if _expression(target).matches(path):
                return [self.expressions[target]]
        return self.classes


def _expression(target: str) -> Any:
    return compiled(target.removeprefix(EXPRESSION))


__all__ = ["Arguments", "Group", "Modules", "arguments", "groups_of", "names_in"]
