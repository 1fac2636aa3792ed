// The page from its data: a section each, left out where there is nothing to show.

const root = document.getElementById("report");
const contents = el("nav", { "aria-label": "Contents" });

function section(id, title, ...children) {
  contents.append(el("a", { href: `#${id}` }, title));
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), children);
}

const note = (text) => el("p", { class: "note" }, text);
const table = (head, rows, label) => el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": label },
  el("table", {}, el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, cell)))), el("tbody", {}, rows)));
const line = (name, ...cells) => el("tr", {}, el("th", { scope: "row" }, name), cells.map((cell) => el("td", {}, cell)));

function head() {
  const figures = [];
  const main = DATA.table.filter((row) => ["Validation accuracy", "Validation reward", "Reverse KL to the teacher", "Reward"].includes(row.name)
    || /^(Loss, validation|Pairs in the right order, validation)$/.test(row.name)).slice(0, 3);
  for (const row of main)
    figures.push(el("div", { class: "figure" }, el("dt", {}, row.name),
      el("dd", {}, el("small", {}, `${number(row.before)} → `), number(row.after)),
      row.teacher !== undefined ? el("dd", { class: "under" }, `teacher ${number(row.teacher)}`) : null));
  const { steps, tokens, seconds } = DATA.figures;
  figures.push(el("div", { class: "figure" }, el("dt", {}, "Training"), el("dd", {}, plural(steps, "step")),
    el("dd", { class: "under" }, [duration(seconds), tokens ? `${short(tokens)} tokens generated` : null].filter(Boolean).join(", "))));
  return el("header", { class: "top" },
    el("p", { class: "eyebrow" }, `${DATA.mode_title[0].toUpperCase()}${DATA.mode_title.slice(1)} · ${DATA.run}`), el("h1", {}, DATA.title),
    el("p", { class: `state ${DATA.state.kind}` }, DATA.state.text),
    DATA.problems.map((sentence) => el("p", { class: "state open" }, sentence)), el("dl", { class: "figures" }, figures));
}

function curves() {
  if (!DATA.charts.length) return DATA.state.kind === "stopped" ? null : section("curves", "Curves", note("No step has been recorded yet."));
  const names = Object.keys(DATA.metrics), place = el("div", { class: "charts" });
  const pick = el("select", { onchange: () => place.replaceChildren(...(pick.value ? [lineChart({ title: pick.value, what: "",
    lines: [{ name: pick.value, points: DATA.metrics[pick.value], trend: [] }] })] : [])) },
    el("option", { value: "" }, "choose one"), names.map((name) => el("option", { value: name }, name)));
  return section("curves", "Curves", el("div", { class: "charts" }, DATA.charts.map((chart) => lineChart(chart))),
    el("p", { class: "controls" }, el("label", {}, `Any of ${names.length} metrics `, pick)), place);
}

function beforeAfter() {
  if (!DATA.table.length) return null;
  const teacher = DATA.table.some((row) => row.teacher !== undefined);
  const rows = DATA.table.map((row) => {
    const gain = row.after - row.before, good = row.better && gain !== 0 && row.noise === false ? (gain > 0) === (row.better === "up") : null;
    return line(row.name, number(row.before), number(row.after),
      el("span", { class: good === null ? "" : good ? "good" : "bad" }, `${gain > 0 ? "+" : ""}${number(gain)}${good === null ? row.noise && row.better ? " within noise" : "" : good ? " better" : " worse"}`),
      ...(teacher ? [row.teacher === undefined ? "" : number(row.teacher)] : []));
  });
  return section("table", "Before and after",
    table(["", "before", "after", "change", ...(teacher ? ["teacher"] : [])], rows, "Before and after"),
    note("Of held-out rows the first and the last validation; of everything else means over the first and the last tenth of the steps. Better and worse are more than two standard errors apart, over prompts in validation and by the noise between steps elsewhere."));
}

function time() {
  const { startup, end, phases, kinds, total, steps } = DATA.time;
  if (!phases.length && !startup) return null;
  const parts = phases.map((name, i) => [name, total[i], `p${kinds[i]}`]);
  if (startup) parts.unshift(["start-up", startup, "startup"]);
  if (end >= 0.05) parts.push(["end", end, "startup"]);
  const sum = parts.reduce((all, [, seconds]) => all + seconds, 0);
  const bar = el("div", { class: "bar", "aria-hidden": "true" },
    parts.map(([, seconds, kind]) => el("i", { class: kind, style: { "flex-grow": seconds } })));
  const rows = parts.map(([name, seconds, kind]) => line(el("span", {}, el("i", { class: `swatch ${kind}` }), name), duration(seconds), percent(seconds / sum)));
  return section("time", "Where the time went", el("div", { class: "two" },
    el("div", { class: "card" }, el("h3", {}, `${duration(sum)} in all`), bar, table(["", "time", "share of all"], rows, "Seconds by phase")),
    steps.length ? phaseChart(DATA.time) : null),
    note("Of the whole run, as in summary.json. The chart by step has neither the start-up and the validation before the first step nor the end."));
}

