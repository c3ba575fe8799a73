// Tables become sortable when they are first opened, and what is shown can be limited to a device, a model or shape, and to lines
// that hold words, with the title of their table and its heading; the address keeps it. Without scripts everything is shown,
// plainly. Pages are read from disk: no module, no fetch.
"use strict";
(() => {
  const VALUE = /^\(?[-+]?\d+(\.\d+)?%?( ± \d+(\.\d+)?)?\)?$/;
  const NUMBER = /[-+]?\d+(\.\d+)?/;
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  // The library has colours of its own for dark screens, by this class.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => document.documentElement.classList.toggle("dark", dark.matches);
  dark.addEventListener("change", follow);
  follow();

  // The library, compressed in assets/datatables.js.
  const fetched = () => new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = "assets/datatables.js";
    script.onload = done;
    script.onerror = failed;
    document.head.append(script);
  });
  const unpack = async (text) => {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return await new Response(stream).text();
  };
  let library;
  const load = () => library ??= (async () => {
    await fetched();
    const style = document.createElement("style");
    style.textContent = await unpack(window.DATATABLES.css);
    document.head.prepend(style);
    const script = new Blob([await unpack(window.DATATABLES.js)], {type: "text/javascript"});
    const DataTable = (await import(URL.createObjectURL(script))).default;
    DataTable.ext.search.push((settings, cells, index) => holds(settings.aoData[index].nTr, settings.nTable));
    return DataTable;
  })();

  // What is sorted by: the first value of a cell that is no plain number.
  const sortable = (table) => {
    for (const cell of all("tbody td", table)) {
      const text = cell.textContent;
      if (text === "exact") cell.dataset.order = "1e99";
      else if (VALUE.test(text) && text !== (text.match(NUMBER) || [])[0]) cell.dataset.order = text.match(NUMBER)[0];
    }
  };
  const enhanced = new Map();
  const enhance = async (details) => {
    const table = details.querySelector(":scope > .scroll > table.data");
    if (!table || table.dataset.ready || table.rows.length < 8) return;
    table.dataset.ready = "yes";
    const DataTable = await load();
    sortable(table);
    for (const row of table.rows) row.hidden = false;
    const size = Number(table.dataset.page) || 15;
    // The page's filter is over all tables: one search is enough.
    const search = document.querySelector("form.filter") ? null : "search";
    enhanced.set(table, new DataTable(table, {order: [], autoWidth: false, pageLength: size,
      lengthMenu: [size, 100, {label: "all", value: -1}],
      layout: {topStart: search, topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging"}}));
    // The table scrolls in a box of the library's own now.
    for (const box of all(".dt-layout-full", details)) wide.observe(box);
  };

  // The filter: selects of attributes of sections and tables, selects of a column's cells, words of lines. A number is a whole one.
  const form = document.querySelector("form.filter");
  const state = {device: "", subject: "", words: [], columns: new Map()};
  const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean).map((word) => /^\d+(\.\d+)?$/.test(word)
    ? (read) => new RegExp(`(?<![\\w.])${word.replace(".", "\\.")}(?!\\w|\\.\\d)`).test(read) : (read) => read.includes(word));
  const around = new WeakMap();
  // What stands around the lines of a table, or around a link to one: its title, and the heading of the section.
  const context = (element) => {
    if (!around.has(element)) {
      const section = element.closest("section"), heading = section && section.querySelector("h2");
      const title = element.matches("details") ? element.querySelector(":scope > summary") : element;
      const told = [...title.childNodes].filter((one) => one.nodeName !== "SMALL").map((one) => one.textContent);
      around.set(element, [heading ? heading.textContent : "", ...told].join(" ").toLowerCase());
    }
    return around.get(element);
  };
  const holds = (row, table) => {
    const read = state.words.length ? `${context(table.closest("details.table"))} ${row.textContent.toLowerCase()}` : "";
    if (!state.words.every((word) => word(read))) return false;
    const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
    return [...state.columns].every(([name, value]) => (row.cells[names.indexOf(name)] || {}).textContent === value);
  };
  const fits = (element) => ["device", "subject"].every((name) =>
    !state[name] || !(name in element.dataset) || element.dataset[name].split("|").includes(state[name]));
  const shownRows = (table) => {
    const made = enhanced.get(table);
    if (made) { made.draw(); return made.rows({search: "applied"}).count(); }
    let count = 0;
    for (const row of all("tbody tr", table)) { row.hidden = !holds(row, table); count += !row.hidden; }
    return count;
  };
  // So few lines of a table need neither pages nor a search of their own.
  const FEW = 15;
  // How many lines of a table the filter leaves, beside how many it has.
  const tell = (details, count) => {
    const told = details.querySelector(":scope > summary > small");
    if (!told) return;
    told.dataset.all ??= told.textContent;
    told.textContent = count ? `${count} of ${told.dataset.all}` : told.dataset.all;
    details.classList.toggle("few", count > 0 && count <= FEW);
  };
  // Tables with lines that were asked for are opened, of many the first; those that only the filter opened are closed again.
  const MOST_SHOWN = 60, opened = new Set();
  const show = (tables) => {
    for (const details of opened) if (!tables.includes(details)) { details.open = false; opened.delete(details); }
    for (const details of tables) if (!details.open) { details.open = true; opened.add(details); }
  };
  const counted = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;
  const apply = () => {
    const narrow = state.words.length > 0 || state.columns.size > 0, found = [];
    let lines = 0, elsewhere = 0;
    for (const element of all("[data-device], [data-subject]")) element.hidden = !fits(element);
    for (const details of all("details.table")) {
      const table = details.querySelector("table.data"), section = details.closest("section");
      if (!table || !fits(details) || (section && !fits(section))) continue;
      const count = shownRows(table);
      details.hidden = count === 0;
      tell(details, narrow ? count : 0);
      if (count) { lines += count; found.push(details); }
    }
    // Of a table on a page of its own title and heading are known here, and no line: words of titles must be in them.
    const links = all("a.elsewhere").map((link) => link.parentElement);
    const titles = state.words.filter((word) => [...all("details.table"), ...links].some((one) => word(context(one))));
    for (const place of links) {
      place.hidden = !fits(place) || !titles.every((word) => word(context(place)));
      elsewhere += !place.hidden && fits(place.closest("section"));
    }
    for (const section of all("section")) {
      const left = all("details.table", section).some((one) => !one.hidden);
      // A figure has lines that were not asked for, and no filter.
      for (const figure of all("figure", section)) figure.hidden = narrow;
      section.hidden = !fits(section) || (narrow && !left && all("p:has(> a.elsewhere)", section).every((one) => one.hidden));
    }
    show(narrow ? lines > MOST_SHOWN ? found.slice(0, 1) : found : []);
    const more = elsewhere ? `; ${counted(elsewhere, "table")} on pages of their own, not searched here` : "";
    if (form) form.querySelector("output").textContent = `${counted(lines, "line")} in ${counted(found.length, "table")}${more}`;
  };
  // Some browsers keep the address of a page that is read from disk as it is.
  const keep = (told) => {
    const search = told.toString();
    try { history.replaceState(null, "", `${location.pathname}${search && "?"}${search}${location.hash}`); } catch { return; }
  };
  const read = () => {
    state.columns.clear();
    const told = new URLSearchParams();
    for (const field of form.elements) {
      if (!field.name) continue;
      if (field.dataset.column && field.value) state.columns.set(field.dataset.column, field.value);
      else if (field.name === "text") state.words = wordsOf(field.value);
      else if (!field.dataset.column) state[field.name] = field.value;
      if (field.value) told.set(field.name, field.value);
    }
    // Links to the tables of other pages carry the filter.
    for (const link of all("a.elsewhere")) link.search = told.toString();
    keep(told);
    apply();
  };
  if (form) {
    form.hidden = false;
    const given = new URLSearchParams(location.search);
    for (const field of form.elements) if (field.name && given.has(field.name)) field.value = given.get(field.name);
    form.addEventListener("input", read);
    form.addEventListener("reset", () => setTimeout(read));
    form.addEventListener("submit", (event) => event.preventDefault());
    if (location.search) read();
  }
  for (const details of all("details.table")) {
    if (details.open) enhance(details);
    details.addEventListener("toggle", () => details.open && enhance(details));
  }
  // What scrolls sideways says so.
  const wide = new ResizeObserver((seen) => {
    for (const {target} of seen) target.classList.toggle("more", target.scrollWidth > target.clientWidth + 1);
  });
  for (const box of all(".wide, .scroll")) wide.observe(box);
  // A menu closes behind the link that was followed.
  for (const link of all(".menu a")) link.addEventListener("click", () => { link.closest("details").open = false; });
  const open = () => {
    const found = location.hash.startsWith("#table-") && document.getElementById(location.hash.slice(1));
    if (found) { found.open = true; found.scrollIntoView(); }
  };
  addEventListener("hashchange", open);
  open();
})();
