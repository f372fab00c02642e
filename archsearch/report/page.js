// The page: puts the values of one study into its sections and ties them together by trial number.

const DATA = JSON.parse(document.getElementById("values").textContent);
const $ = (id) => document.getElementById(id);
const FAMILY = Object.fromEntries(DATA.families.map((family) => [family.name, family]));
const COMPLETE = DATA.trials.filter((trial) => trial.state === "complete");
const FRONT = COMPLETE.filter((trial) => trial.rank === 0);
const hidden = new Set();
let picked = null;

const label = (name) => DATA.metrics[name]?.label ?? name.replaceAll("_", " ");
const kindOf = (name) => DATA.metrics[name]?.kind ?? "number";
const shown = (trial, name) => write(kindOf(name), trial.metrics[name]);

function axisLabel(name) {
  const about = DATA.metrics[name];
  return [about.label, about.place && `(${about.place})`, about.log && "log scale"].filter(Boolean).join(", ").replace(", (", " (");
}

function header() {
  $("study").textContent = DATA.study;
  $("objectives").textContent = DATA.settings.find(([name]) => name === "objectives")?.[1] ?? "";
  $("headline").append(...DATA.headline.map(([number, what]) => html("li", {}, html("b", { text: number }), what)));
  $("settings").append(...DATA.settings.flatMap(([name, text]) => [html("dt", { text: name }), html("dd", { text })]));
  $("spec").textContent = JSON.stringify(DATA.spec, null, 2);
  $("key").textContent = "Solid: on the front in all objectives. Faded: beaten by another trial. Dashed: over a limit. "
    + "Line: best recall on the front at up to that cost. Bars: lowest to highest seed. Hover for numbers, click for the trial.";
}

function legend() {
  const used = new Set(COMPLETE.map((trial) => trial.family));
  for (const family of DATA.families.filter((row) => used.has(row.name))) {
    const button = html("button", { type: "button", "aria-pressed": "true", title: "show or hide" }, swatch(family), family.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(family.name)) hidden.add(family.name);
      button.setAttribute("aria-pressed", String(!hidden.has(family.name)));
      redraw();
    });
    $("legend").append(button);
  }
  $("only-front").addEventListener("change", redraw);
}

function visible(name) {
  const onlyFront = $("only-front").checked;
  return COMPLETE.filter((trial) => trial.metrics[name] !== undefined && trial.metrics.recall !== undefined
    && !hidden.has(trial.family) && (!onlyFront || trial.rank === 0));
}

// Members of the front that no other member beats on both axes of this picture, as a staircase.
function staircase(name, x, y) {
  const sign = DATA.metrics[name].more_is_better ? -1 : 1;
  const rows = FRONT.filter((trial) => trial.metrics[name] !== undefined)
    .map((trial) => [trial.metrics[name], trial.metrics.recall])
    .sort((a, b) => sign * (a[0] - b[0]) || b[1] - a[1]);
  const places = [];
  let best = -Infinity;
  for (const [cost, recall] of rows) {
    if (recall <= best) continue;
    if (places.length) places.push([x.at(cost), places.at(-1)[1]]);
    places.push([x.at(cost), y.at(recall)]);
    best = recall;
  }
  if (places.length) places.push([x.at(sign > 0 ? x.high : x.low), places.at(-1)[1]]);
  return places;
}

function mark(trial, name, x, y) {
  const family = FAMILY[trial.family];
  const on = trial.rank === 0;
  const look = trial.feasible ? (on ? "on" : "off") : "over";
  const node = svg("path", {
    class: `mark ${look}${trial.number === picked ? " picked" : ""}`, d: SHAPES[family.shape](on ? 6.5 : 5.2),
    fill: look === "over" ? null : family.colour, stroke: on ? null : family.colour, "data-trial": trial.number,
    transform: `translate(${x.at(trial.metrics[name]).toFixed(1)},${y.at(trial.metrics.recall).toFixed(1)})`,
    tabindex: 0, role: "button", "aria-label": `trial ${trial.number}: ${trial.summary}, recall ${shown(trial, "recall")}, ${label(name)} ${shown(trial, name)}`,
  });
  node.addEventListener("click", () => pick(trial.number));
  node.addEventListener("keydown", (event) => { if (event.key === "Enter") pick(trial.number); });
  node.addEventListener("pointermove", (event) => showTip(trial, event.clientX, event.clientY));
  node.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  return node;
}

