"use strict";
// All of this is comfort: without it everything can be read, and plots tell their figures as native tooltips.
const root = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const chosen = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = chosen === "dark" ? "light" : "dark";
});

const unfold = document.getElementById("unfold");
const blocks = all("details.block");
const label = () => { unfold.textContent = blocks.every((block) => block.open) ? "Close all" : "Open all"; };
unfold.hidden = !blocks.length;
unfold.addEventListener("click", () => {
  const open = !blocks.every((block) => block.open);
  for (const block of blocks) block.open = open;
});
for (const block of blocks) block.addEventListener("toggle", label);
label();

// Columns sort by their figures, missing ones last, and by their words where there are none.
for (const table of all("table.sortable")) {
  const heads = all("thead th", table);
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const falling = head.ariaSort ? head.ariaSort === "ascending" : all(`tbody tr > :nth-child(${column + 1})[data-v]`, table).length > 0;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const sign = falling ? -1 : 1;
      const rows = all("tbody tr", table).map((row) => ({ row, cell: row.children[column], last: row.children[0].classList.contains("mean") }));
      rows.sort((a, b) => {
        if (a.last !== b.last) return a.last ? 1 : -1;
        const [x, y] = [a.cell.dataset.v, b.cell.dataset.v];
        if (x !== undefined && y !== undefined) return sign * (x - y);
        if (x !== y) return x === undefined ? 1 : -1;
        return sign * a.cell.textContent.localeCompare(b.cell.textContent, "en", { numeric: true });
      });
      table.tBodies[0].append(...rows.map((entry) => entry.row));
    });
  });
}

// One stop of the Tab key per plot; arrow keys go from point to point; what has the focus says its figure.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
tip.setAttribute("aria-hidden", "true");
document.body.append(tip);
for (const plot of all("svg.plot")) {
  const spots = all(".spot", plot);
  spots.slice(1).forEach((spot) => spot.setAttribute("tabindex", "-1"));
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const next = step && spots[spots.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    document.activeElement.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
  plot.addEventListener("focusin", (event) => {
    const box = event.target.getBoundingClientRect();
    tip.textContent = event.target.querySelector("title").textContent;
    tip.hidden = false;
    const left = Math.min(box.left + box.width / 2, root.clientWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left) + scrollX}px`;
    tip.style.top = `${box.top + scrollY - tip.offsetHeight - 6}px`;
  });
  plot.addEventListener("focusout", () => { tip.hidden = true; });
}
