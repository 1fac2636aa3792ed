// Run a report's program in a small DOM and print what it has drawn, as JSON: node dom.js report.html
const fs = require("fs");

class Element {
  constructor(tag) {
    Object.assign(this, { tag, childNodes: [], attributes: {}, dataset: {}, classList: { add() {}, remove() {} } });
    const colours = (this.colours = {});
    this.style = { setProperty: (name, value) => { colours[name] = value; }, removeProperty: (name) => { delete colours[name]; } };
  }
  append(...children) { this.childNodes.push(...children); }
  replaceChildren(...children) { this.childNodes = children; }
  setAttribute(name, value) {
    this.attributes[name] = value;
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = value;
  }
  addEventListener() {}
  get children() { return this.childNodes.filter((child) => child instanceof Element); }
  get text() { return this.childNodes.map((child) => (child instanceof Element ? child.text : String(child))).join(""); }
  all(found) { return [...(found(this) ? [this] : []), ...this.children.flatMap((child) => child.all(found))]; }
  of(name) { return this.all((node) => String(node.attributes.class || "").split(" ").includes(name)); }
}

const html = fs.readFileSync(process.argv[2], "utf8");
const data = html.match(/<script type="application\/json" id="data">([\s\S]*?)<\/script>/)[1];
const program = html.match(/<script>([\s\S]*?)<\/script>\s*<\/body>/)[1];
const known = { data: { textContent: data }, report: new Element("main"), tip: new Element("div") };
global.document = {
  getElementById: (id) => known[id], createElement: (tag) => new Element(tag),
  createElementNS: (_, tag) => new Element(tag), querySelector: () => null, querySelectorAll: () => [],
};
global.window = { innerWidth: 1000, innerHeight: 800 };
const widths = (process.argv[3] || "").split(",").map(Number).filter(Boolean), charts = [];
global.ResizeObserver = class {  // each chart is drawn at each of the given widths
  constructor(changed) { this.changed = changed; }
  observe(target) {
    for (const width of widths) {
      this.changed([{ target, contentRect: { width } }]);
      const grid = target.of("grid")[0];
      const labels = grid ? grid.children.filter((node) => node.tag === "text") : [];
      charts.push({ width, labels: labels.map((node) => [node.text, +node.attributes.x, node.attributes["text-anchor"]]) });
    }
  }
};
global.addEventListener = () => {};
new Function(program)();
console.log(JSON.stringify({
  charts,
  text: known.report.all((node) => node.tag === "section").map((node) => node.text),
  sections: known.report.all((node) => node.tag === "section").map((node) => node.attributes.id),
  samples: known.report.all((node) => node.tag === "article").map((sample) => ({
    chips: sample.of("chips").flatMap((list) => list.children.map((chip) => chip.text)),
    prompt: sample.of("prompt").map((node) => [node.attributes.class, node.children[1] ? node.children[1].text : ""]),
    markup: sample.of("markup").map((node) => node.text),
    turns: sample.of("turn").map((turn) => ({
      kind: turn.attributes.class, label: turn.of("turn-label")[0].text, said: turn.of("said")[0].text,
      coloured: turn.of("t").filter((token) => token.colours["background-color"]).length,
    })),
    tokens: sample.of("t").map((token) => [token.text, token.colours["background-color"] || ""]),
  })),
}));
