// SPDX-License-Identifier: Apache-2.0
// The page of Sockeye. It shows the frames of live, one per second, the events of events, and the trace report.
"use strict";

const pageSize = 100, tileColumns = 48, mostEvents = 500;
const main = document.getElementById("main");
const state = {
  frame: null, paused: false, service: "", events: [], kind: "",
  devices: { sort: { key: "datagrams", down: true }, filter: "", page: 0, order: [] },
};

// --- elements

// element creates an element. Text is never parsed as HTML.
// printable replaces control characters and those that change the direction of text, which names can have.
function printable(text) {
  return typeof text === "string" ? text.replace(/[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd") : text;
}

function element(name, attributes = {}, ...children) {
  const svg = ["svg", "path", "title", "g"].includes(name);
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (value !== false && value !== undefined) e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined).map(printable));
  return e;
}

// setText, setAttribute and setClass change an element only where there is a difference: each change costs layout, and
// screen readers follow changes.
function setText(e, value) {
  const text = printable(value);
  if (e.textContent !== text) e.textContent = text;
}

function setAttribute(e, name, value) {
  if (e.getAttribute(name) !== value) e.setAttribute(name, value);
}

function setClass(e, value) {
  if (e.className !== value) e.className = value;
}

// part returns the element with an ID, which create makes the first time.
function part(id, create) {
  let e = document.getElementById(id);
  if (!e) {
    e = create();
    e.id = id;
    main.append(e);
  }
  return e;
}

// fit makes a parent have n children.
function fit(parent, n, create) {
  while (parent.children.length > n) parent.lastElementChild.remove();
  while (parent.children.length < n) parent.append(create());
}

function heading(text) {
  setText(part("title", () => element("h2")), text);
  document.title = text + " - Sockeye";
}

// table shows rows in a region that can be scrolled. A column has title, number (right-aligned), wide, key (the table is
// sorted by it) and show(cell, row). Cells are kept, so that focus and scroll position stay.
function table(id, columns, rows, caption, sort) {
  const box = part(id, () => {
    const head = element("tr", {}, ...columns.map((c) => element("th", { scope: "col", class: c.number ? "number" : false },
      c.key ? element("button", { type: "button", onclick: () => { sort.by(c.key, c.number); draw(); } }, c.title) : c.title)));
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-labelledby": id + "-caption" },
      element("table", {}, element("caption", { id: id + "-caption" }), element("thead", {}, head), element("tbody")));
  });
  setText(box.querySelector("caption"), caption);
  if (sort) {
    columns.forEach((c, i) => {
      const th = box.querySelector("thead").rows[0].cells[i];
      if (c.key && sort.key === c.key) setAttribute(th, "aria-sort", sort.down ? "descending" : "ascending");
      else th.removeAttribute("aria-sort");
    });
  }
  const body = box.querySelector("tbody");
  fit(body, rows.length, () => element("tr", {}, ...columns.map((c, i) => i === 0 && !c.wide ? element("th", { scope: "row" })
    : element("td", { class: c.number ? "number" : c.wide ? "wide" : false }))));
  rows.forEach((row, i) => columns.forEach((c, j) => c.show(body.rows[i].cells[j], row)));
  return box;
}

// link shows a link in a cell.
function link(cell, href, text) {
  if (!cell.firstElementChild) cell.append(element("a"));
  setAttribute(cell.firstElementChild, "href", href);
  setText(cell.firstElementChild, text);
}

const text = (title, of, more = {}) => ({ title, show: (cell, row) => setText(cell, of(row)), ...more });
const number = (title, of, key) => ({ title, number: true, key, show: (cell, row) => setText(cell, of(row)) });

// --- text

function rate(n) {
  for (const unit of ["", "k", "M", "G", "T"]) {
    if (n === 0) return "0";
    if (n < 9.95) return n.toFixed(1) + unit;
    if (n < 999.5) return n.toFixed(0) + unit;
    n /= 1000;
  }
  return "huge";
}

const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

function latency(ns) {
  if (ns === undefined || ns === null) return "-";
  if (ns < 1e3) return ns + " ns";
  return ns < 1e6 ? (ns / 1e3).toFixed(0) + " µs" : ns < 1e9 ? (ns / 1e6).toFixed(1) + " ms" : (ns / 1e9).toFixed(2) + " s";
}

const two = (n) => String(n).padStart(2, "0");

