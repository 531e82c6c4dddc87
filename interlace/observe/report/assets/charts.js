// Draws the charts of a page from their data with uPlot, and fills their tables of numbers.
"use strict";
const Charts = (() => {
  const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3]];
  const HEIGHT = 220;
  const drawn = new Map(); // id -> {figure, data, plot, log}
  const logTitles = new Set(); // titles of the charts with a log axis, which stays when a live page replaces the figure
  const sync = uPlot.sync("steps");

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const smoothing = () => Number(document.getElementById("smoothing")?.value ?? 0);
  const showsBands = () => document.getElementById("bands")?.checked ?? true;
  const write = (value) => (value == null ? "–" : String(Number(value.toPrecision(5))));

  function tick(value) {
    const size = Math.abs(value);
    if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
    if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
    return size >= 1e-3 || value === 0 ? String(Number(value.toPrecision(6))) : Number(value.toPrecision(3)).toExponential();
  }

  // Exponential moving average without the bias of its start.
  function smooth(values, weight) {
    let mean = 0, total = 0;
    return values.map((value) => {
      if (value == null) return null;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return mean / total;
    });
  }

  const positive = (values, log) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
  const isPresent = (value) => value != null;
  // Without a cursor the legend has the last values.
  const raw = (values) => ({ value: (u, v, at, index) => write(index == null ? values.findLast(isPresent) : values[index]) });

  // Returns uPlot's series and columns of a chart of curves.
  function curveSeries(data, log) {
    const series = [], columns = [], bands = [], weight = smoothing();
    const smooths = data.kind === "lines" && weight > 0 && data.steps.length > 4;
    for (const curve of data.curves) {
      const isSmooth = smooths && !curve.is_exact;
      if (curve.low && data.kind === "lines" && showsBands()) {
        const edge = { stroke: "transparent", width: 0, points: { show: false }, class: "band", label: "band" };
        series.push({ ...edge }, { ...edge });
        columns.push(positive(curve.high, log), positive(curve.low, log));
        bands.push({ series: [series.length - 1, series.length], fill: curve.colour + "26" });
      }
      const few = curve.values.filter(isPresent).length <= 60;
      const line = { label: curve.label, stroke: curve.colour, dash: DASHES[curve.dash % 4], width: 1.8, spanGaps: true };
      if (data.kind === "points") {
        // A line between two evaluations alone would suggest a curve that nobody measured.
        const between = data.steps.length > 2 ? { stroke: curve.colour + "80", width: 1, marker: curve.colour } : { paths: () => null };
        series.push({ ...line, ...between, points: { show: true, size: 8, stroke: curve.colour, fill: curve.colour }, ...raw(curve.values) });
        columns.push(positive(curve.values, log));
      } else if (isSmooth) {
        series.push({ ...line, stroke: curve.colour + "59", width: 1, points: { show: false }, marker: curve.colour, ...raw(curve.values) });
        series.push({ ...line, width: 2.2, points: { show: false }, class: "band" });
        columns.push(positive(curve.values, log), positive(smooth(curve.values, weight), log));
      } else {
        series.push({ ...line, points: { show: few, size: 4 }, ...raw(curve.values) });
        columns.push(positive(curve.values, log));
      }
    }
    return { series, columns, bands };
  }

  // Stacked bars: the highest sum is drawn first, lower ones over it.
  function stackSeries(data) {
    const sums = data.steps.map(() => 0);
    const layers = data.curves.map((curve) => {
      curve.values.forEach((value, at) => (sums[at] += value ?? 0));
      return { curve, sums: [...sums] };
    });
    const paths = uPlot.paths.bars({ size: [0.85, 60] });
    const style = { width: 0, points: { show: false }, paths };
    layers.reverse();
    return {
      series: layers.map(({ curve }) => ({ ...style, label: curve.label, stroke: curve.colour, fill: curve.colour, ...raw(curve.values) })),
      columns: layers.map((layer) => layer.sums),
      bands: [],
    };
  }

  function outlineSeries(data) {
    const paths = uPlot.paths.stepped({ align: 1 });
    return {
      series: data.curves.map((curve) => ({
        label: curve.label, stroke: curve.colour, fill: curve.colour + "26", width: 1.8, paths, points: { show: false },
        value: (u, v) => (v == null ? "–" : `${(100 * v).toFixed(1)} %`),
      })),
      columns: data.curves.map((curve) => curve.values),
      bands: [],
    };
  }

  function drawErrorBars(u, data) {
    const ctx = u.ctx, half = 4 * devicePixelRatio;
    ctx.save();
    ctx.lineWidth = 1.5 * devicePixelRatio;
    for (const curve of data.curves) {
      if (!curve.low) continue;
      ctx.strokeStyle = curve.colour;
      data.steps.forEach((step, at) => {
        if (curve.low[at] == null) return;
        const x = u.valToPos(step, "x", true);
        const [low, high] = [u.valToPos(curve.low[at], "y", true), u.valToPos(curve.high[at], "y", true)];
        ctx.beginPath();
        ctx.moveTo(x, low); ctx.lineTo(x, high);
        ctx.moveTo(x - half, low); ctx.lineTo(x + half, low);
        ctx.moveTo(x - half, high); ctx.lineTo(x + half, high);
        ctx.stroke();
      });
    }
    ctx.restore();
  }

  function yRange(data) {
    const ends = data.curves.flatMap((curve) => [...curve.values, ...(curve.low ?? []), ...(curve.high ?? [])]).filter((v) => v != null);
    const low = Math.min(...ends), high = Math.max(...ends), room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  function options(data, log, parts, width) {
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const whole = data.kind === "lines" || data.kind === "points" || data.kind === "stack";
    const xAxis = { ...axis, label: data.x_label, labelSize: 18, labelFont: "11px system-ui, sans-serif", size: 30, incrs: whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] : undefined, values: (u, ticks) => ticks.map(tick) };
    const y = { distr: log ? 3 : 1 };
    if (data.kind === "points") y.range = () => yRange(data);
    if (data.kind === "stack" || data.kind === "outline") y.range = (u, low, high) => [0, (high || 1) * 1.05];
    const x = { time: false };
    const [first, last] = [data.steps[0], data.steps[data.steps.length - 1]];
    const pad = data.kind === "points" || data.kind === "stack" || first === last ? Math.max((last - first) * 0.06, 0.6) : 0;
    if (pad) x.range = (u, low, high) => (low === first && high === last ? [low - pad, high + pad] : [low, high]);
    const isSynced = data.kind === "lines" || data.kind === "points";
    return {
      width, height: HEIGHT, scales: { x, y }, bands: parts.bands,
      series: [{ label: data.x_label, value: (u, v) => (isPresent(v) ? tick(v) : data.kind === "outline" ? "–" : tick(data.steps.at(-1))) }, ...parts.series],
      axes: [xAxis, { ...axis, size: 52, values: (u, ticks) => ticks.map((v) => (v == null ? "" : tick(v))) }],
      cursor: { points: { size: 6 }, drag: { x: true, y: false }, ...(isSynced ? { sync: { key: sync.key, setSeries: false } } : {}) },
      // The marker has the colour of the smoothed line, not of the faint line below it.
      legend: {
        live: true,
        markers: {
          stroke: (u, at) => u.series[at].marker ?? u.series[at].stroke(u, at),
          dash: (u, at) => (u.series[at].dash?.length ? "dashed" : "solid"),
        },
      },
      hooks: data.kind === "points" ? { draw: [(u) => drawErrorBars(u, data)] } : {},
    };
  }

  function draw(entry) {
    const { figure, data, log } = entry;
    const target = figure.querySelector(".plot"), logButton = figure.querySelector("[data-log]");
    if (logButton) logButton.hidden = !data.curves.some((curve) => curve.values.some((value) => value > 0));
    const parts = data.kind === "stack" ? stackSeries(data) : data.kind === "outline" ? outlineSeries(data) : curveSeries(data, log);
    const scale = entry.plot?.scales.x, all = entry.plot?.data[0];
    const isZoomed = scale && all.length > 1 && (scale.min > all[0] || scale.max < all[all.length - 1]);
    const zoom = isZoomed ? { min: scale.min, max: scale.max } : null;
    entry.plot?.destroy();
    target.textContent = "";
    entry.plot = new uPlot(options(data, log, parts, Math.max(target.clientWidth, 200)), [data.steps, ...parts.columns], target);
    target.querySelector(".u-legend").setAttribute("aria-label", `Values of ${data.title} at the cursor`);
    if (zoom) entry.plot.setScale("x", zoom);
    const table = figure.querySelector(".numbers");
    if (table?.open) fillNumbers(table, data);
  }

  function fillNumbers(details, data) {
    const names = data.curves.flatMap((curve) => (curve.low ? [curve.label, `${curve.label}, low`, `${curve.label}, high`] : [curve.label]));
    const columns = data.curves.flatMap((curve) => (curve.low ? [curve.values, curve.low, curve.high] : [curve.values]));
    const table = document.createElement("table");
    const add = (parent, tag, text, scope) => {
      const cell = parent.appendChild(document.createElement(tag));
      if (text !== undefined) cell.textContent = text;
      if (scope) cell.scope = scope;
      return cell;
    };
    add(table, "caption", `${data.title}: ${data.note}`);
    const head = add(add(table, "thead"), "tr");
    for (const name of [data.x_label, ...names]) add(head, "th", name, "col");
    const body = add(table, "tbody");
    data.steps.forEach((step, at) => {
      const row = add(body, "tr");
      add(row, "th", tick(step), "row");
      for (const column of columns) add(row, "td", column[at] == null ? "–" : String(column[at]));
    });
    details.querySelector(".scroll").replaceChildren(table);
  }

  function onKey(event, entry) {
    const u = entry.plot, steps = entry.data.steps, last = steps.length - 1;
    const { min, max } = u.scales.x, index = u.cursor.idx ?? 0;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key in moves) {
      const next = Math.min(last, Math.max(0, u.cursor.idx == null ? 0 : index + moves[event.key]));
      u.setCursor({ left: u.valToPos(steps[next], "x"), top: u.over.clientHeight / 2 });
      const text = entry.data.curves.map((curve) => `${curve.label} ${write(curve.values[next])}`).join(", ");
      entry.spoken.textContent = `${entry.data.x_label} ${tick(steps[next])}: ${text}`;
    } else if (event.key === "+" || event.key === "-") {
      const middle = steps[index], half = ((max - min) / 2) * (event.key === "+" ? 0.5 : 2);
      u.setScale("x", { min: Math.max(steps[0], middle - half), max: Math.min(steps[last], middle + half) });
    } else if (event.key === "0") {
      reset(entry);
    } else return;
    event.preventDefault();
  }

  function reset(entry) {
    const steps = entry.data.steps;
    entry.plot.setScale("x", { min: steps[0], max: steps[steps.length - 1] });
  }

  function prepare(figure, data) {
    const entry = { figure, data, log: logTitles.has(data.title), plot: null, spoken: document.createElement("output") };
    entry.spoken.className = "hidden-text";
    figure.append(entry.spoken);
    figure.querySelector(".plot").addEventListener("keydown", (event) => onKey(event, entry));
    figure.querySelector("[data-reset]").addEventListener("click", () => reset(entry));
    const logButton = figure.querySelector("[data-log]");
    logButton?.setAttribute("aria-pressed", String(entry.log));
    logButton?.addEventListener("click", () => {
      entry.log = !entry.log;
      logTitles[entry.log ? "add" : "delete"](entry.data.title);
      logButton.setAttribute("aria-pressed", String(entry.log));
      draw(entry);
    });
    const numbers = figure.querySelector(".numbers");
    numbers.addEventListener("toggle", () => numbers.open && fillNumbers(numbers, entry.data));
    return entry;
  }

  // Draws all charts of the page that have data; charts that are drawn already get their new data.
  function show(charts) {
    for (const figure of document.querySelectorAll("[data-chart]")) {
      const id = figure.dataset.chart, data = charts[id];
      if (!data || !data.steps.length) continue;
      let entry = drawn.get(id);
      if (entry?.figure !== figure) {
        entry?.plot?.destroy();
        entry = prepare(figure, data);
        drawn.set(id, entry);
      } else if (JSON.stringify(entry.data) === JSON.stringify(data)) continue;
      entry.data = data;
      draw(entry);
    }
    connectToolbar();
  }

  const redraw = () => drawn.forEach((entry) => entry.figure.isConnected && entry.data.kind === "lines" && draw(entry));

  function connectToolbar() {
    const slider = document.getElementById("smoothing");
    if (!slider || slider.dataset.ready) return;
    slider.dataset.ready = "yes";
    slider.addEventListener("input", () => {
      document.getElementById("smoothing-value").value = Number(slider.value).toFixed(2);
      redraw();
    });
    document.getElementById("bands").addEventListener("change", redraw);
  }

  function resize() {
    drawn.forEach((entry) => {
      const width = entry.figure.querySelector(".plot").clientWidth;
      if (entry.figure.isConnected && width && width !== entry.plot.width) entry.plot.setSize({ width, height: HEIGHT });
    });
  }

  addEventListener("resize", resize);
  // The colours of the axes and the width of the page differ between a dark page, a light one and paper.
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", () => drawn.forEach(draw));
  return { show };
})();

{
  const stored = document.getElementById("chart-data");
  if (stored) Charts.show(JSON.parse(stored.textContent));
}
