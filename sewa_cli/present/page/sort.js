// Tables can be sorted by a click on a column's name; without this they can be read all the same.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent || "\u00a0";
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        const exact = cell.dataset.value ?? cell.dataset.sort;
        return exact === undefined ? cell.textContent.trim() : Number(exact);
      };
      const missing = (value) => value === "–" || Number.isNaN(value);
      const order = (a, b) => {
        const [x, y] = [key(a), key(b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y);
        const found = typeof x === "number" && typeof y === "number"
          ? x - y : String(x).localeCompare(String(y), undefined, {numeric: true});
        return up ? found : -found;
      };
      body.append(...[...body.rows].sort(order));
    });
  });
}
