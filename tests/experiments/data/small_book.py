"""A book in the markup of Standard Ebooks, small enough to read, with one of everything that the rules speak of."""

import gzip
import hashlib
import io
import tarfile

from experiments.data.corpora import Source

PAGE = """<?xml version="1.0" encoding="utf-8"?>
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops">
\t<head><title>Not text</title></head>
\t<body epub:type="{matter}">
\t\t<section epub:type="{section}">
{content}
\t\t</section>
\t</body>
</html>
"""
LONG = "Word for word the same, as it was said before. " * 5
CHAPTER = f"""
<hgroup><h2 epub:type="ordinal z3998:roman">IV</h2><p epub:type="title">The\u2060 Mill</p></hgroup>
<header><blockquote epub:type="epigraph"><p><span>A line,</span>
\t<br/>
\t<span class="i1">and another.</span></p><cite><i>Anon</i>: Verses</cite></blockquote></header>
<p>It was\u200a cold;<a epub:type="noteref" href="endnotes.xhtml#note-1">1</a> the wa\u00adter\u2011mill
stood\u00a0<em>still</em>.</p>
<hr/>
<figure><img alt="A mill" src="mill.svg"/><figcaption>The mill</figcaption></figure>
<table><caption>Flour</caption><tr><td>sacks</td><td>12</td></tr></table>
<table><tr><td epub:type="z3998:persona">Miller</td><td>Who is there?</td></tr></table>
<h3>Lecture II</h3>
<p epub:type="ordinal z3998:roman">II</p>
<p>Cafe\u0301 <math xmlns="http://www.w3.org/1998/Math/MathML"><mi>x</mi></math>and tea, as <cite>Bradshaw</cite> has it.</p>
<p>{LONG}</p>
<!-- nothing -->
"""
#: What the rules make of it.
TEXT = [
    "The Mill",
    "A line,\nand another.",
    "Anon: Verses",
    "It was cold; the water-mill stood still.",
    "Miller Who is there?",
    "Lecture II",
    "II",
    "Caf\u00e9 and tea, as Bradshaw has it.",
    LONG.strip(),
]


def page(content, matter="bodymatter z3998:fiction", section="chapter"):
    return PAGE.format(content=content, matter=matter, section=section).encode()


def package(*names):
    items = "".join(f'<item href="text/{name}" id="{name}"/>' for name in sorted(names))
    spine = "".join(f'<itemref idref="{name}"/>' for name in names)
    return f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'.encode()


def book(**pages):
    """Contents by path of a book whose pages are read in this order."""
    names = [f"{name}.xhtml" for name in pages]
    files = {f"src/epub/text/{name}": data for name, data in zip(names, pages.values(), strict=True)}
    return {"src/epub/content.opf": package(*names), **files}


def archive(files, top="book-abc"):
    """A .tar.gz as GitHub makes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            made.addfile(info, io.BytesIO(data))
    return gzip.compress(out.getvalue())


def source(name, text, split="train"):
    """The manifest's line of a document."""
    owner = "pytorch/examples" if split.startswith("wikitext") else f"standardebooks/{name}"
    return Source(name, owner, "abc", "free", len(text), hashlib.sha256(text).hexdigest(), split)


__all__ = ["CHAPTER", "LONG", "TEXT", "archive", "book", "page", "source"]