function whisker(trial, name, x, y) {
  if (!trial.spread || trial.rank !== 0) return null;
  const at = x.at(trial.metrics[name]);
  const [low, high] = trial.spread.map((recall) => y.at(recall));
  const d = `M${at - 4},${low}H${at + 4}M${at},${low}V${high}M${at - 4},${high}H${at + 4}`;
  return svg("path", { class: "whisker", d, stroke: FAMILY[trial.family].colour });
}

function limitEdge(name, x, box) {
  const limit = DATA.metrics[name].limit;
  if (limit === null || limit >= x.high) return null;
  const at = Math.max(box[0], x.at(limit));
  return svg("g", {},
    svg("rect", { class: "edge", x: at, y: box[1], width: box[2] - at, height: box[3] - box[1] }),
    svg("line", { class: "edge-line", x1: at, x2: at, y1: box[1], y2: box[3] }),
    svg("text", { class: "edge-text", x: at - 5, y: box[3] - 8, "text-anchor": "end", text: `limit ${write(kindOf(name), limit)}` }));
}

function scatter(name) {
  const trials = visible(name);
  if (!trials.length) return html("p", { class: "empty", text: "No complete trial to draw." });
  const about = DATA.metrics[name];
  const box = [56, 12, 546, 330];
  let [low, high] = spread(COMPLETE.map((trial) => trial.metrics[name]).filter((value) => value !== undefined), about.log);
  // A limit near the data is worth a wider axis; a distant one would squeeze the points.
  if (about.limit !== null && about.limit >= high && about.limit < high * (about.log ? 4 : 1.3)) high = about.limit * (about.log ? 1.25 : 1.06);
  const lowest = Math.min(...COMPLETE.map((trial) => trial.spread?.[0] ?? trial.metrics.recall ?? 1));
  const x = makeScale(low, high, box[0], box[2], about.log, about.kind);
  const y = makeScale(Math.max(0, Math.floor((lowest - 0.03) * 20) / 20), 1.015, box[3], box[1], false, "fraction");
  const order = [...trials].sort((a, b) => (b.rank ?? 99) - (a.rank ?? 99));
  return svg("svg", { viewBox: "0 0 560 372", role: "group", "aria-label": `recall against ${about.label}` },
    axes(box, x, y, about.kind, "fraction", axisLabel(name), "recall"),
    limitEdge(name, x, box),
    svg("path", { class: "front-line", d: path(staircase(name, x, y)) }),
    ...order.map((trial) => whisker(trial, name, x, y)),
    ...order.map((trial) => mark(trial, name, x, y)));
}

const panels = [];

function makePanels() {
  if (!DATA.panels.length) {
    $("panels").append(html("p", { class: "empty", text: "No trial is complete yet, so there is nothing to draw." }));
    $("key").hidden = true;
    return;
  }
  for (const first of DATA.panels.slice(0, 2)) {
    const choice = html("select", { "aria-label": "horizontal axis" },
      ...DATA.panels.map((name) => html("option", { value: name, text: label(name), selected: name === first })));
    const canvas = html("div");
    const panel = { choice, canvas };
    choice.addEventListener("change", redraw);
    panels.push(panel);
    $("panels").append(html("div", { class: "panel" }, html("div", { class: "title" }, "recall against", choice), canvas));
  }
  redraw();
}

function redraw() {
  for (const { choice, canvas } of panels) canvas.replaceChildren(scatter(choice.value));
}

