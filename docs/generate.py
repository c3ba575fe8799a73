"""What the site takes from code and results: API pages, tables, pictures; ``docs/conf.py`` writes them first.

Links to results lead in the repository to ``reports/NAME.md``, on the site to a copy of the report's own page. The figure of a
step of an example is put below its code (`scrape`).
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from docs import api, numerics, results, training


def write(folder: Path) -> None:
    """Write all parts; a file whose text stays the same is left alone, so that Sphinx reads only what has changed."""
    pages = {f"api/{name}": text for name, text in api.pages().items()}
    pages |= {f"numerics/{name}": text for name, text in numerics.pages().items()}
    pages |= {f"results/{name}": text for name, text in results.pages().items()}
    pages["parts/training.md"] = training.text()
    for name, text in pages.items():
        put(folder / name, text)
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()
    numerics.draw(folder / "numerics", "".join(pages[f"numerics/{name}"] for name in numerics.pages()))


def put(path: Path, text: str) -> None:
    """Write one file, where it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


REPORTS = Path(__file__).resolve().parents[1] / "reports"
LINK = re.compile(r"\]\((?:\.\./)+reports/([\w-]+)\.md(?:#[\w-]+)?\)")
#: What of the reports is not part of the site: what GPUs validated, and the same pages as Markdown; of data all but rows.
LEFT = ("gpu", "*.md", ".lock", "*.json", "*.sha256")
#: Addresses in pages of the reports.
ADDRESS = re.compile(r'(?:href|src)="([^"#?:]+)(?:[#?][^"]*)?"')


#: The parts of the site that its copies of the reports link, with their titles.
HEADER = {
    "index": "ao_lab",
    "get_started": "Get started",
    "choose": "Choose",
    "generated/results/index": "Results",
    "guides/index": "Guides",
    "numerics/index": "Numerics",
    "generated/examples/index": "Examples",
    "migration/index": "Migration",
    "generated/api/index": "API",
    "help": "Help",
}

#: What people search for, by the page that answers first: main entries of its index, which the search ranks above other words.
SEARCHED = {
    "faq": ("why is my model not faster", "model not faster", "slower than bfloat16", "why is it slow"),
    "choose": ("laptop", "which configuration", "4-bit 8B", "which 4-bit weights"),
    "limits": ("slower than torchao", "worse than torchao", "behind torchao"),
    "guides/attention": ("FP8 attention 128k", "long context"),
    "guides/formats": (
        "custom format",
        "custom scheme",
        "own format",
        "own scheme",
        "new format",
        "1-3-4 bits",
    ),
    "glossary": (
        "perplexity",
        "bits per weight",
        "bits/param",
        "group size",
        "group_size",
        "per-token",
        "confidence interval",
        "standard error",
        "preshuffled",
    ),
    "numerics/rounding": (
        "encode rounding",
        "rounding modes",
        "stochastic rounding",
        "ties to even",
        "saturate",
    ),
    "generated/results/kernels": ("roofline", "memory bandwidth", "speed of the kernels"),
    "guides/quantize": ("quantise", "quantise a model", "quantisation"),
    "guides/calibrate": ("calibration", "calibrate"),
    "guides/lora": ("LoRA", "QLoRA"),
    "guides/serve": ("vLLM", "llama.cpp", "GGUF", "serve", "serving"),
    "generated/results/index": (
        "results",
        "reports",
        "benchmarks",
        "history",
        "history of one number",
        "missed targets",
        "short run",
        "numbers of short runs",
        "scoreboard",
        "published values",
        "published values that have a measured one",
    ),
    "generated/results/calibration": (
        "NVFP4 calibration",
        "calibration results",
        "best calibration method",
        "what calibration wins",
        "calibration gain",
    ),
    "generated/results/linear": (
        "int4 16 tokens H200",
        "int4 speed H200",
        "speed int4",
        "linear layer speed",
        "how fast is one layer",
        "int8 fp8 nvfp4 mxfp4 nf4 H100",
    ),
    "migration/index": (
        "migration",
        "migrate",
        "AutoAWQ",
        "AutoGPTQ",
        "GPTQModel",
        "optimum-quanto",
        "unsloth",
        "ModelOpt",
    ),
    "migration/torchao": ("migration torchao", "migrate from torchao"),
    "migration/llm_compressor": ("migration llm-compressor",),
    "migration/bitsandbytes": ("migration bitsandbytes",),
    "migration/transformer_engine": (
        "migration transformer engine",
        "TransformerEngine",
        "te.Linear",
        "te.fp8_autocast",
    ),
}


