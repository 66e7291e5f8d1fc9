// SPDX-License-Identifier: Apache-2.0
// The page of Sockeye: it shows the frames of /live, one per second, and the events of /events.
"use strict";

const state = { frame: null, paused: false, service: "", history: new Map(), sort: { column: "datagrams_per_second", down: true }, filter: "", page: 0, kind: "" };
const pageSize = 200;
const main = document.getElementById("main");

// element creates an element; text is never parsed as HTML.
function element(name, attributes = {}, ...children) {
  const svg = ["svg", "polyline", "title"].includes(name);
  const e = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (value !== false && value !== undefined) e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined));
  return e;
}

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
const shown = () => state.frame?.services.find((s) => s.name === state.service) ?? state.frame?.services[0];
const nameOf = (d) => d.device || d.address;

// stateOf returns the word for a slot and its class.
function stateOf(slot) {
  if (!slot.pid) return ["empty", "bad"];
  if (slot.state !== "ready") return [slot.state, "warn"];
  return slot.ready ? ["ready", "good"] : ["filling", "warn"];
}

// --- frames

function take(frame) {
  for (const s of frame.services) {
    for (const slot of s.slots) {
      const key = s.name + "/" + slot.slot;
      const list = state.history.get(key) ?? [];
      list.push(slot.datagrams_per_second);
      if (list.length > 120) list.shift();
      state.history.set(key, list);
    }
  }
  if (state.paused) return;
  state.frame = frame;
  status();
  services();
  draw();
}

function status() {
  const p = document.getElementById("state");
  const s = shown();
  p.classList.toggle("bad", Boolean(state.frame.problem));
  if (!s) {
    p.textContent = state.frame.problem || "the policy has no service";
    return;
  }
  const ready = s.slots.filter((x) => x.ready).length;
  const text = [`${ready} of ${s.slots.length} slots ready`, count(s.devices.length + s.omitted, "device", "devices")];
  if (s.split) text.push(count(s.split, "split device", "split devices"));
  if (state.frame.problem) text.push(state.frame.problem);
  // A screen reader repeats the status only if it changes.
  if (p.textContent !== text.join(", ")) p.textContent = text.join(", ");
}

function services() {
  const select = document.getElementById("service");
  const names = state.frame.services.map((s) => s.name);
  if ([...select.options].map((o) => o.value).join() === names.join()) return;
  select.replaceChildren(...names.map((n) => element("option", { value: n, selected: n === state.service }, n)));
  state.service = select.value;
}

// --- views

const routes = {
  slots: drawSlots, slot: drawSlot, devices: drawDevices, device: drawDevice, groups: drawGroups, events: drawEvents,
};

function route() {
  const [name, ...rest] = decodeURIComponent(location.hash.slice(1) || "slots").split("/");
  return routes[name] ? [name, rest.join("/")] : ["slots", ""];
}

let drawn = "";

function draw() {
  const [name, argument] = route();
  if (!state.frame && name !== "events") return;
  const fresh = drawn !== location.hash;
  if (fresh) {
    drawn = location.hash;
    main.replaceChildren();
    for (const a of document.querySelectorAll("nav a")) {
      const current = a.hash.slice(1) === { slot: "slots", device: "devices" }[name] || a.hash.slice(1) === name;
      if (current) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    }
  }
  routes[name](argument, fresh);
}

function part(id, create) {
  let e = document.getElementById(id);
  if (!e) {
    e = create();
    e.id = id;
    main.append(e);
  }
  return e;
}

