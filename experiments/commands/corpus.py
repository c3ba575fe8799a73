"""`ao-lab corpus`: which texts experiments can run on, where they come from, and how one is built."""

from __future__ import annotations

from pathlib import Path

from ao_lab.cli.terminal.output import WrongInput, print_json, print_table
from ao_lab.cli.terminal.progress import track_progress
from experiments.data.corpora.record import CorpusRecord, corpora, corpus_record


def run_corpus(name: str | None, build: Path | None, as_json: bool) -> None:
    """List all corpora, describe one, or build one into a folder."""
    if name is None:
        if build is not None:
            raise WrongInput("corpus --build takes the name of a corpus: ao-lab corpus prose --build DIR")
        show_all(list(corpora().values()), as_json)
        return
    try:
        record = corpus_record(name)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if build is not None:
        run_build(record, build, as_json)
    elif as_json:
        print_json(record.describe())
    else:
        show(record)


def run_build(record: CorpusRecord, folder: Path, as_json: bool) -> None:
    """Build a corpus; WrongInput where it is not built, cannot be fetched, or comes out as another text."""
    if record.build is None:
        raise WrongInput(f"corpus {record.name} is not built: {record.origin}")
    try:
        with track_progress("documents", None) as work:
            written = record.build(folder, work.step)
    except ValueError as error:
        raise WrongInput(str(error)) from error
    if as_json:
        print_json([str(path) for path in written])
    else:
        print_table(f"Built {record.name}", ["file"], [[str(path)] for path in written])


def show_all(records: list[CorpusRecord], as_json: bool) -> None:
    """A line per corpus."""
    if as_json:
        print_json([record.describe() for record in records])
        return
    rows = [[one.name, one.about, usage(one)] for one in records]
    print_table("Corpora", ["name", "text", "use"], rows)


def show(record: CorpusRecord) -> None:
    """What a record says."""
    facts = [
        ["text", record.about],
        *([f"split {name}", what] for name, what in record.splits.items()),
        ["licence", record.licence],
        ["origin", record.origin],
        ["identity", record.identity],
        ["use", usage(record)],
        *([["build", f"ao-lab corpus {record.name} --build DIR (online)"]] if record.build else []),
    ]
    print_table(f"Corpus {record.name}", ["field", "value"], facts)
    if record.files:
        rows = [[one.name, str(one.documents), str(one.bytes), one.sha256] for one in record.files]
        columns = ["file", "documents", "bytes, uncompressed", "SHA-256, uncompressed"]
        print_table("Files", columns, rows, columns[1:3])


def usage(record: CorpusRecord) -> str:
    """How a run is given the corpus."""
    return f"--corpus {record.name} --corpus-path DIR" if record.files else "the default"


__all__ = ["run_corpus"]
