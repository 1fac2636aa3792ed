// Samples as text: every token on the colour of one of its values, and all of its values on hover, tap or focus.

const NAMES = { student: "student log p", rollout: "sampler log p", reference: "reference log p", advantage: "advantage" };
const WIDEST_GRID = 72;  // characters of a line
const MARKUP = /(<\|[^|<>]*\|>|<\/?s>|<(?:start|end)_of_turn>)/;  // what chat templates write around messages
const tip = document.getElementById("tip");

// What tokens can be coloured by: a name, a sentence, and the value of token i of a sample.
function measures(samples) {
  const columns = new Set(samples.flatMap((sample) => Object.keys(sample.values)));
  const minus = (a, b) => (sample, i) => {
    const [one, other] = [sample.values[a], sample.values[b]];
    return one && other && one[i] !== null && other[i] !== null ? one[i] - other[i] : null;
  };
  const teachers = [...columns].filter((name) => name.startsWith("teacher/"));
  const found = teachers.map((name) => ({
    key: name, name: teachers.length > 1 ? `reverse KL to ${name.slice(8)}` : "reverse KL",
    low: "the teacher finds it likelier", high: "the student finds it likelier", of: minus("student", name),
  }));
  if (columns.has("advantage"))
    found.push({ key: "advantage", name: "advantage", low: "made less likely", high: "made more likely",
      of: (sample, i) => (sample.values.advantage ? sample.values.advantage[i] : null) });
  if (columns.has("student"))
    found.push({ key: "surprise", name: "surprise (its mean is the entropy)", low: "", high: "−log p: unlikely to the student",
      of: (sample, i) => (sample.values.student && sample.values.student[i] !== null ? -sample.values.student[i] : null) });
  if (columns.has("reference"))
    found.push({ key: "reference", name: "KL to the reference", low: "likelier before", high: "likelier now", of: minus("student", "reference") });
  if (columns.has("rollout") && samples.some((sample) => sample.values.student && sample.values.rollout))
    found.push({ key: "gap", name: "trainer against sampler", low: "likelier when it was sampled", high: "likelier to the trainer", of: minus("student", "rollout") });
  if (samples.some((sample) => sample.behind > 0))
    found.push({ key: "stale", name: "staleness", low: "", high: "updates since it was sampled", of: (sample) => sample.behind });
  for (const one of found) {  // what was observed has no value and no colour
    const all = one.of, observed = new Map(samples.map((sample) => [sample, new Set(sample.observed)]));
    one.of = (sample, i) => (observed.get(sample).has(i) ? null : all(sample, i));
  }
  for (const one of found) one.scale = scaleOf(samples, one.of, one.key === "advantage" ? 1e-9 : 0.1);
  return found;
}

// The size that has the full colour: 98 of 100 tokens are paler. Log-probs that differ by less than `least` are no news.
function scaleOf(samples, of, least) {
  const values = samples.flatMap((sample) => sample.ids.map((_, i) => of(sample, i))).filter((value) => value !== null);
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  return Math.max(sizes[Math.floor(sizes.length * 0.98)] || 0, least);
}

function tint(value, scale) {
  if (value === null || value === undefined) return null;
  const share = Math.sqrt(Math.min(1, Math.abs(value) / scale));
  return share < 0.08 ? null : `color-mix(in srgb, var(${value > 0 ? "--more" : "--less"}) ${Math.round(100 * share)}%, transparent)`;
}

// What stands in columns, such as a map: several short lines, which are not wrapped.
function layout(text) {
  const lines = text.split("\n");
  return lines.length > 2 && Math.max(...lines.map((one) => one.length)) <= WIDEST_GRID ? "grid" : "prose";
}

// A text with the markup of its chat template on lines of its own: beside the first line of a map it would shift that.
const marked = (text) => text.split(MARKUP).map((part, i) => (i % 2 ? el("span", { class: "markup" }, part) : part));

// The turns of a response, and the observed text between them.
function turnsOf(sample) {
  if (!sample.turns.length) return [{ from: 0, to: sample.pieces.length, acts: true, number: 0 }];
  return sample.turns.map(([from, acts, number], place) => ({
    from, to: place + 1 < sample.turns.length ? sample.turns[place + 1][0] : sample.pieces.length, acts: acts === 1, number }));
}

const meanOf = (values) => values.reduce((a, b) => a + b, 0) / values.length;

