// Line charts and stacked bars as inline SVG, with a rule that follows pointer and arrow keys.

const MARGIN = { top: 12, right: 14, bottom: 24, left: 46 };  // left and right: at least
const CHARACTER = 7.4;  // px, widest digit at the labels' size in the fonts of the page
const POINTS_WITH_DOTS = 40;

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999) * power;
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(place * step);
  return found.map((value) => +value.toPrecision(12));
}

function range(values) {
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  if (low > 0 && low < high / 2) low = 0;
  const room = (high - low) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

function axes(width, height, [x0, x1], [y0, y1]) {
  const longest = (values) => Math.max(0, ...values.map((value) => 4 + CHARACTER * short(value).length));
  const rows = ticks(y0, y1, 4), left = Math.max(MARGIN.left, 8 + longest(rows));
  const columns = ticks(x0, x1, Math.max(2, Math.floor((width - left - MARGIN.right) / 90))).filter(Number.isInteger);
  const right = width - Math.max(MARGIN.right, longest(columns) / 2), high = height - MARGIN.top - MARGIN.bottom;
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (right - left);
  const y = (value) => MARGIN.top + high - ((value - y0) / (y1 - y0 || 1)) * high;
  const grid = svg("g", { class: "grid", "aria-hidden": "true" });
  for (const value of rows)
    grid.append(
      svg("line", { x1: left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  for (const value of columns)
    grid.append(svg("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, short(value)));
  return { x, y, grid, left, right };
}

const path = (points, x, y) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");

// Follow pointer, touch and arrow keys over `steps`; `show(index)` marks one, `show(null)` none.
function follow(node, steps, place, show) {
  let now = null;
  const to = (index) => { now = index; show(index); };
  const nearest = (event) => {
    const at = event.clientX - node.getBoundingClientRect().left;
    let best = 0;
    steps.forEach((step, i) => { if (Math.abs(place(step) - at) < Math.abs(place(steps[best]) - at)) best = i; });
    to(best);
  };
  node.onpointermove = node.onpointerdown = nearest;
  node.onpointerleave = node.onblur = () => to(null);
  node.onkeydown = (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") return to(null);
    if (!(event.key in moves)) return;
    event.preventDefault();
    const start = now === null ? steps.length : now;
    to(Math.max(0, Math.min(steps.length - 1, start + moves[event.key])));
  };
}

function lineChart(chart, height = 190) {
  const lines = chart.lines, first = lines[0].points, last = (line) => line.points[line.points.length - 1];
  const readout = el("output", { class: "readout" });
  const rest = () => lines.map((line) => number(last(line)[1])).join(" · ");
  const told = lines.map((line) => `${line.name}: ${number(line.points[0][1])} at step ${line.points[0][0]}, `
    + `${number(last(line)[1])} at step ${last(line)[0]}`).join("; ");
  const box = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${chart.title}. ${told}. Arrow keys read values.` });
  const steps = [...new Set(lines.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);

  drawn(box, (width) => {
    const references = chart.references || [];
    const values = [...lines.flatMap((line) => line.points.map((point) => point[1])), ...references.map((one) => one.value)];
    const { x, y, grid, left, right } = axes(width, height, [Math.min(0, steps[0]), Math.max(steps[steps.length - 1], 1)], range(values));
    const canvas = svg("svg", { width, height, "aria-hidden": "true" }, grid);
    for (const { name, value } of references) {  // its name stands at the end that the curve is farther from
      const atStart = Math.abs(first[0][1] - value) > Math.abs(last(lines[0])[1] - value);
      canvas.append(
        svg("line", { class: "reference", x1: left, x2: right, y1: y(value), y2: y(value) }),
        svg("text", { class: "label", x: atStart ? left + 4 : right, y: y(value) + (y(value) < 26 ? 14 : -5),
          "text-anchor": atStart ? "start" : "end" }, `${name} ${number(value)}`));
    }
    lines.forEach((line, i) => {
      const many = line.trend.length > 0;
      canvas.append(svg("path", { class: `line l${i} ${many ? "faint" : ""}`, d: path(line.points, x, y) }));
      if (many) canvas.append(svg("path", { class: `line l${i}`, d: path(line.trend, x, y) }));
      else if (line.points.length <= POINTS_WITH_DOTS)
        for (const [a, b] of line.points) canvas.append(svg("circle", { class: `dot l${i}`, cx: x(a), cy: y(b), r: 2.4 }));
    });
    const mark = svg("g", {});
    canvas.append(mark);
    box.replaceChildren(canvas);
    const show = (index) => {
      mark.replaceChildren();
      if (index === null) return readout.replaceChildren(rest());
      const step = steps[index], parts = [];
      mark.append(svg("line", { class: "rule", x1: x(step), x2: x(step), y1: MARGIN.top, y2: height - MARGIN.bottom }));
      lines.forEach((line, i) => {
        const point = line.points.find(([at]) => at === step);
        if (!point) return;
        parts.push(lines.length > 1 ? `${line.name} ${number(point[1])}` : number(point[1]));
        mark.append(svg("circle", { class: `dot l${i}`, cx: x(step), cy: y(point[1]), r: 4.5 }));
      });
      readout.replaceChildren(`step ${step}: ${parts.join(" · ")}`);
    };
    show(null);
    follow(box, steps, x, show);
  });
  const legend = lines.length > 1
    ? el("ul", { class: "legend" }, lines.map((line, i) => el("li", {}, el("i", { class: `swatch l${i}` }), line.name))) : null;
  return el("figure", { class: "card" },
    el("figcaption", {}, el("h3", {}, chart.title), readout), box, legend, chart.what ? el("p", { class: "what" }, chart.what) : null);
}

function phaseChart(time, height = 220) {
  const readout = el("output", { class: "readout" });
  const most = Math.max(...time.bars.map((bar) => bar.reduce((a, b) => a + b, 0)));
  const ends = [time.steps[0][0], time.steps[time.steps.length - 1][1] + 1];
  const box = el("div", { class: "plot", tabindex: 0, role: "img", "aria-label": "Seconds a step by phase. Arrow keys read values." });
  drawn(box, (width) => {
    const { x, y, grid } = axes(width, height, ends, [0, most * 1.04 || 1]);
    const canvas = svg("svg", { width, height, "aria-hidden": "true" }, grid);
    time.bars.forEach((bar, i) => {
      const [from, to] = time.steps[i], gap = x(to + 1) - x(from) > 5 ? 1.5 : 0;
      let base = 0;
      bar.forEach((seconds, phase) => {
        if (seconds > 0)
          canvas.append(svg("rect", { class: `p${time.kinds[phase]}`, x: x(from), width: Math.max(0.5, x(to + 1) - x(from) - gap),
            y: y(base + seconds), height: y(base) - y(base + seconds) }));
        base += seconds;
      });
    });
    box.replaceChildren(canvas);
    const middle = (i) => (x(time.steps[i][0]) + x(time.steps[i][1] + 1)) / 2;
    follow(box, time.steps.map((_, i) => i), middle, (index) => {
      if (index === null) return readout.replaceChildren("");
      const [from, to] = time.steps[index], bar = time.bars[index];
      const parts = bar.map((seconds, i) => [seconds, time.phases[i]]).filter(([s]) => s > 0).sort((a, b) => b[0] - a[0]).slice(0, 3);
      readout.replaceChildren(`${from === to ? `step ${from}` : `steps ${from}–${to}, mean`}: `
        + `${duration(bar.reduce((a, b) => a + b, 0))} (${parts.map(([s, name]) => `${name} ${duration(s)}`).join(", ")})`);
    });
  });
  return el("figure", { class: "card" }, el("figcaption", {}, el("h3", {}, "Seconds a step"), readout), box);
}
