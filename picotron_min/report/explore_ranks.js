"use strict";
// What is chosen, the bar, and who has what. explore_time.js has the other figures, and begins.
const T = lookups(JSON.parse(document.getElementById("data").textContent));
// The layout, then what is looked at. All of it is in the address.
const SHAPE = { model: "tiny", pp: 2, dp: 2, cp: 1, tp: 2, engine: "1f1b", m: 4, zero: 0, sp: 0 };
const V = { ...SHAPE, rank: 5, weight: "q_proj", layer: 3, time: 6.5, cut: "zigzag", hop: 1 };
const questions = {};  // that wait for an answer, by section
let before = null;  // memory before the last change of the layout

const CUT = { pp: "the layers", dp: "the batch", cp: "every sequence", tp: "every matrix" };
const SENT = {
  pp: () => "activations and their gradients",
  dp_cp: () => ["a sum of all gradients a step", "gradients to their owners, new weights back",
    "gradients of each micro-batch to their owners, new weights back",
    "weights for each forward and backward, gradients to their owners"][T.zero(V)],
  cp: () => "keys and values, round a ring",
  tp: () => T.sp(V) ? "four all-gathers, four reduce-scatters of activations a layer" : "four sums of activations a layer",
  dp_cp_tp: () => "a sum of the gradients of norms",
};
const ZERO = "ZeRO divides what dp and cp ranks all keep: 1 optimizer state, 2 + gradients, 3 + weights.";
const NAMES = { embed_tokens: "embed", input_layernorm: "norm 1", post_attention_layernorm: "norm 2" };
const ENDS = ["embed_tokens", "norm", "lm_head"], DRAWN = ["svg", "rect", "path", "text", "circle"];

const $ = id => document.getElementById(id);
function e(tag, attributes, ...children) {
  const node = DRAWN.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(child => child || child === 0));
  return node;
}
// Content is replaced; the control that had the focus has it again, or one beside it.
function put(id, ...children) {
  const controls = () => [...$(id).querySelectorAll("button, select, input")];
  const at = controls().indexOf(document.activeElement);
  $(id).replaceChildren(...children.flat(Infinity).filter(Boolean));
  if (at >= 0) [at, at - 1, at + 1].map(i => controls()[i]).find(c => c && !c.disabled)?.focus();
}
const hue = axis => axis && `--axis: var(--${axis.slice(0, 2)})`;
const title = axis => axis === "dp_cp" && V.cp === 1 ? "dp" : axis;
const tag = axis => e("span", { class: "tag", style: hue(axis) }, title(axis));
const list = ranks => `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(" ")}`;
const chip = (name, isOn, click, label) => e("button", { "aria-pressed": String(isOn), "aria-label": label, click }, name);
const gap = () => e("span", { style: "width: 0.5rem" });
function bytes(n) {
  const [size, unit] = [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]].find(([size]) => n >= size) ?? [1, "B"];
  return `${+(n / size).toPrecision(3)} ${unit}`;
}
// Every change goes through here: it is refused in the trainer's words, or all is drawn again.
function change(changes) {
  const next = { ...V, ...changes }, why = T.refusal(next);
  if (!why) {
    if (Object.keys(SHAPE).some(key => next[key] !== V[key])) before = next.model === V.model && T.memory(V);
    for (const section of Object.keys(questions)) delete questions[section];
    Object.assign(V, next);
  }
  const ends = { rank: T.world(V), layer: T.model(V).layers, hop: ringSize() };
  for (const [name, end] of Object.entries(ends)) V[name] = Math.min(V[name], end - 1);
  draw();
  put("status", why ? `✗ ${why}` : `${T.model(V).about}. ${ZERO}`);
  $("status").classList.toggle("refused", Boolean(why));
}
function stepper(key, name, values, label = key) {
  const at = values.indexOf(V[key]);
  const button = (sign, verb, to) => e("button",
    { "aria-label": `${verb} ${label}`, disabled: !(to in values), click: () => change({ [key]: values[to] }) }, sign);
  return e("span", { class: "stepper" }, name, button("−", "less", at - 1), e("output", {}, V[key]),
    button("+", "more", at + 1), e("small", {}, CUT[key]));
}
function drawBar() {
  const select = (key, options, disabled) => e("select", { disabled, "aria-label": key,
    change: ({ target }) => change({ [key]: options[target.selectedIndex] }) },
    options.map(option => e("option", { selected: option === V[key] }, option)));
  const models = Object.keys(T.data.models), world = T.world(V), { sizes } = T.data;
  put("sizes", e("span", { class: "flow" }, models.map(name => chip(name, name === V.model, () => change(T.refusal({ ...V, model: name }) ? { ...SHAPE, model: name } : { model: name })))),
    AXES.map(axis => stepper(axis, tag(axis), sizes)));
  put("settings", e("label", {}, "schedule ", select("engine", Object.keys(T.data.schedules))),
    stepper("m", "micro-batches", sizes, "micro-batches"),
    e("label", {}, "ZeRO ", select("zero", [0, 1, 2, 3], V.dp * V.cp === 1)),
    e("label", {}, e("input", { type: "checkbox", checked: T.sp(V) === 1, disabled: V.tp === 1,
      change: ({ target }) => change({ sp: +target.checked }) }), " sequence parallel"),
    e("b", { class: "last" }, `${world} ${world > 1 ? "ranks" : "rank"}`));
}

