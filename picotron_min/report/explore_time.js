"use strict";
// The step in time, the ring, memory and bytes, questions; the last lines begin.
const TONES = { F: "k3", B: "k1", W: "k2" };
const rect = (x, y, width, height, fill, more) => e("rect", { x, y, width: Math.max(0, width), height, fill: `var(--${fill})`, ...more });
const text = (x, y, content, more) => e("text", { x, y, ...more }, content);
const sum = numbers => numbers.reduce((a, b) => a + b, 0);
const key = (tone, name) => e("span", {}, e("i", { style: `background: var(--${tone})` }), name);
let timer, scale;  // of the timeline: pixels to forwards
function drawTime() {
  const plan = T.plan(V), { chunks, slots } = T.schedule(V), pipeline = T.row(V, "pp", V.rank), asked = questions.when;
  const width = Math.max(440, $("timeline").clientWidth), isWide = width > 720, [left, right] = isWide ? [126, 150] : [54, 72];
  // One scale for all schedules that fit, so that a shorter one looks shorter.
  const fitting = Object.keys(T.data.schedules).map(engine => ({ ...V, engine })).filter(L => !T.refusal(L));
  const longest = Math.max(...fitting.map(L => inForwards(L, T.plan(L).end)));
  const unit = (width - left - right) / longest / chunks, X = slot => left + slot * unit, Y = pp => 16 + pp * 52;
  const now = Math.min(V.time * chunks, plan.end), most = Math.max(...plan.live), shown = a => !asked || a.start < now;
  const rows = plan.actions.map((actions, pp) => {
    const y = Y(pp), current = actions.find(a => a.start <= now && now < a.end);
    const times = [0, ...actions.flatMap(a => [a.start, a.end]), now].filter(t => !asked || t <= now).sort((a, b) => a - b);
    const steps = times.map(t => `H${X(t)}V${y + 44 - 16 * T.alive(V, actions, t) / most}`);
    const doing = current ? `${current.kind}${current.i}${current.chunk && isWide ? " of chunk 2" : ""}` : now < plan.end ? "idle" : "done";
    return [text(0, y + 17, `rank ${pipeline[pp]}`, { "font-weight": 650 }),
      isWide && text(0, y + 33, layersOf(pp), { style: "fill: var(--quiet)" }), rect(left, y, plan.end * unit, 26, "empty"),
      e("path", { d: `M${left} ${y + 44}${steps.join("")}V${y + 44}Z`, fill: "var(--alive)" }),
      actions.filter(shown).map(a => [rect(X(a.start), y + 4 * a.chunk, (a.end - a.start) * unit - 1, 26 - 8 * a.chunk, TONES[a.kind],
        { rx: 3, stroke: a === current && "var(--ink)", "stroke-width": 2 }), (a.end - a.start) * unit > 9 && text(X((a.start + a.end) / 2),
        y + 17, a.i, { class: "mid", style: `fill: var(--on-${TONES[a.kind]})` })]),
      !asked && text(width - right + 10, y + 17, `${doing} · ${T.alive(V, actions, now) / chunks}${isWide ? " alive" : ""}`)];
  });
  const isOnItsWay = a => a.used !== undefined && a.end <= now && now < Math.max(a.used, a.end + 0.5);
  const messages = plan.actions.flatMap((actions, pp) => asked ? [] : actions.filter(isOnItsWay).map(a => {
    const [from, to] = a.to > pp ? [Y(pp) + 26, Y(a.to)] : [Y(pp), Y(a.to) + 26], x = X(a.used) + 2;
    return [e("path", { d: `M${X(a.end) - 2} ${from}L${x} ${to}`, stroke: "var(--pp)", "stroke-width": 2.5 }),
      e("circle", { cx: x, cy: to, r: 4, fill: "var(--pp)" })];
  }));
  const height = Y(V.pp);
  put("timeline", e("svg", { width, height, role: "img", "aria-label": `${V.engine} in time` }, rows, messages,
    e("path", { d: `M${X(now)} 6V${height}`, stroke: "var(--ink)", "stroke-width": 1.5 }),
    e("path", { d: `M${X(now) - 6} 2h12l-6 9z`, fill: "var(--ink)" })));
  scale = x => Math.max(0, Math.min(plan.end, Math.round((x - left) / unit * 4) / 4)) / chunks;
  Object.assign($("head"), { max: plan.end / chunks, step: 0.25 / chunks, value: now / chunks });
  put("clock", `${+(now / chunks).toFixed(3)} of ${plan.end / chunks} forwards`);
  const [first, last] = [plan.live[0] / chunks, plan.live.at(-1) / chunks];
  put("time-about", `The pipeline of rank ${V.rank}: a number is a micro-batch; a forward takes 1, its backward 2. `,
    !asked && [e("b", {}, `Rank ${pipeline[0]} is idle ${Math.round(100 * plan.bubble)}% of the step. `),
      "Activations are kept from a forward to its backward: ", first > last
        ? `the first rank waits longest for a gradient to come back, and keeps up to ${first}, the last ${last}.` : `up to ${first} on a rank.`]);
  put("time-keys", key("k3", "forward"), slots.B === 1 ? [key("k1", "backward: of inputs"), key("k2", "backward: of weights")]
    : key("k1", "backward"), chunks > 1 && e("span", {}, "lower box: second chunk of layers"), key("alive", "activations alive"),
    V.pp > 1 && key("pp", "message, from made to used"));
  // In the formulas of a schedule a rank is a place along pp; on this page ranks are numbered over all axes.
  const formula = T.schedule(V).about.replace("p - rank", "p - place"), ofChunks = chunks > 1 ? ", v chunks a rank, each with activations" : "";
  put("formula", `${V.engine}: ${formula} (a pipeline of p ranks, place 0 to p-1 in it, m micro-batches${ofChunks}).`);
}
const inForwards = (L, slots) => slots / T.schedule(L).chunks;
function seek(time) {
  timer = clearInterval(timer);
  put("play", "Play");
  if (!questions.when) V.time = time;  // later times would be the answer
  drawTime();
  share();
}
function play() {
  if (timer) return seek(V.time);
  const end = inForwards(V, T.plan(V).end);
  if (V.time >= end) V.time = 0;
  put("play", "Pause");
  timer = setInterval(() => {
    V.time += inForwards(V, 0.25);
    if (V.time < end) drawTime();
    else seek(end);
  }, 100);
}
function toEvent(direction) {
  const far = t => (t - V.time) * direction, events = T.plan(V).actions.flat().flatMap(a => [a.start, a.end]);
  const times = events.map(t => inForwards(V, t)).filter(t => far(t) > 0);
  if (times.length) seek(times.reduce((a, b) => far(a) < far(b) ? a : b));
}

