// The live pool, as it tells of itself at /admin/events. Everything that comes from there goes into the page as text.

const MAX_SHOWN = 300;
const NOTHING = "–";
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function element(name, className, ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// Figures

const isKnown = (value) => value !== null && value !== undefined;
const percent = (ratio) => (isKnown(ratio) ? `${(100 * ratio).toFixed(1)}%` : NOTHING);
const plain = (value, digits = 2) => (isKnown(value) ? value.toFixed(digits) : NOTHING);
const grouped = (value) => (isKnown(value) ? value.toLocaleString("en") : NOTHING);
const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

function seconds(value) {
  if (!isKnown(value)) return NOTHING;
  if (value === 0) return "0 s";
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 9.995 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`;
}

// The pool now

function showState(state) {
  const { controller, recent } = state;
  setText(byId("composition"), state.composition || "no rank left");
  setText(byId("target"), state.target ?? NOTHING);
  setText(byId("controller"), controller.name ? `${controller.name}${controller.is_paused ? ", paused" : ""}` : "none");
  setText(byId("epoch"), String(state.epoch));
  setText(byId("lag"), seconds(state.event_loop_lag_s));
  setText(byId("ttft-p50"), seconds(recent.ttft_s.p50));
  setText(byId("ttft-more"), `p90 ${seconds(recent.ttft_s.p90)}, p99 ${seconds(recent.ttft_s.p99)}`);
  setText(byId("slo"), percent(recent.slo_attainment_ratio));
  setText(byId("slo-target"), `target ${state.slo} s`);
  setText(byId("hit"), percent(recent.hit_ratio));
  setText(byId("reachable"), `reachable ${percent(recent.reachable_hit_ratio)}`);
  setText(byId("demand"), plain(state.history.demand_s_per_s.at(-1)));
  setText(byId("capacity"), isKnown(controller.capacity_s_per_s) ? `capacity ${plain(controller.capacity_s_per_s)}` : "capacity not known");
  setText(byId("long"), percent(recent.long_ratio));
  setText(byId("long-tokens"), `above ${grouped(controller.long_tokens)} tokens`);
  setText(byId("open"), grouped(state.num_open));
  setText(byId("waiting"), `${grouped(state.num_unanswered)} without a first token`);
  const alarm = byId("alarm");
  alarm.hidden = !state.failure && !state.is_draining;
  const drained = state.is_draining ? "The pool is drained: it takes nothing new until it is told to resume" : "";
  setText(alarm, state.failure ? `The pool has failed: ${state.failure}` : drained);
  showDrift(state.drift);
  showRanks(state);
  showDecodeRanks(state.decode_ranks);
  showCharts(state);
}

// What steps took over what the profile says, and what of it the cost model has taken up

function showDrift(drift) {
  const shown = Object.entries(drift).map(([degree, { step_ratio: took, correction_ratio: taken }]) =>
    `CP${degree} ${took.toFixed(2)}×${taken === 1 ? "" : ` (corrected by ${taken.toFixed(2)})`}`);
  setText(byId("drift"), `Steps against their prediction: ${shown.join(", ") || NOTHING}`);
}

// Ranks as cells, in the groups that they serve in or will

function groupsOf(state) {
  const workers = new Map(state.workers.map((worker) => [worker.worker_id, worker]));
  const groups = [];
  for (const rank of state.ranks) {
    const name = `${rank.worker_id ?? rank.state}:${rank.group ?? rank.rank}`;
    if (groups.at(-1)?.name === name) groups.at(-1).ranks.push(rank);
    else groups.push({ name, ranks: [rank], worker: workers.get(rank.worker_id) });
  }
  return groups;
}

let shownGroups = "";

function showRanks(state) {
  const groups = groupsOf(state);
  const shown = groups.map((group) => `${group.name}x${group.ranks.length}`).join(" ");
  const row = byId("ranks");
  if (shown !== shownGroups) {
    shownGroups = shown;
    row.replaceChildren(...groups.map(makeGroup));
  }
  const most = Math.max(1, ...state.workers.map((worker) => worker.outstanding_s));
  groups.forEach((group, place) => updateGroup(row.children[place], group, most));
}

function makeGroup(group) {
  const cells = element("div", "cells", ...group.ranks.map((rank) => element("span", "cell", String(rank.rank))));
  const box = element(
    "div", "worker", element("p", "name"), cells, element("div", "meter", element("span")), element("p", "queue"), element("p", "index"),
  );
  box.setAttribute("role", "listitem");
  return box;
}

function updateGroup(box, { ranks, worker }, most) {
  const state = ranks[0].state;
  box.className = `worker ${state}`;
  box.dataset.degree = ranks.length;
  const [name, cells, meter, queue, index] = box.children;
  setText(name, worker ? `w${worker.worker_id} · CP${worker.degree}` : state);
  ranks.forEach((rank, place) => {
    const cell = cells.children[place];
    const isBusy = rank.state === "serving" && worker?.step;
    cell.className = `cell ${isBusy ? "busy" : rank.state}`;
    cell.title = `rank ${rank.rank}: ${isBusy ? "in a step" : rank.state}`;
  });
  const outstanding = worker?.outstanding_s ?? 0;
  meter.firstChild.style.width = `${(100 * outstanding) / most}%`;
  setText(queue, worker ? `${seconds(outstanding)} · ${worker.num_queued} queued` : "no queue");
  setText(index, worker ? `index ${worker.index_state}` : NOTHING);
  const what = worker ? `worker ${worker.worker_id} of degree ${worker.degree}, ${worker.status}, ${queue.textContent}, ${index.textContent}` : state;
  const label = `Ranks ${ranks.map((rank) => rank.rank).join(", ")}: ${what}`;
  if (box.getAttribute("aria-label") !== label) box.setAttribute("aria-label", label);
}

function showDecodeRanks(ranks) {
  const row = byId("decode");
  if (row.children.length !== ranks.length) {
    row.replaceChildren(...ranks.map((rank) => {
      const box = element("div", "worker", element("p", "name", `rank ${rank.rank}`), element("div", "meter", element("span")), element("p", "queue"));
      box.setAttribute("role", "listitem");
      return box;
    }));
  }
  ranks.forEach((rank, place) => {
    const [, meter, queue] = row.children[place].children;
    meter.firstChild.style.width = `${100 * (1 - rank.free_blocks / rank.num_blocks)}%`;
    setText(queue, rank.is_up ? `${rank.num_sequences} decoding, ${rank.free_blocks} of ${rank.num_blocks} blocks free` : "lost");
  });
}

// Charts

function showCharts({ history, controller, workers }) {
  const { upper_ratio: upper, lower_ratio: lower } = controller;
  const isCapacityKnown = history.capacity_s_per_s.some(isKnown);
  // Where kappa is not known, no worker can do more than one second of work in a second.
  const capacity = history.capacity_s_per_s.map((value) => (isCapacityKnown ? value : workers.length));
  const times = (ratio) => capacity.map((value) => (isKnown(value) && isKnown(ratio) ? value * ratio : null));
  const has = isCapacityKnown && isKnown(upper);
  setText(byId("capacity-name"), isCapacityKnown ? "capacity" : "one per worker");
  drawLines(byId("demand-chart"), history.time, [
    { name: "capacity", values: capacity },
    { name: "threshold", values: has ? times(upper) : [] },
    { name: "threshold", values: has ? times(lower) : [] },
    { name: "demand", values: history.demand_s_per_s },
  ], (value) => plain(value, 1), null,
  `Demand over time, now ${plain(history.demand_s_per_s.at(-1))} of ${plain(capacity.at(-1))} service seconds per second`);
  drawLines(byId("share-chart"), history.time, [
    { name: "long", values: history.long_ratio },
    { name: "hit", values: history.hit_ratio },
  ], (value) => `${Math.round(100 * value)}%`, 1,
  `Shares over time, now ${percent(history.long_ratio.at(-1))} long requests and a hit rate of ${percent(history.hit_ratio.at(-1))}`);
}

function svgElement(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function niceMaximum(value) {
  const step = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * step).find((each) => each >= value);
}

function drawLines(svg, time, lines, show, fixedMaximum, label) {
  const { clientWidth: width, clientHeight: height } = svg;
  const [left, right, top, bottom] = [44, 8, 8, 20];
  const values = lines.flatMap((line) => line.values).filter(isKnown);
  const maximum = fixedMaximum ?? niceMaximum(Math.max(0.1, ...values));
  const x = (place) => left + ((width - left - right) * place) / Math.max(1, time.length - 1);
  const y = (value) => top + (height - top - bottom) * (1 - value / maximum);
  const made = [0, maximum / 2, maximum].flatMap((value) => [
    svgElement("path", { class: "grid", d: `M${left} ${y(value)}H${width - right}` }),
    svgElement("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, show(value)),
  ]);
  if (time.length > 1) {
    made.push(
      svgElement("text", { x: left, y: height - 4 }, clock(time[0])),
      svgElement("text", { x: width - right, y: height - 4, "text-anchor": "end" }, clock(time.at(-1))),
    );
  }
  for (const { name, values: line } of lines) made.push(svgElement("path", { class: name, d: pathOf(line, x, y) }));
  svg.replaceChildren(...made);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", label);
}

// Broken where nothing is known.
function pathOf(values, x, y) {
  let path = "";
  values.forEach((value, place) => {
    if (!isKnown(value)) return;
    path += `${place > 0 && isKnown(values[place - 1]) ? "L" : "M"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
  });
  return path;
}

