"""The page of experiment `kv_cache`: FP8 sums by context, predictions from stored keys and values."""

from __future__ import annotations

from collections.abc import Sequence

from ao_lab.kv_cache.recipe import RECIPES
from experiments.harness.rows import Row
from experiments.kv_cache import speed_page
from experiments.kv_cache.needle import METHODS
from experiments.kv_cache.run import ALL, BESIDE, CHAINS, ERROR, FOUND, GROWING, LAST, NEEDLE, SUMS, UNLIKE
from experiments.models.causal_lm import REAL
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.plots import NARROW, curves
from experiments.report.real_runs import KL, KL_ERROR, PREDICTED, predicted_cells, relative
from experiments.report.results import Results, Where, best_run, by_run, number
from reference.attention.window import Window

EXPERIMENT = "kv_cache"
TITLE = "Keys and values in low precision"
QUESTION = (
    "What do models predict from a cache in low precision, and what do FP8 sums lose over a long context?"
)
ABOUT = (
    (
        "A cache stores keys and values in a quantization scheme, along a head's channels or along tokens; "
        "transformers' generate() reads it through this library's attention kernels. Measured are a model's predictions"
        " from the quantized cache, and the error of the tensor core's 14-bit accumulation in FP8 over the length of "
        "the context."
    ),
)
#: The recipe that quantizes nothing: what the attention alone changes. Tokens of a long context, at which bytes are told too.
UNQUANTIZED, LONG = "bfloat16", 8192
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("kv-cache-sums-full", "kv-cache-sums-quick")
SUM_TEXT = (
    (
        "One query, equal scores, values in e4m3 of mean 0.5, by reference.matmul's model of Hopper's tensor core. In "
        "one chain of additions, addends below 2^-13 of the sum are cut off, so that late tokens count for little: this"
        " is how a published needle retrieval fell from 91% to 13% at 131072 tokens, and rose to 89% with sums in two "
        "levels (vLLM, 2026-04-22)."
    ),
)
NEEDLE_TEXT = (
    "A model of one attention layer, trained here, names the value of a needle among noise tokens. In the longest contexts a "
    "needle is a few percent of the attention, beside the mean value of the noise. Caches are read with exact sums; FP8 sums "
    "are as above.",
)
MODEL_TEXT = (
    "Every token is predicted from the cache, its own keys and values too; changes are from the model's own predictions. "
    "After ± stands half of the 95% interval (Student's t), over windows of a text of one document and over documents where "
    "there are several. The last quarter of a window has the longest context.",
)


def near(recipe: str) -> str:
    """How many of the first and of the last tokens a recipe by name leaves unquantized; "" where all are quantized."""
    window = RECIPES[recipe].window if recipe in RECIPES else Window()
    counts = {"first": window.sinks, "latest": window.residual}
    return " and ".join(f"the {name} {count}" for name, count in counts.items() if count)


def by_tokens(methods: Sequence[str]) -> dict[str, list[str]]:
    """Recipes that quantize something, by the tokens that they leave unquantized; those that quantize all first."""
    found: dict[str, list[str]] = {}
    for method in sorted((one for one in methods if one != UNQUANTIZED), key=lambda one: bool(near(one))):
        found.setdefault(near(method), []).append(method)
    return found


def unlike(methods: Sequence[str]) -> str:
    """A sentence on the recipes of a list that quantize some tokens only; "" where each quantizes all."""
    groups = by_tokens(methods)
    rest = groups.pop("", [])
    words = [
        f"{', '.join(names)} {'leave' if len(names) > 1 else 'leaves'} {tokens} tokens unquantized"
        for tokens, names in groups.items()
    ]
    others = f", {', '.join(rest)} none" if rest else ""
    return f"{'; '.join(words)}{others}" if words else ""


def divergence_words(results: Results) -> str:
    """KL of recipes beside others that quantize the same tokens, and of an unquantized cache through the same attention."""
    found = {name: results.with_half(ALL, name, KL, KL_ERROR) for name in results.methods}
    groups = by_tokens([name for name, cell in found.items() if cell])
    words = [
        (f"with {tokens} tokens unquantized " if tokens else "")
        + ", ".join(f"{name} {found[name]}" for name in names)
        for tokens, names in groups.items()
    ]
    floor = found.get(UNQUANTIZED)
    words += [f"the same attention over an unquantized cache {floor}"] if floor and words else []
    return "; ".join(words)