function drawSlots() {
  const s = shown();
  part("title", () => element("h2", {}, "Slots and the devices that flow into them"));
  const list = part("flow", () => element("ul", { class: "flow" }));
  if (!s) return list.replaceChildren();
  const bySlot = new Map(s.slots.map((x) => [x.slot, []]));
  for (const d of s.devices) bySlot.get(d.slot)?.push(d);
  const most = Math.max(1, ...s.devices.map((d) => d.datagrams_per_second));
  while (list.children.length > s.slots.length) list.lastChild.remove();
  s.slots.forEach((slot, i) => {
    let item = list.children[i];
    if (!item) {
      item = element("li", {},
        element("h3", {}, element("a"), element("span")), element("p", { class: "member" }), element("p", { class: "numbers" }),
        element("svg", { viewBox: "0 0 120 24", preserveAspectRatio: "none", "aria-hidden": "true" },
          element("polyline", { fill: "none", stroke: "currentColor", "stroke-width": "1", "vector-effect": "non-scaling-stroke" })),
        element("canvas", { "aria-hidden": "true" }));
      list.append(item);
    }
    const [word, kind] = stateOf(slot);
    const link = item.querySelector("a");
    link.href = "#slot/" + slot.slot;
    link.textContent = "Slot " + slot.slot;
    const mark = item.querySelector("h3 span");
    mark.textContent = word;
    mark.className = kind;
    item.querySelector(".member").textContent = slot.pid ? `${slot.pid} ${slot.command}` : "no member";
    const numbers = [count(slot.devices, "device", "devices"), rate(slot.datagrams_per_second) + " datagrams/s", rate(slot.bytes_per_second) + " bytes/s"];
    if (slot.refused_per_second) numbers.push(rate(slot.refused_per_second) + " refused/s");
    if (slot.drops_per_second) numbers.push(rate(slot.drops_per_second) + " dropped/s");
    if (slot.zero_windows) numbers.push(count(slot.zero_windows, "closed window", "closed windows"));
    item.querySelector(".numbers").textContent = numbers.join(", ");
    sparkline(item.querySelector("polyline"), state.history.get(s.name + "/" + slot.slot) ?? []);
    tiles(item.querySelector("canvas"), bySlot.get(slot.slot), most);
  });
}

function sparkline(line, values) {
  const most = Math.max(1, ...values);
  line.setAttribute("points", values.map((v, i) => `${120 - values.length + i},${(23 - 22 * v / most).toFixed(1)}`).join(" "));
}

// tiles draws one tile for each device: the stronger, the more it sends.
function tiles(canvas, devices, most) {
  const width = canvas.clientWidth || 280, scale = devicePixelRatio || 1, size = devices.length > 600 ? 4 : 7, gap = 1;
  const columns = Math.max(1, Math.floor(width / (size + gap)));
  const height = Math.max(size, Math.ceil(devices.length / columns) * (size + gap));
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = height + "px";
  }
  const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  const colors = { ok: style.getPropertyValue("--accent"), bad: style.getPropertyValue("--bad") };
  devices.forEach((d, i) => {
    g.globalAlpha = 0.15 + 0.85 * Math.sqrt(Math.min(1, d.datagrams_per_second / most));
    g.fillStyle = d.split || d.refused_per_second ? colors.bad : colors.ok;
    g.fillRect((i % columns) * (size + gap), Math.floor(i / columns) * (size + gap), size, size);
  });
  g.globalAlpha = 1;
}

const deviceColumns = [
  ["address", "Address", false], ["device", "Device", false], ["slot", "Slot", true], ["datagrams_per_second", "Datagrams/s", true],
  ["bytes_per_second", "Bytes/s", true], ["refused_per_second", "Refused/s", true], ["sessions", "Sessions", true],
];

function sorted(devices) {
  const { column, down } = state.sort;
  const order = down ? -1 : 1;
  return devices.sort((a, b) => {
    const x = a[column] ?? "", y = b[column] ?? "";
    return (typeof x === "number" ? x - y : String(x).localeCompare(String(y))) * order || a.address.localeCompare(b.address);
  });
}