// Decisions

const SAYINGS = {
  placement: (d) => `${d.request_id}: ${grouped(d.input_tokens)} tokens, ${grouped(d.reusable_tokens)} cached, to w${d.worker_id} (CP${d.degree}), ${seconds(d.predicted_s)}${d.is_redirected ? ", again" : ""}`,
  copy: (d) => `${d.num_blocks} blocks from w${d.source_worker_id} to w${d.destination_worker_id}: ${d.reason}`,
  reclaim: (d) => `${d.num_blocks} blocks at w${d.worker_id}`,
  proposal: (d) => `to ${d.composition}: ${d.reason}`,
  composition_requested: (d) => `${d.composition}, by hand`,
  activation: (d) => `epoch ${d.epoch}: ranks ${d.groups.map((ranks) => ranks.join(" ")).join(" | ")}`,
  split: (d) => `${d.sources.map((ranks) => ranks.join(" ")).join(" | ")} into ${d.results.map((ranks) => ranks.join(" ")).join(" | ")}; drain ${seconds(d.drain_s)}, switch ${seconds(d.switch_s)}`,
  worker_opened: (d) => `w${d.worker_id} on ranks ${d.ranks.join(" ")}`,
  worker_closed: (d) => `w${d.worker_id}`,
  rank_lost: (d) => `rank ${d.rank}: ${d.reason}`,
  rank_back: (d) => `rank ${d.rank}`,
  restart: (d) => `${d.request_id}: ${d.reason}`,
  step_failed: (d) => `ranks ${d.ranks.join(" ")}: ${d.reason}`,
  controller_failed: (d) => d.reason,
  pool_failed: (d) => d.reason,
};
SAYINGS.merge = SAYINGS.split;