def kinds(rows: Sequence[Row]) -> list[str]:
    """Kinds of tables of real models."""
    return sorted({row.table.split("/")[0] for row in rows if row.table.startswith(REAL)})


def findings(rows: Sequence[Row]) -> list[str]:
    """The longest context's errors, changes of perplexity, and times."""
    return [*sums_found(rows), *needles_found(rows), *predictions_found(rows), *speed_page.findings(rows)]


def sums_found(rows: Sequence[Row]) -> list[str]:
    """The errors of the longest context."""
    found = best_run(by_run(rows, SUMS))
    if found is None:
        return []
    longest = max(found[1].settings, key=int)
    errors = [found[1].value(longest, method, ERROR) for method in CHAINS]
    return [
        f"FP8 sums over {longest} tokens lose {number(100 * (errors[0] or 0), 0)}% in one chain and "
        f"{number(100 * (errors[1] or 0), 2)}% in chains of 128."
    ]


def needles_found(rows: Sequence[Row]) -> list[str]:
    """How many needles are found among the most tokens, and that a test which all methods pass tells nothing of them."""
    needle = best_run(by_run(rows, NEEDLE))
    if needle is None:
        return []
    longest = max(needle[1].settings, key=int)
    found = {method: needle[1].value(longest, method, FOUND) for method in METHODS}
    if set(found.values()) == {100.0}:
        return [
            f"All needles among {longest} tokens are found by every cache and sum: at this length the test tells none apart."
        ]
    parts = [f"{number(found[one], 0)}% ({one})" for one in found if one == "exact" or "sums" in one]
    return [f"Of needles among {longest} tokens are found {', '.join(parts)}."]


def predictions_found(rows: Sequence[Row], brief: bool = False) -> list[str]:
    """Divergences and changes of perplexity of each model, on the last text of its largest run; brief: the first of them."""
    words = []
    for kind in kinds(rows):
        best = largest_run(by_run(rows, kind))
        told = "" if best is None else divergence_words(best[1])
        if best is None or not told:
            continue
        of = f"{kind.removeprefix(REAL)} ({best[0]})"
        words.append(f"{of}, KL from its own predictions, nats: {told}.")
        changes = {method: relative(best[1], ALL, method) for method in best[1].methods}
        if change := "; ".join(f"{method} {one}" for method, one in changes.items() if one and not brief):
            words.append(f"{of}, change of perplexity: {change}.")
    return words


def largest_run(runs: dict[Where, Results]) -> tuple[Where, Results] | None:
    """The run of the largest scale over the most text, of equal ones the last; None without any."""
    last_first = reversed(list(runs.items()))
    return max(last_first, key=lambda run: (run[0].scale == "full", tokens_of(run[0])), default=None)


def tokens_of(where: Where) -> int:
    """Tokens of text that a run is over."""
    return 0 if where.windows is None else where.windows.count * where.windows.length


def main_finding(rows: Sequence[Row]) -> str:
    """What models predict, and what sums lose; needles where they tell methods apart."""
    needles = [one for one in needles_found(rows) if "tells none apart" not in one]
    return " ".join([*predictions_found(rows, brief=True), *needles, *sums_found(rows)]).rstrip(".")


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """None: the first page has ten."""
    return []


def sections(rows: Sequence[Row]) -> list[Section]:
    """Sums, then models, run by run."""
    return [
        *(sums_section(where, results) for where, results in by_run(rows, SUMS).items()),
        *(needle_section(where, results) for where, results in by_run(rows, NEEDLE).items()),
        *(
            model_section(kind, where, results)
            for kind in kinds(rows)
            for where, results in by_run(rows, kind).items()
        ),
        *speed_page.sections(rows),
    ]


#: Times that are to be reached.
targets_by_run = speed_page.targets_by_run


