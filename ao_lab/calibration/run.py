"""The job of `quantize_(..., calibration=, methods=)`: block after block, each by inputs that the quantized ones before make.

First everything is checked and the model runs once as it is (`ao_lab.transforms.walk.captured`; where blocks come to a device
one at a time, all batches through one before the next, `ao_lab.transforms.by_block`). Then each block's data run
with a watch on its layers, which keeps moments of their inputs (`ao_lab.calibration.tokens`), shared by layers that read one
tensor; its weights are quantized stack by stack (`ao_lab.calibration.layers`) and put in place, and the data run once more,
for the next block. One block's moments are in memory at a time.

Weights outside of the blocks (a head, embeddings) are rounded to nearest as without calibration.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.autoround import Learned, Learning
from ao_lab.calibration.cache_scales import NO_ATTENTION, scales_of_block
from ao_lab.calibration.checks import check_targets, check_tokens, check_usable, useless_reason
from ao_lab.calibration.equivalence import Pair
from ao_lab.calibration.experts import (
    ExpertTarget,
    ExpertWatch,
    Sources,
    expert_of,
    is_batched,
    joined,
    left_reason,
    lend,
    lists_of_experts,
    notes_of,
    owners,
    reached_by_siblings,
    siblings,
)
from ao_lab.calibration.groups import Stack, Target, in_one_block, names_of, path_inside, stacks
from ao_lab.calibration.layers import Calibrated, Part, Placing, Work, quantized_either_way
from ao_lab.calibration.methods import (
    GPTQ,
    AutoRound,
    Clip,
    LowRank,
    Method,
    Rotate,
    StaticKV,
    of_kind,
    ordered,
)
from ao_lab.calibration.offline import rotate_residual
from ao_lab.calibration.ranks import Ranks
from ao_lab.calibration.residence import Residence, moved_batches, needs_residence
from ao_lab.calibration.result import LayerResult, remember
from ao_lab.calibration.resume import Finished, key_of
from ao_lab.calibration.smoothing import MORE, Smoothing, smoothing_method
from ao_lab.calibration.statistics import InputScales, Statistics
from ao_lab.calibration.tokens import HELD_OUT, SplitMoments, Tokens
from ao_lab.config.base import Observer
from ao_lab.kv_cache.static_scales import CacheScales, remember_scales
from ao_lab.tensor.chunked import outer_scale
from ao_lab.transforms.data import calibrating, holds_batches, observe
from ao_lab.transforms.layers import shorten, tied_layers
from ao_lab.transforms.plan import Device, Progress
from ao_lab.transforms.walk import (
    Block,
    Capture,
    block_of,
    captured,
    check_reached,
    find_blocks,
    is_inside,
    walk,
)
from reference import Scales
from reference.arrays.namespace import choice

LOG = logging.getLogger(__name__)

#: What `progress` is told first, and with each batch: all data run through the model as it is.
FIRST_PASS = "inputs of the blocks"
#: Whose outputs a block sees: those of the quantized blocks before it, or of what these were.
PREFIXES = ("quantized", "float")
#: What is said of a layer whose inputs do not fit the tokens of their batches.
UNMATCHED = ("padding and held-out tokens are among its inputs, which are not of the batch's tokens",)


@dataclass(frozen=True)
class Request:
    """What a caller asks for beyond a configuration."""

    methods: tuple[Method, ...]
    batches: Iterable[Any] | None = None
    blocks: str | None = None
    offload: bool = False
    #: The folder of finished blocks, or None.
    resume: str | os.PathLike[str] | None = None
    #: Whose outputs a block's inputs are: of `PREFIXES`.
    prefix: str = "quantized"


def request_of(
    calibration: Iterable[Any] | None, methods: Any, blocks: str | None, offload: bool, observing: bool = False,
    resume: str | os.PathLike[str] | None = None, prefix: str = "quantized",
) -> Request | None:  # fmt: skip
    """The request of these arguments of `quantize_`; None where they ask for nothing.

    observing: whether the configuration finds static scales. ValueError or TypeError where they do not fit each other.
    """
    records, prefix = ordered(methods), choice(prefix, PREFIXES, "prefix")
    reading = [method.name for method in records if method.calibrates]
    if reading and calibration is None:
        raise ValueError(
            f"methods: {' and '.join(reading)} need{'s' * (len(reading) == 1)} calibration data; give calibration=, an "
            f"iterable of batches, or drop the method"
        )
    if calibration is not None and not reading and not observing:
        raise ValueError(
            "calibration is used by methods only, and none is given; give methods=(Clip(), GPTQ()), for instance, or drop "
            "calibration"
        )
    how = blocks is not None or offload or resume is not None or prefix != PREFIXES[0]
    if calibration is None and how:
        raise ValueError(
            "blocks, offload, resume and prefix are options of calibration; give calibration too"
        )
    asked = records or calibration is not None
    return Request(records, calibration, blocks, offload, resume, prefix) if asked else None


@dataclass
class Job:
    """One call, once its plan is made."""

    model: nn.Module
    request: Request
    targets: Sequence[Target]
    #: The outer scale that a weight shares, or None.
    outer: Callable[[Any], torch.Tensor | None]
    progress: Progress | None = None
    #: What finds static scales of inputs, by full names of weights.
    observers: Mapping[str, Observer] = field(default_factory=dict)
    #: How many weights the call changes in all.
    total: int = 0
    #: Results by first full names of weights that are quantized.
    done: dict[str, LayerResult] = field(default_factory=dict)
    #: Pairs of layers of the block before.
    pairs: list[Pair] = field(default_factory=list)
    #: Blocks that were finished before, or by an earlier call.
    finished: Finished | None = None
    #: A weight that is being put in place.
    placing: Placing | None = None
    #: Where blocks run, one at a time; None: where the model is.
    device: Device = None
    residence: Residence | None = None
    #: The processes that calibrate together, or None.
    ranks: Ranks | None = None
    #: All batches again, where the first one was looked at before; and what is to be said of every weight.
    batches: Iterable[Any] | None = None
    notes: tuple[str, ...] = ()

    def run(self) -> None:
        """Quantize all weights; what is outside of the blocks stays for the caller."""
        if self.request.batches is None:
            check_targets(self.targets, self.request.methods)
            for target in self.targets:
                parts = {target.name: Part(_input_scales(target))}
                if is_batched(target):
                    self.put(target, self.experts_of(target, None, parts[target.name]))
                    continue
                for one, calibrated in self.quantized(Stack([target]), None, parts):
                    self.put(one, calibrated)
            return
        self.ranks = Ranks.of(self.request.batches)
        if self.ranks is not None and self.ranks.size > 1 and self.learning is not None:
            raise ValueError(
                "AutoRound learns from the batches of one process; leave it out of a call of several ranks. quantize_ changed "
                "nothing"
            )
        blocks = find_blocks(self.model, self.request.blocks)
        mine = [t for t in self.targets if in_one_block(t, blocks)]
        resident = needs_residence(self.model, self.device)
        check_targets(mine, self.request.methods, self.device)
        self.check_observers(mine)
        if resident and self.device is not None:
            self.residence = Residence(self.model, blocks, torch.device(self.device))
        if self.rotation is not None:
            self.rotate(mine, blocks, self.rotation)
        with self.running():
            self.walk(mine, blocks)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Data may run through the model inside, its blocks where they run."""
        with calibrating(self.model), self.residence.placed() if self.residence else nullcontext():
            yield

    def rotate(self, mine: list[Target], blocks: dict[str, nn.Module], method: Rotate) -> None:
        """Rotate the residual stream, once all batches have run and the first one has proved that the function stays."""
        heads = tied_layers(self.model)
        tied = [name for t in self.targets for name in t.layers if name.removesuffix(".weight") in heads]
        if tied and method.kind == "offline":
            raise ValueError(
                f"{shorten(tied)} has the weight of an embedding, from which Rotate(kind='offline') parts it; quantize_ "
                f"changed nothing. Exclude it with filter_fn, or untie the model first"
            )
        batches = self.request.batches
        if batches is not None and holds_batches(batches):
            self.batches = list(batches)
        with self.running():
            check_tokens(Tokens.of(self.captured(mine, blocks), self.ranks))
        if self.batches is not None:
            with calibrating(self.model):
                rotation = rotate_residual(
                    self.model,
                    blocks,
                    next(iter(self.batches)),
                    method.size,
                    self.device,
                    method.heads,
                    stream=method.kind == "offline",
                )
            self.notes = (str(rotation),)

    @property
    def rotation(self) -> Rotate | None:
        """The method that rotates the residual stream."""
        method: Rotate | None = of_kind(self.request.methods, Rotate)
        return method if method is not None and method.offline else None

    def walk(self, mine: list[Target], blocks: dict[str, nn.Module]) -> None:
        """Block after block."""
        self.say(FIRST_PASS)
        capture = self.captured(mine, blocks)
        tokens = Tokens.of(capture, self.ranks)
        check_tokens(tokens)
        if self.request.resume is not None:
            key = key_of(
                mine, (*self.request.methods, self.request.prefix), capture, self.ranks, self.observers
            )
            self.finished = Finished.of(self.request.resume, key)
            if self.residence is not None:
                self.residence.stored = self.finished.mapped
        visit = partial(self.visit, targets=mine, tokens=tokens)
        changed = self.request.prefix == PREFIXES[0]
        walk(capture, visit, originals=self.learning is not None, changed=changed)

    def captured(self, targets: list[Target], blocks: dict[str, nn.Module]) -> Capture:
        """What the walk needs; ValueError where data do not reach a layer."""
        flat = [t for t in targets if not is_batched(t)]
        layers = [(t.name, module) for t in flat for module in t.layers.values()]
        batches: Any = self.batches if self.batches is not None else self.request.batches
        if holds_batches(batches):
            batches = self.counted(batches)
        if self.residence is not None:
            batches = moved_batches(batches, self.residence.device)
        with nullcontext() if self.ranks is None else self.ranks.together():
            capture = captured(
                self.model, batches, blocks, offload=self.request.offload, layers=layers, make=self.captures(targets)
            )  # fmt: skip
        if self.ranks is not None:
            self.ranks.check_batches(len(capture.calls))
            capture.reached = set().union(*self.ranks.gathered(capture.reached))
        lent = reached_by_siblings(names_of(flat), lists_of_experts(self.model, blocks), capture.reached)
        # Nothing lends a static scale of inputs.
        lent -= set(self.observers)
        check_reached(capture, [name for name in names_of(flat) if name not in lent], "quantize_")
        return capture

    def captures(self, targets: list[Target]) -> Callable[..., Capture]:
        """What makes a capture: where blocks come one at a time, with outputs that wait in the memory of later sums x x^T."""
        if self.residence is None:
            return Capture
        widest = max((t.parameter.shape[t.axis] for t in targets), default=0)
        sums = (self.reading + self.factorizing) * widest**2 * torch.float64.itemsize
        return self.residence.captures(sums, lambda word: self.say(f"{FIRST_PASS}: {word}"))

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, each of which `progress` is told before it runs."""
        count = f" of {len(batches)}" if isinstance(batches, Sequence) else ""
        for number, batch in enumerate(batches, 1):
            self.say(f"{FIRST_PASS}, batch {number}{count}")
            yield batch

    def visit(self, block: Block, targets: list[Target], tokens: Tokens) -> None:
        """Quantize one block by the inputs that its layers have now, or take it from an earlier call."""
        mine = [t for t in targets if block_of(t.name, [block.name]) is not None]
        if not mine:
            # A cache holds the keys and values of blocks that stay dense too.
            self.find_cache_scales(block, mine, tokens)
            return
        if self.residence is not None:
            self.residence.visit(block.name)
        if self.restored(block, mine):
            return
        self.say(f"{block.name}: statistics of its inputs")
        self.quantize_block(block, mine, tokens)
        scales = self.find_cache_scales(block, mine, tokens)
        if self.finished is not None:
            results = {t.name: self.done[t.name] for t in mine}
            if self.ranks is None or self.ranks.rank == 0:
                self.finished.save(block.index, block.module, results, self.pairs, scales)
            if self.ranks is not None:
                self.ranks.wait()

    def find_cache_scales(self, block: Block, mine: list[Target], tokens: Tokens) -> dict[str, CacheScales]:
        """Static scales of keys and values of a block whose weights are quantized, where they are asked for."""
        method: StaticKV | None = of_kind(self.request.methods, StaticKV)
        if method is None:
            return {}
        scales = scales_of_block(self.model, block, tokens, method.element, method.per, self.ranks)
        remember_scales(self.model, scales)
        texts = {name: str(one) for name, one in scales.items()} or {block.name: NO_ATTENTION}
        for name, one in texts.items() if mine else ():
            # With the first weight of the attention, or of the block where those of the attention stay as they are.
            target = next((t for t in mine if is_inside(t.name, [name])), mine[0])
            result = replace(self.done[target.name], notes=(*self.done[target.name].notes, one))
            self.done[target.name] = result
            remember(self.model, dict.fromkeys(target.places, result))
        return scales

    def restored(self, block: Block, targets: list[Target]) -> bool:
        """Whether an earlier call has finished a block, which is in place now."""
        stored = None if self.finished is None else self.finished.restore(block.index, block.module, targets)
        if stored is None:
            return False
        results, self.pairs, scales = stored
        remember_scales(self.model, scales)
        for target in targets:
            self.tell(target, results[target.name])
        return True

    def quantize_block(self, block: Block, mine: list[Target], tokens: Tokens) -> None:
        """Quantize one block."""
        batched = [t for t in mine if is_batched(t)]
        flat = [t for t in mine if not is_batched(t)]
        inputs, experts = self.inputs_of(block, flat, batched, tokens) if self.reading else ({}, {})
        common = (
            self.notes
            if self.request.prefix == PREFIXES[0]
            else (*self.notes, "by inputs of the float model")
        )
        unmatched = [name for name, one in inputs.items() if one.unmatched and useless_reason(one) is None]
        lent = notes_of(inputs)
        parts = {
            t.name: Part(
                _input_scales(t),
                notes=(*common, *lent.get(t.name, ()), *(UNMATCHED if t.name in unmatched else ())),
            )
            for t in mine
        }
        method = smoothing_method(self.request.methods)
        if method is not None:
            self.smooth(block, flat, inputs, parts, method)
        self.find_input_scales(block, flat, parts)
        learned = []
        for target in batched:
            self.put(target, self.experts_of(target, experts.pop(target.name, None), parts[target.name]))
        for stack in stacks(flat, {name: id(one) for name, one in inputs.items()}):
            # Let go of with the last of its stacks: those of a wide layer are gigabytes.
            moments = inputs.get(stack.targets[0].name)
            for target in stack.targets:
                inputs.pop(target.name, None)
            spent = not any(one is moments for one in inputs.values())
            last = spent and self.learning is None
            learning = self.learning is not None and useless_reason(moments) is None
            for target, calibrated in self.quantized(stack, moments, parts, last=last, spent=spent):
                if moments is None or not learning:
                    self.put(target, calibrated)
                else:
                    learned.append(Learned(target, calibrated, parts[target.name], moments.for_judging()))
            if learned and moments is not None and spent and inputs and self.factorizing:
                # They wait for the end of learning, and a matrix of the next ones' size is short of memory.
                moments.judge_on("cpu")
            moments = None
            stack.dense.clear()
        if learned and self.learning is not None:
            results = Learning(block, tokens, self.learning, learned).run()
            for one, calibrated in zip(learned, results, strict=True):
                self.put(one.target, calibrated)

    def inputs_of(
        self,
        block: Block,
        targets: list[Target],
        batched: list[Target],
        tokens: Tokens,
        products: bool = False,
    ) -> tuple[dict[str, SplitMoments], dict[str, list[SplitMoments]]]:
        """Moments of the inputs of each weight's layers, one for those that read the same tensor; and of batched experts.

        products: whether to have sums of x x^T even of tokens that no method reads them of.
        """
        sampling = any(target.recipe.activation is not None for target in [*targets, *batched])
        lists = lists_of_experts(self.model, [block.name])
        products = products or self.needs_products(tokens) or bool(batched or lists)
        statistics = Statistics(partial(SplitMoments, None, tokens, sampling, products=products))
        watched = [(t.name, module, statistics) for t in targets for module in t.layers.values()]
        around = [
            *owners(self.model, block.name, lists).items(),
            *((t.name, m) for t in batched for m in t.layers.values()),
        ]
        sources = Sources(tokens)
        watch = ExpertWatch(batched, tokens, sampling)
        with watch if batched else nullcontext():
            observe([*((name, m, sources) for name, m in dict(around).items()), *watched], block.run)
        statistics.forget_inputs()
        tokens.source = tokens.routed = None
        moments: dict[str, Any] = {name: shared.statistic for name, shared in statistics.layers.items()}
        if any(one.lacks_products() for one in moments.values()):
            return self.inputs_of(block, targets, batched, tokens, products=True)
        if self.ranks is not None:
            self.ranks.collect(moments, partial(SplitMoments, None, None, sampling))
            for group in watch.moments.values():
                self.ranks.collect_all(group)
        unreached: dict[Any, SplitMoments] = {}
        for names in siblings(names_of(targets), lists):
            known = {id(one): one for name in names if (one := moments.get(name)) is not None}
            missing = [name for name in names if name not in moments]
            if not known or not (missing or any(one.routed for one in known.values())):
                continue
            # Layers of an expert whose siblings read one tensor have one moment too, so that each is lent to once.
            read = frozenset(known)
            for name in missing:
                key = read, expert_of(name, lists)
                moments[name] = unreached.setdefault(key, SplitMoments(None, None, sampling, routed=True))
                known[id(moments[name])] = moments[name]
            lend([one for one in known.values() if not one.train.borrowed])
        check_usable(moments)
        return moments, watch.finished()

    def experts_of(self, target: Target, inputs: list[SplitMoments] | None, part: Part) -> Calibrated:
        """A weight of batched experts, each quantized as a matrix."""
        outer = self.outer(target)
        if outer is None and target.recipe.weight.outer is not None:
            outer = outer_scale(target.parameter.detach(), target.recipe.weight)
        experts, notes = [], list(part.notes)
        for expert in range(len(target.parameter)):
            one: Any = ExpertTarget(target, expert)
            mine = replace(part, outer=outer, notes=())
            moments = None if inputs is None else inputs[expert]
            experts += [
                result for _, result in self.quantized(Stack([one]), moments, {one.name: mine}, False)
            ]
            if inputs is not None:
                inputs[expert] = SplitMoments()
        if any(isinstance(one, (Rotate, AutoRound)) for one in self.request.methods):
            notes.append("experts of one weight are neither rotated nor learned with their block")
        if of_kind(self.request.methods, LowRank) is not None:
            notes.append(
                "no residual: it is for the weight of one nn.Linear, and this one has several experts"
            )
        return joined(target, experts, notes)

    def smooth(
        self, block: Block, targets: list[Target], inputs: dict[str, SplitMoments], parts: dict[str, Part], method: Method
    ) -> None:  # fmt: skip
        """Scale the pairs of a block."""
        inside = {
            t.name: path_inside(t, block) for t in targets if useless_reason(inputs.get(t.name)) is None
        }
        here = {path: t for t in targets if (path := inside.get(t.name)) is not None}
        smoothing = Smoothing(
            block, here,
            {path: inputs[t.name] for path, t in here.items()},
            {path: parts[t.name] for path, t in here.items()}, method,
            MORE if any(isinstance(one, (Clip, GPTQ)) for one in self.request.methods) else 1.0,
        )  # fmt: skip
        pairs = smoothing.find(self.pairs)
        self.pairs = pairs if self.ranks is None else self.ranks.gathered(pairs)[0]
        smoothing.run(self.pairs)
        inputs.update({t.name: smoothing.inputs[path] for path, t in here.items()})

    def check_observers(self, inside: Sequence[Target]) -> None:
        """ValueError for static scales of layers that no block's data reach, or that something unknown finds."""
        names = {target.name for target in inside}
        for target in self.targets:
            observer = self.observers.get(target.name)
            if observer is not None and (target.name not in names or not isinstance(observer, InputScales)):
                why = (
                    f"{type(observer).__name__} finds them"
                    if target.name in names
                    else "it is outside of the blocks"
                )
                raise ValueError(
                    f"{target.name}: calibration finds static scales only for layers in blocks, and {why}; quantize_ changed "
                    f"nothing. Exclude it with filter_fn, or give forward_loop= in place of calibration="
                )

    def find_input_scales(self, block: Block, targets: list[Target], parts: dict[str, Part]) -> None:
        """Run data for those that need static scales, through the block as it is now."""
        watched = [(t, self.observers[t.name]) for t in targets if t.name in self.observers]
        if not watched:
            return
        observe([(t.name, m, observer) for t, observer in watched for m in t.layers.values()], block.run)
        for target, observer in watched:
            if self.ranks is not None and isinstance(observer, InputScales):
                self.ranks.merge(observer.statistic)
            if (reason := observer.unsupported_reason()) is not None:
                raise ValueError(f"calibration: {reason} by {target.name}; exclude it with filter_fn")
            if isinstance(observer, InputScales):
                parts[target.name].input_scales = observer.scales()

    def needs_products(self, tokens: Tokens) -> bool:
        """Whether sums of x x^T are read of tokens that are not held out: by methods, other ranks, or to judge."""
        held = any(bool((one == HELD_OUT).any()) for one in tokens.roles)
        return not held or self.ranks is not None or self.factorizing

    @property
    def reading(self) -> bool:
        """Whether a method reads inputs."""
        return any(method.calibrates for method in self.request.methods)

    @property
    def factorizing(self) -> bool:
        """Whether a method reads all products of inputs, as GPTQ does."""
        return any(method.needs_hessian for method in self.request.methods)

    @property
    def learning(self) -> AutoRound | None:
        """The method that learns a block's weights together."""
        method: AutoRound | None = of_kind(self.request.methods, AutoRound)
        return method

    def quantized(
        self,
        stack: Stack,
        inputs: SplitMoments | None,
        parts: dict[str, Part],
        whole: bool = True,
        last: bool = False,
        spent: bool = False,
    ) -> list[tuple[Target, Calibrated]]:
        """The weights of a stack, quantized. whole: whether they are whole parameters, not experts of one. last: whether nobody
        needs the inputs afterwards; spent: whether no other stack needs the products that methods read.
        """
        mine = [parts[target.name] for target in stack.targets]
        for target, part in zip(stack.targets, mine, strict=True):
            part.outer = self.outer(target) if whole else part.outer
        reason = useless_reason(inputs) if self.reading else None
        if reason is not None:
            for part in mine:
                part.notes += (reason,)
        try:
            inputs, methods = (inputs, self.request.methods) if reason is None else (None, ())
            rotate = None if self.rotation is not None or not whole else of_kind(methods, Rotate)
            results = quantized_either_way(Work(stack, inputs, mine, methods, last=last, spent=spent), rotate)
        except ValueError as error:
            error.add_note(f"this is of {shorten(names_of(stack.targets))}")
            raise
        return list(zip(stack.targets, results, strict=True))

    def put(self, target: Target, calibrated: Calibrated) -> None:
        """A quantized weight in every place of the dense one, its bias, and its residual."""
        self.placing = Placing.of(target, calibrated)
        self.placing.place()
        self.placing = None
        self.tell(target, calibrated.result)

    def tell(self, target: Target, result: LayerResult) -> None:
        """Note what was won for a weight that is quantized now."""
        self.done[target.name] = result
        LOG.info("%s, %d of %d: %s", target.name, len(self.done), self.total, result)
        remember(self.model, dict.fromkeys(target.places, result))
        self.say(target.name)

    def say(self, word: str) -> None:
        """Tell `progress` what is under way or done, and how many weights are quantized."""
        if self.progress is not None:
            self.progress(word, len(self.done), self.total)

    def reason(self, target: Target) -> str:
        """Why a weight was left to be rounded, as the end of a sentence."""
        if is_batched(target) and (left := left_reason(target)) is not None:
            why = left
        elif target.layers:
            why = "it is outside of the blocks, or shared between them"
        else:
            why = "it is a lookup table, not a matmul weight"
        return f"; rounded to nearest, {why}"

    def stopped(self) -> str:
        """What is to be said at an error; a weight that was placed somewhere is placed everywhere."""
        if self.placing is not None:
            self.placing.place()
        rest = "the others are rotated, the same function" if self.notes else "the others are as they were"
        return (
            f"quantize_ stopped with {len(self.done)} of {self.total} weights quantized; {rest}. "
            f"ao_lab.explain(model) lists both"
        )


def _input_scales(target: Target) -> Scales | None:
    return target.config.input_scales() if target.recipe.activation is not None else None
