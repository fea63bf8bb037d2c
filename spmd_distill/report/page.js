"use strict";
(() => {
  const main = document.querySelector("main");
  const tip = document.getElementById("tip");
  const SVG = "http://www.w3.org/2000/svg";

  // A path of the page holds its numbers: "M1 2.5L2 2.25", or "M1 2.5h0M2 2.25h0" for dots.
  const read = (path) => path.getAttribute("d").split(/[ML]/).slice(1).map((part) => part.split(" ").map(parseFloat));
  const write = (points, dots, log) => points
    .filter((p) => !log || p[1] > 0)
    .map((p, i) => `${i && !dots ? "L" : "M"}${p[0]} ${log ? Math.log10(p[1]) : p[1]}${dots ? "h0" : ""}`).join("");
  const short = (y) => (Math.abs(y) >= 1e4 ? Math.round(y).toLocaleString("en") : String(Number(y.toPrecision(4))));

  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return Math.abs(points[high][0] - x) < Math.abs(points[low][0] - x) ? points[high] : points[low];
  };

  const prepare = (chart) => {
    const svg = chart.querySelector("svg"), inner = svg.querySelector(".inner"), plot = svg.querySelector(".plot");
    const button = chart.querySelector(".scale"), matrix = plot.getAttribute("transform");
    const paths = [...plot.querySelectorAll("path")].map((node) => ({ node, points: read(node), dots: /h0$/.test(node.getAttribute("d")) }));
    const ends = [...svg.querySelectorAll(".end")].map((node) => ({ node, y: node.getAttribute("y") }));
    const first = Number(chart.dataset.first), last = Number(chart.dataset.last);
    const [x, top, wide, height] = ["x", "y", "width", "height"].map((name) => Number(inner.getAttribute(name)));
    const room = -inner.viewBox.baseVal.x, left = x + room, width = wide - 2 * room;
    const cursor = document.createElementNS(SVG, "path");
    cursor.setAttribute("class", "cursor off");
    svg.append(cursor);

    if (button) {
      const show = (log) => {
        plot.setAttribute("transform", log ? plot.dataset.log : matrix);
        for (const p of paths) p.node.setAttribute("d", write(p.points, p.dots, log));
        for (const end of ends) end.node.setAttribute("y", log ? end.node.dataset.y : end.y);
        svg.querySelector(".lin").classList.toggle("off", log);
        svg.querySelector(".log").classList.toggle("off", !log);
        button.textContent = log ? "log" : "linear";
        button.setAttribute("aria-label", `${log ? "logarithmic" : "linear"} axis; change it`);
        button.dataset.log = log ? "1" : "";
      };
      button.hidden = false;
      button.addEventListener("click", () => show(!button.dataset.log));
      show("logFirst" in chart.dataset);
    }

    const steps = [...new Set(paths.flatMap((p) => (p.node.matches(".level") ? [] : p.points.map((q) => q[0]))))].sort((a, b) => a - b);
    let at = null;
    const hide = () => { at = null; tip.hidden = true; cursor.classList.add("off"); };
    const show = (x, clientX, clientY) => {
      const rows = [];
      let step = null;
      for (const { node, points } of paths) {
        if (node.matches(".level, .held") || !node.getClientRects().length || getComputedStyle(node).display === "none") continue;
        const group = node.parentNode, p = nearest(points, x);
        const what = node.matches(".dots") ? `held out, step ${p[0].toLocaleString("en")}` : node.matches(".mean") ? "mean" : "training";
        if (step === null || node.matches(".train")) step = p[0];
        const row = document.createElement("div");
        row.className = (group.getAttribute("class").match(/c\d/) || [""])[0];
        const extra = "nats" in chart.dataset ? ` (perplexity ${short(Math.exp(p[1]))})` : "";
        row.append(document.createElement("i"), `${group.dataset.name}, ${what}: ${short(p[1])}${extra}`);
        rows.push(row);
      }
      if (!rows.length) return hide();
      at = x;
      const title = document.createElement("b");
      title.textContent = `step ${step.toLocaleString("en")}`;
      tip.replaceChildren(title, ...rows);
      tip.hidden = false;
      tip.style.left = `${Math.max(6, Math.min(clientX + 16, innerWidth - tip.offsetWidth - 8))}px`;
      tip.style.top = `${clientY + 18 + tip.offsetHeight > innerHeight ? clientY - tip.offsetHeight - 14 : clientY + 18}px`;
      cursor.classList.remove("off");
      cursor.setAttribute("d", `M${left + (x - first) / (last - first) * width} ${top}v${height}`);
    };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const place = ((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width - left) / width;
      if (place < -.03 || place > 1.03) return hide();
      show(first + Math.min(Math.max(place, 0), 1) * (last - first), event.clientX, event.clientY);
    });
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") return hide();
      if (!move || !steps.length || event.target !== chart) return;
      event.preventDefault();
      const stride = event.shiftKey ? Math.ceil(steps.length / 10) : 1;
      const now = at === null ? (move > 0 ? -stride : steps.length - 1 + stride) : steps.findIndex((s) => s >= at);
      const x = steps[Math.min(Math.max(now + move * stride, 0), steps.length - 1)];
      const box = svg.getBoundingClientRect();
      show(x, box.left + (left + (x - first) / (last - first) * width) / svg.viewBox.baseVal.width * box.width, box.top + box.height / 2);
    });
  };

  for (const chart of document.querySelectorAll(".chart")) prepare(chart);

  for (const button of document.querySelectorAll("[data-hide]")) {
    button.addEventListener("click", () => {
      const what = button.dataset.hide, hidden = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!hidden));
      if (/\d$/.test(what)) for (const node of document.querySelectorAll(`.chart .${what}`)) node.classList.toggle("off", hidden);
      else main.classList.toggle(`hide-${what}`, hidden);
    });
  }

  for (const code of document.querySelectorAll(".copy")) {
    code.title = "click to copy";
    code.tabIndex = 0;
    code.setAttribute("role", "button");
    const copy = () => {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      if (navigator.clipboard) navigator.clipboard.writeText(code.textContent).catch(() => {});
    };
    code.addEventListener("click", copy);
    code.addEventListener("keydown", (event) => { if (event.key === "Enter") copy(); });
  }

  addEventListener("beforeprint", () => { for (const node of document.querySelectorAll("details")) node.open = true; });
})();
