"use strict";
// Looks up the tables of explore_data.py. It draws nothing, so that node can run it in a test.
const AXES = ["pp", "dp", "cp", "tp"];

// L is a layout: {model, pp, dp, cp, tp, engine, m, zero, sp}, of m micro-batches.
function lookups(data) {
  const world = L => L.pp * L.dp * L.cp * L.tp;
  const ranks = L => Array.from({ length: world(L) }, (_, rank) => rank);
  const model = L => data.models[L.model];
  const schedule = L => data.schedules[L.engine];
  // The schedule that has its layers at the same places.
  const alike = L => schedule(L).chunks > 1 ? L.engine : "1f1b";
  // Settings without an effect are off.
  const zero = L => L.dp * L.cp > 1 ? L.zero : 0;
  const sp = L => L.tp > 1 ? L.sp : 0;
  const find = (table, ...key) => table[key.join(" ")];
  function refusal(L) {
    if (world(L) > data.most) return `${world(L)} ranks: this page has layouts of up to ${data.most}`;
    const { refusals } = model(L);
    return find(refusals, "pp", L.pp, L.engine) ?? find(refusals, "tp", L.tp);
  }
  function place(L, rank) {
    const at = {};
    for (const axis of [...AXES].reverse()) {
      at[axis] = rank % L[axis];
      rank = Math.floor(rank / L[axis]);
    }
    return at;
  }
  // All ranks that differ from this one in the coordinates of an axis only.
  function row(L, axis, rank) {
    const own = place(L, rank), fixed = AXES.filter(name => !data.axes[axis].includes(name));
    return ranks(L).filter(other => fixed.every(name => place(L, other)[name] === own[name]));
  }
  function placed(L, weight) {
    const [cuts, sum, owned] = find(model(L).placed, sp(L), zero(L) ? 1 : 0)[weight];
    return { cuts, sum, owned };
  }
  // [first, last + 1] of each dim that cuts leave to a rank, in pieces as torch.chunk makes them.
  function part(L, weight, rank, cuts) {
    const spans = model(L).shapes[weight].map(length => [0, length]);
    for (const [axis, dim] of cuts) {
      const peers = row(L, axis, rank), [start, stop] = spans[dim];
      const each = Math.ceil((stop - start) / peers.length);
      const first = Math.min(start + each * peers.indexOf(rank), stop);
      spans[dim] = [first, Math.min(first + each, stop)];
    }
    return spans;
  }
  // The layers of each chunk of a pipeline rank, as [first, last + 1].
  const stages = (L, pp) => find(model(L).stages[alike(L)], L.pp)[pp];
  function has(L, rank, weight, layer) {
    const chunks = stages(L, place(L, rank).pp), last = model(L).layers;
    if (weight === "embed_tokens") return chunks.some(([first]) => first === 0);
    if (["norm", "lm_head"].includes(weight)) return chunks.some(([, stop]) => stop === last);
    return chunks.some(([first, stop]) => first <= layer && layer < stop);
  }
  // The ranks that compute with the same part of a weight.
  function copies(L, rank, weight, layer) {
    const { cuts } = placed(L, weight), of = other => String(part(L, weight, other, cuts));
    return ranks(L).filter(other => has(L, other, weight, layer) && of(other) === of(rank));
  }
  // Bytes of each pipeline rank: weights, gradients, optimizer, activations, loss. It is fullest in
  // the backward of a layer, or at a loss; from ZeRO 2 on some tensors are whole for a moment.
  function memory(L) {
    const { states, activations, moments, pool } = model(L), cut = [L.cp, L.tp, sp(L)];
    const live = find(activations[L.engine], L.pp, L.m, ...cut), other = find(moments[L.engine], L.pp, ...cut);
    const total = row => row.reduce((a, b) => a + b);
    return find(states[alike(L)], L.pp, L.dp * L.cp, L.tp, zero(L)).map((number, pp) => {
      const [weights, gradients, state, gathered, buffers, ends, head] = pool[number];
      const [alive] = pool[live[pp]], [freed, layer, loss = 0] = pool[other[pp]];
      const behind = Math.max(loss && head, buffers - freed);
      const backward = [weights + gathered, gradients + buffers + behind, state, alive, 0];
      const atLoss = [weights + ends, gradients + head, state, alive - layer, loss];
      return (loss && total(atLoss) > total(backward) ? atLoss : backward).map(Math.ceil);
    });
  }
  // Bytes that a rank of each stage sends in a step, by axis; `tp`: its place along tp.
  function traffic(L, tp = 0) {
    const { moved, summed, pool } = model(L);
    const sums = find(summed[alike(L)], L.pp, L.dp * L.cp, L.tp, zero(L), sp(L));
    return find(moved[alike(L)], L.pp, L.cp, L.tp, sp(L)).map((number, pp) => {
      const [once, each, norms] = pool[sums.length > L.pp ? sums[pp * L.tp + tp] : sums[pp]];
      const [ofPp, ofCp, ofTp] = pool[number].map(bytes => L.m * bytes);
      return { pp: ofPp, cp: ofCp, tp: ofTp, dp_cp: once + L.m * each, dp_cp_tp: norms };
    });
  }
  // What each pipeline rank computes, and when; times are in slots, a chunk's forward takes one.
  function plan(L) {
    const { slots, plans } = schedule(L), [rows, bubble] = find(plans, L.pp, L.m);
    const actions = rows.map(text => text.split(" ").map(word => {
      const [, start, letter, i, to] = word.match(/^(\d+)([a-zA-Z])(\d+)(?:>(\d+))?$/);
      const kind = letter.toUpperCase(), end = +start + slots[kind];
      return { kind, i: +i, chunk: letter === kind ? 0 : 1, start: +start, end, to };
    }));
    for (const action of actions.flat().filter(action => action.to !== undefined)) {
      // The receiver uses a message in its next action of the same kind and micro-batch.
      const { kind, i, end } = action, isUse = b => b.kind === kind && b.i === i && b.start >= end;
      action.used = actions[action.to].find(isUse).start;
    }
    const live = actions.map(of => Math.max(...of.map(a => alive(L, of, a.start))));
    return { actions, live, bubble, end: Math.max(...actions.flat().map(action => action.end)) };
  }
  // How many activations, each of a micro-batch in a chunk, are alive at a time: from the start of
  // a forward to the end of its backward, or of its W where backward is cut in two.
  function alive(L, actions, time) {
    const last = schedule(L).slots.B === 1 ? "W" : "B";
    const begun = actions.filter(action => action.kind === "F" && action.start <= time);
    return begun.length - actions.filter(({ kind, end }) => kind === last && end <= time).length;
  }

  return { data, world, ranks, model, schedule, zero, sp, refusal, place, row, placed, part, stages,
    has, copies, memory, traffic, plan, alive };
}
if (typeof module === "object") module.exports = { lookups, AXES };
