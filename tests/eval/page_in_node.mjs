// Runs a report's script over a document of as little as it asks for, and tells what stands there: first all of it,
// then after each event what is new. Usage: node page_in_node.mjs report.html '[["press", "›"], ...]'

import { readFileSync } from "node:fs";

const [page, events] = [readFileSync(process.argv[2], "utf8"), JSON.parse(process.argv[3])];

globalThis.ImageData = class {
  constructor(...given) {
    const data = typeof given[0] === "object" ? given.shift() : new Uint8ClampedArray(4 * given[0] * given[1]);
    Object.assign(this, { data, width: given[0], height: given[1] });
  }
};

/** What a canvas shows, short: its size, the mean and the first of its pixels. */
function shown({ width, height, data }) {
  const mean = data.reduce((sum, value) => sum + value, 0) / data.length;
  return `${width}x${height} mean ${mean.toFixed(3)} first ${[...data.slice(0, 12)].join(" ")}`;
}

/** Pixels that tell which file they are of: this page's pictures are texts of letters. */
function fileOf(source) {
  const letters = atob(source.split(",")[1]);
  return new ImageData(Uint8ClampedArray.from([...letters].flatMap((one) => Array(4).fill(one.charCodeAt(0)))), letters.length, 1);
}

globalThis.Image = class {
  async decode() {
    this.file = fileOf(this.src);
    [this.naturalWidth, this.naturalHeight] = [this.file.width, this.file.height];
  }
};

class Element {
  constructor(tag, attributes = {}) {
    Object.assign(this, { tag, attributes, children: [], style: {}, dataset: {}, listeners: {}, clientWidth: 1000, told: [] });
    this.classList = { toggle: (name, on) => this.setAttribute("classes", on ? name : "") };
    for (const name of Object.keys(attributes)) this.setAttribute(name, attributes[name]);
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "value") this.value = value;
    if (name.startsWith("data-")) this.dataset[name.slice(5)] = String(value);
  }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  get textContent() { return this.children.map((one) => one.textContent ?? one).join(""); }
  set textContent(text) { this.children = [String(text)]; }
  addEventListener(name, heard) { (this.listeners[name] ??= []).push(heard); }
  setPointerCapture() {}
  getBoundingClientRect() { return { left: 10, top: 20, width: 500, height: 400, bottom: 420 }; }
  getContext() {
    return {
      drawImage: (from) => { this.image = from.image ?? from.file; this.told = []; },
      putImageData: (image) => { this.image = image; },
      getImageData: () => this.image,
      clearRect: () => { this.image = null; },
      fillRect: (...box) => this.told.push(box.map((side) => side.toFixed(1)).join(" ")),
      fillText: (text) => this.told.push(text),
      strokeText: () => {},
    };
  }
  all(tag) {
    const inside = this.children.filter((one) => one.all).flatMap((one) => one.all(tag));
    return tag === undefined || this.tag === tag ? [this, ...inside] : inside;
  }
  querySelectorAll(tag) { return this.all(tag); }
  closest() { return null; }
  contains() { return false; }
  lines() {
    const told = { ...this.attributes, ...this.style, ...Object.fromEntries(Object.entries(this.dataset).map(([a, b]) => [`data-${a}`, b])) };
    for (const name of ["hidden", "disabled", "value"]) if (this[name] !== undefined) told[name] = this[name];
    const texts = this.children.filter((one) => !one.lines), image = this.image ? [shown(this.image)] : [];
    const words = [...Object.entries(told).map(([name, value]) => `${name}=${value}`), ...this.told, ...image, ...texts];
    const line = `${this.tag}: ${words.join(", ")}`.replace(/\d+\.\d{4,}/g, (number) => Number(number).toFixed(3));
    return [line, ...this.children.flatMap((one) => (one.lines ? one.lines() : []))];
  }
}

const blocks = [...page.matchAll(/<script type="[^"]*"([^>]*)>(.*?)<\/script>/gs)].map(([, words, text]) => {
  const block = new Element("script", Object.fromEntries([...words.matchAll(/([\w-]+)="([^"]*)"/g)].map(([, name, value]) => [name, value])));
  block.textContent = text;
  return block;
});
const ofClass = (name) => blocks.filter((block) => block.attributes.class === name);
const series = ofClass("numbers").map((numbers, place) => {
  const section = new Element("section", { "data-series": String(place) }), [volume, viewer] = ["volume", "viewer"].map((name) => new Element(name));
  section.append(volume, viewer);
  section.querySelector = (name) => ({ ".numbers": numbers, ".viewer": viewer, ".volume": volume })[name];
  return section;
});
const heard = {};
globalThis.window = { innerHeight: 900, devicePixelRatio: 2 };
globalThis.ResizeObserver = class { observe() {} };
globalThis.document = {
  createElement: (name) => new Element(name),
  createElementNS: (_, name) => new Element(name),
  getElementById: (id) => blocks.find((block) => block.attributes.id === id),
  querySelectorAll(selector) {
    if (selector === ".series") return series;
    const [, name, of] = selector.match(/^script\.(\w+)(?:\[data-series="(\d+)"\])?$/);
    return ofClass(name).filter((block) => of === undefined || block.dataset.series === of);
  },
  querySelector: (selector) => series[Number(selector.match(/"(\d+)"/)[1])].querySelector(".volume"),
  addEventListener: (name, action) => { heard[name] = action; },
};

let before = [], decoding = 0;
const Whole = globalThis.Response;
globalThis.Response = class extends Whole {
  async arrayBuffer() {
    decoding += 1;
    return super.arrayBuffer().finally(() => { decoding -= 1; });
  }
};
async function tell(title) {
  do await new Promise((done) => setTimeout(done, 20)); // what is decoded meanwhile is drawn
  while (decoding);
  const now = series.flatMap((section) => section.lines()), seen = new Set(before);
  console.log([title, ...now.filter((line) => !seen.has(line))].join("\n  "));
  before = now;
}

(0, eval)(page.match(/<script>(.*?)<\/script>/s)[1]);
await tell("at first");
const quiet = { preventDefault() {}, stopPropagation() {} };
for (const [what, ...words] of events) {
  const fire = (element, name, event) => (element.listeners[name] ?? []).forEach((action) => action({ ...quiet, type: name, target: element, ...event }));
  const all = series.flatMap((section) => section.all()), of = (tag) => all.filter((one) => one.tag === tag);
  if (what === "press") fire(of("button").find((one) => one.textContent === words[0]), "click");
  if (what === "key") heard.keydown({ ...quiet, key: words[0], target: series[0] });
  if (what === "view") fire(of("volume")[0].all("canvas")[words[0]], words[1], words[2]);
  if (what === "curve") fire(of("svg")[words[0]], "click", { clientX: words[1] });
  if (what === "slide") {
    const range = of("input").find((one) => one.attributes["aria-label"] === words[0]);
    range.value = words[1];
    fire(range, "input");
  }
  await tell([what, ...words.map((word) => JSON.stringify(word))].join(" "));
}
