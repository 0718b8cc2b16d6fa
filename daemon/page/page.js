"use strict";

// Everything that comes from the daemon is set as text: names of tenants and models are other people's input.

const SILENCE_MS = 5000; // events come every second
const FORMAT = 1;
const HOUR_S = 3600;
const CHART_S_MIN = 300; // of a daemon that has just started
const TIERS = { l1: "L1, GPU memory", l2: "L2, host memory", ram: "RAM, in front of L3", l3: "L3, the store" };

const at = (id) => document.getElementById(id);

/** Makes these the children of an element. What is the same stays, with what the reader has selected of it. */
function fill(id, ...children) {
  const parent = at(id);
  children.forEach((child, index) => {
    const old = parent.childNodes[index];
    if (!old) parent.append(child);
    else if (!old.isEqualNode(child)) old.replaceWith(child);
  });
  while (parent.childNodes.length > children.length) parent.lastChild.remove();
}

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; value >= 1023.5 && unit < units.length - 1; unit++) value /= 1024;
  return `${value >= 99.95 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

function seconds(value) {
  if (value === null) return "–";
  if (value < 1) return `${(value * 1e3).toPrecision(value < 1e-3 ? 2 : 3)} ms`;
  return `${value.toPrecision(3)} s`;
}

function span(value) {
  const [s, m, h, d] = [value, value / 60, value / 3600, value / 86400].map(Math.floor);
  return d ? `${d} d ${h % 24} h` : h ? `${h} h ${m % 60} min` : m ? `${m} min` : `${s} s`;
}

const count = (value) => value.toLocaleString("en");
const percent = (value) => (value === null ? "–" : `${(value * 100).toFixed(value < 0.9995 ? 1 : 0)}%`);
const words = (name) => name.replaceAll("_", " ");
const clock = (atS) => new Date(atS * 1000).toLocaleTimeString();

const row = (left, right) => make("div", "row", make("span", "", left), make("span", "muted", right));
const figure = (value, label, className = "") =>
  make("span", `figure ${className}`, make("b", "", value), make("small", "", label));
const orNone = (rows, text) => (rows.length ? rows : [make("li", "muted", text)]);

/** A bar for a part of a whole, with words for those who do not see it. A quota that is full is trouble; a cache is not. */
function bar(label, used, limit, isQuota) {
  const share = limit ? Math.min(1, used / limit) : 0;
  const inner = make("div");
  inner.style.width = `${share * 100}%`;
  const colour = !isQuota || share < 0.9 ? "" : share < 0.98 ? " warn" : " bad";
  const outer = make("div", `bar${colour}`, inner);
  outer.role = "meter";
  outer.ariaLabel = label;
  outer.ariaValueMin = "0";
  outer.ariaValueMax = "100";
  outer.ariaValueNow = String(Math.round(share * 100));
  return outer;
}

function showStatus(status) {
  at("state").textContent = status.state;
  at("state").dataset.state = status.state;
  at("about").textContent = `${status.version} on ${location.host}, ${status.backend}, up ${span(status.uptime_s)}`;
  document.title = `hicached: ${status.state}`;
  showStore(status);
  showUse(status);
  showProblems(status);
}

function showStore({ tiers, lookups, traffic, latency }) {
  fill("tiers", ...orNone(tiers.map((tier) => {
    const name = TIERS[tier.name] ?? tier.name;
    const more = tier.engines !== null ? `, ${count(tier.engines)} engines`
      : tier.objects !== null ? `, ${count(tier.objects)} objects` : "";
    const text = `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}${more}`;
    return make("li", "", row(name, text), bar(`${name}: ${text}`, tier.used_bytes, tier.capacity_bytes, false));
  }), "The store is being opened."));
  fill("hits",
    figure(percent(lookups.hit_rate), `of ${count(lookups.asked)} objects found`, "first"),
    figure(percent(lookups.ceiling), "if nothing were forgotten", "second"));
  fill("bytes",
    figure(`${bytes(traffic.read_bytes_per_s)}/s`, `read, ${bytes(traffic.read_bytes)} in all`, "first"),
    figure(`${bytes(traffic.written_bytes_per_s)}/s`, `written, ${bytes(traffic.written_bytes)} in all`, "second"));
  fill("latency", ...latency.map(({ kind, p50_s, p99_s, calls }) => {
    const head = make("th", "", kind);
    head.scope = "row";
    return make("tr", "", head, ...[seconds(p50_s), seconds(p99_s), count(calls)].map((text) => make("td", "", text)));
  }));
}

function showUse({ tenants, tenant_count, sessions, loop_delay, namespaces, namespace_count, tiers }) {
  const capacity = tiers.find((tier) => tier.name === "l3")?.capacity_bytes ?? 0;
  at("tenant-count").textContent = tenant_count > tenants.length ? `the fullest ${tenants.length} of ${count(tenant_count)}` : "";
  fill("tenants", ...orNone(tenants.map((tenant) => {
    const limit = tenant.quota_bytes || capacity;
    const text = `${bytes(tenant.used_bytes)} of ${bytes(limit)}${tenant.quota_bytes ? "" : ", no quota"}`;
    const item = make("li", "", row(tenant.name, text), bar(`${tenant.name}: ${text}`, tenant.used_bytes, limit, tenant.quota_bytes > 0));
    if (tenant.quota_objects) {
      const objects = `${count(tenant.objects)} of ${count(tenant.quota_objects)} objects`;
      item.append(row("", objects), bar(`${tenant.name}: ${objects}`, tenant.objects, tenant.quota_objects, true));
    }
    return item;
  }), "None yet."));
  fill("sessions",
    figure(count(sessions.open), `of ${count(sessions.limit)} sessions`),
    figure(bytes(sessions.inflight_bytes), `in flight, ${count(sessions.inflight_waiting)} waiting`),
    figure(seconds(loop_delay.longest_s), `longest delay of an answer, ${seconds(loop_delay.core_wait_s)} for want of a core`));
  fill("namespaces", ...orNone(namespaces.map(({ model, tenant, digest }) =>
    make("li", "", row(model || "unnamed model", `${tenant}, ${digest.slice(0, 8)}`))), "No namespaces yet."));
  if (namespace_count > namespaces.length)
    at("namespaces").append(make("li", "muted", `and ${count(namespace_count - namespaces.length)} more`));
}

function showProblems({ slowest, errors }) {
  fill("slowest", ...orNone(slowest.map((slow) => {
    const together = slow.objects > 1 ? ` among ${slow.objects}` : "";
    return make("li", "",
      row(`${slow.kind} ${bytes(slow.size_bytes)}${together}`, seconds(slow.seconds)),
      make("div", "muted", `${clock(slow.at_s)}, ${slow.tenant}, object ${slow.key}`));
  }), "Nothing was moved."));
  fill("errors", ...orNone(errors.map((error) =>
    make("li", "", row(`${words(error.reason)}, ${error.of}`, count(error.count)))), "None."));
}

// Charts: a line for each series over the last hour, or what there has been of it; gaps where nothing was measured.

let samples = [];

function chart(id, series, { format, max = 0, scale = (value) => value }) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 360 100");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  const values = series.flatMap(({ field }) => samples.map((sample) => sample[field]).filter((value) => value !== null));
  const top = Math.max(max, ...values);
  const end = samples.at(-1)?.at_s ?? 0;
  const length = Math.min(HOUR_S, Math.max(CHART_S_MIN, end - (samples[0]?.at_s ?? end)));
  for (const { field, className } of series) {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    let d = "", pen = "M";
    for (const sample of samples) {
      const x = 360 * (1 - (end - sample.at_s) / length), value = sample[field];
      if (value === null) pen = "M";
      else {
        d += `${pen}${x.toFixed(1)} ${(98 - 96 * (top ? scale(value / top) : 0)).toFixed(1)}`;
        if (pen === "M") d += "h0.01"; // one point alone is a dot
        pen = "L";
      }
    }
    path.setAttribute("class", className);
    path.setAttribute("d", d);
    svg.append(path);
  }
  const names = series.map(({ name, className }) => make("span", className, name));
  const most = values.length ? format(top) : "nothing measured yet";
  svg.setAttribute("aria-label", `${series.map(({ name }) => name).join(", ")}; top of the scale: ${most}`);
  fill(id, make("figcaption", "", make("span", "", ...names), make("span", "", most)), svg,
    make("figcaption", "", make("span", "", `${span(length)} ago`), make("span", "", "now")));
}

function showHistory() {
  chart("hits-chart", [
    { name: "found", field: "hit_rate", className: "first" },
    { name: "at best (dashed)", field: "ceiling", className: "second dashed" },
  ], { format: percent, max: 1 });
  chart("bytes-chart", [
    { name: "read", field: "read_bytes_per_s", className: "first" },
    { name: "written", field: "written_bytes_per_s", className: "second" },
  ], { format: (value) => `${bytes(value)}/s` });
  chart("latency-chart", [
    { name: "get, half within", field: "get_p50_s", className: "first" },
    { name: "99% within (dashed)", field: "get_p99_s", className: "second dashed" },
  ], { format: (value) => `${seconds(value)}, root scale`, scale: Math.sqrt });
}

async function loadHistory() {
  const response = await fetch("v1/history", { cache: "no-store", signal: AbortSignal.timeout(SILENCE_MS) });
  if (response.ok) samples = (await response.json()).samples;
  showHistory();
}

function addSample(sample) {
  samples = [...samples.filter((old) => old.at_s > sample.at_s - HOUR_S && old.at_s < sample.at_s), sample];
  showHistory();
}

// The link to the daemon: a stream that says something every second, or is lost.

let heardMs = Date.now();
let isLost = false;

function heard() {
  heardMs = Date.now();
  if (isLost) loadHistory().catch(() => {}); // what was missed
  setLost(false);
}

function setLost(lost) {
  isLost = lost;
  document.querySelector("main").classList.toggle("stale", lost);
  at("trouble").hidden = !lost;
  if (!lost) return;
  at("state").textContent = "lost";
  at("state").dataset.state = "lost";
  document.title = "hicached: lost";
  const text = `hicached does not answer since ${clock(heardMs / 1000)}. What is shown is from then; trying again.`;
  if (at("trouble").textContent !== text) at("trouble").textContent = text;
}

function listen() {
  const events = new EventSource("v1/events");
  events.addEventListener("status", (event) => {
    const status = JSON.parse(event.data);
    if (status.format !== FORMAT) return location.reload(); // another release answers
    heard();
    showStatus(status);
  });
  events.addEventListener("sample", (event) => addSample(JSON.parse(event.data)));
  events.addEventListener("error", () => {
    setLost(true);
    if (events.readyState === EventSource.CLOSED) setTimeout(listen, 2000); // refused; otherwise it tries by itself
  });
}

setInterval(() => { if (Date.now() - heardMs > SILENCE_MS) setLost(true); }, 1000);
loadHistory().catch(() => {});
listen();