// A response. `measure()` says what colours it; the returned node has `paint()` for when that changes.
function response(sample, measure) {
  const observed = new Set(sample.observed), masked = new Set(sample.masked.filter((i) => !observed.has(i)));
  const tokens = sample.pieces.map((piece, i) => {
    const shown = piece === "" ? "·" : observed.has(i) ? piece : piece.replace(/\n/g, "↵\n");
    const known = sample.ids.length > 0;
    const left = sample.cut && sample.cut.at === i ? el("em", { class: "cut" }, ` … ${plural(sample.cut.count, "token")} left out … `) : null;
    const markup = observed.has(i) && piece.split(MARKUP)[1] === piece ? " markup" : "";
    return [left, el("span", { class: `t${markup}${masked.has(i) ? " masked" : ""}${piece === "" ? " part" : ""}`, "data-i": known ? i : null, tabindex: known ? -1 : null }, shown)];
  });
  const spans = tokens.map(([, span]) => span), turns = turnsOf(sample), isGame = observed.size > 0;
  const labels = turns.map(() => el("div", { class: "turn-label" }));
  const blocks = turns.map(({ from, to, acts }, place) => {
    const inside = tokens.slice(from, to).flat();
    if (!isGame) return inside;
    const kind = acts ? "acted" : `observed ${layout(sample.pieces.slice(from, to).join(""))}`;
    return el("div", { class: `turn ${kind}` }, labels[place], el("div", { class: "said" }, inside));
  });
  const box = el("div", { class: "response", role: "group", "aria-label": `Response of ${plural(sample.length, "token")}. Arrow keys go through them.` }, blocks);
  let current = 0;
  if (spans.length && sample.ids.length) spans[0].tabIndex = 0;
  const go = (i) => {
    spans[current].tabIndex = -1;
    current = Math.max(0, Math.min(spans.length - 1, i));
    spans[current].tabIndex = 0;
    spans[current].focus();
  };
  const at = (event) => (event.target.dataset && event.target.dataset.i !== undefined ? +event.target.dataset.i : null);
  const show = (event) => { const i = at(event); if (i !== null) { current = i; showTip(spans[i], sample, i, masked.has(i), observed.has(i)); } };
  for (const name of ["pointerover", "focusin", "click"]) box.addEventListener(name, show);
  for (const name of ["pointerleave", "focusout"]) box.addEventListener(name, hideTip);
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: spans.length - 1, ArrowDown: current + 10, ArrowUp: current - 10 };
    if (event.key === "Escape") hideTip();
    if (!(event.key in moves) || !sample.ids.length) return;
    event.preventDefault();
    go(moves[event.key]);
  });
  box.paint = () => {
    const { name, of, scale } = measure() || {};
    turns.forEach(({ from, to, acts, number: turn }, place) => {
      const values = of ? spans.slice(from, to).map((_, i) => of(sample, from + i)).filter((value) => value !== null) : [];
      labels[place].replaceChildren(!acts ? "observed" : [`turn ${turn}`,
        values.length && sample.ids.length ? `mean ${name.split(" (")[0]} ${number(meanOf(values))}` : null,
        sample.turn_rewards.length ? `reward ${number(sample.turn_rewards[turn - 1])}` : null].filter((part) => part !== null).join(" · "));
    });
    spans.forEach((span, i) => {
      const colour = of && sample.ids.length ? tint(of(sample, i), scale) : null;
      if (colour) span.style.setProperty("background-color", colour);
      else span.style.removeProperty("background-color");
    });
  };
  return box;
}

function showTip(span, sample, i, masked, observed) {
  const row = (name, value) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value));
  const chance = (logp) => (logp === null ? "–" : `${number(logp)}  (${(100 * Math.exp(logp)).toPrecision(3)} %)`);
  const rows = [row("token", `${sample.ids[i]}, ${JSON.stringify(sample.pieces[i])}`)];
  const { student, ...rest } = sample.values;
  for (const [name, column] of observed ? [] : Object.entries({ ...(student ? { student } : {}), ...rest })) {
    const label = NAMES[name] || `${name.replace("teacher/", "")} log p`;
    rows.push(row(label, name === "advantage" ? number(column[i]) : chance(column[i])));
    if (name.startsWith("teacher/") && student && student[i] !== null && column[i] !== null)
      rows.push(row("reverse KL", number(student[i] - column[i])));
  }
  for (const [name, cut] of Object.entries(sample.cuts)) {
    const [count, pieces] = cut[i] || [0, []];
    if (count) rows.push(row(`${name} reads`, `${pieces.map((one) => JSON.stringify(one)).join(" ")}, for ${plural(count, "token")}`));
    else if (!observed) rows.push(row(`${name} reads`, "nothing: no credit"));
  }
  if (observed) rows.push(row("", "observed, counts nowhere"));
  else if (sample.behind !== null) rows.push(row("sampled", sample.behind ? `${plural(sample.behind, "update")} earlier` : "with the newest weights"));
  if (masked) rows.push(row("", "not learned from"));
  tip.replaceChildren(el("table", {}, rows));
  hideTip();
  tip.hidden = false;
  span.classList.add("now");
  placeTip();
}