function clock(t) {
  const d = new Date(t);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

function percent(part, whole) { return whole ? Math.round(100 * part / whole) + " %" : "-"; }

const slotLink = (service, slot) => `#slot/${encodeURIComponent(service)}/${slot}`;
const deviceLink = (service, address) => `#device/${encodeURIComponent(service)}/${address}`;

// --- frames

// take stores a frame. A device arrives as an array, see encodeDevices of the server.
function take(frame) {
  for (const s of frame.services) {
    s.devices = s.devices.map(([address, device, slot, datagrams, bytes, refused, sessions, seen, flags, drops, dropped]) =>
      ({ address, device, slot, datagrams, bytes, refused, sessions, seen, drops, dropped, pinned: Boolean(flags & 1), split: Boolean(flags & 2) }));
  }
  state.frame = frame;
}

const shown = () => state.frame?.services.find((s) => s.name === state.service) ?? state.frame?.services[0];
const sum = (list, of) => list.reduce((n, x) => n + of(x), 0);
const ready = (s) => s.slots.filter((x) => x.ready).length;

// stateOf returns the word for the state of a slot, and its class.
function stateOf(slot) {
  if (slot.state !== "ready") return [slot.state, "warn"];
  if (slot.ready) return ["ready", "good"];
  if (slot.waiting || slot.wait_until) return ["waits", "warn"];
  return slot.pid ? ["opening", "warn"] : ["empty", "bad"];
}

// condition says the state of a slot after its name.
function condition(slot) {
  const [word] = stateOf(slot);
  return { waits: "waits for its next member", drain: "drains", maint: "is in maint" }[word] ?? "is " + word;
}

// problems lists what needs attention: [severe, text, link].
function problems(frame) {
  const list = [];
  if (frame.problem) list.push([true, frame.problem]);
  for (const s of frame.services) {
    if (s.problem) list.push([true, `${s.name}: ${s.problem}`]);
    for (const slot of s.slots) {
      const at = [`${s.name} slot ${slot.slot}`, slotLink(s.name, slot.slot)];
      if (!slot.ready) list.push([stateOf(slot)[1] === "bad", `${at[0]} ${condition(slot)}` + (slot.refused_per_second ? `, ${rate(slot.refused_per_second)} packets/s are refused` : ""), at[1]]);
      else if (slot.refused_per_second) list.push([true, `${at[0]} refuses ${rate(slot.refused_per_second)} packets/s`, at[1]]);
      if (slot.drops_per_second) list.push([true, `${at[0]} drops ${rate(slot.drops_per_second)} datagrams/s at its sockets: the member reads too slowly`, at[1]]);
      if (slot.zero_windows) list.push([false, `${at[0]} has ${count(slot.zero_windows, "closed window", "closed windows")}: the member does not read`, at[1]]);
      if (slot.waiting) list.push([false, `${at[0]}: ${count(slot.waiting, "datagram waits", "datagrams wait")} for a member`, at[1]]);
    }
    if (s.split) list.push([false, `${s.name}: the connections of ${count(s.split, "device are", "devices are")} not all at the member of the slot`, "#devices"]);
  }
  for (const g of frame.groups) if (g.problem) list.push([false, `${g.kind} ${g.cgroup}: ${g.problem}`, "#trace"]);
  if (frame.fleet) for (const [severe, words] of fleetProblems(frame.fleet)) list.push([severe, "fleet: " + words, "#fleet"]);
  return list.sort((a, b) => b[0] - a[0]);
}

// fleetProblems lists what is wrong with the fleet: [severe, text]. A host that has devices and cannot serve them is severe, as is
// this host without a table; one that the operator has drained is not.
function fleetProblems(fleet) {
  const list = fleet.problems.map((words) => [false, words]);
  const own = fleet.hosts.find((h) => h.name === fleet.host);
  if (!fleet.healthy) list.push([!own || own.share > 0 || !fleet.epoch, "this host is not healthy: " + fleet.reason]);
  for (const h of fleet.hosts) {
    if (!h.alive) {
      if (h.state !== "removed") list.push([h.share > 0, `host ${h.name} is dead`]);
    } else if (!h.healthy && h.name !== fleet.host) list.push([h.share > 0, `host ${h.name} cannot serve devices`]);
    else if (h.state === "drain") list.push([false, `host ${h.name} drains`]);
    else if (h.state === "maint") list.push([false, `host ${h.name} is in maint`]);
  }
  return list.sort((a, b) => b[0] - a[0]);
}

function status() {
  const p = document.getElementById("state"), list = problems(state.frame);
  const slots = state.frame.services.flatMap((s) => s.slots);
  const words = slots.length ? `${slots.filter((x) => x.ready).length} of ${slots.length} slots ready` : "no service";
  // A screen reader says the status when it changes.
  setText(p, words + ", " + (list.length ? count(list.length, "problem", "problems") : "no problems"));
  setClass(p, list.some((x) => x[0]) ? "bad" : "");
}

function services() {
  const select = document.getElementById("service");
  const names = state.frame.services.map((s) => s.name);
  if ([...select.options].map((o) => o.value).join("\n") !== names.join("\n")) {
    select.replaceChildren(...names.map((n) => element("option", { value: n }, n)));
  }
  select.closest("label").hidden = names.length < 2;
  if (!names.includes(state.service)) state.service = names[0] ?? "";
  select.value = state.service;
}

// --- views

const routes = { overview: drawOverview, slot: drawSlot, devices: drawDevices, device: drawDevice, fleet: drawFleet, events: drawEvents, trace: drawTrace };
const views = { slot: "overview", device: "devices" };
let drawn = "";

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const parts = rest.map((r) => { try { return decodeURIComponent(r); } catch { return r; } });
  return Object.hasOwn(routes, name) && (name !== "fleet" || state.frame?.fleet) ? [name, parts] : ["overview", []];
}