function deviceTable(id, devices, caption) {
  const box = part(id, () => element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }));
  const focus = document.activeElement?.dataset?.column;
  const head = element("tr", {}, ...deviceColumns.map(([key, title, number]) => element("th",
    { class: number ? "number" : false, "aria-sort": state.sort.column === key ? (state.sort.down ? "descending" : "ascending") : false },
    element("button", { type: "button", "data-column": key, onclick: () => {
      state.sort = { column: key, down: state.sort.column === key ? !state.sort.down : number };
      draw();
    } }, title))));
  const rows = devices.map((d) => element("tr", {},
    element("td", {}, element("a", { href: "#device/" + d.address }, d.address)),
    element("td", {}, d.device ?? "", d.pinned ? " (pinned)" : "", d.split ? element("strong", { class: "bad" }, " split") : ""),
    element("td", { class: "number" }, element("a", { href: "#slot/" + d.slot }, String(d.slot))),
    ...["datagrams_per_second", "bytes_per_second", "refused_per_second"].map((key) => element("td", { class: "number" }, rate(d[key]))),
    element("td", { class: "number" }, String(d.sessions))));
  box.replaceChildren(element("table", {}, element("caption", {}, caption), element("thead", {}, head), element("tbody", {}, ...rows)));
  if (focus) box.querySelector(`[data-column="${focus}"]`)?.focus();
}

function drawDevices() {
  const s = shown();
  part("title", () => element("h2", {}, "Devices"));
  part("tools", () => element("div", { class: "tools" },
    element("label", {}, "Filter ", element("input", { type: "search", id: "filter", value: state.filter, oninput: (e) => { state.filter = e.target.value; state.page = 0; draw(); } })),
    element("button", { type: "button", onclick: () => { state.page = Math.max(0, state.page - 1); draw(); } }, "Previous"),
    element("button", { type: "button", onclick: () => { state.page++; draw(); } }, "Next")));
  const filter = state.filter.toLowerCase();
  const all = sorted((s?.devices ?? []).filter((d) => !filter || d.address.includes(filter) || (d.device ?? "").toLowerCase().includes(filter)));
  state.page = Math.min(state.page, Math.max(0, Math.ceil(all.length / pageSize) - 1));
  const from = state.page * pageSize;
  const rows = all.slice(from, from + pageSize);
  deviceTable("devices-table", rows, all.length ? `${from + 1} to ${from + rows.length} of ${count(all.length, "device", "devices")}` : "no devices");
}

function definitions(id, list) {
  const dl = part(id, () => element("dl"));
  dl.replaceChildren(...list.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]));
}

function drawSlot(number, fresh) {
  const s = shown(), slot = s?.slots.find((x) => String(x.slot) === number);
  part("title", () => element("h2", {}, "Slot " + number));
  if (!slot) return definitions("facts", [["State", "the policy has no such slot"]]);
  definitions("facts", [
    ["State", stateOf(slot)[0]], ["Member", slot.pid ? `${slot.pid} ${slot.command}` : "none"], ["Sessions", String(slot.sessions)],
    ["Receives", `${rate(slot.datagrams_per_second)} datagrams/s, ${rate(slot.bytes_per_second)} bytes/s, ${rate(slot.connections_per_second)} connections/s`],
    ["Refused", rate(slot.refused_per_second) + "/s"], ["Dropped at its sockets", rate(slot.drops_per_second) + "/s"],
    ["UDP queue", `${rate(slot.queued_bytes)} of ${rate(slot.queue_limit_bytes)} bytes`], ["Unread by TCP", rate(slot.unread_bytes) + " bytes"],
    ["Closed windows", String(slot.zero_windows)], ["Waiting", count(slot.waiting, "datagram", "datagrams")],
  ]);
  deviceTable("devices-table", sorted(s.devices.filter((d) => d.slot === slot.slot)).slice(0, pageSize), `devices of slot ${number}`);
  if (fresh) pastEvents("slot=" + encodeURIComponent(number));
}

