// Tables become sortable when they are first opened, and what is shown can be limited to a device, a model or shape, and to lines
// that hold a text. Without scripts everything is shown, plainly. Pages are read from disk: no module, no fetch.
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
    enhanced.set(table, new DataTable(table, {order: [], autoWidth: false, pageLength: size,
      lengthMenu: [size, 100, {label: "all", value: -1}],
      layout: {topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging"}}));
  };

  // The filter: selects of attributes of sections and tables, selects of a column's cells, a text of lines.
  const form = document.querySelector("form.filter");
  const state = {device: "", subject: "", text: "", columns: new Map()};
  const holds = (row, table) => {
    if (state.text && !row.textContent.toLowerCase().includes(state.text)) return false;
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
  const apply = () => {
    let lines = 0, tables = 0;
    for (const element of all("[data-device], [data-subject]")) element.hidden = !fits(element);
    for (const details of all("details.table")) {
      const table = details.querySelector("table.data");
      if (!table || !fits(details)) continue;
      const count = shownRows(table);
      details.hidden = count === 0;
      if (count) { lines += count; tables += 1; }
    }
    if (form) form.querySelector("output").textContent = `${lines} lines in ${tables} tables`;
  };
  const read = () => {
    state.columns.clear();
    const told = new URLSearchParams();
    for (const field of form.elements) {
      if (!field.name) continue;
      if (field.dataset.column && field.value) state.columns.set(field.dataset.column, field.value);
      else if (!field.dataset.column) state[field.name] = field.name === "text" ? field.value.trim().toLowerCase() : field.value;
      if (field.value) told.set(field.name, field.value);
    }
    // Links to the tables of other pages carry the filter.
    for (const link of all("a.elsewhere")) link.search = told.toString();
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