function draw() {
  if (!state.frame) return;
  services();
  document.getElementById("fleet-link").hidden = !state.frame.fleet;
  const [name, parts] = route(), here = name + "/" + parts.join("/");
  const fresh = drawn !== here;
  if (fresh) {
    drawn = here;
    follower?.abort();
    main.replaceChildren();
    for (const a of document.querySelectorAll("nav a")) {
      if (a.hash.slice(1) === (views[name] ?? name)) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    }
  }
  if (parts.length > 1 && state.frame.services.some((s) => s.name === parts[0])) state.service = parts[0];
  routes[name](parts, fresh);
  document.getElementById("service").value = state.service;
}

// problemList shows problems, the first of them: [severe, text, link].
function problemList(list) {
  const most = 12;
  const box = part("problems", () => element("section", { "aria-labelledby": "problems-title" }, element("h3", { id: "problems-title" }), element("ul", { class: "problems" })));
  setText(box.querySelector("h3"), list.length ? `Problems (${list.length})` : "No problems");
  const items = list.slice(0, most);
  if (list.length > most) items.push([false, `${list.length - most} more`]);
  const ul = box.querySelector("ul");
  ul.hidden = items.length === 0;
  fit(ul, items.length, () => element("li", {}, element("a")));
  items.forEach(([severe, words, to], i) => {
    const li = ul.children[i], a = li.firstElementChild;
    setClass(li, severe ? "severe" : "");
    setText(a, words);
    if (to) setAttribute(a, "href", to);
    else a.removeAttribute("href");
  });
}

function drawOverview() {
  heading("Overview");
  problemList(problems(state.frame));

  part("services-title", () => element("h2", {}, "Services"));
  table("services", [
    { title: "Service", show: (cell, s) => setText(cell, s.name) },
    number("Slots ready", (s) => `${ready(s)} of ${s.slots.length}`), number("Devices", (s) => (s.devices.length + s.omitted).toLocaleString("en")),
    number("Sessions", (s) => sum(s.slots, (x) => x.sessions).toLocaleString("en")),
    number("Datagrams/s", (s) => rate(sum(s.slots, (x) => x.datagrams_per_second))), number("Bytes/s", (s) => rate(sum(s.slots, (x) => x.bytes_per_second))),
    number("Refused/s", (s) => rate(s.refused_per_second)), number("Split", (s) => String(s.split)),
  ], state.frame.services, state.frame.services.length ? "rates over the last second" : "the policy has no service");

  outside(state.frame.services.flatMap((s) => processes(s)));
  const s = shown();
  if (!s) return;
  setText(part("flow-title", () => element("h2")), `Slots of ${s.name} and the devices that flow into them`);
  part("flow-legend", () => element("p", { class: "under" }, element("svg", { class: "legend", viewBox: "0 0 7 1", width: "5.6rem", "aria-hidden": "true" },
    ...[1, 2, 3, 4, 5, 6, 7].map((l) => element("path", { class: "t" + l, d: `M${l - 1} .5h1` }))), "a square is a device, from little to much traffic (logarithmic); ",
    element("svg", { class: "legend", viewBox: "0 0 1 1", width: ".9rem", "aria-hidden": "true" }, element("path", { class: "t8", d: "M0 .5h1" })), "refused, or split over members. The line is the rate of the last two minutes."));
  part("under", () => element("p", { class: "under", id: "under", "aria-hidden": "true" }, "Point to a square for its device."));
  const flow = part("flow", () => element("ul", { class: "flow" }));
  fit(flow, s.slots.length, slotCard);
  s.slots.forEach((slot, i) => showCard(flow.children[i], s, slot));
}

// processes lists the processes of a service that wait to be a member, or are refused.
const processes = (s) => [...(s.waiting ?? []).map((p) => ({ ...p, service: s.name, state: "not ready" })),
  ...(s.refused ?? []).map((p) => ({ ...p, service: s.name, state: "refused" }))];