function drawWeights() {
  const layers = T.model(V).layers, isEnd = ENDS.includes(V.weight);
  const named = name => chip(NAMES[name] ?? name.replace("_proj", ""), name === V.weight, () => change({ weight: name }), name);
  const other = (sign, to, label) => e("button", { disabled: isEnd || to < 0 || to >= layers, "aria-label": label,
    click: () => change({ layer: to }) }, sign);
  const inside = Object.keys(T.model(V).shapes).filter(name => !ENDS.includes(name));
  put("weights", named("embed_tokens"), gap(), e("span", { class: "stepper" }, e("small", {}, "layer"),
    other("−", V.layer - 1, "layer before"), e("output", {}, V.layer), other("+", V.layer + 1, "next layer")),
    inside.map(named), gap(), named("norm"), named("lm_head"));
}
function choose(rank) {
  const { picked } = questions.who ?? {};
  if (picked && rank !== V.rank && !picked.delete(rank)) picked.add(rank);
  if (picked) return paintRanks();
  const layer = T.has(V, rank, V.weight, V.layer) ? V.layer : T.stages(V, T.place(V, rank).pp)[0][0];
  change({ rank, layer });
}
function layersOf(pp) {
  const names = T.stages(V, pp).map(([first, stop]) => stop - first > 1 ? `${first}–${stop - 1}` : first);
  return `${names.join(", ").match(/\D/) ? "layers" : "layer"} ${names.join(", ")}`;
}
// Boxes in boxes: ranks are numbered row by row over the axes, so each box has a run of them.
function boxes([axis, ...inner], ranks) {
  if (!axis) return ranks.map(rank => e("button", { class: "cell", "data-rank": rank, click: () => choose(rank),
    mouseenter: () => paintRanks(rank), mouseleave: () => paintRanks() }));
  if (axis === "tp") return e("div", { class: "cells" }, boxes(inner, ranks));
  if (axis !== "pp" && V[axis] === 1) return boxes(inner, ranks);
  const each = ranks.length / V[axis], runs = T.ranks(V).slice(0, V[axis]).map(i => ranks.slice(i * each, (i + 1) * each));
  return e("div", { class: axis }, runs.map((run, i) => e("div", { class: "box" },
    e("span", { class: "label" }, tag(axis), ` ${i}${axis === "pp" ? ` · ${layersOf(i)}` : ""}`), boxes(inner, run))));
}
function drawRanks() {
  put("ranks", boxes(AXES, T.ranks(V)));
  $("ranks").firstChild.style.setProperty("--columns", V.pp > 2 && T.world(V) / V.pp < 3 ? 2 : 1);
  $("ranks").onkeydown = event => {
    const far = T.world(V) / V.pp, steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -far, ArrowDown: far };
    const to = +document.activeElement.dataset.rank + steps[event.key];
    if (!(to >= 0 && to < T.world(V))) return;
    event.preventDefault();
    if (!questions.who) choose(to);
    $("ranks").querySelector(`[data-rank="${to}"]`).focus();
  };
  paintRanks();
}
// The rank's part of a weight; a vector is one row.
function icon(rank, { cuts, owned }) {
  const shape = T.model(V).shapes[V.weight], [long, wide] = shape.length > 1 ? shape : [1, ...shape];
  const width = 33, height = shape.length > 1 ? 31 : 8, isHere = T.has(V, rank, V.weight, V.layer), shares = T.zero(V) > 0;
  const draw = (cuts, fill) => {
    const spans = T.part(V, V.weight, rank, cuts), [rows, columns] = spans.length > 1 ? spans : [[0, 1], ...spans];
    const [x, right] = columns.map(n => n / wide * width), [y, bottom] = rows.map(n => n / long * height);
    return e("rect", { x, y, width: right - x, height: bottom - y, fill });
  };
  return e("svg", { width: width + 2, height: height + 2, viewBox: `-1 -1 ${width + 2} ${height + 2}` },
    isHere && draw(cuts, shares ? "var(--k3)" : "var(--k1)"), isHere && shares && draw(owned, "var(--k1)"),
    e("rect", { width, height, fill: "none", stroke: "var(--k2)", "stroke-dasharray": isHere ? undefined : "2 3" }));
}
function paintRanks(hovered = V.rank) {
  const asked = questions.who, answered = $("ask-who").answered, me = asked ? V.rank : hovered;
  const own = T.place(V, me), placed = T.placed(V, V.weight), isHere = T.has(V, me, V.weight, V.layer);
  const sum = isHere && !asked ? T.row(V, placed.sum, me) : [];
  for (const cell of document.querySelectorAll(".cell")) {
    const rank = +cell.dataset.rank, at = T.place(V, rank), differ = AXES.filter(axis => at[axis] !== own[axis]);
    const near = !asked && differ.length === 1 && differ[0], sums = sum.length > 1 && sum.includes(rank);
    const verdict = answered?.picked.has(rank) && (answered.right.has(rank) ? " ✓" : " ✗");
    cell.className = `cell${rank === me ? " me" : ""}${near ? " near" : ""}${asked?.picked.has(rank) ? " picked" : ""}`;
    cell.style = hue(near) || "";
    cell.replaceChildren(...[e("b", {}, rank, verdict), near && tag(near), icon(rank, placed),
      sums && e("span", { class: "sum" }, "Σ")].filter(Boolean));
    cell.setAttribute("aria-pressed", String(asked ? asked.picked.has(rank) : rank === me));
    cell.setAttribute("aria-label", `rank ${rank}${near ? `, along ${near}` : ""}${sums ? ", sums this gradient" : ""}`);
  }
  put("rank-keys", !asked && [e("span", {}, `coloured: differs from rank ${me} along one axis`),
    sum.length > 1 && e("span", {}, "Σ: sums this gradient"), V.pp > 1 && e("span", {}, "dotted: not on this rank"),
    T.zero(V) > 0 && e("span", {}, "pale: computes with it; dark: updates it")]);
  drawAbout(me, placed, sum, isHere);
}