function drawDevice(address, fresh) {
  const s = shown(), d = s?.devices.find((x) => x.address === address);
  part("title", () => element("h2", {}, "Device " + address));
  definitions("facts", d ? [
    ["Name", d.device || "none in the device map"], ["Slot", element("a", { href: "#slot/" + d.slot }, String(d.slot))],
    ["Sends", `${rate(d.datagrams_per_second)} datagrams/s, ${rate(d.bytes_per_second)} bytes/s`], ["Refused", rate(d.refused_per_second) + "/s"],
    ["Sessions", String(d.sessions)], ["Last seen", new Date(d.last_seen).toLocaleTimeString()], ["Split", d.split ? "yes" : "no"],
  ] : [["State", "sends nothing now"]]);
  if (fresh) pastEvents("device=" + encodeURIComponent(d ? nameOf(d) : address));
}

function drawGroups() {
  part("title", () => element("h2", {}, "Tuned and traced connections"));
  const box = part("groups", () => element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "groups" }));
  box.replaceChildren(element("table", {}, element("caption", {}, count(state.frame.groups.length, "group", "groups")),
    element("thead", {}, element("tr", {}, ...["Kind", "Cgroup", "Name", "Rate/s", "Open", "P50", "P99"].map((t) => element("th", {}, t)))),
    element("tbody", {}, ...state.frame.groups.map((g) => element("tr", {}, ...[g.kind, g.cgroup, g.name, rate(g.per_second), String(g.connections),
      latency(g.median_ns), latency(g.p99_ns)].map((t) => element("td", {}, t)))))));
}

function latency(ns) {
  if (!ns) return "-";
  return ns < 1e6 ? (ns / 1e3).toFixed(0) + " µs" : ns < 1e9 ? (ns / 1e6).toFixed(1) + " ms" : (ns / 1e9).toFixed(2) + " s";
}

// --- events

let stream = null;

function eventRow(e) {
  const where = [e.service, e.cgroup, e.interface, e.device, e.slot === undefined ? "" : "slot " + e.slot].filter(Boolean).join(" ");
  const details = Object.entries(e.details ?? {}).map(([k, v]) => `${k} ${v}`);
  if (e.pid) details.unshift("pid " + e.pid);
  return element("tr", {}, element("td", {}, new Date(e.time).toLocaleString()),
    element("td", { class: { warning: "warn", error: "bad" }[e.level] ?? false }, e.kind), element("td", {}, where),
    element("td", {}, e.text + (details.length ? ` (${details.join(", ")})` : "")));
}

function eventTable(id, caption) {
  const box = part(id, () => element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...["Time", "Kind", "Where", "What"].map((t) => element("th", {}, t)))), element("tbody"))));
  return box.querySelector("tbody");
}

async function pastEvents(query) {
  const body = eventTable("events-table", "last events");
  const answer = await fetch("events?last=50&" + query);
  const list = (await answer.text()).trim().split("\n").filter(Boolean).map((l) => JSON.parse(l));
  body.replaceChildren(...list.reverse().map(eventRow));
}

function drawEvents(_, fresh) {
  part("title", () => element("h2", {}, "Events"));
  const body = eventTable("events-table", "the newest first");
  if (!fresh) return;
  stream?.close();
  stream = new EventSource("events/follow?last=200");
  stream.onmessage = (m) => {
    body.prepend(eventRow(JSON.parse(m.data)));
    while (body.children.length > 500) body.lastChild.remove();
  };
}

// --- start

document.getElementById("service").addEventListener("change", (e) => { state.service = e.target.value; drawn = ""; draw(); });
document.getElementById("pause").addEventListener("click", (e) => {
  state.paused = !state.paused;
  e.target.setAttribute("aria-pressed", String(state.paused));
});
addEventListener("hashchange", () => {
  if (route()[0] !== "events") { stream?.close(); stream = null; }
  draw();
  main.focus();
});
const live = new EventSource("live");
live.onmessage = (m) => take(JSON.parse(m.data));
live.onerror = () => {
  const p = document.getElementById("state");
  p.textContent = "the agent does not answer; trying again";
  p.classList.add("bad");
};
draw();