const ringSize = () => V.cp > 1 ? V.cp : 4;
function drawRing() {
  const n = ringSize(), pieces = T.data.rings[`${n} ${V.cut}`], me = V.cp > 1 ? T.place(V, V.rank).cp : 2;
  // By rank and hop: the blocks of queries and earlier keys, of which a piece's own is half a square.
  const seen = (keys, q) => keys.filter(k => k <= q).map(k => ({ q, k, isHalf: k === q }));
  const hops = pieces.map((own, rank) => pieces.map((_, hop) => own.flatMap(q => seen(pieces[(rank - hop + n) % n], q))));
  const side = Math.min(380, $("triangle").clientWidth - 24), unit = side / pieces.flat().length;
  const toneOf = (rank, hop) => hop > V.hop ? "empty" : hop < V.hop ? "k3" : rank === me ? "cp" : "k2";
  const inkOf = tone => ({ empty: "var(--quiet)", cp: "var(--card)" }[tone] ?? `var(--on-${tone})`);
  const blocks = hops.map((of, rank) => of.map((found, hop) => found.map(({ q, k, isHalf }) => {
    const tone = toneOf(rank, hop), third = isHalf ? 1 / 6 : 0, shape = `v${unit}h${unit}${isHalf ? "" : `v${-unit}`}Z`;
    return [e("path", { d: `M${k * unit} ${q * unit}${shape}`, fill: `var(--${tone})`, stroke: "var(--card)" }),
      text((k + 0.5 - third) * unit, (q + 0.5 + third) * unit + 4, rank, { class: "mid", style: `fill: ${inkOf(tone)}` })];
  })));
  put("triangle", e("svg", { width: side + 22, height: side + 22, viewBox: `-20 -20 ${side + 22} ${side + 22}`, role: "img",
    "aria-label": "which rank computes which block" }, text(0, -7, "keys →"), text(-side, -7, "← queries", { transform: "rotate(-90)" }), blocks));
  const work = hops.map(of => of.map(found => sum(found.map(({ isHalf }) => isHalf ? 0.5 : 1))));
  const slowest = work[0].map((_, hop) => Math.max(...work.map(of => of[hop]))), totals = work.map(sum);
  const width = $("hops").clientWidth, pixels = (width - 50) / sum(slowest), X = hop => 48 + sum(slowest.slice(0, hop)) * pixels;
  const bars = slowest.map((most, hop) => [text(X(hop) + most * pixels / 2, 12, most * pixels > 40 ? `hop ${hop}` : hop, { class: "mid" }),
    work.map((of, rank) => [rect(X(hop), 20 + 28 * rank, most * pixels - 2, 22, "empty", { stroke: hop === V.hop && "var(--ink)" }),
      rect(X(hop), 20 + 28 * rank, of[hop] * pixels - 2, 22, hop > V.hop ? "k3" : toneOf(rank, hop), { opacity: hop > V.hop && 0.5 })])]);
  const source = (me - V.hop + n) % n, ratio = +(sum(slowest) / sum(totals) * n).toPrecision(3);
  const why = { zigzag: "Each rank has an early and a late piece, so all have the same work in every hop.",
    "in order": "The last rank's queries see all keys, the first rank's only their own: the others wait." };
  put("hops", e("p", {}, V.cp === 1 && "cp is 1, so this is drawn for 4 ranks. ", e("b", {}, `cp ${me} `), V.hop
    ? `has the keys and values of cp ${source}, which cp ${(me + n - 1) % n} sent.` : "begins with its own keys and values."),
    e("svg", { width, height: 28 * n + 24, role: "img", "aria-label": "work of each rank in each hop" }, bars, hops.map((_, rank) =>
      text(0, 36 + 28 * rank, `cp ${rank}`, { style: rank === me && "fill: var(--cp); font-weight: 700" }))),
    e("p", {}, e("b", {}, `With all waits, attention takes ${ratio} × the mean work of a rank. `), why[V.cut]),
    e("p", { class: "quiet" }, "A frame is as long as the slowest rank of its hop: what is empty is waiting."));
  put("ring-choices", Object.keys(why).map(cut => chip(cut, cut === V.cut, () => change({ cut }))), gap(),
    slowest.map((_, hop) => chip(`hop ${hop}`, hop === V.hop, () => change({ hop }))));
}

