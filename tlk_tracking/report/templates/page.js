"use strict";
for (const box of document.querySelectorAll("div.table")) {
  const body = box.querySelector("tbody");
  const headings = [...box.querySelectorAll("th")];
  const rows = [...body.rows];
  const search = box.querySelector("input");
  const shown = box.querySelector("output");
  headings.forEach((heading, column) => {
    heading.firstElementChild.addEventListener("click", () => {
      const isNumber = heading.classList.contains("number");
      const before = heading.getAttribute("aria-sort");
      // Numbers begin with the largest, texts with the first.
      const order = before ? (before === "ascending" ? "descending" : "ascending") : isNumber ? "descending" : "ascending";
      const sign = order === "ascending" ? 1 : -1;
      for (const other of headings) other.removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", order);
      const keyed = rows.map((row, place) => {
        const cell = row.cells[column];
        return { row, place, number: parseFloat(cell.dataset.order), text: cell.textContent };
      });
      keyed.sort((one, other) => {
        if (!isNumber) return sign * one.text.localeCompare(other.text) || one.place - other.place;
        // A number that is not there comes last in both orders.
        const gone = Number.isNaN(one.number) - Number.isNaN(other.number);
        return gone || sign * (one.number - other.number) || one.place - other.place;
      });
      body.append(...keyed.map((each) => each.row));
    });
  });
  if (search) {
    search.addEventListener("input", () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        count += !row.hidden;
      }
      shown.textContent = count === rows.length ? `${count} rows` : `${count} of ${rows.length} rows`;
    });
  }
}
