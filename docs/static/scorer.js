// What the site's search ranks by, beside the weights of Sphinx: an object that is called exactly so comes first, then a heading
// that holds the whole query, then pages by how many of its words their entries of the index (docs/generate.py) have, in any
// order and form, whether or not the page's text has them all. A word that stands nowhere on the site is taken for a misspelling
// of public names, and of entries of one word, that are one edit away: these are suggested.
"use strict";
const ASKED = (new URLSearchParams(location.search).get("q") || "").trim();
const STEMMER = new Stemmer();
const stems = (text) => new Set(text.toLowerCase().split(/[^\p{L}\p{N}_]+/u)
  .filter((word) => word && !stopwords.has(word)).map((word) => STEMMER.stemWord(word)));
const QUERY = stems(ASKED);
//: The least part of a query's words that entries of a page must have.
const PART = 0.6;

// Main entries of the index by page: the words of each.
const ENTRIES = new Map();
const entriesOf = (page) => {
  if (!ENTRIES.size) {
    const {indexentries, docnames} = Search._index;
    for (const [entry, places] of Object.entries(indexentries)) {
      for (const [file, , isMain] of places) {
        if (isMain) ENTRIES.set(docnames[file], [...(ENTRIES.get(docnames[file]) || []), stems(entry)]);
      }
    }
  }
  return ENTRIES.get(page) || [];
};
const common = (words) => [...QUERY].filter((word) => words.has(word)).length;
// 0, or up to 150: all of the query's words in the entries of a page, and one entry that says just this.
const byEntries = (page) => {
  const entries = entriesOf(page);
  const share = common(new Set(entries.flatMap((words) => [...words]))) / QUERY.size;
  if (QUERY.size < 2 || share < PART) return 0;
  const alike = Math.max(...entries.map((words) => common(words) / new Set([...words, ...QUERY]).size));
  return 50 * share + (share === 1 ? 50 : 0) + 50 * alike;
};

var Scorer = {
  // Of one or two words only headings of pages: parts of pages are often called so too.
  score: ([page, title, , , score, , kind]) => {
    if (kind === "object") return title === ASKED || title === `ao_lab.${ASKED}` ? 1000 : score;
    if (kind === "text") return score + byEntries(page);
    const part = title.split(" > ");
    return kind === "title" && (part.length === 1 || part.pop().split(" ").length > 2) ? 10 * score : score;
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

// Whether one letter more, less, changed or swapped with the next makes one word of the other.
const isOneEdit = (a, b) => {
  if (a.length > b.length) return isOneEdit(b, a);
  if (a === b || b.length - a.length > 1) return false;
  let start = 0;
  while (start < a.length && a[start] === b[start]) start += 1;
  if (a.length < b.length) return a.slice(start) === b.slice(start + 1);
  const isSwapped = a[start] === b[start + 1] && a[start + 1] === b[start];
  return a.slice(start + 1) === b.slice(start + 1) || (isSwapped && a.slice(start + 2) === b.slice(start + 2));
};
const plain = (name) => name.toLowerCase().replace(/_$/, "");
// Entries of one word and public names, without members of classes: as [name, address].
const names = () => {
  const {objects, objnames, docnames, indexentries} = Search._index;
  const found = Object.entries(indexentries).filter(([entry, places]) => !entry.includes(" ") && places[0][2])
    .map(([entry, [[file]]]) => [entry, `${docnames[file]}.html`]);
  for (const [prefix, members] of Object.entries(objects)) {
    for (const [file, kind, , anchor, name] of members) {
      const whole = prefix ? `${prefix}.${name}` : name;
      if (!["method", "attribute", "property"].includes(objnames[kind][1])) {
        found.push([name.split(".").pop(), `${docnames[file]}.html#${anchor || whole}`]);
      }
    }
  }
  return found;
};
// Names that are one edit from a word of the query which neither a name nor the text has.
const meant = () => {
  const known = names(), called = new Set(known.map(([name]) => plain(name)));
  const words = ASKED.split(/[\s,;()`"]+/).map((word) => plain(word.split(".").pop()))
    .filter((word) => word.length > 3 && !stopwords.has(word) && !called.has(word) && !(STEMMER.stemWord(word) in Search._index.terms));
  return known.filter(([name]) => words.some((word) => isOneEdit(word, plain(name))));
};
const suggest = () => {
  const found = new Map(meant());
  if (!found.size) return;
  const line = document.createElement("p");
  line.className = "suggestion";
  line.append("Did you mean ");
  [...found].forEach(([name, address], place) => {
    const link = Object.assign(document.createElement("a"), {href: address, textContent: name});
    line.append(place ? ", " : "", link);
  });
  line.append("?");
  Search.output.before(line);
};
const extend = () => {
  const terms = Search.performTermsSearch, query = Search.query;
  // Pages whose entries have the words, where their text has not.
  Search.performTermsSearch = (...given) => {
    const results = terms(...given), seen = new Set(results.map(([page]) => page));
    const {docnames, titles, filenames} = Search._index;
    docnames.forEach((page, file) => {
      if (!seen.has(page) && byEntries(page)) results.push([page, titles[file], "", null, 0, filenames[file], "text"]);
    });
    return results;
  };
  Search.query = (text) => { query(text); suggest(); };
};
// Themes differ in which script comes first.
if (typeof Search === "undefined") document.addEventListener("DOMContentLoaded", extend);
else extend();
