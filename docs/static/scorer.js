// What the site's search ranks by: the weights of Sphinx, but a heading that holds the whole query comes first.
"use strict";
var Scorer = {
  // Of one or two words only those of pages: parts of pages are often called so too.
  score: ([, title, , , score, , kind]) => {
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
