"use strict";
// The page works without this script. The script fetches the page again, replaces the old content with the new,
// announces changes as text, and lets arrow keys move from hour to hour.
(() => {
  const live = () => document.getElementById("live");
  const every = Number(live().dataset.every || 0) * 1000;
  const news = document.getElementById("news");
  const connection = document.getElementById("connection");

  const clock = () => new Date().toISOString().slice(11, 19) + " UTC";

  function links(table) {
    return Array.from(table.querySelectorAll("td a"));
  }

  // One hour of the calendar is a tab stop; arrow keys move on from there.
  function rove(table, to) {
    for (const link of links(table)) link.tabIndex = -1;
    if (to) to.tabIndex = 0;
  }

  const regions = () => Array.from(document.querySelectorAll(".wide[aria-labelledby]"));
  const nameOf = (region) => region.getAttribute("aria-labelledby");

  // The newest hours are at the right end, out of view in a narrow window.
  function toNewest() {
    for (const table of document.querySelectorAll("[data-newest]")) {
      const region = table.closest(".wide");
      const newest = links(table).pop();
      if (newest) region.scrollLeft = newest.getBoundingClientRect().right - region.getBoundingClientRect().right + 8;
    }
  }

  function prepare(focused) {
    for (const table of document.querySelectorAll("[data-arrows]")) {
      const all = links(table);
      rove(table, all.find((link) => link.id === focused) || all[all.length - 1]);
    }
  }

  function neighbour(link, key) {
    const cell = link.closest("td");
    const row = cell.parentElement;
    const rows = Array.from(row.parentElement.rows);
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    let [y, x] = [rows.indexOf(row), cell.cellIndex];
    if (key === "Home" || key === "End") {
      const inRow = Array.from(row.querySelectorAll("td a"));
      return key === "Home" ? inRow[0] : inRow[inRow.length - 1];
    }
    if (!step) return null;
    while (rows[(y += step[0])] && rows[y].cells[(x += step[1])]) {
      const found = rows[y].cells[x].querySelector("a");
      if (found) return found;
    }
    return null;
  }

  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const link = event.target.closest && event.target.closest("[data-arrows] td a");
    const to = link && neighbour(link, event.key);
    if (!to) return;
    event.preventDefault();
    rove(link.closest("table"), to);
    to.focus();
  });

  function swap(fresh) {
    const old = live();
    const focused = document.activeElement && document.activeElement.id;
    const folded = new Map(Array.from(old.querySelectorAll("details"), (details) => [details.id, details.open]));
    const roving = old.querySelector("[data-arrows] td a[tabindex='0']");
    const said = old.dataset.summary;
    const moved = new Map(regions().map((region) => [nameOf(region), region.scrollLeft]));
    old.replaceWith(document.adoptNode(fresh));
    for (const details of live().querySelectorAll("details")) {
      if (folded.has(details.id)) details.open = folded.get(details.id);
    }
    prepare(roving && roving.id);
    for (const region of regions()) {
      if (moved.has(nameOf(region))) region.scrollLeft = moved.get(nameOf(region));
    }
    const again = focused && document.getElementById(focused);
    if (again && again !== document.activeElement) again.focus({ preventScroll: true });
    if (live().dataset.summary !== said) news.textContent = live().dataset.summary;
  }

  let lastAnswer = clock();
  let shown = "";

  async function renew() {
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error("status " + answer.status);
      const text = await answer.text();
      // An unchanged page keeps the reader's selection of text.
      if (text !== shown) {
        const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("live");
        if (!fresh || !fresh.dataset.every) throw new Error("another page than this one");
        shown = text;
        swap(fresh);
      }
      lastAnswer = clock();
      connection.textContent = "";
    } catch (error) {
      connection.textContent =
        "Not renewed: the page's server gave no answer since " + lastAnswer + " (" + error.message + ").";
    }
    setTimeout(renew, every);
  }

  prepare("");
  toNewest();
  if (every) setTimeout(renew, every);
})();