// outside shows processes that are not members. It is hidden without any, and keeps its place on the page.
function outside(list) {
  part("outside-title", () => element("h2", {}, "Processes that are not members")).hidden = !list.length;
  table("outside", [
    text("Process", (p) => String(p.pid)), text("Service", (p) => p.service), text("State", (p) => p.state), text("Slot", (p) => String(p.slot ?? "-")),
    text("Problem", (p) => p.problem + (p.hint ? "; hint: " + p.hint : ""), { wide: true }), text("Command", (p) => p.command, { wide: true }),
  ], list, count(list.length, "process", "processes")).hidden = !list.length;
}

const cardFigures = [
  ["Devices", (x) => x.devices.toLocaleString("en")], ["Sessions", (x) => x.sessions.toLocaleString("en")], ["Datagrams/s", (x) => rate(x.datagrams_per_second)],
  ["Bytes/s", (x) => rate(x.bytes_per_second)], ["UDP queue", (x) => percent(x.queued_bytes, x.queue_limit_bytes)], ["Reader lag", (x) => latency(x.reader_lag_ns)],
];

function slotCard() {
  const tiles = element("svg", { class: "tiles", "aria-hidden": "true", onclick: (e) => { const d = deviceAt(e); if (d) location.hash = deviceLink(state.service, d.address); },
    onpointermove: (e) => { const d = deviceAt(e); if (d) setText(document.getElementById("under"), describe(d)); } },
  ...[1, 2, 3, 4, 5, 6, 7, 8].map((l) => element("path", { class: "t" + l })));
  return element("li", {}, element("h3", {}, element("a"), element("span")), element("p", { class: "member" }),
    element("dl", { class: "figures" }, ...cardFigures.map(([name]) => element("div", {}, element("dt", {}, name), element("dd")))),
    element("p", { class: "alarm" }), element("svg", { class: "spark", viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": "true" }, element("path")), tiles);
}

function showCard(li, s, slot) {
  const [word, kind] = stateOf(slot), a = li.querySelector("a"), mark = li.querySelector("h3 span");
  setAttribute(a, "href", slotLink(s.name, slot.slot));
  setText(a, "Slot " + slot.slot);
  setText(mark, word);
  setClass(mark, kind);
  setText(li.querySelector(".member"), slot.pid ? `${slot.command}, pid ${slot.pid}` : "no member");
  li.querySelectorAll("dd").forEach((dd, i) => setText(dd, cardFigures[i][1](slot)));
  const alarms = [];
  if (slot.refused_per_second) alarms.push(rate(slot.refused_per_second) + " refused/s");
  if (slot.drops_per_second) alarms.push(rate(slot.drops_per_second) + " dropped/s");
  if (slot.zero_windows) alarms.push(count(slot.zero_windows, "closed window", "closed windows"));
  if (slot.backlog) alarms.push(count(slot.backlog, "connection", "connections") + " in the backlog");
  if (slot.waiting) alarms.push(count(slot.waiting, "datagram waits", "datagrams wait"));
  setText(li.querySelector(".alarm"), alarms.join(", "));
  setAttribute(li.querySelector(".spark path"), "d", slot.spark);
  const tiles = li.querySelector(".tiles");
  tiles.dataset.slot = slot.slot;
  // Few devices have the size of a square as many have.
  setAttribute(tiles, "viewBox", `0 0 ${tileColumns} ${Math.max(1, slot.rows)}`);
  slot.tiles.forEach((d, i) => setAttribute(tiles.children[i], "d", d));
}

// deviceAt returns the device of a square under the pointer.
function deviceAt(event) {
  const svg = event.currentTarget, box = svg.getBoundingClientRect(), s = shown();
  const size = box.width / tileColumns;
  const column = Math.floor((event.clientX - box.left) / size), row = Math.floor((event.clientY - box.top) / size);
  if (!s || column < 0 || column >= tileColumns || row < 0) return undefined;
  return s.devices.filter((d) => d.slot === Number(svg.dataset.slot))[row * tileColumns + column];
}

const describe = (d) => `${d.device ? d.device + " " : ""}${d.address}: ${rate(d.datagrams)} datagrams/s, ${rate(d.bytes)} bytes/s, ${count(d.sessions, "session", "sessions")}`
  + (d.refused ? `, ${rate(d.refused)} refused/s` : "") + (d.split ? ", split" : "");

function deviceColumns(service) {
  return [
    { title: "Address", key: "address", show: (cell, d) => link(cell, deviceLink(service, d.address), d.address) },
    text("Device", (d) => d.device + (d.pinned ? " (pinned)" : "") + (d.split ? " (split)" : ""), { key: "device" }),
    { title: "Slot", number: true, key: "slot", show: (cell, d) => link(cell, slotLink(service, d.slot), String(d.slot)) },
    number("Datagrams/s", (d) => rate(d.datagrams), "datagrams"), number("Bytes/s", (d) => rate(d.bytes), "bytes"),
    number("Refused/s", (d) => rate(d.refused), "refused"), number("Sessions", (d) => String(d.sessions), "sessions"),
  ];
}

// by changes the order of the devices.
function by(key, down) {
  const v = state.devices;
  v.sort = { key, down: v.sort.key === key ? !v.sort.down : Boolean(down) };
  v.page = 0;
  v.order = [];
}

// ordered sorts devices. While the focus or the pointer is in the rows, they keep their places, so that a link does not
// become one to another device.
function ordered(devices) {
  const v = state.devices, { key, down } = v.sort, body = document.querySelector("#devices tbody");
  const held = body && (body.contains(document.activeElement) || body.matches(":hover"));
  const places = new Map(held ? v.order.map((address, i) => [address, i]) : []);
  const compare = (a, b) => {
    const x = a[key], y = b[key];
    const order = typeof x === "number" ? x - y : x < y ? -1 : x > y ? 1 : 0;
    return down ? -order : order; // sort keeps the order of the frame, by address, where values are equal
  };
  const list = key === "address" && !down ? devices.slice() : devices.slice().sort(compare);
  if (places.size) list.sort((a, b) => (places.get(a.address) ?? places.size) - (places.get(b.address) ?? places.size));
  v.order = list.map((d) => d.address);
  return list;
}

// deviceList shows the devices of a list in pages.
function deviceList(service, devices, none) {
  const v = state.devices;
  part("tools", () => element("div", { class: "tools" },
    element("label", {}, "Filter ", element("input", { type: "search", value: v.filter, oninput: (e) => { v.filter = e.target.value; v.page = 0; v.order = []; draw(); } })),
    element("button", { type: "button", class: "previous", onclick: () => { v.page--; draw(); } }, "Previous"),
    element("button", { type: "button", class: "next", onclick: () => { v.page++; draw(); } }, "Next")));
  const filter = v.filter.trim().toLowerCase();
  const all = ordered(filter ? devices.filter((d) => d.address.includes(filter) || d.device.toLowerCase().includes(filter)) : devices);
  const pages = Math.max(1, Math.ceil(all.length / pageSize));
  v.page = Math.max(0, Math.min(v.page, pages - 1));
  document.querySelector(".previous").disabled = v.page === 0;
  document.querySelector(".next").disabled = v.page === pages - 1;
  const from = v.page * pageSize, rows = all.slice(from, from + pageSize);
  table("devices", deviceColumns(service), rows, all.length ? `${(from + 1).toLocaleString("en")} to ${(from + rows.length).toLocaleString("en")} of ${count(all.length, "device", "devices")}` : none,
    { ...v.sort, by });
}

function drawDevices() {
  const s = shown();
  heading("Devices" + (s ? " of " + s.name : ""));
  if (s?.omitted) part("omitted", () => element("p", { class: "under" }, count(s.omitted, "device", "devices") + " with the lowest rates are not shown."));
  deviceList(s?.name ?? "", s?.devices ?? [], "no devices");
}

// facts shows names and values; a value is a text, or [text, href].
function facts(id, list) {
  const dl = part(id, () => element("dl", { class: "facts" }));
  fit(dl, 2 * list.length, () => element(dl.children.length % 2 ? "dd" : "dt"));
  list.forEach(([name, value], i) => {
    const dd = dl.children[2 * i + 1];
    setText(dl.children[2 * i], name);
    if (Array.isArray(value)) {
      if (!dd.firstElementChild) dd.replaceChildren(element("a"));
      link(dd, value[1], value[0]);
    } else setText(dd, value);
  });
}

// stuck lists connections that do not progress.
function stuck(list) {
  part("stuck-title", () => element("h2", {}, "Connections without progress"));
  table("stuck", [text("Remote", (x) => x.remote), text("Local", (x) => x.local), text("Reason", (x) => x.reason === "zero_window" ? "the member does not read" : "the peer does not read"),
    number("Waiting bytes", (x) => x.bytes.toLocaleString("en")), number("Idle", (x) => x.idle_seconds.toFixed(0) + " s")], list, list.length ? count(list.length, "connection", "connections") : "none");
}

function drawSlot([name, at], fresh) {
  const s = state.frame.services.find((x) => x.name === name), slot = s?.slots.find((x) => String(x.slot) === at);
  heading(`Slot ${at} of ${name}`);
  if (!slot) {
    facts("facts", [["State", "the policy has no such slot"]]);
    return;
  }
  facts("facts", [
    ["State", stateOf(slot)[0]], ["Member", slot.pid ? `${slot.command}, pid ${slot.pid}` : "none"], ["Cgroup", slot.cgroup || "-"],
    ["Devices", slot.devices.toLocaleString("en")], ["Sessions", slot.sessions.toLocaleString("en")],
    ["Receives", `${rate(slot.datagrams_per_second)} datagrams/s, ${rate(slot.bytes_per_second)} bytes/s, ${rate(slot.connections_per_second)} connections/s`],
    ["Refused", rate(slot.refused_per_second) + " packets/s"], ["Dropped at its sockets", rate(slot.drops_per_second) + " datagrams/s"],
    ["UDP queue", `${rate(slot.queued_bytes)} of ${rate(slot.queue_limit_bytes)} bytes`], ["TCP backlog", count(slot.backlog, "connection", "connections")],
    ["Unread by TCP", rate(slot.unread_bytes) + " bytes"], ["Closed windows", String(slot.zero_windows)],
    ["Reader lag", latency(slot.reader_lag_ns)], ["Waiting room", count(slot.waiting, "datagram", "datagrams") + (slot.wait_until ? ", open until " + clock(slot.wait_until) : "")],
  ]);
  outside(processes(s).filter((p) => p.slot === slot.slot));
  part("spark-title", () => element("h2", {}, "Datagrams and kilobytes per second"));
  const spark = part("spark", () => element("svg", { class: "spark tall", viewBox: "0 0 120 24", preserveAspectRatio: "none", role: "img", "aria-label": "rate of the last two minutes" }, element("path")));
  setAttribute(spark.firstElementChild, "d", slot.spark);
  part("devices-title", () => element("h2", {}, "Devices"));
  deviceList(name, s.devices.filter((d) => d.slot === slot.slot), "no devices");
  stuck(state.frame.stuck.filter((x) => x.service === name && x.slot === slot.slot));
  if (fresh) follow(`service=${encodeURIComponent(name)}&slot=${encodeURIComponent(at)}&last=100`);
  eventTable();
}

// addressOf returns the address of an address and port, as in [2001:db8::1]:179.
const addressOf = (remote) => remote.slice(0, remote.lastIndexOf(":")).replace(/^\[|\]$/g, "");

// reasons says why a device is in its slot, and what is wrong.
function reasons(s, d) {
  const slot = s.slots.find((x) => x.slot === d.slot), list = [];
  if (d.pinned) list.push("a command has pinned the device to this slot");
  else if (d.device) list.push(`the device map gives the address to ${d.device}, whose name decides the slot`);
  else list.push("the hash of the address decides the slot");
  if (slot && !slot.ready) list.push(`the slot ${condition(slot)}`);
  if (d.split) list.push("its connections are not all at the member of its slot");
  if (d.refused) list.push(rate(d.refused) + " of its packets per second are refused");
  if (d.drops) list.push(`the member reads too slowly, and ${rate(d.drops)} of its datagrams per second are dropped`);
  return list.join("; ");
}

function drawDevice([name, address], fresh) {
  const s = state.frame.services.find((x) => x.name === name), d = s?.devices.find((x) => x.address === address);
  heading("Device " + (d?.device ? `${d.device} (${address})` : address));
  facts("facts", d ? [
    ["Name in the device map", d.device || "none"], ["Slot", [`${d.slot} of ${name}`, slotLink(name, d.slot)]], ["Why", reasons(s, d)],
    ["Sends", `${rate(d.datagrams)} datagrams/s, ${rate(d.bytes)} bytes/s`], ["Refused", rate(d.refused) + " packets/s"],
    ["Dropped at the member", d.dropped === undefined ? "not counted by this kernel" : `${rate(d.drops)} datagrams/s, ${d.dropped.toLocaleString("en")} since the start of the agent`],
    ["Sessions", String(d.sessions)], ["Last datagram or connection", d.seen > 0 ? clock(d.seen * 1000) : "before the last ten minutes"],
  ] : [["State", "the device has no connection, and has sent nothing in the last ten minutes"]]);
  stuck(state.frame.stuck.filter((x) => x.service === name && addressOf(x.remote) === address));
  if (fresh) follow(`device=${encodeURIComponent(d?.device || address)}&last=100`);
  eventTable();
}

// --- fleet

// outcomes says what has happened to packets to the services that have arrived at this host. The first two are always shown.
const outcomes = {
  local: "this host serves the device", forwarded: "sent to the host that serves the device",
  second_chance: "no socket here: sent to the other host of a device that moves", disagreed: "another host sent the packet here in error; it was served",
  no_table: "dropped: this host has no table yet", no_owner: "dropped: no host serves the device", ttl: "dropped: the packet has made too many hops",
  unreachable: "dropped: the host that serves the device is not reachable", untrusted: "dropped: it came through the tunnel from a stranger, or in a broadcast or doubly tagged frame",
};

// marked shows a text about a host, with a class if something is wrong. Nothing is wrong with a host that was removed.
const marked = (title, of, wrong, kind) => ({ title, show: (cell, h) => { setText(cell, of(h)); setClass(cell, wrong(h) && h.state !== "removed" ? kind : ""); } });
const yesNo = (title, of, kind) => marked(title, (h) => of(h) ? "yes" : "no", (h) => !of(h), kind);

const hostColumns = [
  text("Host", (h) => h.name + (h.name === state.frame.fleet.host ? " (this host)" : "")),
  marked("State", (h) => h.state, (h) => h.state !== "ready", "warn"),
  yesNo("Alive", (h) => h.alive, "bad"), yesNo("Can serve", (h) => h.healthy, "warn"),
  number("Weight", (h) => String(h.weight)), number("Share", (h) => (100 * h.share).toFixed(1) + " %"),
  { title: "Epoch", number: true, show: (cell, h) => { setText(cell, !h.alive ? "-" : h.epoch + (h.behind ? " (behind)" : "")); setClass(cell, h.behind ? "number warn" : "number"); } },
  marked("Path", (h) => h.path, (h) => h.path === "none", "warn"),
  text("Addresses", (h) => h.addresses.join(" ") || "-", { wide: true }),
];

function drawFleet() {
  const f = state.frame.fleet, packets = sum(Object.values(f.packets), (n) => n);
  heading("Fleet " + f.fleet);
  problemList(fleetProblems(f));
  part("facts-title", () => element("h2", {}, "State"));
  facts("facts", [
    ["This host", `${f.host}, ${f.healthy ? "healthy" : "not healthy: " + f.reason}`],
    ["Table", (f.epoch ? "epoch " + f.epoch : "none yet") + (f.store_epoch > f.epoch ? `; the newest one has epoch ${f.store_epoch}` : "")],
    ["Moving", f.moving ? `${count(f.moving, "bucket", "buckets")} of 16,384` : "nothing"],
    ["Leader", f.leader || (f.store === "file" ? "none: each host computes the table" : "none")],
    ["Store", f.connected ? f.store : f.store + " does not answer; the rest is of the time before"],
  ]);
  part("hosts-title", () => element("h2", {}, "Hosts"));
  table("hosts", hostColumns, f.hosts, f.hosts.length ? count(f.hosts.length, "host", "hosts") : "this host knows no hosts yet");
  part("packets-title", () => element("h2", {}, "Packets at this host"));
  table("packets", [text("Outcome", ([name]) => name), number("Packets", ([, n]) => n.toLocaleString("en")), number("Share", ([, n]) => percent(n, packets)),
    text("Meaning", ([name]) => outcomes[name] ?? "", { wide: true })],
  Object.keys(outcomes).map((name) => [name, f.packets[name] ?? 0]).filter(([name, n]) => n || name === "local" || name === "forwarded"),
  "to the services, since the fleet was set up");
}

// --- events

let follower = null;

// follow requests events and those that follow, until the next view.
async function follow(query) {
  follower?.abort();
  const abort = follower = new AbortController();
  state.events = [];
  while (!abort.signal.aborted) {
    try {
      // After an interruption only new events are missing; the list begins anew, because it is short.
      const answer = await fetch(`events?follow=1&${query}`, { signal: abort.signal });
      if (!answer.ok) throw new Error(await answer.text());
      state.events = [];
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "";;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) state.events.unshift(JSON.parse(line));
        state.events.length = Math.min(state.events.length, mostEvents);
        if (!state.paused && !abort.signal.aborted) eventTable();
      }
    } catch (e) {
      if (abort.signal.aborted) return;
      setText(part("events-problem", () => element("p", { class: "bad", role: "alert" })), "The events are not available: " + e.message.trim());
    }
    await new Promise((resolve) => setTimeout(resolve, 5000));
  }
}

function eventTable() {
  const filter = state.kind.trim().toLowerCase();
  const list = filter ? state.events.filter((e) => JSON.stringify(e).toLowerCase().includes(filter)) : state.events;
  part("log-title", () => element("h2", {}, "Events"));
  table("log", [
    text("Time", (e) => clock(e.time)),
    { title: "Level", show: (cell, e) => { setText(cell, e.level); setClass(cell, { warning: "warn", error: "bad" }[e.level] ?? ""); } },
    text("Kind", (e) => e.kind),
    text("Where", (e) => [e.service, e.slot === undefined ? "" : "slot " + e.slot, e.device, e.cgroup, e.interface].filter(Boolean).join(" ")),
    text("What", (e) => {
      const details = Object.entries(e.details ?? {}).map(([k, v]) => `${k} ${v}`);
      if (e.pid) details.unshift("pid " + e.pid);
      return e.text + (details.length ? ` (${details.join(", ")})` : "");
    }, { wide: true }),
  ], list, list.length ? `${count(list.length, "event", "events")}, the newest first` : "no events");
}

function drawEvents(_, fresh) {
  heading("Events");
  part("tools", () => element("div", { class: "tools" }, element("label", {}, "Filter ",
    element("input", { type: "search", value: state.kind, oninput: (e) => { state.kind = e.target.value; eventTable(); } }))));
  part("log-title", () => element("h3", {}, "The last 500 events, and those that follow"));
  if (fresh) follow("last=" + mostEvents);
  eventTable();
}

// --- trace

function drawTrace() {
  heading("Tuned and traced connections");
  const groups = state.frame.groups, traced = groups.some((g) => g.kind === "trace");
  table("groups", [
    text("Cgroup", (g) => g.cgroup), text("Kind", (g) => g.kind), text("Name", (g) => g.name), number("Rate/s", (g) => rate(g.per_second)),
    number("Open", (g) => g.kind === "tune" ? String(g.connections ?? 0) : "-"), number("Retransmits/s", (g) => g.kind === "tune" ? rate(g.retransmits_per_second ?? 0) : "-"),
    text("Slowest stage", (g) => g.stage ?? "-"), number("p50", (g) => latency(g.median_ns)), number("p99", (g) => latency(g.p99_ns)), number("Oldest unread", (g) => latency(g.oldest_ns)),
    text("Problem", (g) => g.problem ?? "", { wide: true }),
  ], groups, groups.length ? count(groups.length, "rule or group", "rules and groups") + ", over the last 10 to 20 seconds" : "the policy has no rules of tune and trace");
  part("report-title", () => element("h2", {}, "Trace report"));
  if (!traced) {
    part("untraced", () => element("p", {}, "No cgroup is traced: the policy has no rule of trace that applies."));
    return;
  }
  document.getElementById("untraced")?.remove();
  part("tools", () => element("div", { class: "tools" },
    element("label", {}, "Last ", element("select", { id: "last", onchange: renewReport }, ...["5m", "15m", "1h"].map((v) => element("option", { value: v }, v)))),
    element("button", { type: "button", onclick: renewReport }, "Update"),
    element("label", {}, element("input", { type: "checkbox", id: "renew", checked: true }), " every 10 seconds")));
  const frame = part("report", () => element("iframe", { title: "Trace report", src: "report?last=5m" }));
  frame.dataset.since ??= String(Date.now());
  if (document.getElementById("renew").checked && !state.paused && Date.now() - Number(frame.dataset.since) > 10000
    && !frame.contains(document.activeElement) && document.activeElement !== frame) renewReport();
}

// renewReport loads the report again, at the same place.
function renewReport() {
  const frame = document.getElementById("report"), top = frame.contentWindow.scrollY;
  frame.dataset.since = String(Date.now());
  frame.addEventListener("load", () => frame.contentWindow.scrollTo(0, top), { once: true });
  frame.contentWindow.location.replace("report?last=" + document.getElementById("last").value);
}

// --- start

document.getElementById("service").addEventListener("change", (e) => {
  state.service = e.target.value;
  if (route()[1].length) location.hash = views[route()[0]];
  else draw();
});

document.getElementById("pause").addEventListener("click", (e) => {
  state.paused = !state.paused;
  e.target.setAttribute("aria-pressed", String(state.paused));
});

const themes = ["auto", "light", "dark"];

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(document.getElementById("theme"), "Theme: " + theme);
}