const spoken = (kind) => (kind === "composition_requested" ? "asked for" : kind.replaceAll("_", " "));

const log = { decisions: [], chosen: null, isHeld: false, numWaiting: 0 };

function isWanted(decision) {
  const filter = byId("filter").value;
  return filter === "all" || (filter === "placement") === (decision.kind === "placement");
}

function takeDecisions({ decisions }) {
  log.decisions.unshift(...[...decisions].reverse());
  log.decisions.length = Math.min(log.decisions.length, MAX_SHOWN);
  if (log.isHeld) {
    log.numWaiting += decisions.length;
    setText(byId("hold"), `Go on (${log.numWaiting})`);
    return;
  }
  const list = byId("log");
  const isAtTop = list.scrollTop < 4;
  for (const decision of decisions.filter(isWanted)) list.prepend(entryOf(decision));
  while (list.children.length > MAX_SHOWN) list.lastChild.remove();
  if (isAtTop) list.scrollTop = 0;
}

function showLog() {
  byId("log").replaceChildren(...log.decisions.filter(isWanted).map(entryOf));
}

function entryOf(decision) {
  const time = element("time", "", clock(decision.time));
  time.dateTime = new Date(decision.time * 1000).toISOString();
  const what = SAYINGS[decision.kind]?.(decision) ?? "";
  const button = element("button", "", time, element("span", "kind", spoken(decision.kind)), element("span", "what", what));
  button.type = "button";
  button.dataset.kind = decision.kind;
  if (decision.sequence === log.chosen) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => choose(decision, button));
  return element("li", "", button);
}