function drawAbout(me, placed, sum, isHere) {
  const at = T.place(V, me), sent = T.traffic(V, at.tp)[at.pp], shape = T.model(V).shapes[V.weight];
  const isTold = axis => sent[axis] && !(questions.who && axis.startsWith("dp"));  // that would be the answer
  const rows = Object.keys(SENT).filter(isTold).map(axis => e("tr", {},
    e("td", {}, tag(axis), ` ${T.row(V, axis, me).join(" ")}`), e("td", {}, SENT[axis]()),
    e("td", {}, questions.cost ? "?" : bytes(sent[axis]))));
  const head = ["with", "it exchanges", "it sends a step"].map(name => e("th", {}, name));
  const whole = ENDS.includes(V.weight) ? V.weight : `${V.weight} of layer ${V.layer}`;
  const facts = isHere ? factsOf(me, placed, sum) : [["has", "nothing: another stage has it"]];
  put("about", e("p", {}, e("b", {}, `Rank ${me}`), AXES.map(axis => [" ", tag(axis), ` ${at[axis]} `])),
    T.world(V) > 1 ? e("table", {}, e("tr", {}, head), rows) : e("p", { class: "quiet" }, "One rank has all, and sends nothing."),
    e("p", {}, e("b", {}, whole), e("small", {}, ` ${shape.map(n => n.toLocaleString("en")).join(" × ")}`)),
    e("table", {}, facts.map(([name, ...value]) => e("tr", {}, e("th", {}, name), e("td", {}, value)))));
}
function factsOf(me, { cuts, owned, sum: axis }, sum) {
  const shape = T.model(V).shapes[V.weight], part = cuts => T.part(V, V.weight, me, cuts)
    .map(([first, stop], dim) => stop - first < shape[dim] && `${shape.length > 1 && dim ? "columns" : "rows"} ${first}–${stop - 1}`)
    .filter(Boolean).join(", ") || "all of it";
  const shares = T.zero(V) > 0, facts = [[shares ? "computes with" : "has", part(cuts)]];
  if (shares) facts.push(["updates", part(owned)]);
  if (questions.who) return facts;
  const alike = T.copies(V, me, V.weight, V.layer).filter(rank => !sum.includes(rank));
  facts.push(["its gradient", sum.length > 1 ? [e("b", { style: "color: var(--dp)" }, "Σ "),
    `over ${title(axis)}, ${list(sum)}: the same part, other tokens`] : "is whole: no sum"]);
  if (alike.length) facts.push(["no sum with", `${list(alike)}: the same part, and the same tokens`]);
  return facts;
}
