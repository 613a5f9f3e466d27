"use strict";
// The pages of `redco-flow ui`: the table of runs, a run's live page, notes and labels. Asks its
// own server alone, and asks again only for what has changed. Texts become nodes, never HTML,
// except for tables that the server has rendered and escaped.
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  function make(tag, attributes, ...content) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
    }
    made.append(...content);
    return made;
  }

  const badge = ({ state, mark }) =>
    make("span", { class: `state ${state}` }, make("span", { "aria-hidden": "true" }, mark), ` ${state}`);
  const parse = (text) => new DOMParser().parseFromString(text, "text/html");
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
        if (goesOn) setTimeout(ask, Math.max(1000 * seconds, 10 * (performance.now() - began)));
      }
    }
    return ask();
  }

  // Notes and labels.
  const dialog = $("#notes-dialog");
  const fields = $("form", dialog).elements;
  let edited = null;

  const isChanged = () => fields.note.value !== edited.note || fields.labels.value !== edited.labels;
  const mayClose = () => !isChanged() || confirm("Discard the changes?");

  function edit(run, { note, labels, edited_at }, onSaved) {
    edited = { run, edited_at, note, labels: labels.join(", "), onSaved };
    $("h2 span", dialog).textContent = run;
    $(".wrong", dialog).textContent = "";
    fields.note.value = edited.note;
    fields.labels.value = edited.labels;
    dialog.showModal();
  }

  async function save(event) {
    event.preventDefault();
    const body = { run: edited.run, edited_at: edited.edited_at, note: fields.note.value, labels: fields.labels.value };
    const headers = { "Content-Type": "application/json" };
    try {
      const response = await fetch("/api/notes", { method: "POST", headers, body: JSON.stringify(body) });
      const found = await response.json();
      if (found.present) {
        const { labels, note, edited_at } = found.present;
        edited.edited_at = edited_at;
        throw new Error(`${found.error} Saved are the labels “${labels.join(", ")}” and the note “${note}”. Save again to replace them.`);
      }
      if (!response.ok) throw new Error(found.error);
    } catch (error) {
      $(".wrong", dialog).textContent = error.message;
      return;
    }
    dialog.close();
    edited.onSaved();
  }
  $("form", dialog).addEventListener("submit", save);
  $(".cancel", dialog).addEventListener("click", () => mayClose() && dialog.close());
  dialog.addEventListener("cancel", (event) => mayClose() || event.preventDefault());
  window.addEventListener("beforeunload", (event) => dialog.open && isChanged() && event.preventDefault());

  const title = (figure) => $("figcaption", figure).textContent;

  // The charts by title, and by number among those of one title.
  function charts() {
    const found = new Map();
    for (const figure of all("figure")) {
      let key = title(figure);
      while (found.has(key)) key += "+";
      found.set(key, figure);
    }
    return found;
  }

  // Make a node like a fresh one but keep what is alike, so that focus, inputs and charts stay.
  function morph(node, fresh) {
    if (node.nodeName === "FIGURE" && fresh.nodeName === "FIGURE" && title(node) === title(fresh)) return node;
    if (node.isEqualNode(fresh)) return node;
    if (node.nodeName !== fresh.nodeName || !node.firstChild) {
      node.replaceWith(fresh);
      return fresh;
    }
    for (const { name, value } of fresh.attributes) node.setAttribute(name, value);
    for (const { name } of [...node.attributes]) if (name !== "open" && !fresh.hasAttribute(name)) node.removeAttribute(name);
    const [old, next] = [[...node.childNodes], [...fresh.childNodes]];
    const key = (one) => `${one.nodeName} ${one.id || ""}`;
    if (old.map(key).join() === next.map(key).join()) old.forEach((one, index) => morph(one, next[index]));
    else {
      const known = new Map(old.filter((one) => one.id).map((one) => [key(one), one]));
      node.replaceChildren(...next.map((one) => (one.id && known.has(key(one)) ? morph(known.get(key(one)), one) : one)));
    }
    return node;
  }

  // A run's page.
  function followRun() {
    const { run, page } = $("#live").dataset;
    const known = { page, charts: "" };

    async function refresh() {
      const response = await fetch(location.pathname, { cache: "no-store" });
      if (!response.ok) return;
      const fresh = parse(await response.text());
      known.page = $("#live", fresh).dataset.page;
      document.title = fresh.title;
      const kept = charts();
      for (const part of ["header", "nav", "main"]) morph($(part), $(part, fresh));
      // A chart stays itself, with the reader's choices, where what is around it is new.
      for (const [key, figure] of charts()) {
        const old = kept.get(key);
        if (old && !old.isConnected) figure.replaceWith(old);
      }
      await redcoCharts.scan();
      for (const search of all("input.search")) search.dispatchEvent(new Event("input"));
    }

    function show(found) {
      $(".title .state").replaceWith(badge(found));
      $("#live").replaceChildren(...found.lines.map((line) => make("div", {}, line)));
      const took = all(".facts dt").find((one) => one.textContent === "took");
      if (took && found.took) took.nextElementSibling.textContent = found.took;
      for (const [index, facts] of (found.facts || []).entries()) {
        const list = all("dl.numbers")[index];
        if (list) list.replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
      }
    }

    $("header").addEventListener("click", (event) => {
      if (event.target.matches("button.edit")) edit(run, JSON.parse($(".notes").dataset.notes), refresh);
    });
    return poll(() => `live?charts=${known.charts}`, 2, async (found) => {
      const titles = () => JSON.stringify(all("figcaption").map((one) => one.textContent));
      const isOther = () => found.titles && titles() !== JSON.stringify(found.titles);
      if (found.page !== known.page || isOther()) await refresh();
      show(found);
      if (found.plots && !isOther()) redcoCharts.update(found.plots);
      known.charts = found.charts;
    });
  }

  // The table of runs: which of them it lists, in which order.
  const NUM_COLUMNS = matchMedia("(max-width: 640px)").matches ? 1 : 4;
  const NO_CHOICE = { view: "runs", q: "", pipeline: "", tag: "", state: "", metric: "", op: "≥", value: "", sort: "created", up: "", columns: "" };
  const VALUES = {
    run: (row) => row.run,
    state: (row) => row.state,
    time: (row) => row.seconds,
    created: (row) => row.sequence,
    note: (row) => row.note || null,
  };
  const valueOf = (row, key) => (Object.hasOwn(VALUES, key) ? VALUES[key](row) : row.metrics.get(key.slice(1))) ?? null;

  function fits(row, choice, words) {
    const value = row.metrics.get(choice.metric) ?? null;
    const limit = Number(choice.value);
    return (
      words.every((word) => row.text.includes(word)) &&
      (!choice.pipeline || row.pipeline === choice.pipeline) &&
      (!choice.tag || row.tags.includes(choice.tag) || row.labels.includes(choice.tag)) &&
      (!choice.state || row.state === choice.state) &&
      (!choice.metric || value !== null) &&
      (!choice.metric || choice.value === "" || (choice.op === "≤" ? value <= limit : value >= limit))
    );
  }

  function matching(rows, choice) {
    const words = choice.q.toLowerCase().split(/\s+/).filter(Boolean);
    const sign = choice.up ? 1 : -1;
    const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b));
    return rows
      .filter((row) => fits(row, choice, words))
      .map((row) => [valueOf(row, choice.sort), row])
      .sort(([a, one], [b, other]) =>
        a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b) || other.sequence - one.sequence)
      .map(([, row]) => row);
  }

  // The chosen metrics, or those that most of the runs have.
  function columns(rows, choice) {
    if (choice.columns) return JSON.parse(choice.columns);
    const counts = new Map();
    for (const row of rows) for (const name of row.metrics.keys()) counts.set(name, (counts.get(name) || 0) + 1);
    const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
    return [...new Set([choice.metric, ...names].filter(Boolean))].slice(0, NUM_COLUMNS);
  }

  const [NUM_AT_FIRST, NUM_AT_ONCE] = [30, 150];

  function listRuns(form) {
    let rows = [];
    let shown = NUM_AT_FIRST;
    let headed = "";
    const choice = { ...NO_CHOICE, ...Object.fromEntries(new URLSearchParams(location.hash.slice(1))) };
    const ticked = new Set();
    const drawn = new Map();
    const body = $("#table tbody");

    function set(changes) {
      Object.assign(choice, changes);
      const kept = Object.entries(choice).filter(([name, value]) => value !== NO_CHOICE[name]);
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
      shown = NUM_AT_ONCE;
      draw();
    }

    function button(attributes, text, onClick) {
      const made = make("button", { type: "button", ...attributes }, text);
      made.addEventListener("click", onClick);
      return made;
    }

    function box(label, isChecked, onChange) {
      const made = make("input", { type: "checkbox", "aria-label": label });
      made.checked = isChecked;
      made.addEventListener("change", () => {
        onChange(made.checked ? "add" : "delete");
        draw();
      });
      return made;
    }

    const chip = (text, kind) =>
      button({ class: `chip ${kind}`, title: `show the runs with ${text}` }, text, () => set({ tag: text }));

    function cells(row, names) {
      const settings = row.overrides.join("  ");
      const details = make("small", { class: "cut", title: settings }, settings);
      if (row.sweep) details.append(settings ? " · " : "", make("a", { href: `/sweep/${encodeURIComponent(row.sweep)}`, title: row.sweep }, `sweep ${row.sweep.split("-").pop()}`));
      const progress = row.progress || (row.state === "completed" ? "" : row.message);
      const remarks = [row.damage, row.is_deleted ? "artifacts deleted" : "", progress].filter(Boolean).join("; ");
      return [
        make("td", {}, box(`compare ${row.run}`, ticked.has(row.run), (change) => ticked[change](row.run))),
        make("th", { scope: "row" }, make("a", { class: "id", title: row.run, href: `/run/${encodeURIComponent(row.run)}/` }, row.run), details),
        make("td", {}, badge(row), ...(remarks ? [make("small", { class: "cut", title: remarks }, remarks)] : [])),
        ...names.map((name) => make("td", { class: "num" }, row.scores.get(name) ?? "–")),
        make("td", { class: "num" }, row.took),
        make("td", { class: "num" }, row.created),
        make("td", { class: "remark" },
          button({ class: "edit", "aria-label": `note and labels of ${row.run}`, title: "note and labels" }, "✎", () => edit(row.run, row, load)),
          ...row.labels.map((text) => chip(text, "label")), ...row.tags.map((text) => chip(text, "")),
          ...(row.note ? [make("div", { class: "text", title: row.note }, row.note)] : [])),
      ];
    }

    function line(row, names) {
      const key = JSON.stringify([row.json, names, ticked.has(row.run)]);
      const known = drawn.get(row.run);
      if (known?.key === key) return known.made;
      const made = known ? known.made : make("tr", { "data-run": row.run });
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
        const everything = box("compare all that are listed", false, (change) => {
          for (const row of matching(rows, choice)) ticked[change](row.run);
        });
        const made = heads.map(([name, text]) => {
          const isSorted = choice.sort === name;
          const arrow = isSorted ? (choice.up ? " ▲" : " ▼") : "";
          const sort = button({ title: text }, text, () => set({ sort: name, up: isSorted && !choice.up ? "1" : "" }));
          const isNumber = name[0] === "=" || ["time", "created"].includes(name);
          const sorted = isSorted ? (choice.up ? "ascending" : "descending") : "none";
          return make("th", { scope: "col", class: isNumber && "num", "aria-sort": sorted }, sort, arrow);
        });
        $("#table thead").replaceChildren(make("tr", {}, make("th", { scope: "col" }, everything), ...made));
      }
      $("#table thead input").checked = found.length > 0 && found.every((row) => ticked.has(row.run));
    }

    // Draw, and focus what has taken the place of the focused element.
    function draw() {
      const focused = document.activeElement;
      const row = focused.closest("#table tr");
      const index = row ? all("a, button, input", row).indexOf(focused) : -1;
      const run = row?.dataset.run;
      drawTable();
      const after = run ? drawn.get(run)?.made : $("#table thead tr");
      if (row && document.activeElement !== focused && after?.isConnected) all("a, button, input", after)[index]?.focus();
    }

    function drawTable() {
      const found = matching(rows, choice);
      const names = columns(found, choice);
      drawHead(names, found);
      const lines = found.slice(0, shown).map((row) => line(row, names));
      if (lines.length !== body.rows.length || lines.some((one, index) => one !== body.rows[index])) body.replaceChildren(...lines);
      $("#count").textContent = found.length === rows.length ? `${rows.length} runs` : `${found.length} of ${rows.length} runs`;
      const empty = $(".empty");
      empty.hidden = found.length > 0;
      empty.textContent = rows.length ? "No run fits these filters." : "There are no runs yet: redco-flow run PIPELINE starts one.";
      $("#reset").hidden = Object.keys(choice).every((name) => name === "view" || choice[name] === NO_CHOICE[name]);
      const numHidden = ticked.size - found.filter((row) => ticked.has(row.run)).length;
      $("#compare").disabled = ticked.size < 2;
      $("#compare").textContent = ["Compare", ticked.size || "", numHidden ? `(${numHidden} not listed)` : ""].join(" ").trim();
      $("#untick").hidden = ticked.size === 0;
      for (const one of all("[data-view]")) {
        if (one.matches("button")) one.setAttribute("aria-pressed", one.dataset.view === choice.view);
        else one.hidden = one.dataset.view !== choice.view;
      }
    }

    function fill(name, values) {
      const select = form.elements[name];
      const options = ["", ...new Set([...values, choice[name]].filter(Boolean))];
      if (JSON.stringify(options) !== select.dataset.known) {
        select.dataset.known = JSON.stringify(options);
        select.replaceChildren(...options.map((value) => make("option", { value }, value || "all")));
      }
      select.value = choice[name];
    }

    function fillChoices() {
      const sorted = (values) => [...new Set(values)].sort();
      const metrics = sorted(rows.flatMap((row) => [...row.metrics.keys()]));
      fill("pipeline", sorted(rows.map((row) => row.pipeline)));
      fill("tag", sorted(rows.flatMap((row) => [...row.tags, ...row.labels])));
      fill("state", sorted(rows.map((row) => row.state)));
      fill("metric", metrics);
      for (const name of ["q", "op", "value"]) if (document.activeElement !== form.elements[name]) form.elements[name].value = choice[name];
      const list = $(".columns div");
      if (list.dataset.known === JSON.stringify(metrics)) return;
      const chosen = columns(rows, choice);
      list.dataset.known = JSON.stringify(metrics);
      list.replaceChildren(...metrics.map((name) => {
        const made = make("input", { type: "checkbox", value: name });
        made.checked = chosen.includes(name);
        return make("label", { title: name }, made, ` ${name}`);
      }));
    }

    function show(found) {
      rows = found.runs.map((row) => {
        const text = [row.run, row.sweep, row.profile, row.user, row.message, row.damage, row.note, ...row.overrides, ...row.tags, ...row.labels].join("\n").toLowerCase();
        const [metrics, scores] = [row.metrics, row.scores].map((one) => new Map(Object.entries(one)));
        return { ...row, metrics, scores, json: JSON.stringify(row), text };
      });
      const present = new Set(rows.map((row) => row.run));
      for (const run of [...ticked, ...drawn.keys()]) if (!present.has(run)) ticked.delete(run), drawn.delete(run);
      fillChoices();
      draw();
      const counts = { runs: rows.length, sweeps: found.num_sweeps, schedules: found.num_schedules };
      for (const [name, count] of Object.entries(counts)) $(`button[data-view=${name}] span`).textContent = count;
      for (const name of ["sweeps", "schedules"]) {
        const list = $(`#${name}`);
        if (counts[name] && list.dataset.known !== found[name]) list.replaceChildren(...parse(found[name]).body.childNodes);
        list.dataset.known = found[name];
      }
      document.documentElement.classList.add("has-rows");
      // The first screen is drawn at once, and then what is below it.
      if (shown < NUM_AT_ONCE) setTimeout(() => {
        shown = Math.max(shown, NUM_AT_ONCE);
        draw();
      }, 200);
    }

    async function load() {
      const response = await fetch("/api/runs?fresh=1", { cache: "no-store" });
      if (response.ok) show(await response.json());
    }

    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", (event) => {
      const { name, value } = event.target;
      if (name) set({ [name]: value });
      else set({ columns: JSON.stringify(all(".columns input:checked").map((one) => one.value)) });
    });
    const chooser = $(".columns");
    document.addEventListener("click", (event) => chooser.contains(event.target) || (chooser.open = false));
    chooser.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      chooser.open = false;
      $("summary", chooser).focus();
    });
    $("#reset").addEventListener("click", () => {
      set({ ...NO_CHOICE, view: choice.view });
      fillChoices();
    });
    $("#untick").addEventListener("click", () => {
      ticked.clear();
      draw();
    });
    $("#compare").addEventListener("click", () => {
      location.href = `/compare?runs=${[...ticked].map(encodeURIComponent).join(",")}`;
    });
    for (const one of all("button[data-view]")) one.addEventListener("click", () => set({ view: one.dataset.view }));
    $(".list").addEventListener("scroll", (event) => {
      const { scrollTop, clientHeight, scrollHeight } = event.target;
      if (scrollTop + 2 * clientHeight > scrollHeight && body.rows.length === shown) {
        shown += 2 * NUM_AT_ONCE;
        draw();
      }
    });
    return poll(() => "/api/runs", 3, show);
  }

  const filters = $(".filters");
  if ($("#live")) followRun();
  if (filters) listRuns(filters);
})();