function choose(decision, button) {
  byId("log").querySelector("[aria-current]")?.removeAttribute("aria-current");
  button.setAttribute("aria-current", "true");
  log.chosen = decision.sequence;
  setText(byId("detail-title"), `Why: ${spoken(decision.kind)}${decision.request_id ? ` of ${decision.request_id}` : ""}`);
  const { candidates, sequence, time, kind, ...facts } = decision;
  const list = element("dl", "");
  for (const [name, value] of Object.entries(facts)) {
    list.append(element("dt", "", spoken(name)), element("dd", "", shown(value)));
  }
  byId("detail-body").replaceChildren(...(candidates ? tableOf(candidates) : []), list);
  byId("detail-body").scrollTop = 0;
}

function shown(value) {
  if (!isKnown(value)) return NOTHING;
  if (typeof value === "number") return Number.isInteger(value) ? grouped(value) : value.toPrecision(4);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function tableOf(candidates) {
  const terms = Object.entries(candidates.terms);
  const heads = ["worker", "J", ...terms.map(([name]) => spoken(name)), "cached", ...(candidates.awaited_tokens ? ["awaited"] : []), "E(R, P)"];
  const head = element("tr", "", ...heads.map((name) => {
    const cell = element("th", "", name);
    cell.scope = "col";
    return cell;
  }));
  const rows = candidates.worker_id.map((worker, row) => {
    const cells = [
      `w${worker} · CP${candidates.degree[row]}${row === candidates.chosen ? " ✓" : ""}`,
      plain(candidates.cost[row], 3), ...terms.map(([, values]) => plain(values[row], 3)),
      grouped(candidates.reusable_tokens[row]),
      ...(candidates.awaited_tokens ? [grouped(candidates.awaited_tokens[row])] : []), plain(candidates.service_s[row], 3),
    ];
    const made = element("tr", row === candidates.chosen ? "chosen" : "", ...cells.map((text) => element("td", "", text)));
    if (row === candidates.chosen) made.firstChild.setAttribute("aria-label", `worker ${worker}, chosen`);
    return made;
  });
  const table = element("table", "", element("thead", "", head), element("tbody", "", ...rows));
  table.setAttribute("aria-label", "J and its terms for every candidate");
  const note = element("p", "note", "J and its terms for every candidate, seconds; the least J wins. E(R, P): predicted service.");
  return [note, element("div", "table", table)];
}

byId("filter").addEventListener("change", showLog);
byId("hold").addEventListener("click", () => {
  log.isHeld = !log.isHeld;
  log.numWaiting = 0;
  byId("hold").setAttribute("aria-pressed", String(log.isHeld));
  setText(byId("hold"), log.isHeld ? "Go on" : "Hold");
  if (!log.isHeld) showLog();
});

// The stream

let lastState = null;

function showConnection(text, isLive) {
  const status = byId("connection");
  setText(status, text);
  status.dataset.live = String(isLive);
}

async function explainError() {
  const answer = await fetch("/admin/state").catch(() => null);
  if (answer === null) showConnection("the server does not answer", false);
  else if (answer.status === 401 || answer.status === 403) showConnection("open /dashboard?token=… once, with the control token", false);
  else showConnection("connecting again", false);
  return answer?.ok ?? true;
}

function follow() {
  const source = new EventSource("/admin/events");
  let isFirst = true;
  source.onopen = () => showConnection("live", true);
  source.onmessage = (message) => {
    const event = JSON.parse(message.data);
    if (event.event === "state") showState((lastState = event));
    else if (event.event === "decisions") {
      if (isFirst) {  // after a new connection the server tells the last hundred again
        isFirst = false;
        log.decisions = [];
        byId("log").replaceChildren();
      }
      takeDecisions(event);
    }
  };
  source.onerror = async () => {
    source.close();
    showConnection("connecting again", false);
    if (await explainError()) setTimeout(follow, 2000);
  };
}

new ResizeObserver(() => lastState && showCharts(lastState)).observe(byId("demand-chart"));
follow();