const PARTS = { weights: "k1", gradients: "k2", optimizer: "k3", activations: "alive", loss: "line" };
const AXIS_TONES = { pp: "pp", cp: "cp", tp: "tp", dp_cp: "dp", dp_cp_tp: "dp" };
// The legend has the numbers of one row.
function drawBars(id, name, rows, own, tones, marks, limit) {
  const width = $(id).clientWidth, left = 46, names = Object.keys(tones), most = Math.max(1, ...rows.map(sum), ...marks ?? []);
  const pixels = (width - left - 70) / most, height = 34 * rows.length + 4;
  const line = (x, y, high, more) => e("path", { d: `M${left + x * pixels} ${y}v${high}`, stroke: "var(--ink)", "stroke-width": 2, ...more });
  put(id, e("b", {}, name), e("svg", { width, height, role: "img", "aria-label": name }, rows.map((row, pp) => [
    text(0, 34 * pp + 21, `pp ${pp}`, { style: "fill: var(--pp); font-weight: 700" }),
    row.map((n, i) => rect(left + sum(row.slice(0, i)) * pixels, 34 * pp + 4, n * pixels - 1, 26, tones[names[i]])),
    text(left + sum(row) * pixels + 6, 34 * pp + 21, bytes(sum(row))), marks && line(marks[pp], 34 * pp, 34)]),
    limit <= most && line(limit, 0, height, { "stroke-dasharray": "5 4" })),
    e("div", { class: "flow keys" }, rows.length > 1 && `pp ${own}:`, names.map((name, i) => rows.some(row => row[i])
      && key(tones[name], `${title(name)} ${rows[own][i] ? bytes(rows[own][i]) : "0"}`))));
}
function drawCost() {
  const rows = T.memory(V), old = before?.length === rows.length ? before : null, { capacity } = T.data;
  // The largest part says why a layout does not fit, the largest change what the last change did.
  const names = Object.keys(PARTS), largest = numbers => numbers.indexOf(Math.max(...numbers));
  const pp = largest(rows.map(sum)), fullest = rows[pp], top = largest(fullest), was = old?.[largest(old.map(sum))];
  drawBars("memory", "Memory of a rank", rows, pp, PARTS, old?.map(sum), capacity);
  const at = was && largest(fullest.map((n, i) => Math.abs(n - was[i]))), more = was && fullest[at] - was[at];
  $("memory").append(e("p", {}, e("b", {}, sum(fullest) > capacity ? "✗ More than " : "✓ Fits "),
    `the ${bytes(capacity)} that a plan may use of an H100 with 80 GB. The largest part of the fullest rank is ${names[top]}, ${bytes(fullest[top])}. `,
    more && `Your last change: ${names[at]} ${more < 0 ? "−" : "+"}${bytes(Math.abs(more))}.`));
  if (questions.cost) return put("sent", "");
  drawBars("sent", "Bytes that a rank sends in a step", T.traffic(V).map(of => Object.keys(AXIS_TONES).map(axis => of[axis])),
    T.place(V, V.rank).pp, AXIS_TONES);
}

