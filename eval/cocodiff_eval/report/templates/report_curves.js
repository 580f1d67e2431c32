// Curves of the quality over the slices, drawn from the numbers.

const CURVE = { height: 150, left: 46, right: 8, top: 8, bottom: 20 };

function filled(found, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  found.append(...children);
  return found;
}

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function vector(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function button(attributes, action, ...children) {
  const found = element("button", { type: "button", ...attributes }, ...children);
  found.addEventListener("click", action);
  return found;
}

/** The colour of a preset; biharmonic, the last, is grey. */
function colourOf(modes, mode) {
  return mode === "biharmonic" ? "var(--baseline)" : `var(--c${modes.indexOf(mode) % 6})`;
}

/** Three to six round values between two. */
function ticks(low, high) {
  const rough = (high - low) / 4 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high; n += 1) found.push(Number((n * step).toPrecision(6)));
  return found;
}

/** A curve of one measure: `values` has a list for each preset, `numbers` the slices that the lists are of. */
class Curve {
  constructor(title, values, numbers, modes, first, total, choose) {
    Object.assign(this, { values, numbers, first, span: Math.max(1, total - 1) });
    const known = Object.values(values).flat().filter((value) => value !== null);
    const low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
    const room = 0.06 * (high - low) || Math.abs(0.1 * high) || 1;
    this.low = low - room;
    this.high = high + room;
    this.modes = modes;
    const label = `${title} over slices, from ${low} to ${high}; click to go to a slice`;
    this.svg = vector("svg", { role: "img", "aria-label": label });
    this.cursor = vector("line", { class: "cursor", y1: CURVE.top, y2: CURVE.height - CURVE.bottom });
    this.svg.addEventListener("click", (event) => {
      const box = this.svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * this.width;
      const share = (x - CURVE.left) / (this.width - CURVE.left - CURVE.right);
      choose(this.first + Math.round(Math.min(1, Math.max(0, share)) * this.span));
    });
    this.figure = element("figure", { class: "curve" }, element("h3", {}, title), this.svg);
    this.marked = first;
    this.draw(900);
  }

  /** So many pixels wide. */
  draw(width) {
    this.width = Math.max(200, width);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${CURVE.height}`);
    this.svg.replaceChildren();
    this.axes();
    for (const mode of this.modes.filter((one) => one in this.values)) this.line(mode, colourOf(this.modes, mode));
    this.svg.append(this.cursor);
    this.mark(this.marked);
  }

  x(number) {
    return CURVE.left + ((number - this.first) / this.span) * (this.width - CURVE.left - CURVE.right);
  }

  y(value) {
    const share = (value - this.low) / (this.high - this.low);
    return CURVE.height - CURVE.bottom - share * (CURVE.height - CURVE.top - CURVE.bottom);
  }

  axes() {
    for (const value of ticks(this.low, this.high)) {
      const y = this.y(value);
      this.svg.append(vector("line", { class: "axis", x1: CURVE.left, x2: this.width - CURVE.right, y1: y, y2: y }));
      this.svg.append(vector("text", { x: CURVE.left - 6, y: y + 4, "text-anchor": "end" }, String(value)));
    }
    for (const number of ticks(this.first, this.first + this.span).filter(Number.isInteger)) { // slices
      this.svg.append(vector("text", { x: this.x(number), y: CURVE.height - 4, "text-anchor": "middle" }, String(number)));
    }
  }

  /** Breaks where slices have no value; a slice alone is a dot. */
  line(mode, colour) {
    let path = "", before = -2;
    const few = this.numbers.length <= 60;
    this.numbers.forEach((number, place) => {
      const value = this.values[mode][place];
      if (value === null) return;
      const at = `${this.x(number).toFixed(1)} ${this.y(value).toFixed(1)}`;
      path += `${number === before + 1 ? "L" : "M"}${at}`;
      before = number;
      if (few) {
        const [cx, cy] = at.split(" ");
        this.svg.append(vector("circle", { cx, cy, r: 2.4, style: `fill: ${colour}` }));
      }
    });
    const dash = mode === "biharmonic" ? "; stroke-dasharray: 4 3" : "";
    this.svg.append(vector("path", { d: path, style: `stroke: ${colour}${dash}` }));
  }

  mark(number) {
    this.marked = number;
    this.cursor.setAttribute("x1", this.x(number));
    this.cursor.setAttribute("x2", this.x(number));
  }
}
