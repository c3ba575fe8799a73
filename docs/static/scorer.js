// What the site's search ranks by: the weights of Sphinx, but a heading that holds the whole query comes first, and of pages that
// hold all words, in any order, those whose entries of the index (docs/generate.py) have all of them.
"use strict";
const QUERY = (new URLSearchParams(location.search).get("q") || "").toLowerCase().split(/\W+/)
  .filter((word) => word.length > 2 || /\d/.test(word));
const ENTRIES = new Map();
const entriesOf = (page) => {
  if (!ENTRIES.size) {
    const {indexentries, docnames} = Search._index;
    for (const [entry, places] of Object.entries(indexentries)) {
      for (const [file, , isMain] of places) {
        const known = ENTRIES.get(docnames[file]) || new Set();
        if (isMain) entry.toLowerCase().split(/\W+/).forEach((word) => known.add(word));
        ENTRIES.set(docnames[file], known);
      }
    }
  }
  return ENTRIES.get(page) || new Set();
};
var Scorer = {
  // Of one or two words only those of pages: parts of pages are often called so too.
  score: ([page, title, , , score, , kind]) => {
    const part = title.split(" > ");
    if (kind === "title") return part.length === 1 || part.pop().split(" ").length > 2 ? 10 * score : score;
    const known = kind === "text" && QUERY.length > 1 ? entriesOf(page) : null;
    return known && QUERY.every((word) => known.has(word)) ? 100 + score : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