document.getElementById("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  localStorage.setItem("theme", next);
  showTheme(next);
});
showTheme(themes.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto");

addEventListener("hashchange", () => {
  if (location.hash === "#main") return; // the link that skips the header
  state.devices.page = 0;
  draw();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});

document.querySelector(".skip").addEventListener("click", (e) => {
  e.preventDefault();
  main.focus();
});

let live = null;

// receive draws a frame. The measure "frame" is the time from the message to the picture.
function receive(message) {
  const start = performance.now();
  if (state.paused) return;
  take(JSON.parse(message.data));
  status();
  draw();
  requestAnimationFrame(() => {
    // The task after the callback is after the picture.
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      if (performance.getEntriesByName("frame").length >= 300) performance.clearMeasures("frame");
      performance.measure("frame", { start });
      port1.close();
    };
    port2.postMessage(null);
  });
}

async function lost() {
  const p = document.getElementById("state");
  setText(p, "the agent does not answer; trying again");
  setClass(p, "bad");
  if (live?.readyState !== EventSource.CLOSED) return; // the browser tries again
  live = null;
  try {
    const answer = await fetch("live", { method: "HEAD" });
    if (answer.status === 401) {
      location.assign("login");
      return;
    }
  } catch { /* the agent is away */ }
  setTimeout(connect, 5000);
}

// connect requests frames while the page is visible: a browser has few connections for all its tabs.
function connect() {
  if (document.hidden || live) return;
  live = new EventSource("live");
  live.onmessage = receive;
  live.onerror = lost;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    live?.close();
    live = null;
  } else connect();
});
connect();
