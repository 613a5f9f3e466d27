"use strict";
// The pages of `redco-flow ui`: the table of runs, a run's live page, notes and labels. Asks its
// own server alone, and asks again only for what has changed. Texts become nodes, never HTML.
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  function make(tag, attributes, ...content) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...content);
    return made;
  }

  const MARKS = { completed: "✓", failed: "✗", cancelled: "■", stopped_early: "■", running: "▶", skipped: "–" };
  const badge = (state) =>
    make("span", { class: `state ${state}` }, make("span", { "aria-hidden": "true" }, MARKS[state] || "…"), ` ${state}`);

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    const two = (value) => String(value).padStart(2, "0");
    if (whole < 60) return `${whole} s`;
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
    return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  }

  function score(value) {
    if (typeof value !== "number") return value === undefined ? "–" : String(value);
    const size = Math.abs(value);
    if (Number.isInteger(value) && size >= 1e4) return value.toLocaleString("en");
    if (value === 0 || (size >= 1 && size < 1e4)) return value.toFixed(2);
    return size >= 1e-3 && size < 1 ? value.toPrecision(4) : value.toExponential(3);
  }

  const moment = (text) => (text || "").slice(0, 16).replace("T", " ");
  const lost = (text) => ($("#lost").textContent = text);

  // Ask for a JSON document every few seconds; a slow server is asked less often.
  function poll(address, seconds, show) {
    let etag = "";
    async function ask() {
      const began = performance.now();
      let [response, found] = [null, null];
      try {
        const headers = etag ? { "If-None-Match": etag } : {};
        if (!document.hidden) response = await fetch(address(), { cache: "no-store", headers });
        if (response && response.status !== 304) found = await response.json();
        if (response) lost(found && !response.ok ? found.error : "");
      } catch {
        lost("The server does not answer. If redco-flow ui has ended, start it again and open its new link.");
      }
      const goesOn = !response || ![401, 403, 404].includes(response.status);
      try {
        if (found && response.ok) await show(found);
        etag = response?.headers.get("ETag") || etag;
      } finally {
        for (const one of all("[data-started]")) {
          one.textContent = duration((Date.now() - Date.parse(one.dataset.started)) / 1000);
        }
        if (goesOn) setTimeout(ask, Math.max(1000 * seconds, 10 * (performance.now() - began)));
      }
    }
    return ask();
  }

  // Notes and labels.
  const dialog = $("#notes-dialog");
  let edited = null;

  function edit(run, notes, saved) {
    edited = { run, edited_at: notes.edited_at, saved };
    $("h2 span", dialog).textContent = run;
    $(".wrong", dialog).textContent = "";
    $("form", dialog).elements.note.value = notes.note;
    $("form", dialog).elements.labels.value = notes.labels.join(", ");
    dialog.showModal();
  }

  async function save(event) {
    event.preventDefault();
    const { note, labels } = event.target.elements;
    const body = { run: edited.run, edited_at: edited.edited_at, note: note.value, labels: labels.value };
    const headers = { "Content-Type": "application/json" };
    try {
      const response = await fetch("/api/notes", { method: "POST", headers, body: JSON.stringify(body) });
      const found = await response.json();
      if (!response.ok) throw new Error(found.error);
    } catch (error) {
      $(".wrong", dialog).textContent = error.message;
      return;
    }
    dialog.close();
    edited.saved();
  }
  $("form", dialog).addEventListener("submit", save);
  $(".cancel", dialog).addEventListener("click", () => dialog.close());

  // A run's page.
  function followRun(live) {
    let known = { page: live.dataset.page, charts: "" };

    function listen() {
      const notes = $(".notes");
      $("button.edit", notes).addEventListener("click", () =>
        edit(live.dataset.run, JSON.parse(notes.dataset.notes), refresh));
    }

    // Take the page's new parts; what the reader has opened stays open.
    async function refresh() {
      const response = await fetch(location.pathname, { cache: "no-store" });
      if (!response.ok) return;
      const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
      const opened = new Set(all("details[open] > summary").map((one) => one.textContent));
      for (const part of ["header", "nav", "main"]) $(part).replaceWith($(part, fresh));
      for (const one of all("details > summary")) one.parentNode.open = opened.has(one.textContent);
      live = $("#live");
      known.page = live.dataset.page;
      document.title = fresh.title;
      await redcoCharts.scan();
      listen();
    }

    function show(found) {
      $(".title .state").replaceWith(badge(found.state));
      live.replaceChildren(...found.lines.map((line) => make("div", {}, line)));
      const took = all(".facts dt").find((one) => one.textContent === "took");
      if (took && found.started_at) took.nextElementSibling.dataset.started = found.started_at;
      for (const [index, facts] of (found.facts || []).entries()) {
        const list = all("dl.numbers")[index];
        if (list) list.replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
      }
    }

    listen();
    return poll(() => `live?charts=${known.charts}`, 2, async (found) => {
      const titles = () => JSON.stringify(all("figcaption").map((one) => one.textContent));
      const isOther = () => found.titles && titles() !== JSON.stringify(found.titles);
      if (found.page !== known.page || isOther()) await refresh();
      show(found);
      if (found.plots && !isOther()) redcoCharts.update(found.plots);
      known.charts = found.charts;
    });
  }

  // The table of runs.
  const NUM_COLUMNS = 4;
  const NUM_AT_ONCE = 150;
  const NO_CHOICE = { view: "runs", q: "", pipeline: "", tag: "", state: "", metric: "", op: "≥", value: "", sort: "created", up: "", columns: "" };

  function listRuns(form) {
    let rows = [];
    let shown = NUM_AT_ONCE;
    let headed = "";
    const choice = { ...NO_CHOICE, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
    const ticked = new Set();
    const drawn = new Map();
    const body = $("#table tbody");

    const VALUES = {
      run: (row) => row.run,
      state: (row) => row.state,
      time: (row) => row.seconds ?? (row.started_at ? (Date.now() - Date.parse(row.started_at)) / 1000 : undefined),
      created: (row) => row.sequence,
      note: (row) => row.note || undefined,
    };
    const valueOf = (row, key) => (VALUES[key] ? VALUES[key](row) : row.metrics[key.slice(1)]);

    function fits(row, words, least) {
      const value = row.metrics[choice.metric];
      return (
        words.every((word) => row.text.includes(word)) &&
        (!choice.pipeline || row.pipeline === choice.pipeline) &&
        (!choice.tag || row.tags.includes(choice.tag) || row.labels.includes(choice.tag)) &&
        (!choice.state || row.state === choice.state) &&
        (!choice.metric || value !== undefined) &&
        (!choice.metric || choice.value === "" || (choice.op === "≤" ? value <= least : value >= least))
      );
    }

    function matching() {
      const words = choice.q.toLowerCase().split(/\s+/).filter(Boolean);
      const found = rows.filter((row) => fits(row, words, Number(choice.value)));
      const sign = choice.up ? 1 : -1;
      const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
      return found
        .map((row) => [valueOf(row, choice.sort), row])
        .sort(([a, one], [b, other]) =>
          a === undefined || b === undefined
            ? (a === undefined) - (b === undefined)
            : sign * compare(a, b) || other.sequence - one.sequence)
        .map(([, row]) => row);
    }

    // The chosen metrics, or those that most of the runs have: two of evaluations before two of trainings.
    function columns(found) {
      if (choice.columns) return choice.columns.split("|").slice(1);
      const counts = new Map();
      for (const row of found) for (const name in row.metrics) counts.set(name, (counts.get(name) || 0) + 1);
      const isOwn = (name) => name.split("/").includes("val") || name.endsWith("train/loss");
      const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
      const scores = names.filter((name) => !isOwn(name));
      const own = names.filter(isOwn);
      const first = [choice.metric, ...scores.slice(0, 2), ...own.slice(0, 2), ...scores.slice(2), ...own.slice(2)];
      return [...new Set(first.filter(Boolean))].slice(0, NUM_COLUMNS);
    }

    function set(changes) {
      Object.assign(choice, changes);
      const kept = Object.entries(choice).filter(([name, value]) => value !== NO_CHOICE[name]);
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
      shown = NUM_AT_ONCE;
      draw();
    }

    const chip = (text, kind) => {
      const made = make("button", { type: "button", class: `chip ${kind}`, title: `show the runs with ${text}` }, text);
      made.addEventListener("click", () => set({ tag: text }));
      return made;
    };

    function cells(row, names) {
      const box = make("input", { type: "checkbox", "aria-label": `compare ${row.run}` });
      box.checked = ticked.has(row.run);
      box.addEventListener("change", () => {
        ticked[box.checked ? "add" : "delete"](row.run);
        draw();
      });
      const settings = row.overrides.join("  ");
      const small = make("small", { class: "cut", title: settings }, settings);
      if (row.sweep) small.append(settings ? " · " : "", make("a", { href: `/sweep/${encodeURIComponent(row.sweep)}`, title: row.sweep }, `sweep ${row.sweep.split("-").pop()}`));
      const wrong = [row.damage, row.is_deleted ? "artifacts deleted" : ""].filter(Boolean);
      const said = [...wrong, row.progress || (row.state === "completed" ? "" : row.message)].filter(Boolean).join("; ");
      const pencil = make("button", { type: "button", class: "edit", "aria-label": `note and labels of ${row.run}`, title: "note and labels" }, "✎");
      pencil.addEventListener("click", () => edit(row.run, row, load));
      const isRunning = row.seconds === null && row.started_at && row.state === "running";
      return [
        make("td", {}, box),
        make("th", { scope: "row" }, make("a", { class: "id", href: `/run/${encodeURIComponent(row.run)}/` }, row.run), small),
        make("td", {}, badge(row.state), ...(said ? [make("small", { class: "cut", title: said }, said)] : [])),
        ...names.map((name) => make("td", { class: "num" }, score(row.metrics[name]))),
        make("td", { class: "num", "data-started": isRunning && row.started_at }, duration(VALUES.time(row))),
        make("td", { class: "num" }, moment(row.created_at)),
        make("td", { class: "remark" }, ...row.labels.map((text) => chip(text, "label")), ...row.tags.map((text) => chip(text, "")), pencil,
          ...(row.note ? [make("div", { class: "text", title: row.note }, row.note)] : [])),
      ];
    }

    function line(row, names) {
      const key = `${row.json}|${names}|${ticked.has(row.run)}`;
      const known = drawn.get(row.run);
      if (known && known.key === key) return known.made;
      const made = known ? known.made : make("tr");
      made.replaceChildren(...cells(row, names));
      made.classList.toggle("chosen", ticked.has(row.run));
      drawn.set(row.run, { key, made });
      return made;
    }

    function drawHead(names, found) {
      const heads = [["run", "run"], ["state", "state"], ...names.map((name) => [`=${name}`, name]), ["time", "time"], ["created", "created (UTC)"], ["note", "labels and note"]];
      const key = JSON.stringify([heads, choice.sort, choice.up]);
      if (key !== headed) {
        headed = key;
        const box = make("input", { type: "checkbox", "aria-label": "compare all that are listed" });
        box.addEventListener("change", () => {
          for (const row of matching()) ticked[box.checked ? "add" : "delete"](row.run);
          draw();
        });
        const made = heads.map(([name, text]) => {
          const isSorted = choice.sort === name;
          const button = make("button", { type: "button" }, text + (isSorted ? (choice.up ? " ▲" : " ▼") : ""));
          button.addEventListener("click", () => set({ sort: name, up: isSorted && !choice.up ? "1" : "" }));
          const isNumber = name[0] === "=" || ["time", "created"].includes(name);
          const sorted = isSorted ? (choice.up ? "ascending" : "descending") : "none";
          return make("th", { scope: "col", class: isNumber && "num", "aria-sort": sorted }, button);
        });
        $("#table thead").replaceChildren(make("tr", {}, make("th", { scope: "col" }, box), ...made));
      }
      const box = $("#table thead input");
      box.checked = found.length > 0 && found.every((row) => ticked.has(row.run));
    }

    function draw() {
      const found = matching();
      const names = columns(found);
      const focused = document.activeElement;
      drawHead(names, found);
      const lines = found.slice(0, shown).map((row) => line(row, names));
      if (lines.length !== body.rows.length || lines.some((one, index) => one !== body.rows[index])) body.replaceChildren(...lines);
      if (body.contains(focused)) focused.focus();
      $("#count").textContent = found.length === rows.length ? `${rows.length} runs` : `${found.length} of ${rows.length} runs`;
      const empty = $(".empty");
      empty.hidden = found.length > 0;
      empty.textContent = rows.length ? "No run fits these filters." : "There are no runs yet: redco-flow run PIPELINE starts one.";
      $("#reset").hidden = found.length === rows.length && Object.keys(choice).every((name) => name === "view" || choice[name] === NO_CHOICE[name]);
      const compare = $("#compare");
      compare.disabled = ticked.size < 2;
      compare.textContent = ticked.size ? `Compare ${ticked.size}` : "Compare";
      for (const one of all("[data-view]")) {
        if (one.matches("button")) one.setAttribute("aria-pressed", one.dataset.view === choice.view);
        else one.hidden = one.dataset.view !== choice.view;
      }
    }

    function fill(name, values) {
      const select = form.elements[name];
      const wanted = ["", ...new Set([...values, choice[name]].filter(Boolean))];
      if (JSON.stringify(wanted) !== select.dataset.known) {
        select.dataset.known = JSON.stringify(wanted);
        select.replaceChildren(...wanted.map((value) => make("option", { value }, value || "all")));
      }
      select.value = choice[name];
    }

    function fillChoices() {
      const sorted = (values) => [...new Set(values)].sort();
      const metrics = sorted(rows.flatMap((row) => Object.keys(row.metrics)));
      fill("pipeline", sorted(rows.map((row) => row.pipeline)));
      fill("tag", sorted(rows.flatMap((row) => [...row.tags, ...row.labels])));
      fill("state", sorted(rows.map((row) => row.state)));
      fill("metric", metrics);
      for (const name of ["q", "op", "value"]) if (document.activeElement !== form.elements[name]) form.elements[name].value = choice[name];
      const chosen = columns(rows);
      const boxes = metrics.map((name) => {
        const box = make("input", { type: "checkbox", value: name });
        box.checked = chosen.includes(name);
        return make("label", {}, box, ` ${name}`);
      });
      const list = $(".columns div");
      if (list.dataset.known !== JSON.stringify(metrics)) list.replaceChildren(...boxes);
      list.dataset.known = JSON.stringify(metrics);
    }

    function drawOthers(found) {
      const counts = { runs: found.runs, sweeps: found.sweeps, schedules: found.schedules };
      for (const [name, listed] of Object.entries(counts)) $(`button[data-view=${name}] span`).textContent = listed.length;
      $("#sweeps tbody").replaceChildren(...found.sweeps.map((one) => make("tr", {},
        make("th", { scope: "row" }, make("a", { class: "id", href: `/sweep/${encodeURIComponent(one.sweep)}` }, one.sweep)),
        make("td", {}, badge(one.state), one.message ? make("small", {}, one.message) : ""),
        make("td", { class: "num" }, `${one.completed} of ${one.points}`),
        make("td", { class: "num" }, moment(one.created_at)))));
      $("#schedules tbody").replaceChildren(...found.schedules.map((one) => make("tr", {},
        make("th", { scope: "row" }, one.schedule),
        make("td", {}, one.when),
        make("td", {}, one.damage || one.pipeline),
        make("td", { class: "num" }, moment(one.last)),
        make("td", {}, one.state ? badge(one.state) : "", one.run ? make("a", { href: `/run/${encodeURIComponent(one.run)}/` }, ` ${one.result}`) : ` ${one.result}`))));
    }

    function show(found) {
      rows = found.runs.map((row) => {
        const json = JSON.stringify(row);
        const text = [row.run, row.sweep, row.profile, row.user, row.message, row.damage, row.note, ...row.overrides, ...row.tags, ...row.labels].join("\n").toLowerCase();
        return { ...row, json, text };
      });
      const present = new Set(rows.map((row) => row.run));
      for (const run of [...ticked, ...drawn.keys()]) if (!present.has(run)) ticked.delete(run), drawn.delete(run);
      fillChoices();
      draw();
      drawOthers(found);
      document.documentElement.classList.add("has-rows");
    }

    async function load() {
      const response = await fetch("/api/runs", { cache: "no-store" });
      if (response.ok) show(await response.json());
    }

    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      const { name, value } = event.target;
      if (name) set({ [name]: value });
      else set({ columns: ["", ...all(".columns input:checked").map((box) => box.value)].join("|") });
    });
    $("#reset").addEventListener("click", () => {
      set({ ...NO_CHOICE, view: choice.view });
      fillChoices();
    });
    $("#compare").addEventListener("click", () => {
      location.href = `/compare?runs=${[...ticked].map(encodeURIComponent).join(",")}`;
    });
    for (const button of all("button[data-view]")) button.addEventListener("click", () => set({ view: button.dataset.view }));
    $(".list").addEventListener("scroll", (event) => {
      const { scrollTop, clientHeight, scrollHeight } = event.target;
      if (scrollTop + 2 * clientHeight > scrollHeight && body.rows.length === shown) {
        shown += 2 * NUM_AT_ONCE;
        draw();
      }
    });
    return poll(() => "/api/runs", 3, show);
  }

  const live = $("#live");
  const filters = $(".filters");
  if (live) followRun(live);
  if (filters) listRuns(filters);
})();