def connect(app: Any) -> None:
    """Rewrite links as pages are read, and copy the reports when they are written."""
    app.connect("source-read", rewrite)
    app.connect("build-finished", copy)


def rewrite(app: Any, name: str, content: list[str]) -> None:
    """Links of one page, and its entries of the index; ValueError where there is no such report."""
    up = "../" * name.count("/")
    content[0] = LINK.sub(lambda found: f"](reports:{up}reports/{page(found[1], name)})", content[0])
    if name in SEARCHED:
        title, _, rest = content[0].partition("\n")
        content[0] = (
            f"{title}\n\n```{{index}} {', '.join(f'!{words}' for words in SEARCHED[name])}\n```\n{rest}"
        )


def page(name: str, source: str) -> str:
    """The page of a report; one that is Markdown alone is on the first. ValueError for none, with who links it."""
    if not (REPORTS / f"{name}.md").exists():
        raise ValueError(f"docs/{source}.md has a link to reports/{name}.md, which is not there")
    name = name if (REPORTS / f"{name}.html").exists() else "index"
    return f"{name}.html"


def copy(app: Any, error: Exception | None) -> None:
    """Pages, figures, scripts and rows of the reports beside the site; ValueError where a link of them leads nowhere there."""
    if error is None and app.builder.format == "html":
        folder = Path(app.outdir) / "reports"
        shutil.copytree(REPORTS, folder, ignore=shutil.ignore_patterns(*LEFT), dirs_exist_ok=True)
        for path in folder.glob("*.html"):
            path.write_text(of_site(with_header(path.read_text(encoding="utf-8"))), encoding="utf-8")
        if gone := broken(folder):
            raise ValueError(
                f"links of reports lead nowhere in {folder}: {'; '.join(gone)}; run `ao-lab reproduce --pages`"
            )


def with_header(html: str) -> str:
    """A page of the reports with the way back to the site, and its search, on top."""
    links = "".join(f'<a href="../{name}.html">{title}</a>' for name, title in HEADER.items())
    search = '<form action="../search.html"><input name="q" type="search" placeholder="Search" aria-label="Search"></form>'
    return html.replace("<body>", f'<body>\n<header class="site">{links}{search}</header>', 1)


def of_site(html: str) -> str:
    """A page of the reports whose links to Markdown of the documentation lead to the site's pages."""
    return re.sub(r'href="\.\./docs/([\w/-]+)\.md((?:#[\w-]+)?)"', r'href="../\1.html\2"', html)


def broken(folder: Path) -> list[str]:
    """Links of the pages of a folder, and their pictures and scripts, that are not there, each with its page."""
    return [
        f"{path.name}: {address}"
        for path in sorted(folder.glob("*.html"))
        for address in dict.fromkeys(ADDRESS.findall(path.read_text(encoding="utf-8")))
        if not (path.parent / address).exists()
    ]


def scrape(block: Any, variables: dict[str, Any], settings: dict[str, Any]) -> str:
    """Save what the step has called `figure`, once, and return the markup that shows it."""
    from sphinx_gallery.scrapers import figure_rst

    from ao_lab.plot import save

    figure = variables["example_globals"].pop("figure", None)
    if figure is None:
        return ""
    path = next(variables["image_path_iterator"])
    save(figure, path)
    return figure_rst([path], settings["src_dir"])
