"use strict";
// Drawing without a library: numbers as people write them, axes, marks. Knows nothing of studies.
// Every text goes through textContent, so that a name can never become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function html(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function digits(value) {
  return String(Number(value.toPrecision(3)));
}

// The largest unit of which there is at least one after rounding, as in archsearch.units.
function scaled(value, base, suffixes) {
  let step = suffixes.length - 1;
  while (step > 0 && Number((value / base ** step).toPrecision(3)) < 1) step -= 1;
  return digits(value / base ** step) + suffixes[step];
}

function write(kind, value) {
  if (value === null || value === undefined) return "-";
  if (kind === "fraction") return value.toFixed(3);
  if (kind === "bytes") return scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]);
  if (kind === "ms") return digits(value) + "ms";
  if (kind === "count") return scaled(value, 1000, ["", "k", "M", "G", "T"]);
  return digits(value);
}

function spaced(low, high, step) {
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-9); n += 1) found.push(n * step);
  return found;
}

function linearTicks(low, high, wanted) {
  const raw = (high - low) / wanted;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((candidate) => candidate >= raw);
  return spaced(low, high, step).map((value) => Number(value.toPrecision(12)));
}

function logTicks(low, high, base) {
  for (const every of [1, 2, 4, 8]) {
    const ticks = spaced(Math.log(low) / Math.log(base), Math.log(high) / Math.log(base), every)
      .map((power) => base ** power);
    if (ticks.length <= 8 && (base === 2 || ticks.length >= 3)) return ticks;
    if (base === 10 && every === 1 && ticks.length < 3) {
      const fine = [];
      for (let size = 10 ** Math.floor(Math.log10(low)); size <= high; size *= 10) {
        fine.push(...[1, 2, 5].map((factor) => factor * size));
      }
      const inside = fine.filter((value) => value >= low && value <= high);
      return inside.length >= 2 ? inside : linearTicks(low, high, 5);
    }
  }
  return [low, high];
}

// A position for every value of [low, high], and round values to write beside the axis.
function makeScale(low, high, from, to, log, kind) {
  const warp = log ? Math.log : (value) => value;
  const span = warp(high) - warp(low) || 1;
  const at = (value) => from + ((warp(value) - warp(low)) / span) * (to - from);
  const ticks = log ? logTicks(low, high, kind === "bytes" ? 2 : 10) : linearTicks(low, high, 6);
  return { at, ticks, low, high };
}

function spread(values, log) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (log) {
    const room = Math.max((high / low) ** 0.07, 1.15);
    return [low / room, high * room];
  }
  const room = (high - low) * 0.07 || Math.abs(high) * 0.1 || 1;
  low = low >= 0 ? Math.max(0, low - room) : low - room;
  return [low, high + room];
}

function star(radius) {
  const points = [];
  for (let corner = 0; corner < 10; corner += 1) {
    const reach = corner % 2 ? radius * 0.5 : radius * 1.3;
    const angle = (Math.PI * corner) / 5 - Math.PI / 2;
    points.push(`${(reach * Math.cos(angle)).toFixed(2)},${(reach * Math.sin(angle)).toFixed(2)}`);
  }
  return `M${points.join("L")}Z`;
}

const SHAPES = {
  circle: (r) => `M${-r},0A${r},${r} 0 1 1 ${r},0A${r},${r} 0 1 1 ${-r},0Z`,
  square: (r) => `M${-r * 0.9},${-r * 0.9}H${r * 0.9}V${r * 0.9}H${-r * 0.9}Z`,
  triangle: (r) => `M0,${-r * 1.2}L${r * 1.15},${r * 0.85}H${-r * 1.15}Z`,
  down: (r) => `M0,${r * 1.2}L${r * 1.15},${-r * 0.85}H${-r * 1.15}Z`,
  diamond: (r) => `M0,${-r * 1.3}L${r * 1.3},0L0,${r * 1.3}L${-r * 1.3},0Z`,
  plus: (r) => { const a = r * 0.42, b = r * 1.15; return `M${-a},${-b}H${a}V${-a}H${b}V${a}H${a}V${b}H${-a}V${a}H${-b}V${-a}H${-a}Z`; },
  star: (r) => star(r),
  hexagon: (r) => `M${-r * 1.1},0L${-r * 0.55},${-r}H${r * 0.55}L${r * 1.1},0L${r * 0.55},${r}H${-r * 0.55}Z`,
};

function swatch(family, size = 14) {
  const middle = size / 2;
  return svg("svg", { class: "swatch", viewBox: `0 0 ${size} ${size}`, "aria-hidden": "true" },
    svg("path", { d: SHAPES[family.shape](size * 0.33), fill: family.colour, transform: `translate(${middle},${middle})` }));
}

// Axes of one picture. `box` is [left, top, right, bottom] of the plotting area.
function axes(box, x, y, xKind, yKind, xLabel, yLabel) {
  const [left, top, right, bottom] = box;
  const group = svg("g");
  for (const tick of y.ticks) {
    const at = y.at(tick);
    group.append(svg("line", { class: "grid", x1: left, x2: right, y1: at, y2: at }),
      svg("text", { class: "tick", x: left - 7, y: at + 4, "text-anchor": "end", text: yKind === "fraction" ? Number(tick.toFixed(4)) : write(yKind, tick) }));
  }
  for (const tick of x.ticks) {
    const at = x.at(tick);
    group.append(svg("line", { class: "grid", x1: at, x2: at, y1: top, y2: bottom }),
      svg("text", { class: "tick", x: at, y: bottom + 17, "text-anchor": "middle", text: write(xKind, tick) }));
  }
  group.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("line", { class: "axis", x1: left, x2: left, y1: top, y2: bottom }),
    svg("text", { class: "label", x: (left + right) / 2, y: bottom + 36, "text-anchor": "middle", text: xLabel }),
    svg("text", { class: "label", transform: `translate(12,${(top + bottom) / 2}) rotate(-90)`, "text-anchor": "middle", text: yLabel }));
  return group;
}

function path(points) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");
}

// A small line picture: series of [colour, dash, [[x, y]...]].
function lines(series, xLabel, yLabel, xKind, yKind, size = [560, 250], floor = null) {
  const [width, height] = size;
  const box = [60, 10, width - 14, height - 44];
  const points = series.flatMap((row) => row[2]);
  const xs = points.map((point) => point[0]);
  const [low, high] = spread(points.map((point) => point[1]), false);
  const x = makeScale(Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1), box[0] + 6, box[2] - 6, false, xKind);
  const y = makeScale(floor ?? low, yKind === "fraction" ? Math.min(1.0, high) : high, box[3], box[1] + 4, false, yKind);
  x.ticks = x.ticks.filter((tick) => xKind !== "whole" || Number.isInteger(tick));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${yLabel} over ${xLabel}` },
    axes(box, x, y, xKind, yKind, xLabel, yLabel));
  for (const [colour, dash, row] of series) {
    const places = row.map(([a, b]) => [x.at(a), y.at(b)]);
    picture.append(svg("path", { d: path(places), fill: "none", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash }));
    if (row.length < 40) for (const [cx, cy] of places) picture.append(svg("circle", { cx, cy, r: 2.6, fill: colour }));
  }
  return picture;
}

// Black or white, whichever reads better on a colour (relative luminance of WCAG 2).
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.3 ? "#111" : "#fff";
}
