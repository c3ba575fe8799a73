// Tables that are wider than the screen say so.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const seen = new ResizeObserver((boxes) => {
    for (const {target} of boxes) target.classList.toggle("more", target.scrollWidth > target.clientWidth + 1);
  });
  for (const box of document.querySelectorAll(".bd-article .pst-scrollable-table-container")) seen.observe(box);
});
