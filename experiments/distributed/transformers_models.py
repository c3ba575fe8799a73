"""Models of transformers that it shards itself: quantized while they are read, and folders of ours; what they generate, and
caches whose heads are split. It shards by `tp_plan="auto"`, experts over ranks, and by FSDP2.

One process has the same bits where its layers multiply the slices that ranks have and add them up in their order: `in_slices`.
With more than two ranks sums have another order, and logits are compared within a bound.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.distributed.cases import BITS, ORDER, REFUSED, SLICES, Case, Rank, Tally
from experiments.distributed.inference import laid_out
from experiments.distributed.training import plain_

TOKENS = 4
OURS, READ, DENSE = "folder of ours", "quantized while read", "dense folder"
#: Words of the error of a model that is sharded already.
WAY_OUT = "Quantize the model first, then shard it"
#: How transformers cuts layers, by the words of its plans.
COLUMNS, ROWS = "colwise", "rowwise"
SCHEMES = ("int8_rowwise", "int4_g32_asymmetric", "fp8_rowwise", "mxfp4", "nvfp4")


def configuration(kind: str) -> Any:
    """A small model's."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    more = {"MixtralForCausalLM": {"num_local_experts": 4}}.get(kind, {})
    return getattr(transformers, kind).config_class(**sizes, **more)


def written(rank: Rank, kind: str) -> Path:
    """The folder of a random dense model, written by the first rank."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    folder = rank.folder / "dense"
    if rank.first:
        torch.manual_seed(0)
        model = getattr(transformers, kind)._from_config(configuration(kind), dtype=rank.dtype)
        model.save_pretrained(folder)
    rank.wait()
    return folder


def read(rank: Rank, kind: str, folder: Path, **given: Any) -> Any:
    """A model from its folder, on this rank's device; sharded where `distributed_config` says so."""
    import transformers

    if "distributed_config" not in given:
        given["device_map"] = {"": str(rank.device)}
    model = getattr(transformers, kind).from_pretrained(folder, dtype=rank.dtype, **given)
    return model.eval().requires_grad_(False)


def sharding(rank: Rank, **sizes: Any) -> Any:
    """transformers' record of how ranks share a model."""
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**sizes)


def tokens(rank: Rank) -> Tensor:
    """A prompt of two lines."""
    return torch.randint(3, 500, (2, 9), generator=torch.Generator().manual_seed(0)).to(rank.device)


class Slices(nn.Module):
    """A layer that multiplies the slices of its weight one after another, as ranks do."""

    def __init__(self, layer: nn.Linear, local: Any, ranks: int, by: str) -> None:
        super().__init__()
        axis = 0 if by == COLUMNS else 1
        weight: Any = layer.weight.detach()
        whole = getattr(weight, "plain", weight)
        found = whole.chunk(ranks, axis)
        self.slices = [laid_out(one, local) if hasattr(local, "meta") else one.contiguous() for one in found]
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        """What ranks make of the layer together."""
        linear = nn.functional.linear
        if self.by == COLUMNS:
            return torch.cat([linear(x, w) for w in self.slices], -1)
        parts = x.chunk(len(self.slices), -1)
        products = [linear(part.contiguous(), w) for part, w in zip(parts, self.slices, strict=True)]
        return sum(products[1:], products[0])


def in_slices(one: Any, many: Any, ranks: int) -> Any:
    """One process's model with the layers that ranks have split as they have split them."""
    shards = dict(many.named_modules())
    for name, module in list(one.named_modules()):
        weight = getattr(shards.get(name), "weight", None)
        place = next((p.dim for p in getattr(weight, "placements", ()) if p.is_shard()), None)
        if isinstance(module, nn.Linear) and place is not None:
            assert weight is not None
            made = Slices(module, weight.to_local(), ranks, COLUMNS if place == 0 else ROWS)
            one.set_submodule(name, made)
    return one


def split_model(rank: Rank, tally: Tally, scheme: str | None, stored: bool) -> None:
    """Weights gathered, logits of a prompt, and generated tokens."""
    kind = "LlamaForCausalLM"
    from ao_lab import HfConfig

    dense = written(rank, kind)
    given = {} if scheme is None else {"quantization_config": HfConfig(scheme)}
    one = read(rank, kind, dense, **given)
    folder = dense
    if stored:
        folder, given = rank.folder / "quantized", {}
        if rank.first:
            one.save_pretrained(folder)
        rank.wait()
    plan = sharding(rank, tp_size=rank.size, tp_plan="auto")
    many = read(rank, kind, folder, distributed_config=plan, **given)
    gathered(tally, one, many)
    ids = tokens(rank)
    sliced = in_slices(one, many, rank.size)
    with torch.no_grad():
        compare_logits(rank, tally, many(ids).logits, sliced(ids).logits)
    options = {
        "max_new_tokens": TOKENS,
        "min_new_tokens": TOKENS,
        "do_sample": False,
        "disable_compile": True,
    }
    if rank.size == 2:
        tally.bits("generated tokens", many.generate(ids, **options), sliced.generate(ids, **options))


def quantized_then(rank: Rank, tally: Tally) -> None:
    """A sharded dense model that is to be quantized then: an error on every rank that says to do it the other way round."""
    import ao_lab

    kind = "LlamaForCausalLM"
    plan = sharding(rank, tp_size=rank.size, tp_plan="auto")
    dense = written(rank, kind)
    many, one = read(rank, kind, dense, distributed_config=plan), read(rank, kind, dense)
    try:
        ao_lab.quantize_(many, ao_lab.SchemeConfig(scheme="int8_rowwise"))
        said = "no error"
    except TypeError as error:
        said = str(error)
    tally.true(f"the error says {said}", WAY_OUT in said)
    gathered(tally, one, many)


