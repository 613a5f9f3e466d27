"use strict";
// Draws the page's charts: each `.plot` holds its Plotly figure as JSON. Colours are the style
// sheet's, so they follow the reader's scheme and paper; log scale and smoothing are the reader's.
(() => {
  const paper = matchMedia("print");
  const schemes = [paper, matchMedia("(prefers-color-scheme: dark)")];
  const PAPER_WIDTH = { wide: 680, half: 330 };
  const states = new Map();
  const searches = new WeakSet();

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // Exponential moving average, corrected for its start: what TensorBoard calls smoothing.
  function smoothed(values, weight) {
    let sum = 0;
    let norm = 0;
    return values.map((value) => {
      if (value === null) return null; // a gap
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  function coloured(trace) {
    const own = colour(`c${trace.meta.colour}`);
    const line = { ...trace.line, color: own };
    return { ...trace, line, marker: { ...trace.marker, color: own } };
  }

  function traces(state) {
    return state.figure.data.flatMap((trace) => {
      const drawn = coloured(trace);
      if (!trace.meta.dense || !state.smoothing) return [drawn];
      const faint = { ...drawn, opacity: 0.3, showlegend: false };
      const y = smoothed(trace.y, state.smoothing);
      return [faint, { ...drawn, name: `${trace.name} (smoothed)`, y, line: { ...drawn.line, width: 2.4 } }];
    });
  }

  function axis(own) {
    const line = { gridcolor: colour("grid"), linecolor: colour("muted"), zerolinecolor: colour("line") };
    const title = { font: { size: 12 }, standoff: 8, ...own.title };
    return { automargin: true, exponentformat: "power", showline: true, ...line, ...own, title };
  }

  function layout(state) {
    const own = state.figure.layout;
    const type = state.isLog ? "log" : "linear";
    const yaxis = own.yaxis.tickvals ? axis(own.yaxis) : axis({ ...own.yaxis, type, uirevision: type });
    const width = paper.matches ? PAPER_WIDTH[state.isWide ? "wide" : "half"] : undefined;
    return {
      ...own,
      width,
      autosize: !width,
      uirevision: "kept",
      yaxis,
      xaxis: axis(own.xaxis),
      margin: { l: 8, r: 12, t: 10, b: 8 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text") }, namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("link") },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    };
  }

  const config = {
    responsive: true,
    displaylogo: false,
    // Named one by one: the library's own choice has a button that sends a chart to its maker's cloud.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  function draw(plot) {
    const state = states.get(plot);
    return Plotly.react(plot, traces(state), layout(state), config);
  }

  function drawAll() {
    return Promise.all([...states.keys()].map(draw));
  }

  function listen(plot, state) {
    const figure = plot.closest("figure");
    const log = figure.querySelector("input.log");
    if (log) {
      log.checked = state.isLog;
      log.addEventListener("change", () => {
        state.isLog = log.checked;
        draw(plot);
      });
    }
    const smoothing = figure.querySelector("input.smoothing");
    if (smoothing) {
      smoothing.addEventListener("input", () => {
        state.smoothing = Number(smoothing.value);
        figure.querySelector("output").textContent = state.smoothing ? state.smoothing.toFixed(2) : "off";
        draw(plot);
      });
    }
  }

  function addPlots() {
    for (const plot of [...states.keys()]) if (!plot.isConnected) states.delete(plot);
    for (const source of document.querySelectorAll(".plot > script")) {
      const plot = source.parentNode;
      const figure = JSON.parse(source.textContent);
      source.remove();
      const isWide = plot.closest("figure").classList.contains("wide");
      const state = { figure, isWide, isLog: figure.layout.yaxis.type === "log", smoothing: 0 };
      states.set(plot, state);
      listen(plot, state);
    }
  }

  // Samples beyond the first ones are shown on demand, or where what is searched for stands in them.
  function addSearch(search) {
    if (searches.has(search)) return;
    searches.add(search);
    const controls = search.closest(".controls");
    const list = controls.nextElementSibling;
    const all = controls.querySelector("input.all");
    const filter = () => {
      const wanted = search.value.trim().toLowerCase();
      let found = 0;
      list.classList.toggle("whole", all.checked || wanted !== "");
      for (const sample of list.children) {
        const fits = sample.textContent.toLowerCase().includes(wanted);
        sample.classList.toggle("hidden", !fits);
        found += fits ? 1 : 0;
      }
      controls.querySelector("output").textContent = wanted ? `${found} found` : "";
    };
    search.addEventListener("input", filter);
    all.addEventListener("change", filter);
  }

  // Draw what is new in the document.
  function scan() {
    addPlots();
    for (const search of document.querySelectorAll("input.search")) addSearch(search);
    return drawAll();
  }

  // Draw all charts, in the document's order, with other data; the reader's choices stay.
  function update(figures) {
    for (const [index, plot] of [...document.querySelectorAll(".plot")].entries()) states.get(plot).figure = figures[index];
    return drawAll();
  }

  window.redcoCharts = { scan, update };
  for (const scheme of schemes) scheme.addEventListener("change", drawAll);
  document.documentElement.classList.add("has-script");
  scan().then(() => document.documentElement.classList.add("has-charts"));
})();