const any = choices => choices[Math.floor(Math.random() * choices.length)];
const QUESTIONS = {
  who(isLinked) {
    const weights = Object.keys(T.model(V).shapes).filter(name => T.has(V, V.rank, name, V.layer));
    if (!isLinked || !weights.includes(V.weight)) V.weight = any(weights.filter(name => name !== V.weight));
    const { sum: axis } = T.placed(V, V.weight), right = new Set(T.row(V, axis, V.rank).filter(rank => rank !== V.rank));
    const reason = right.size ? `It is summed over ${title(axis)}: ${list([...right])} ${right.size > 1 ? "have" : "has"} the same part, and saw other tokens.`
      : "No rank has the same part and saw other tokens.";
    return { picked: new Set(), right, reason, ask: `Which ranks sum the gradient of ${V.weight} with rank ${V.rank}? Choose them.` };
  },
  when(isLinked) {
    const { actions, end } = T.plan(V), pp = isLinked ? T.place(V, V.rank).pp : any([...actions.keys()]), own = actions[pp];
    const ends = [0, ...own.map(a => a.end)].filter(t => isLinked ? inForwards(V, t) <= V.time : t < 0.75 * end);
    const at = isLinked ? ends.at(-1) : any(ends), later = own.filter(a => a.start >= at), name = a => `${a.kind}${a.i}`;
    const next = later.find(a => a.start === at);
    V.time = inForwards(V, at);
    const options = [...new Set(["F", "B", "W"].flatMap(kind => later.find(a => a.kind === kind) ?? []).map(name))];
    return { options: [...options, "it waits"], right: next ? name(next) : "it waits",
      ask: `What does rank ${T.row(V, "pp", V.rank)[pp]} do next?`, reason: next ? "" : "What it needs is not there yet." };
  },
  cost() {
    const { pp, tp } = T.place(V, V.rank), sent = T.traffic(V, tp)[pp], axes = Object.keys(sent).filter(axis => sent[axis]);
    const right = axes.reduce((a, b) => sent[b] > sent[a] ? b : a, "none");
    return { options: axes.length ? axes : ["none"], right, ask: `Over which axis does rank ${V.rank} send most bytes?`,
      reason: axes.map(axis => `${axis} ${bytes(sent[axis])}`).join(", ") };
  },
};
const score = { right: 0, asked: 0 };
function ask(section, isLinked) {
  seek(V.time);
  const q = QUESTIONS[section](isLinked), guess = option => answer(section, q, option === q.right);
  questions[section] = q;
  const isSame = () => q.picked.size === q.right.size && [...q.picked].every(rank => q.right.has(rank));
  draw();
  put(`ask-${section}`, e("b", {}, "Predict: "), q.ask, q.picked ? e("button", { click: () => answer(section, q, isSame()) }, "Check")
    : q.options.map(option => e("button", { click: () => guess(option) }, option)), e("button", { click: () => answer(section, q) }, "Show"));
}
function answer(section, q, isRight) {
  delete questions[section];
  if (isRight !== undefined) score.asked += 1;
  if (isRight) score.right += 1;
  $(`ask-${section}`).answered = q.picked && q;
  draw();
  const verdict = { true: "✓ Right. ", false: "✗ Not quite. " }[isRight];
  put(`ask-${section}`, e("b", {}, verdict), e("span", {}, q.picked ? q.reason : `${q.right}. ${q.reason}`),
    score.asked > 0 && e("small", {}, `${score.right} of ${score.asked} so far`), e("button", { click: () => ask(section) }, "Another"));
  $(`ask-${section}`).answered = null;
}

const share = () => history.replaceState(null, "", `#${new URLSearchParams(V)}`);
function draw() {
  for (const section of Object.keys(QUESTIONS)) if (!questions[section]) put(`ask-${section}`);
  for (const figure of [drawBar, drawWeights, drawRanks, drawTime, drawRing, drawCost, share]) figure();
}
// The address may come from anyone: what does not fit is left out.
function begin() {
  const given = new URLSearchParams(location.hash.slice(1)), usual = { ...V };
  const number = text => Math.max(0, +text || 0), whole = text => Math.floor(number(text));
  for (const [key, value] of given) if (Object.hasOwn(V, key))
    V[key] = typeof V[key] === "string" ? value : key === "time" ? number(value) : whole(value);
  try { change(T.refusal(V) ? usual : {}); } catch { change(usual); }
  if (Object.hasOwn(QUESTIONS, given.get("ask"))) ask(given.get("ask"), true);
}
$("back").onclick = () => toEvent(-1);
$("on").onclick = () => toEvent(1);
$("play").onclick = play;
$("head").oninput = ({ target }) => seek(+target.value);
$("timeline").onpointerdown = $("timeline").onpointermove = event => {
  if (!event.buttons) return;
  $("timeline").setPointerCapture(event.pointerId);
  seek(scale(event.clientX - $("timeline").getBoundingClientRect().left + $("timeline").scrollLeft));
};
for (const button of document.querySelectorAll("[data-ask]")) button.onclick = () => ask(button.dataset.ask);
addEventListener("resize", () => [drawTime, drawRing, drawCost].forEach(figure => figure()));
begin();