def gathered(tally: Tally, one: Any, many: Any) -> None:
    """Every weight of the sharded model, gathered, beside one process's."""
    sharded = 0
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        whole: Any = b.detach()
        sharded += hasattr(whole, "full_tensor")
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        expected: Any = a.detach()
        tally.stored(name, getattr(whole, "plain", whole), getattr(expected, "plain", expected))
    tally.true("no weight is sharded", sharded > 0)


def compare_logits(rank: Rank, tally: Tally, found: Any, expected: Tensor) -> None:
    """Bits of two ranks; of more, as far as another order of sums takes them: the dtype's unit a layer and a rank."""
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    if rank.size == 2:
        tally.bits("logits", found, expected)
        return
    roundings = 4 * rank.size * configuration("LlamaForCausalLM").num_hidden_layers
    tally.near("logits", found, expected, roundings * unit(rank) * float(expected.abs().max()))


def unit(rank: Rank) -> float:
    """What one rounding to nearest changes at most, relative to the value."""
    return torch.finfo(rank.dtype).eps / 2


def experts(rank: Rank, tally: Tally, scheme: str) -> None:
    """Experts over ranks: weights gathered; logits up to the order in which experts' outputs are added."""
    kind = "MixtralForCausalLM"
    from ao_lab import HfConfig

    dense = written(rank, kind)
    config = HfConfig(scheme)
    one = read(rank, kind, dense, quantization_config=config)
    plan = sharding(rank, tp_size=rank.size, ep_size=rank.size)
    many = read(rank, kind, dense, distributed_config=plan, quantization_config=HfConfig(scheme))
    gathered(tally, one, many)
    ids = tokens(rank)
    with torch.no_grad():
        found, expected = many(ids).logits, plain_(one)(ids).logits
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    # Two experts a token and as many sums as ranks in a layer, each with a rounding, which later layers carry on.
    layers = configuration(kind).num_hidden_layers
    bound = 4 * (rank.size + 2) * layers * unit(rank) * float(expected.abs().max())
    tally.near("logits", found, expected, bound)


def fsdp(rank: Rank, tally: Tally, scheme: str) -> None:
    """Sharded by FSDP2 while it is read: the bits of one process."""
    from ao_lab import HfConfig

    kind = "LlamaForCausalLM"
    dense = written(rank, kind)
    one = read(rank, kind, dense, quantization_config=HfConfig(scheme))
    plan = sharding(rank, fsdp_size=rank.size)
    many = read(rank, kind, dense, distributed_config=plan, quantization_config=HfConfig(scheme))
    gathered(tally, one, many)
    ids = tokens(rank)
    with torch.no_grad():
        tally.bits("logits", many(ids).logits, plain_(one)(ids).logits)


def cache(rank: Rank, tally: Tally, recipe: str) -> None:
    """Each rank stores its own key heads: what one process stores of them, and the tokens."""
    from ao_lab import use_kv_cache_
    from ao_lab.install.versions import cache_argument

    kind = "LlamaForCausalLM"
    dense = written(rank, kind)
    many = read(rank, kind, dense, distributed_config=sharding(rank, tp_size=rank.size, tp_plan="auto"))
    one = in_slices(read(rank, kind, dense), many, rank.size)
    options: dict[str, Any] = {
        "max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "disable_compile": True,
    }  # fmt: skip
    made = []
    for model in (one, many):
        use_kv_cache_(model, recipe)
        made.append(model.generate(tokens(rank), return_dict_in_generate=True, **options))
    tally.bits("tokens", made[1].sequences, made[0].sequences)
    argument = cache_argument(many)
    for number, (whole, own) in enumerate(zip(*(getattr(m, argument).layers for m in made), strict=True)):
        for name in ("keys", "values"):
            a, b = (getattr(layer, name).store for layer in (whole, own))
            heads = a.codes.shape[1] // rank.size
            mine = slice(heads * rank.rank, heads * (rank.rank + 1))
            for part in ("codes", "scale", "zero"):
                x, y = getattr(a, part, None), getattr(b, part, None)
                if x is not None and x.dim() > 1:
                    tally.bits(
                        f"{part} of {name}, layer {number}",
                        y.view(torch.uint8),
                        x[:, mine].contiguous().view(torch.uint8),
                    )


CASES = (
    *(
        Case(
            f"transformers tp_plan, {scheme or 'dense'}, {OURS if stored else READ if scheme else DENSE}",
            partial(split_model, scheme=scheme, stored=stored), SLICES,
        )
        for scheme in (None, *SCHEMES)
        for stored in ((False, True) if scheme else (False,))
    ),
    Case("transformers tp_plan, read dense, then quantized", quantized_then, REFUSED),
    *(Case(f"transformers experts, {scheme}", partial(experts, scheme=scheme), ORDER) for scheme in ("int8_rowwise", "mxfp4")),
    *(
        Case(f"transformers FSDP2, {scheme}", partial(fsdp, scheme=scheme), BITS)
        for scheme in ("int4_g32_asymmetric", "fp8_rowwise")
    ),
    *(
        Case(f"KV cache split by heads, {recipe}", partial(cache, recipe=recipe), SLICES)
        for recipe in ("bfloat16", "int8", "fp8", "int4")
    ),
)  # fmt: skip