function placeTip() {
  const span = document.querySelector(".t.now");
  if (!span) return;
  for (const side of ["left", "top"]) tip.style.removeProperty(side);
  if (window.innerWidth < 600) return;  // on a phone it is a sheet at the bottom
  const place = span.getClientRects()[0], size = tip.getBoundingClientRect();
  const below = place.bottom + 8 + size.height < window.innerHeight;
  tip.style.setProperty("left", `${Math.max(8, Math.min(place.left, window.innerWidth - size.width - 8))}px`);
  tip.style.setProperty("top", `${below ? place.bottom + 8 : Math.max(8, place.top - size.height - 8)}px`);
}

function hideTip() {
  tip.hidden = true;
  document.querySelectorAll(".t.now").forEach((span) => span.classList.remove("now"));
}

addEventListener("scroll", placeTip, { passive: true, capture: true });
addEventListener("pointerdown", (event) => { if (!event.target.closest(".response")) hideTip(); });

function sampleCard(sample, measure, title) {
  const chips = [
    sample.reward === null ? null : `reward ${number(sample.reward)}`, sample.reason || null, sample.tag || null,
    plural(sample.acted, "token") + (sample.acted < sample.length ? `, ${number(sample.length - sample.acted)} observed` : ""), sample.finish === "length" ? "cut off at the limit" : null,
    sample.behind > 0 ? `${plural(sample.behind, "update")} old` : null,
  ].filter((chip) => chip !== null);
  const body = response(sample, measure), average = el("li", {});
  const card = el("article", { class: "sample" },
    el("header", {}, title ? el("h4", {}, title) : null, el("ul", { class: "chips" }, chips.map((chip) => el("li", {}, chip)), average)),
    title ? null : promptOf(sample), body);
  card.paint = () => {
    const { name, of } = measure() || {}, values = of ? sample.ids.map((_, i) => of(sample, i)).filter((value) => value !== null) : [];
    average.replaceChildren(values.length ? `mean ${name.split(" (")[0]} ${number(meanOf(values))}` : "");
    body.paint();
  };
  card.paint();
  return card;
}

function promptOf(sample) {
  const prompt = el("div", { class: `prompt ${layout(sample.prompt)}`, tabindex: 0, role: "region", "aria-label": "Prompt" }, el("b", {}, "Prompt"), el("div", {}, marked(sample.prompt)));
  return el("div", {}, prompt, sample.truth ? el("p", { class: "prompt" }, el("b", {}, "Expected "), sample.truth) : null);
}

// The switch of colours and its legend; `changed()` is called when another one is chosen.
function colourSwitch(found, changed) {
  let chosen = found[0] || null;
  const legend = el("div", { class: "scale" });
  const tell = () => {
    if (!chosen) return;
    const most = number(+chosen.scale.toPrecision(2));
    const swatches = (chosen.low ? [-1, -0.25, 0, 0.25, 1] : [0, 0.0625, 0.25, 0.5, 1])
      .map((share) => el("i", { class: "shade", style: { "background-color": tint(share * chosen.scale, chosen.scale) || "transparent" } }));
    legend.replaceChildren(
      chosen.low ? `${chosen.low}  −${most} ` : "0 ", el("span", { class: "shades", "aria-hidden": "true" }, swatches),
      ` ${most}  ${chosen.high}`);
  };
  const list = el("select", { onchange: () => { chosen = found[list.selectedIndex]; tell(); changed(); } },
    found.map((one) => el("option", {}, one.name)));
  tell();
  const node = chosen ? el("div", { class: "controls" }, el("label", {}, "Colour by ", list), legend) : null;
  return { node, measure: () => chosen };
}
