"use strict";
// Elements, numbers and words. Text becomes text nodes: no string is ever read as HTML.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.001) return value.toExponential(1).replaceAll("-", "−");
  return String(+value.toPrecision(size < 1 ? 3 : 4)).replace("-", "−");
}

function short(value) {
  for (const [scale, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= scale) return `${+(value / scale).toPrecision(3)}${suffix}`;
  return number(value);
}

function duration(seconds) {
  if (seconds < 10) return `${+seconds.toPrecision(2)} s`;
  const whole = Math.round(seconds), [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  if (h) return `${h} h ${m} min`;
  return m ? `${m} min ${s} s` : `${s} s`;
}

const percent = (share) => (share > 0 && share < 0.01 ? "<1 %" : `${Math.round(100 * share)} %`);
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// Charts are drawn to the width they have, again when that changes.
const drawings = new Map();
const watcher = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const drawing = drawings.get(target), width = Math.floor(contentRect.width);
    if (width > 0 && drawing.width !== width) {
      drawing.width = width;
      drawing.draw(width);
    }
  }
});

function drawn(node, draw) {
  drawings.set(node, { draw, width: 0 });
  watcher.observe(node);
  return node;
}
