"""Which files of a book of Standard Ebooks are its body, in reading order."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from xml.etree import ElementTree

#: The package document (EPUB 3) of a repository of Standard Ebooks.
PACKAGE = "src/epub/content.opf"
EPUB_TYPE = "{http://www.idpf.org/2007/ops}type"
#: What is left out wherever a file calls itself so, in words of the EPUB 3 Structural Semantics Vocabulary.
LEFT_OUT = frozenset(
    (
        *("titlepage", "halftitlepage", "imprint", "colophon", "copyright-page", "toc", "loi", "lot"),
        *("dedication", "epigraph", "foreword", "preface", "introduction", "acknowledgments"),
        *("endnotes", "footnotes", "rearnotes", "afterword", "appendix", "glossary", "bibliography", "index"),
    )
)


def body_files(files: Mapping[str, bytes]) -> list[str]:
    """Paths of the files that are body matter, in the order of the package document's spine.

    files: contents of a repository by path. ValueError without a package document, or where it lists a file that is not there.
    """
    if PACKAGE not in files:
        raise ValueError(
            f"a book of Standard Ebooks has a file {PACKAGE}, got {sorted(files)[:5]} and others"
        )
    listed = [posixpath.normpath(f"{posixpath.dirname(PACKAGE)}/{href}") for href in spine(files[PACKAGE])]
    missing = [path for path in listed if path not in files]
    if missing:
        raise ValueError(f"{PACKAGE} lists {missing[0]}, which the book does not have; fetch it again")
    return [path for path in listed if is_body(files[path])]


def spine(package: bytes) -> Iterator[str]:
    """References to the files of a package document, in reading order."""
    root = ElementTree.fromstring(package)
    places = {item.get("id"): item.get("href") for item in root.iterfind(".//{*}item")}
    for item in root.iterfind(".//{*}itemref"):
        href = places.get(item.get("idref"))
        if href:
            yield href


def is_body(page: bytes) -> bool:
    """Whether a page is body matter: its body says so, and its outermost section is none of LEFT_OUT."""
    body = ElementTree.fromstring(page).find("{*}body")
    if body is None or "bodymatter" not in types(body):
        return False
    return not any(LEFT_OUT & types(section) for section in body)


def types(element: ElementTree.Element) -> set[str]:
    """The words of an element's `epub:type`."""
    return set(element.get(EPUB_TYPE, "").split())


__all__ = ["body_files", "types"]