function showTip(trial, x, y) {
  const names = [...new Set(["recall", ...DATA.columns, ...DATA.panels])].filter((name) => trial.metrics[name] !== undefined);
  const rows = names.slice(0, 7).map((name) => html("tr", {}, html("td", { text: label(name) }), html("td", { text: shown(trial, name) })));
  const place = trial.feasible ? (trial.rank === 0 ? "on the front" : `front rank ${trial.rank}`) : "over a limit";
  const tip = $("tip");
  tip.replaceChildren(html("b", { text: `#${trial.number}  ${trial.summary}` }), html("table", {}, html("tbody", {}, ...rows)), html("div", { text: place }));
  tip.hidden = false;
  const size = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - size.width - 6))}px`;
  tip.style.top = `${y + 16 + size.height > innerHeight ? Math.max(4, y - size.height - 12) : y + 16}px`;
}

function seedRange(trial) {
  return trial.spread ? trial.spread.map((recall) => recall.toFixed(3)).join("\u2013") : "-";
}

function isConfirmed(trial) {
  return trial.confirmed !== undefined;
}

function confirmed(trial) {
  return isConfirmed(trial) ? trial.confirmed.toFixed(3) : "-";
}

function frontTable() {
  if (!FRONT.length) {
    $("front").replaceWith(html("p", { class: "empty", text: "The front is empty: no complete trial is within the limits." }));
    return;
  }
  const columns = [["#", (trial) => trial.number, (trial) => String(trial.number)],
    ["architecture", (trial) => trial.summary, null],
    ...DATA.columns.flatMap((name) => [[label(name), (trial) => trial.metrics[name] ?? Infinity, (trial) => shown(trial, name)],
      ...(name === "recall" && FRONT.some(isConfirmed) ? [["fresh seeds", (trial) => trial.confirmed ?? Infinity, confirmed]] : []),
      ...(name === "recall" ? [["over seeds", (trial) => (trial.spread ? trial.spread[1] - trial.spread[0] : Infinity), seedRange]] : [])])];
  let sorted = columns.findIndex((column) => column[0] === label("state_bytes"));
  let sign = 1;
  const body = html("tbody");
  const head = columns.map(([title], index) => html("th", { class: index === 1 ? "text" : null, scope: "col" },
    html("button", { type: "button", text: title, onclick: () => { sign = sorted === index ? -sign : 1; sorted = index; draw(); } })));
  function draw() {
    head.forEach((cell, index) => cell.setAttribute("aria-sort", index === sorted ? (sign > 0 ? "ascending" : "descending") : "none"));
    const value = columns[Math.max(0, sorted)][1];
    const rows = [...FRONT].sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.number - b.number));
    body.replaceChildren(...rows.map((trial) => html("tr", { "data-trial": trial.number, class: trial.number === picked ? "picked" : null, onclick: () => pick(trial.number) },
      ...columns.map(([, , text], index) => (index === 1
        ? html("td", { class: "text" }, swatch(FAMILY[trial.family]), ` ${trial.summary}`)
        : html("td", { text: text(trial) }))))));
  }
  draw();
  $("front").append(html("thead", {}, html("tr", {}, ...head)), body);
}

function pick(number) {
  picked = number;
  for (const node of document.querySelectorAll("[data-trial]")) node.classList.toggle("picked", Number(node.dataset.trial) === number);
  detail(COMPLETE.find((trial) => trial.number === number));
}

function detail(trial) {
  if (trial === undefined) {
    $("detail").replaceChildren(html("p", { class: "empty", text: "Click a point or a row to see a trial." }));
    return;
  }
  const about = trial.detail;
  $("picked").textContent = trial.number;
  const facts = [["architecture", about.layers.map((layer) => layer.mixer).join(" > ") + `, width ${about.width}`],
    ...about.layers.map((layer, depth) => [`layer ${depth}`, [layer.mixer, ...Object.entries(layer.fields).map(([key, value]) => `${key} ${value}`)].join(", ")]),
    ["channel mixer", about.channel], ["device", about.device], ["trained for", about.train_time],
    ["over a limit", about.violations.join(" ") || null]];
  const parts = [html("dl", { class: "facts" }, ...facts.filter((row) => row[1]).flatMap(([name, text]) => [html("dt", { text: name }), html("dd", { text })]))];
  if (about.members) parts.push(html("h3", { text: "recall by learning rate (rows) and seed" }), memberTable(about));
  if (about.members) parts.push(html("div", { class: "minis" },
    mini("recall by pairs", about.by_pairs, "pairs"), mini("selection recall while training", null, "epoch", about)));
  parts.push(html("p", { class: "soft" }, "Take it home: ", html("code", { text: `archsearch export ${trial.number} DIR --study ${DATA.study}` })));
  $("detail").replaceChildren(...parts);
}

function memberTable(about) {
  const rates = [...new Set(about.members.map((member) => member[0]))];
  return html("div", { class: "scroll" }, html("table", {}, html("tbody", {}, ...rates.map((rate) => html("tr", {},
    html("td", { text: `${rate}${rate === about.chosen ? " (chosen)" : ""}` }),
    ...about.members.filter((member) => member[0] === rate).map(([, , recall, diverged]) => html("td", { class: rate === about.chosen ? "good" : "soft", text: diverged ? "diverged" : recall.toFixed(3) })))))));
}

const DASHES = ["5 3", "2 2", "8 3 2 3"];

function mini(title, points, xLabel, about = null) {
  const series = points ? [["#0072B2", null, points]]
    : about.curves.map(([rate, row], index) => [rate === about.chosen ? "#0072B2" : "#9aa4b2", rate === about.chosen ? null : DASHES[index % DASHES.length], row]);
  const drawn = series.filter((row) => row[2].length);
  return html("div", {}, html("h3", { text: title }),
    drawn.length ? lines(drawn, xLabel, "recall", "whole", "fraction", [300, 180], 0) : html("p", { class: "soft", text: "not recorded" }));
}

function hypervolume() {
  const points = DATA.hypervolume;
  $("hypervolume").append(points.length
    ? lines([["#0072B2", null, points]], "complete trials", "hypervolume", "whole", "fraction")
    : html("p", { class: "empty", text: "Nothing yet." }));
}

function shares() {
  const grid = html("div", { class: "shares" });
  for (const { layer, on, off } of DATA.shares) {
    for (const [side, counts] of [["front", on], ["others", off]]) {
      const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
      const stack = html("div", { class: "stack" }, ...DATA.families.filter((family) => counts[family.name]).map((family) => html("span", {
        style: `width:${(100 * counts[family.name]) / total}%;background:${family.colour};color:${inkOn(family.colour)}`,
        title: `${family.name}: ${counts[family.name]} of ${total}`, text: counts[family.name] / total < 0.2 ? "" : `${family.name} ${Math.round((100 * counts[family.name]) / total)}%` })));
      grid.append(html("span", { text: side === "front" ? `layer ${layer}` : "" }), html("span", { class: "soft", text: side }), stack);
    }
  }
  $("shares").append(DATA.shares.length ? grid : html("p", { class: "empty", text: "Nothing yet." }));
}

function failures() {
  $("failure-section").hidden = DATA.failures.length === 0;
  leftOut($("failures"), DATA.failures);
}

function stopped() {
  $("stopped-section").hidden = DATA.stopped.length === 0;
  $("saved").textContent = `Early stopping saved ${Math.round(100 * DATA.training_saved)} % of the training.`;
  leftOut($("stopped"), DATA.stopped);
}

function leftOut(place, rows) {
  for (const { reason, count, trials } of rows) {
    place.append(html("details", {}, html("summary", { text: `${reason}: ${count}` }),
      html("ul", {}, ...trials.map((trial) => html("li", {}, html("b", { text: `#${trial.number} ` }), `${trial.summary}: `, html("span", { class: "soft", text: trial.message }))))));
  }
}

header();
legend();
makePanels();
frontTable();
hypervolume();
shares();
stopped();
failures();
pick([...FRONT].sort((a, b) => b.metrics.recall - a.metrics.recall)[0]?.number ?? null);