def sums_section(where: Where, results: Results) -> Section:
    """A picture and a table by context."""
    contexts = sorted(results.settings, key=int)
    errors = {method: [results.value(one, method, ERROR) for one in contexts] for method in CHAINS}
    series = {
        method: [None if one is None else 100 * one for one in values] for method, values in errors.items()
    }
    labels = "tokens of the context", f"{ERROR} (%)"
    names = [f"{int(one):,}" for one in contexts]
    figure, narrow = (curves(series, *labels, names=names, width=width) for width in (7.6, NARROW))
    for one in (figure, narrow):
        one.axes[0].set_yscale("log")
    caption = "What FP8 sums of attention lose over a context, in one chain of additions and in chains of 128 tokens."
    drawing = Drawing(f"kv-cache-sums-{where.scale}", caption, figure, narrow)
    lines = [[one, *(number(results.value(one, method, ERROR), 5) for method in CHAINS)] for one in contexts]
    table = Table("Relative error of attention", ["tokens", *CHAINS], lines, results.rows)
    return Section(f"FP8 sums ({where})", SUM_TEXT, [drawing], [table])


def needle_section(where: Where, results: Results) -> Section:
    """Needles that are found, and answers that change, by context."""
    contexts = sorted(results.settings, key=int)
    tables = [
        Table(
            f"{metric[0].upper()}{metric[1:]} (%)", ["tokens", *METHODS],
            [[one, *(number(results.value(one, method, metric), 1) for method in METHODS)] for one in contexts], results.rows,
        )
        for metric in (FOUND, UNLIKE)
    ]  # fmt: skip
    return Section(f"A needle ({where})", NEEDLE_TEXT, [], tables)


def model_section(kind: str, where: Where, results: Results) -> Section:
    """A line for every recipe and part of the windows."""
    contexts = dict.fromkeys(([where.windows.length] if where.windows else []) + [LONG])
    lines = [
        [
            method, setting, *predicted_cells(results, setting, method),
            *(number(bytes_per_token(results, setting, method, tokens), 0) for tokens in contexts),
        ]
        for method in results.methods
        for setting in (ALL, LAST)
    ]  # fmt: skip
    columns = ["recipe", "predicted", *PREDICTED, *(f"bytes a token, {tokens} tokens" for tokens in contexts)]
    table = Table("Predictions from what is stored", columns, lines, results.rows)
    text = [*unquantized_words(where, results), *MODEL_TEXT, floor_words(results)]
    return Section(f"{kind.removeprefix(REAL)} ({where})", text, [], [table])


def bytes_per_token(results: Results, setting: str, method: str, tokens: int) -> float | None:
    """Bytes a token of a sequence so long, tokens that stay unquantized counted; None where they were not measured."""
    growing, beside = (results.value(setting, method, one) for one in (GROWING, BESIDE))
    if beside is None and not near(method):
        beside = 0.0
    return None if growing is None or beside is None else growing + beside / tokens


def floor_words(results: Results) -> str:
    """What of a change is the attention's and not the cache's."""
    floor = results.with_half(ALL, UNQUANTIZED, KL, KL_ERROR)
    if not floor:
        return (
            "No row is of an unquantized cache through the same attention, so how much of a change is the attention's is not "
            "known here."
        )
    return (
        f"{UNQUANTIZED} is an unquantized cache through the same attention: a KL of {floor} is that of other rounding inside "
        "attention, and a recipe that is no further from the model than that is not told from one that quantizes nothing."
    )


def unquantized_words(where: Where, results: Results) -> list[str]:
    """What a section says first of recipes that leave tokens unquantized: which, of how many, and what bytes count."""
    said = unlike(results.methods)
    if not said:
        return []
    length = f" of {where.windows.length}" if where.windows else ""
    peer = (
        ""
        if "fp8_residual" in results.methods
        else " fp8_residual, which leaves the same in 8 bits, has no row."
    )
    return [
        f"**{said}.** Bits alone make the difference between those that leave the same tokens. In windows{length} tokens "
        f"these are a large share of what is read and a smaller one in the last quarter; bytes a token count them beside the "
        f"codes of all tokens.{peer}"
    ]
