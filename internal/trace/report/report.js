"use strict";
(function () {
  const tip = document.getElementById("tip");

  // Returns the time at position i on the log axis, the inverse of place in plot.go.
  function timeAt(i) {
    const whole = Math.min(Math.floor(i), 511), part = i - whole;
    if (whole < 16) return 16 * (whole + part);
    const width = Math.pow(2, Math.floor(whole / 16) + 3);
    return (16 + whole % 16 + part) * width;
  }

  function duration(ns) {
    if (ns <= 0) return "0";
    for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
      if (ns >= size * 0.9995) {
        const v = ns / size;
        return v.toFixed(v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2) + " " + unit;
      }
    }
    return Math.round(ns) + " ns";
  }

  function count(n) { return String(n).replace(/\B(?=(\d{3})+$)/g, ","); }

  function clock(ms) { return new Date(ms).toISOString().slice(11, 19); }

  function show(event, text) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
    const y = Math.min(event.clientY + 14, innerHeight - box.height - 6);
    tip.style.left = Math.max(x, 4) + "px";
    tip.style.top = Math.max(y, 4) + "px";
  }

  // Returns the position of the pointer in the frame, 0 to 1 from the left and from below, or null outside of the frame.
  function within(svg, event) {
    const box = svg.querySelector(".frame").getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width, y = 1 - (event.clientY - box.top) / box.height;
    return x >= 0 && x < 1 && y >= 0 && y < 1 ? [x, y] : null;
  }

  function watch(svg, read) {
    const frame = svg.querySelector(".frame"), cross = svg.querySelector(".cross");
    const width = frame.width.baseVal.value, height = frame.height.baseVal.value;
    function leave() {
      tip.hidden = true;
      cross.setAttribute("d", "");
    }
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", function (event) {
      const at = within(svg, event);
      const text = at && read(at[0], at[1]);
      if (!text) return leave();
      cross.setAttribute("d", "M" + at[0] * width + " 0V" + height);
      show(event, text);
    });
  }

  function share(buckets, total, at) {
    let below = 0;
    for (const [i, n] of buckets) {
      if (i + 1 <= at) below += n;
      else if (i < at) below += n * (at - i);
    }
    const percent = 100 * below / total;
    return percent.toFixed(percent > 99 && percent < 100 ? 3 : 1) + " %";
  }

  for (const svg of document.querySelectorAll(".cdf")) {
    const first = Number(svg.dataset.first), last = Number(svg.dataset.last);
    let curves;
    watch(svg, function (x) {
      curves = curves || Array.from(svg.querySelectorAll("[data-buckets]"), function (path) {
        return {
          name: path.dataset.name, total: Number(path.dataset.count),
          buckets: path.dataset.buckets.split(",").map(function (pair) { return pair.split(" ").map(Number); }),
        };
      });
      const at = first + x * (last - first);
      return "at most " + duration(timeAt(at)) + "\n" + curves.map(function (c) {
        return c.name.padEnd(9) + share(c.buckets, c.total, at);
      }).join("\n");
    });
  }

  for (const svg of document.querySelectorAll(".map")) {
    const d = svg.dataset, columns = Number(d.columns), rows = Number(d.rows), each = Number(d.each);
    let cells;
    watch(svg, function (x, y) {
      cells = cells || d.cells.split(";");
      const c = Math.floor(x * columns), row = Math.floor(y * rows);
      const start = Number(d.start) + c * Number(d.step);
      const when = clock(start) + " to " + clock(start + Number(d.step));
      if (!cells[c]) return when + "\nno messages";
      const [list, p50, p99, most] = cells[c].split(":");
      const counts = list.split(",").map(Number);
      const low = Number(d.first) + row * each;
      const here = row >= counts[0] ? counts[row - counts[0] + 1] || 0 : 0;
      const all = counts.slice(1).reduce(function (a, b) { return a + b; }, 0);
      return when + "\n" + duration(timeAt(low)) + " to " + duration(timeAt(low + each)) + ": " + count(here) +
        "\nof " + count(all) + " messages\np50 " + duration(p50) + "\np99 " + duration(p99) + "\nmax " + duration(most);
    });
  }

  for (const table of document.querySelectorAll(".sortable")) {
    const heads = Array.from(table.tHead.rows[0].cells), body = table.tBodies[0];
    heads.forEach(function (head, column) {
      const sample = body.rows[0].cells[column];
      if (!sample || sample.dataset.sort === undefined) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", function () {
        const down = head.getAttribute("aria-sort") !== "descending";
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = function (row) { return Number(row.cells[column].dataset.sort); };
        body.append(...Array.from(body.rows).sort(function (a, b) { return down ? key(b) - key(a) : key(a) - key(b); }));
      });
    });
  }
})();
