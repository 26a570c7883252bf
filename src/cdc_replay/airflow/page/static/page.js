// The page in Airflow's menu. Every text of a server is hostile: nodes are made by `node`, which sets text, never markup.
"use strict";

const POLL_MS = 10000;
const MESSAGE_MS = 10000;
const ROOT = new URL("../", location.href);
const HOURS = { "1h": 1, "24h": 24, "7d": 168 };

const page = {
  status: null,
  details: new Map(), // by subscription, the last answer
  charts: new Map(), // by subscription, two uPlots and their element
  open: new Set(JSON.parse(sessionStorage.getItem("open") || "[]")),
  range: sessionStorage.getItem("range") || "24h",
};

// ---------------------------------------------------------------- nodes and texts

function node(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (key === "text") made.textContent = value;
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

function sizeText(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let size = bytes, unit = 0;
  for (; size >= 1024 && unit < units.length - 1; unit++) size /= 1024;
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

function durationText(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds > 0 && seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.round((minutes % 1440) / 60)} h`;
}

const countText = (count) => (count === null || count === undefined ? "–" : count.toLocaleString("en"));
const timeText = (time) => new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
const ageText = (time) => `${durationText(Math.max(0, (Date.now() - new Date(time)) / 1000))} ago`;

function age(time) {
  return time ? node("time", { datetime: time, title: timeText(time), "data-age": true, text: ageText(time) }) : "–";
}

function facts(values) {
  return node("dl", { class: "facts" }, Object.entries(values).filter(([, value]) => value !== null).map(([name, value]) =>
    node("div", {}, node("dt", { text: name }), node("dd", {}, value))));
}

function table(columns, rows) {
  const isNumber = (column) => (column.endsWith("#") ? "number" : null);
  const label = (column) => column.replace("#", "");
  return node("div", { class: "scroll" }, node("table", {},
    node("thead", {}, node("tr", {}, columns.map((column) => node("th", { class: isNumber(column), text: label(column) })))),
    node("tbody", {}, rows.map((row) => node("tr", {}, row.map((cell, index) =>
      node("td", { class: isNumber(columns[index]), "data-label": label(columns[index]) }, cell)))))));
}

const badge = (kind, text) => node("span", { class: `badge ${kind}`, text });

// ---------------------------------------------------------------- links and buttons

// Airflow's frame for plugins may not leave itself, so a link is followed by the page around it.
function link(path, text, properties = {}) {
  const href = new URL(path, ROOT).href;
  return node("a", { href, target: "_top", ...properties, onclick: (event) => {
    if (window.parent === window) return;
    event.preventDefault();
    const outer = window.parent.document.createElement("a");
    outer.href = href;
    if (event.ctrlKey || event.metaKey) outer.target = "_blank";
    outer.click();
  } }, text);
}

const dagLink = (dagId) => link(`dags/${encodeURIComponent(dagId)}`, dagId);
const runLink = (run, text) => link(`dags/${encodeURIComponent(run.dag_id)}/runs/${encodeURIComponent(run.run_id)}`, text);
const reportLink = (subscription, report, text, properties) =>
  link(`cdc-replay/reports/${encodeURIComponent(subscription)}/${encodeURIComponent(report)}`, text, properties);

function quote(argument) {
  return /^[\w.:\/-]+$/.test(argument) ? argument : `'${argument.replaceAll("'", "'\\''")}'`;
}

const command = (...parts) => node("code", { class: "command", text: ["cdc-replay", ...parts.map(quote)].join(" ") });

// A button, if the DAG exists and the user may trigger it. `options` are Params: name to [label, default]; the default
// is a boolean, a text to enter (empty: not given), or a list to choose from.
function action(dag, label, text, conf = {}, options = {}) {
  if (!dag || !dag.may_trigger) return null;
  const key = `${dag.dag_id} ${label} ${JSON.stringify(conf)}`;
  return node("button", { type: "button", "data-key": key, onclick: () => ask(dag, label, text, conf, options) }, label);
}

function ask(dag, label, text, conf, options) {
  const dialog = document.getElementById("confirm");
  const fields = Object.entries(options).map(([name, option]) => field(name, ...option));
  document.getElementById("confirm-title").textContent = label;
  document.getElementById("confirm-text").textContent = `${text} It runs as ${dag.dag_id}.`;
  document.getElementById("confirm-options").replaceChildren(...fields);
  document.getElementById("confirm-paused").hidden = !dag.is_paused;
  document.getElementById("confirm-run").onclick = () => {
    const chosen = chosenOptions([...dialog.querySelectorAll("input")], options);
    dialog.close();
    trigger(dag.dag_id, { ...conf, ...chosen });
  };
  dialog.showModal();
}

function field(name, description, initial) {
  const box = (properties, text) => node("label", {}, node("input", { type: "checkbox", name, ...properties }), ` ${text}`);
  if (typeof initial === "boolean") return box({ checked: initial }, description);
  if (typeof initial === "string") return node("label", {}, `${description} `, node("input", { name, spellcheck: "false" }));
  return node("fieldset", {}, node("legend", { text: description }), initial.map((value) => box({ value }, value)));
}

function chosenOptions(inputs, options) {
  const chosen = {};
  for (const [name, [, initial]] of Object.entries(options)) {
    const named = inputs.filter((input) => input.name === name);
    if (typeof initial === "boolean") chosen[name] = named[0].checked;
    else if (typeof initial === "string") chosen[name] = named[0].value.trim() || null;
    else chosen[name] = named.filter((input) => input.checked).map((input) => input.value);
  }
  return chosen;
}

async function trigger(dagId, conf) {
  try {
    const response = await fetch(new URL(`api/v2/dags/${encodeURIComponent(dagId)}/dagRuns`, ROOT), {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ logical_date: null, conf }),
    });
    const answer = await response.json();
    if (!response.ok) throw new Error(typeof answer.detail === "string" ? answer.detail : JSON.stringify(answer.detail));
    say(`${dagId} was triggered: `, runLink(answer, answer.dag_run_id || "run"));
    await poll();
  } catch (error) {
    say(`${dagId} was not triggered: ${error.message}`);
  }
}

let silence = 0;
function say(...content) {
  const message = document.getElementById("message");
  message.replaceChildren(...content);
  message.hidden = false;
  clearTimeout(silence);
  silence = setTimeout(() => { message.hidden = true; }, MESSAGE_MS);
}

// ---------------------------------------------------------------- publishers

function walLimit(publisher) {
  const configured = (page.status.max_retained_wal || {})[publisher.publisher];
  const safe = publisher.safe_wal_size_bytes;
  const server = safe === null ? null : publisher.retained_wal_bytes + Math.max(0, safe);
  const limits = [configured, server].filter((limit) => limit !== null && limit !== undefined);
  return limits.length ? Math.min(...limits) : null;
}

function slotBadge(publisher) {
  if (publisher.error) return badge("bad", publisher.slot_state === "missing" ? "slot missing" : "not reachable");
  if (publisher.slot_state === "lost") return badge("bad", "slot lost");
  return badge(publisher.slot_state === "unreserved" ? "warn" : "good", `slot ${publisher.slot_state}`);
}

function retainedWal(publisher) {
  const used = publisher.retained_wal_bytes, limit = walLimit(publisher);
  if (used === null) return null;
  if (limit === null) return node("p", { class: "soft", text: `${sizeText(used)} of WAL are retained; no limit is set` });
  const share = used / limit;
  return node("div", {},
    node("progress", { max: limit, value: used, class: share > 0.8 ? "full" : null, "aria-label": "Retained WAL" }),
    node("p", { class: "soft", text: `${sizeText(used)} of WAL are retained, ${Math.round(share * 100)} % of ${sizeText(limit)}` }));
}

function publisherCard(publisher) {
  const dagId = `capture__${publisher.publisher}`, dag = page.status.dags[dagId];
  return node("article", { class: "card" },
    node("div", { class: "head" }, node("h3", { text: publisher.publisher }), slotBadge(publisher),
      publisher.seconds_old === null ? null : badge("warn", `as of ${durationText(publisher.seconds_old)} ago`)),
    publisher.error ? node("p", { class: "notice", text: publisher.error }) : null,
    retainedWal(publisher),
    facts({
      "Not captured yet": sizeText(publisher.behind_bytes),
      "Change log": sizeText(publisher.log_bytes),
      "Log starts at": publisher.log_start || "–",
      "Log ends at": publisher.log_end || "–",
      "Publisher is at": publisher.position || "–",
      Slot: publisher.slot,
    }),
    node("div", { class: "buttons" },
      dag ? action({ dag_id: dagId, ...dag }, "Capture now", "Reads what the slot has into the change log.") : null,
      dag ? dagLink(dagId) : null));
}

// ---------------------------------------------------------------- subscriptions

function stateBadge(row) {
  if (row.seconds_old !== null || /does not answer/.test(row.behind_reason || "")) return badge("bad", "not reachable");
  if (/^parked/.test(row.error || "")) return badge("bad", "parked");
  if (page.status.tables.some((other) => other.subscription === row.subscription && /^parked/.test(other.state)))
    return badge("bad", "table parked");
  if (row.error) return badge("warn", "incomplete");
  if (page.status.copies.some((copy) => copy.subscription === row.subscription)) return badge("warn", "copying");
  if (row.applied_lsn === null) return badge("warn", "no tables yet");
  return row.behind_reason ? badge("warn", "lagging") : badge("good", "up to date");
}

function proof(row) {
  // The proof is the oldest of the tables'. A validation that has just held may have compared a part only.
  const details = page.details.get(row.subscription), last = (details?.validations || [])[0];
  const provenAt = details?.tables ? details.proven_at : row.proven_at;
  if (last && !last.consistent) return [badge("bad", "differs"), " ", age(last.finished)];
  if (provenAt) return [badge("good", "proven"), " ", age(provenAt)];
  if (last || row.last_validation_at) return [badge("warn", "not all proven"), " ", age(last ? last.finished : row.last_validation_at)];
  return [row.last_validation || "never proven"];
}

function summary(row) {
  const fact = (name, ...value) => node("span", { class: "fact" }, node("span", { class: "soft", text: `${name} ` }), ...value);
  return node("summary", { "data-key": `subscription ${row.subscription}` },
    node("h3", { text: row.subscription }), stateBadge(row),
    fact("lag", durationText(row.lag_seconds), row.lag_bytes === null ? "" : ` · ${sizeText(row.lag_bytes)}`),
    fact("last proof", ...proof(row)), fact("from", row.publisher),
    row.seconds_old === null ? null : badge("warn", `as of ${durationText(row.seconds_old)} ago`));
}

function parkedBox(subscription, parked, details) {
  const option = parked.table ? ["--table", parked.table] : [], { replay, snapshot, resume } = details.dags;
  const tables = parked.table ? { tables: [parked.table] } : {};
  const ways = [];
  if (!parked.table)
    ways.push(["Remove the cause on the subscriber, then let replay try again: ",
      action(replay, "Retry now", "Replays the group; the parked transaction is tried again.") || command("replay", subscription)]);
  else
    ways.push(["Remove the cause on the subscriber, then let replay try again: ",
      action(resume, "Resume", `The next replay tries the transaction again for ${parked.table}.`, tables) || command("resume", subscription, ...option)]);
  ways.push(["Skip the whole transaction, so that its changes never reach the subscriber: ",
    action(resume, "Skip the transaction", `The changes of the whole transaction ${parked.transaction} are lost for good.`,
      { ...tables, skip: parked.transaction }) || command("resume", subscription, ...option, "--skip", parked.transaction)]);
  if (parked.reason.includes("R4.6"))
    ways.push(["Store NULL for the values that exist nowhere: ",
      action(resume, "Store NULL", "The next replay stores NULL for these values of the transaction.", { ...tables, accept_null: true })
        || command("resume", subscription, ...option, "--accept-null")]);
  if (parked.table)
    ways.push(["Copy the table again: ", copyAgain(snapshot, parked.table) || command("snapshot", subscription, ...option)]);
  return node("div", { class: "problem" },
    node("strong", { text: parked.table ? `Table ${parked.table} is parked at ${parked.position}` : `Parked at ${parked.position}` }),
    ` before transaction ${parked.transaction}`,
    node("p", { class: "reason", text: parked.reason }),
    node("ul", {}, ways.map((way) => node("li", {}, way))));
}

const copyAgain = (dag, name) => action(dag, "Copy again",
  `Replaces the rows of ${name} with a fresh copy of what is published.`, { tables: [name] });

function problems(row, details) {
  const boxes = (details.parked || []).map((parked) => parkedBox(row.subscription, parked, details));
  if (row.error && !(details.parked || []).length) boxes.push(node("p", { class: "notice", text: row.error }));
  if (row.behind_reason && !boxes.length) boxes.push(node("p", { class: "notice", text: row.behind_reason }));
  return boxes;
}

function backfillOptions(row, details) {
  const publisher = page.status.publishers.find((other) => other.publisher === row.publisher);
  const held = publisher?.log_start ? `; the log holds ${publisher.log_start} to ${publisher.log_end}` : "";
  return {
    from: [`After this date, time or LSN${held}. Empty: from its start`, ""],
    to: [`Up to this date, time or LSN${held}. Empty: what the subscriber has applied`, ""],
    tables: ["Only these tables; none chosen: all", (details.tables || []).map((known) => known.table)],
    into_conn_id: ["Airflow connection of another database to fill. Empty: repair the subscriber", ""],
    dry_run: ["Dry run: change nothing, and count in the task's log", true],
  };
}

function buttons(row, details) {
  const { replay, validate, refresh, backfill } = details.dags;
  return node("div", { class: "buttons" },
    action(replay, "Replay now", "Applies the change log to all subscriptions of the group, up to its end."),
    action(validate, "Validate", "Compares both sides at one position and writes a report.", { due: false }, {
      repair: ["Repair: if rows differ, insert, update and delete rows until all are as published", false],
      dry_run: ["Dry run of a repair: write no row, and count in the task's log", true],
    }),
    action(refresh, "Refresh", "Reads the publications again, copies new tables and removes dropped ones.", {}, {
      reconcile: ["Reconcile: make every table equal what is published; this inserts, updates and deletes rows", false],
      dry_run: ["Dry run: change nothing, and count in the task's log", true],
    }),
    action(backfill, "Backfill a range", "Applies a past range of the change log again.", {}, backfillOptions(row, details)),
    validate?.may_trigger ? node("button", { type: "button", "data-key": `why ${row.subscription}`,
      onclick: () => openWhy(row.subscription, (details.tables || []).map((known) => known.table)) }, "Explain a row") : null);
}

function tableRows(row, details) {
  return (details.tables || []).map((known) => {
    const status = page.status.tables.find((other) => other.subscription === row.subscription && other.table === known.table);
    const copy = page.status.copies.find((other) => other.subscription === row.subscription && other.table === known.table);
    const kind = { ready: "good", parked: "bad", dropped: "bad" }[known.state] || "warn";
    return [known.table,
      [badge(kind, known.state), copy ? copyProgress(copy) : null, status?.notice ? node("p", { class: "notice", text: status.notice }) : null],
      known.applied_lsn || "–",
      tableProof(known),
      known.filters === null ? (known.columns.length ? "all rows" : "not copied yet")
        : ["rows where ", known.filters.flatMap((filter, index) => [index ? " or " : null, node("code", { text: filter })])],
      copyAgain(details.dags.snapshot, known.table)];
  });
}

function rowsDiffer(count) {
  return count === 1 ? "1 row differs" : `${countText(count)} rows differ`;
}

function tableProof(known) {
  if (known.proof === null) return "–";
  const marks = (known.validations || []).map((done) => {
    const outcome = done.error ? `error: ${done.error}` : done.differing_rows ? rowsDiffer(done.differing_rows) : "no difference";
    const label = `${timeText(done.finished)}: ${outcome} in ${done.buckets} of 256 buckets, ${countText(done.row_count)} rows, ${durationText(done.seconds)}`;
    return node("span", { class: done.error || done.differing_rows ? "differs" : null, title: label, role: "img", "aria-label": label });
  });
  return node("div", {}, known.proven_at ? [badge("good", "proven"), " ", age(known.proven_at)] : node("span", { class: "notice", text: known.proof }),
    marks.length ? node("div", { class: "proofs small" }, marks) : null);
}

function copyProgress(copy) {
  const left = copy.seconds_left === null ? "" : `, ${durationText(copy.seconds_left)} left`;
  return node("div", {}, node("progress", { max: Math.max(copy.expected_bytes, copy.bytes, 1), value: copy.bytes }),
    node("span", { class: "soft", text: `${countText(copy.rows)} rows, ${sizeText(copy.bytes)}, ${sizeText(copy.bytes_per_second)}/s${left}` }));
}

function windowRows(details) {
  return (details.windows || []).map((done) => [age(done.finished), `(${done.from_lsn}, ${done.end_lsn}]`,
    countText(done.changes_read), countText(done.filtered_out), countText(done.updates_to_insert), countText(done.updates_to_delete),
    countText(done.applied), done.conflicts ? badge("warn", countText(done.conflicts)) : "0", durationText(done.seconds),
    done.error ? node("span", { class: "reason", text: done.error }) : null]);
}

function validationRows(row, details) {
  return (details.validations || []).slice(0, 5).map((done) => [age(done.finished),
    badge(done.consistent ? "good" : "bad", done.consistent ? (done.is_partial ? "no difference in a part" : "consistent") : "differs"), done.lsn,
    `${done.tables - done.differing_tables} of ${done.tables}`, countText(done.differing_rows), durationText(done.seconds),
    reportLink(row.subscription, done.report, "report")]);
}

function proofs(row, details) {
  return node("div", { class: "proofs" }, (details.validations || []).map((done) => {
    const label = `${timeText(done.finished)}: ${done.consistent ? "consistent" : rowsDiffer(done.differing_rows)} at ${done.lsn}`;
    return reportLink(row.subscription, done.report, "", { class: done.consistent ? null : "differs", title: label, "aria-label": label });
  }));
}

function runRows(details) {
  return (details.runs || []).map((run) => [runLink(run, run.run_id), dagLink(run.dag_id),
    badge({ success: "good", failed: "bad" }[run.state] || "warn", run.state), age(run.started),
    run.ended ? durationText((new Date(run.ended) - new Date(run.started)) / 1000) : "–"]);
}

function section(title, rows, columns) {
  return rows.length ? [node("h4", { text: title }), table(columns, rows)] : [];
}

function subscriptionBody(row) {
  const details = page.details.get(row.subscription);
  if (!details) return node("p", { class: "soft", text: "Loading…" });
  if (!details.tables) return [...problems(row, details), details.error ? node("p", { class: "notice", text: details.error }) : null];
  return [problems(row, details), buttons(row, details), charts(row, details),
    (details.validations || []).length ? [node("h4", { text: "Proofs" }), proofs(row, details)] : null,
    section("", validationRows(row, details), ["When", "Result", "At", "Tables that hold#", "Differing rows#", "Took#", "Report"]).slice(1),
    section("Tables", tableRows(row, details), ["Table", "State", "Applied", "Proof", "Filter", ""]),
    section("Windows", windowRows(details), ["When", "Range", "Changes read#", "Filtered out#", "UPDATE to INSERT#",
      "UPDATE to DELETE#", "Rows applied#", "Conflicts#", "Took#", ""]),
    section("Runs", runRows(details), ["Run", "DAG", "State", "Started", "Took#"])].flat(2);
}

function subscriptionCard(row) {
  const card = node("details", { class: "card", open: page.open.has(row.subscription) }, summary(row),
    page.open.has(row.subscription) ? subscriptionBody(row) : null);
  card.addEventListener("toggle", () => {
    if (card.open === page.open.has(row.subscription)) return;
    page.open[card.open ? "add" : "delete"](row.subscription);
    sessionStorage.setItem("open", JSON.stringify([...page.open]));
    poll();
  });
  return card;
}

// ---------------------------------------------------------------- charts

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function chart(element, title, series, axes) {
  const axis = { stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1 } };
  const now = () => Date.now() / 1000;
  const clock = (time) => new Date(time * 1000).toLocaleString(undefined, page.range === "7d"
    ? { weekday: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  return new uPlot({
    title: null, width: Math.max(element.clientWidth, 260), height: 180,
    scales: { x: { range: () => [now() - HOURS[page.range] * 3600, now()] }, ...Object.fromEntries(
      axes.map(({ scale }) => [scale, { range: (_, __, greatest) => [0, Math.max(greatest || 0, 1) * 1.1] }])) },
    axes: [{ ...axis, values: (_, times) => times.map(clock) }, ...axes.map(({ scale, text, side }) => ({ ...axis, scale, side, size: 64, grid: side === 1 ? { show: false } : axis.grid,
      values: (_, values) => values.map(text) }))],
    series: [{ value: (_, time) => (time === null ? "–" : timeText(time * 1000)) }, ...series.map((line) => ({
      width: 1.5, points: { size: 4 }, spanGaps: true, ...line, stroke: color(line.color), fill: line.fill ? `${color(line.color)}22` : null }))],
    legend: { live: true }, cursor: { drag: { x: false, y: false } },
  }, [[], ...series.map(() => [])], element);
}

function makeCharts() {
  const lag = node("div", { class: "chart", role: "img", "aria-label": "Lag over time" });
  const rows = node("div", { class: "chart", role: "img", "aria-label": "Rows applied over time" });
  return { element: node("div", { class: "charts" }, lag, rows), lag, rows, plots: null };
}

function charts(row, details) {
  if (!page.charts.has(row.subscription)) page.charts.set(row.subscription, makeCharts());
  const made = page.charts.get(row.subscription);
  requestAnimationFrame(() => draw(made, row, details.points || []));
  return [node("h4", { text: "Lag and throughput" }), made.element];
}

function draw(made, row, points) {
  if (!made.element.isConnected) return;
  made.plots ||= [
    chart(made.lag, "Lag", [
      { label: "Lag in time", scale: "s", color: "accent", fill: true, value: (_, value) => durationText(value) },
      { label: "in WAL", scale: "b", color: "second", value: (_, value) => sizeText(value) }],
    [{ scale: "s", text: durationText, side: 3 }, { scale: "b", text: sizeText, side: 1 }]),
    chart(made.rows, "Rows", [
      { label: "Rows applied", scale: "n", color: "accent", fill: true, value: (_, value) => countText(value) },
      { label: "Changes read", scale: "n", color: "soft", value: (_, value) => countText(value) },
      { label: "Conflicts", scale: "n", color: "bad", value: (_, value) => countText(value) }],
    [{ scale: "n", text: (value) => countText(value), side: 3 }])];
  const times = points.map((point) => new Date(point.time) / 1000);
  const column = (name) => points.map((point) => point[name]);
  // The present lag is the last point: while nothing is applied, there are no windows.
  made.plots[0].setData([[...times, Date.now() / 1000], [...column("lag_seconds"), row.lag_seconds], [...column("lag_bytes"), row.lag_bytes]]);
  made.plots[1].setData([times, column("applied"), column("changes_read"), column("conflicts")]);
}

function forgetCharts() {
  page.charts.clear();
  if (page.status) render();
}

// ---------------------------------------------------------------- polling

async function get(path) {
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  if (!response.ok) throw new Error(response.status === 401 ? "you are not logged in to Airflow any more" : `${response.status}`);
  return response.json();
}

async function poll() {
  const range = page.range;
  const names = [...page.open];
  const [status, ...details] = await Promise.allSettled([get("data"), ...names.map((name) =>
    get(`subscriptions/${encodeURIComponent(name)}?time_range=${range}`))]);
  const updated = document.getElementById("updated");
  if (status.status === "rejected") {
    updated.textContent = `No answer from Airflow: ${status.reason.message}. What is shown is old.`;
    return;
  }
  page.status = status.value;
  if (range === page.range) details.forEach((answer, index) => {
    if (answer.status === "fulfilled") page.details.set(names[index], answer.value);
  });
  updated.textContent = `Updated at ${new Date().toLocaleTimeString()}`;
  render();
}

function render() {
  const { publishers, subscriptions } = page.status;
  const focused = document.activeElement?.dataset?.key;
  const scrolled = [...document.querySelectorAll(".scroll")].map((element) => element.scrollTop);
  const nothing = () => node("p", { class: "soft", text: "There is nothing that you may see: this requires the right to read a DAG." });
  document.getElementById("publishers").replaceChildren(...(publishers.length ? publishers.map(publisherCard) : [nothing()]));
  document.getElementById("subscriptions").replaceChildren(...(subscriptions.length ? subscriptions.map(subscriptionCard) : [nothing()]));
  for (const button of document.querySelectorAll("#ranges button"))
    button.setAttribute("aria-pressed", String(button.dataset.range === page.range));
  document.querySelectorAll(".scroll").forEach((element, index) => { element.scrollTop = scrolled[index] || 0; });
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

function start() {
  document.getElementById("confirm-cancel").addEventListener("click", () => document.getElementById("confirm").close());
  for (const button of document.querySelectorAll("#ranges button"))
    button.addEventListener("click", () => {
      page.range = button.dataset.range;
      sessionStorage.setItem("range", page.range);
      poll();
    });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", forgetCharts);
  addEventListener("resize", () => {
    for (const { plots, lag } of page.charts.values())
      plots?.forEach((plot) => plot.setSize({ width: Math.max(lag.clientWidth, 260), height: 180 }));
  });
  setInterval(() => { if (!document.hidden) poll(); }, POLL_MS);
  setInterval(() => {
    for (const time of document.querySelectorAll("time[data-age]")) time.textContent = ageText(time.dateTime);
  }, 1000);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  poll();
}

start();
