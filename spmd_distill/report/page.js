"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const off = new Set();
  const colour = (run) => {
    const group = document.querySelector(`.run-${run}`);
    return group ? group.style.getPropertyValue("--c") : "";
  };
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return Math.abs(points[high][0] - x) < Math.abs(points[low][0] - x) ? points[high] : points[low];
  };
  const line = (run, name, point) => {
    const row = document.createElement("div");
    const dot = document.createElement("i");
    dot.style.background = colour(run);
    row.append(dot, `${name} ${Number(point[1].toPrecision(4))}`);
    return row;
  };

  for (const chart of document.querySelectorAll(".chart")) {
    if (chart.dataset.set) continue;
    const svg = chart.querySelector("svg");
    const axes = svg.querySelector(".axes").dataset;
    const [x0, x1, left, right] = [axes.x0, axes.x1, axes.left, axes.right].map(Number);
    const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
    cursor.setAttribute("class", "cursor off");
    cursor.setAttribute("y1", 10);
    cursor.setAttribute("y2", 220);
    svg.append(cursor);
    const hide = () => { tip.hidden = true; cursor.classList.add("off"); };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      if (at < left - 8 || at > right + 8) return hide();
      const x = x0 + (at - left) / (right - left) * (x1 - x0);
      const rows = [];
      let step = null;
      data.series[chart.dataset.metric].forEach((series, run) => {
        if (off.has(run)) return;
        const name = data.runs.length > 1 ? data.runs[run] : "";
        for (const split of ["train", "eval"]) {
          if (!series[split].length) continue;
          const point = nearest(series[split], x);
          step = step === null || split === "train" ? point[0] : step;
          const which = split === "eval" ? `held-out, step ${point[0]}:` : "train:";
          rows.push(line(run, `${name} ${which}`.trim(), point));
        }
      });
      if (!rows.length) return hide();
      const title = document.createElement("div");
      title.textContent = `step ${Math.round(step)}`;
      tip.replaceChildren(title, ...rows);
      tip.hidden = false;
      const wide = tip.offsetWidth;
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - wide - 8)}px`;
      tip.style.top = `${event.clientY + 16}px`;
      cursor.classList.remove("off");
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, at);
    });
  }

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      const hidden = !off.has(run);
      if (hidden) off.add(run); else off.delete(run);
      button.setAttribute("aria-pressed", String(!hidden));
      for (const group of document.querySelectorAll(`.run-${run}`)) group.classList.toggle("off", hidden);
    });
  }

  for (const code of document.querySelectorAll(".copy")) {
    code.title = "click to copy";
    code.addEventListener("click", () => navigator.clipboard && navigator.clipboard.writeText(code.textContent));
  }
})();
