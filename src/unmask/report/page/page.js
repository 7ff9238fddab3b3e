// The page of `unmask report`: charts, heat maps, and the viewer of viewer.js, from the data in #data (gzip, base64).
"use strict";

const SHAPES = [
  "M0-6 1.8-2 6-1.6 2.8 1.3 3.7 5.6 0 3.3-3.7 5.6-2.8 1.3-6-1.6-1.8-2Z", // learned orders: a star
  "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0Z",
  "M-3.6-3.6H3.6V3.6H-3.6Z",
  "M0-5 4.6 3.4H-4.6Z",
  "M0-5.2 5.2 0 0 5.2-5.2 0Z",
  "M0 5-4.6-3.4H4.6Z",
  "M-1.6-5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5V-1.6H-1.6Z",
];

function drawn(tag, values = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(values)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const size = power * [1, 2, 5, 10].find((k) => k * power >= rough);
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-6; value += size) found.push(Number(value.toFixed(6)));
  return found;
}

// {title, x, y, log, percent, series: [{label, learned, line, points: [[x, y, low, high, text, joined to the one before, small]]}]}
function chart(root, data) {
  const svg = drawn("svg", {role: "img", "aria-label": data.title});
  root.prepend(svg);
  const points = data.series.flatMap((series) => series.points);
  const looks = data.series.map((series, i) => {
    const place = data.series.slice(0, i).filter((other) => other.learned === series.learned).length;
    const shape = series.learned ? (place ? SHAPES[1 + (place % 6)] : SHAPES[0]) : SHAPES[1 + (place % (SHAPES.length - 1))];
    return {colour: series.learned ? "var(--c0)" : `var(--c${1 + (place % 7)})`, shape};
  });
  let only = -1, groups = [], places = [];

  function draw() {
    const width = Math.max(240, root.clientWidth), height = data.small ? 200 : Math.min(380, Math.max(260, width * 0.5));
    const [left, right, top, bottom] = [60, 14, 10, 44];
    const xs = points.map((p) => p[0]), lows = points.map((p) => p[2] ?? p[1]), highs = points.map((p) => p[3] ?? p[1]);
    let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...lows), Math.max(...highs)];
    const room = (y1 - y0) * 0.06 || 1;
    [y0, y1] = data.percent ? [Math.max(0, y0 - room), Math.min(100, y1 + room)] : [y0 - room, y1 + room];
    const scaled = data.log ? Math.log : (x) => x;
    if (data.log) [x0, x1] = [x0 / 1.12, x1 * 1.12];
    else if (x0 === x1) x1 = x0 + 1;
    const X = (x) => left + ((scaled(x) - scaled(x0)) / (scaled(x1) - scaled(x0))) * (width - left - right);
    const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const parts = [];
    for (const y of ticks(y0, y1, 5))
      parts.push(drawn("line", {x1: left, x2: width - right, y1: Y(y), y2: Y(y), stroke: "var(--grid)"}),
        drawn("text", {x: left - 8, y: Y(y) + 4, "text-anchor": "end"}, y));
    let before = -99;
    const marks = data.log ? [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024] : ticks(x0, x1, 5);
    for (const x of marks.filter((x) => x >= x0 && x <= x1)) {
      parts.push(drawn("line", {x1: X(x), x2: X(x), y1: height - bottom, y2: height - bottom + 5, stroke: "var(--mask)"}));
      if (X(x) - before > 30) {
        parts.push(drawn("text", {x: X(x), y: height - bottom + 19, "text-anchor": "middle"}, x));
        before = X(x);
      }
    }
    parts.push(drawn("line", {x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, stroke: "var(--mask)"}),
      drawn("text", {x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle"}, data.x),
      drawn("text", {x: 12, y: (top + height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 12 ${(top + height - bottom) / 2})`}, data.y));
    places = [];
    groups = data.series.map((series, i) => {
      const group = drawn("g"), {colour, shape} = looks[i];
      series.points.forEach(([x, y, low, high, text, joined, small], k) => {
        const [px, py] = [X(x), Y(y)], [bx, by] = k ? series.points[k - 1] : [];
        if (k && (series.line || joined))
          group.append(drawn("line", {x1: X(bx), y1: Y(by), x2: px, y2: py, stroke: colour, "stroke-width": series.line ? 2 : 1.2, opacity: series.line ? 1 : 0.55, "stroke-linecap": "round"}));
        if (low != null) group.append(drawn("line", {x1: px, x2: px, y1: Y(low), y2: Y(high), stroke: colour, "stroke-width": 2, opacity: 0.45}));
        if (!series.line) group.append(drawn("path", {d: shape, transform: `translate(${px} ${py}) scale(${small ? 0.6 : series.learned ? 1.5 : 1.1})`, fill: colour, stroke: "var(--card)", "stroke-width": 0.8}));
        places.push({px, py, series: i, lines: [series.label, text]});
      });
      return group;
    });
    svg.replaceChildren(...parts, ...[...groups].sort((a, b) => data.series[groups.indexOf(a)].learned - data.series[groups.indexOf(b)].learned));
    isolate(only);
  }

  const legend = element("div", "legend");
  const chips = data.series.length < 2 ? [] : data.series.map((series, i) => {
    const chip = element("button", "chip"), mark = drawn("svg", {viewBox: "-7 -7 14 14", "aria-hidden": "true"});
    mark.append(drawn("path", {d: looks[i].shape, fill: looks[i].colour}));
    chip.append(mark, element("span", "", series.label));
    chip.onclick = () => isolate(only === i ? -1 : i);
    return chip;
  });
  function isolate(which) {
    only = which;
    legend.classList.toggle("isolating", only >= 0);
    chips.forEach((chip, i) => chip.setAttribute("aria-pressed", only === i));
    groups.forEach((group, i) => group.classList.toggle("faded", only >= 0 && only !== i));
  }
  legend.append(...chips);
  svg.after(legend);
  hover.over(svg, (event) => {
    const box = svg.getBoundingClientRect(), [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const near = places.filter((p) => only < 0 || p.series === only).map((p) => [Math.hypot(p.px - x, p.py - y), p])
      .filter(([far]) => far < (data.small ? 40 : 22)).sort((a, b) => a[0] - b[0]);
    const shown = near.filter(([far]) => far < near[0][0] + 4).slice(0, data.small ? 1 : 4).map(([, p]) => p);
    return shown.flatMap((p) => p.lines);
  });
  svg.addEventListener("click", (event) => {
    const group = groups.findIndex((one) => one.contains(event.target));
    if (chips.length) isolate(group < 0 || group === only ? -1 : group);
  });
  new ResizeObserver(draw).observe(root);
  draw();
}

// {policies, grid, groups: [[position]], first: position, positions: [[mean step]] per rule, classes: {name: [mean step per rule]}, examples}
function heatMap(root, data) {
  const known = [...data.positions.flat(), ...Object.values(data.classes).flat()].filter((value) => value !== null);
  const last = Math.max(1, ...known), box = element("div", data.grid[0] ? "squares" : "strips"), [columns] = data.grid;
  data.policies.forEach((name, rule) => {
    const part = element("div"), size = columns ? 26 : 1000 / Math.max(1, data.groups.flat().length + 0.4 * (data.groups.length - 1));
    const svg = drawn("svg", columns
      ? {viewBox: `0 0 ${columns * size} ${data.groups.length * size}`, style: `width: ${columns * 1.7}rem; max-width: 100%`}
      : {viewBox: "0 0 1000 34", preserveAspectRatio: "none", height: 34});
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${name}: mean reveal step by position`);
    let place = 0;
    data.groups.forEach((group, row) => {
      group.forEach((position, column) => {
        const value = data.positions[rule][position], gap = columns ? 2 : size > 8 ? 1.5 : 0;
        const cell = drawn("rect", columns
          ? {x: column * size, y: row * size, width: size - gap, height: size - gap, rx: 3}
          : {x: place * size, y: 0, width: Math.max(size - gap, size * 0.7), height: 34, rx: gap});
        cell.setAttribute("fill", value === null ? "var(--grid)" : stepColour(value, last)[0]);
        cell.about = [name, `position ${position - data.first + 1}`, value === null ? "never written" : `revealed at step ${value} on average`];
        svg.append(cell);
        place += 1;
      });
      place += 0.4; // a gap between the groups
    });
    hover.over(svg, ({target}) => target.about);
    part.append(element("p", "name", name), svg);
    box.append(part);
  });
  root.append(box);
  if (Object.keys(data.classes).length) {
    const table = element("table"), head = element("tr"), body = element("tbody"), top = element("thead"), around = element("div", "scroll");
    head.append(...["class", ...data.policies].map((name) => Object.assign(element("th", "", name), {scope: "col"})));
    for (const [name, means] of Object.entries(data.classes)) {
      const row = element("tr");
      row.append(element("td", "", name), ...means.map((value) => {
        const cell = element("td", "step", value === null ? "–" : value.toFixed(1));
        if (value !== null) [cell.style.background, cell.style.color] = stepColour(value, last);
        return cell;
      }));
      body.append(row);
    }
    top.append(head);
    table.append(top, body);
    around.tabIndex = 0;
    around.setAttribute("role", "region");
    around.setAttribute("aria-label", "mean reveal step by class of token");
    around.append(table);
    root.append(around);
  }
}

// All examples, one at a time.
function examples(root, list) {
  const bar = element("div", "turn"), stage = element("div");
  const [back, on] = [element("button", "", "◀"), element("button", "", "▶")], choice = element("select");
  back.setAttribute("aria-label", "the example before");
  on.setAttribute("aria-label", "the next example");
  choice.setAttribute("aria-label", "example");
  list.forEach((example, i) => {
    const marks = example.policies.map(({valid}) => (valid === null ? "" : valid ? "✓" : "✗")).join("");
    choice.append(Object.assign(element("option", "", `${example.name}  ${marks}`), {value: i}));
  });
  let viewer = null, hidden = null;
  function show(which) {
    hidden = viewer && [...stage.querySelectorAll(".chip")].map((chip) => chip.getAttribute("aria-pressed"));
    viewer?.stop();
    choice.value = (which + list.length) % list.length;
    viewer = orderViewer(stage, list[Number(choice.value)]);
    stage.querySelectorAll(".chip").forEach((chip, i) => {
      if (hidden?.[i] && chip.getAttribute("aria-pressed") !== hidden[i]) chip.click();
    });
  }
  back.onclick = () => show(Number(choice.value) - 1);
  on.onclick = () => show(Number(choice.value) + 1);
  choice.onchange = () => show(Number(choice.value));
  bar.append(back, choice, on);
  root.prepend(bar, stage);
  show(0);
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return JSON.parse(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text());
}

unpacked(document.getElementById("data").textContent.trim()).then((data) => {
  for (const [attribute, draw] of [["chart", chart], ["orders", examples], ["heat", heatMap]])
    for (const root of document.querySelectorAll(`[data-${attribute}]`)) draw(root, data[root.dataset[attribute]]);
  for (const toggle of document.querySelectorAll("[data-more]"))
    toggle.onchange = () => toggle.closest(".card").classList.toggle("all", toggle.checked);
  document.documentElement.dataset.ready = "true";
});