function samples() {
  if (!DATA.samples.length)
    return !DATA.figures.steps || ["sft", "dpo"].includes(DATA.mode) ? null : section("samples", "Samples", note("No samples were recorded (logged_samples_per_step)."));
  const steps = [...new Set(DATA.samples.map((sample) => sample.step))], place = el("div", { class: "samples" });
  const colours = colourSwitch(measures(DATA.samples), () => { for (const card of place.children) card.paint(); });
  const show = (step) => place.replaceChildren(...DATA.samples.filter((sample) => sample.step === step).map((sample) => sampleCard(sample, colours.measure)));
  const radios = el("fieldset", { class: "steps" }, el("legend", {}, "Step"), steps.map((step, i) => el("label", {},
    el("input", { type: "radio", name: "step", value: step, checked: i ? null : "", onchange: () => show(step) }), el("span", {}, step))));
  show(steps[0]);
  const plain = DATA.samples.some((sample) => !sample.ids.length && sample.length);
  return section("samples", "Samples", radios, colours.node, place,
    plain ? note("This run did not record where its tokens end, so its samples are shown without colours.") : null);
}

function sideBySide() {
  if (!DATA.pairs.length)
    return DATA.samples.length ? section("early-late", "Early and late", note("Answers to the same prompts are recorded where a run validates (validation, eval_steps); this one has none.")) : null;
  const cards = [];
  const colours = colourSwitch(measures(DATA.pairs.flat()), () => { for (const card of cards) card.paint(); });
  const prompts = DATA.pairs.map((answers) => el("div", { class: "pair" }, promptOf(answers[0]), el("div", { class: "columns" },
    answers.map((answer) => {
      const title = answer.by.startsWith("teacher/") ? answer.by.replace(/^teacher\//, "teacher ").replace("teacher teacher", "teacher") : answer.step === 0 ? "before training" : `after step ${answer.step}`;
      cards.push(sampleCard(answer, colours.measure, title));
      return cards[cards.length - 1];
    }))));
  return section("early-late", "Early and late", note("Answers to the same held-out prompts."), colours.node, prompts);
}

function overlap() {
  const [early, late] = DATA.agreement.length > 1 ? DATA.agreement : [null, DATA.agreement[0]];
  if (!late) return null;
  const edges = DATA.edges, both = [early, late].filter(Boolean);
  const label = (i) => (i === 0 ? `below ${number(edges[0])}` : i === edges.length ? `above ${number(edges[i - 1])}`
    : edges[i - 1] === -edges[i] ? `within ±${number(edges[i])}` : `${number(edges[i - 1])} to ${number(edges[i])}`);
  const most = Math.max(...both.flatMap((part) => part.bins));
  const steps = (part) => (part.from === part.to ? `step ${part.from}` : `steps ${part.from}–${part.to}`);
  const bars = late.bins.map((_, i) => el("tr", {}, el("th", { scope: "row" }, label(i)), both.map((part, which) => el("td", { class: "hist" },
    el("i", { class: both.length > 1 && which === 0 ? "early" : "late", style: { width: `${(100 * part.bins[i]) / most}%` } }), el("span", {}, part.bins[i] ? percent(part.bins[i]) : "–")))));
  const facts = [line("tokens looked at", ...both.map((part) => number(part.tokens))),
    line("mean reverse KL, nats", ...both.map((part) => number(part.mean))),
    line("within ±0.1 nats", ...both.map((part) => percent(part.close)))];
  if (both.some((part) => part.topk !== null)) facts.push(line("sampled token in the teacher's top-k", ...both.map((part) => (part.topk === null ? "–" : percent(part.topk)))));
  const columns = ["", ...both.map(steps)];
  return section("overlap", "Student and teacher", el("div", { class: "two" },
    el("div", { class: "card" }, el("h3", {}, "Reverse KL of recorded tokens"), table(columns, bars, "Distribution of the reverse KL")),
    el("div", { class: "card" }, el("h3", {}, "Agreement"), table(columns, facts, "Agreement"),
      note("Positive: the student finds its token likelier than the teacher does. Means over recorded samples, which are a few of each step."))));
}

function preflight() {
  if (!DATA.preflight.length) return null;
  const sign = { ok: "✓ ok", warning: "! warning", failed: "✗ failed" };
  const ended = DATA.preflight_first && DATA.state.kind === "stopped" ? note("A check of a teacher failed, which ended the run before anything was learned from it.") : null;
  return section("preflight", "Teachers before the first step", ended, DATA.preflight.map(({ teacher, rows }) => [el("h3", {}, teacher),
    table(["check", "value", "verdict", "meaning"], rows.map((row) => line(row.check, row.value,
      el("span", { class: row.verdict === "ok" ? "good" : "bad" }, sign[row.verdict] || row.verdict), row.meaning)), `Checks of ${teacher}`)]));
}

function rest() {
  const warnings = DATA.warnings.length ? section("warnings", "Warnings", el("ul", { class: "warnings" }, DATA.warnings.map((text) => el("li", {}, text)))) : null;
  const facts = el("dl", { class: "facts" }, DATA.facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  return [warnings, section("run", "The run", facts, DATA.config ? el("details", {}, el("summary", {}, "Configuration, resolved"), el("pre", { tabindex: 0 }, DATA.config)) : null)];
}

const checks = DATA.preflight_first ? [preflight, () => null] : [() => null, preflight];
const sections = [checks[0](), curves(), beforeAfter(), time(), samples(), sideBySide(), overlap(), checks[1](), rest()].flat().filter(Boolean);
root.append(head(), contents, ...sections, el("footer", {}, `roll_opd ${DATA.version}, ${DATA.made}`));
