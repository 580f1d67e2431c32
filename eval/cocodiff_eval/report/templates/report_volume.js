// A volume in three views through one voxel: a click or a drag in one view moves the others.

const AXES = ["z", "y", "x"];
// Along which axis a view looks, and which axes its rows and columns are; in the order of the grid.
const VIEWS = [{ through: 0, rows: 1, columns: 2 }, { through: 2, rows: 1, columns: 0 }, { through: 1, rows: 0, columns: 2 }];
const GAP = 8; // pixels between views
const CROSS = "#ffb000";

async function unpacked(base64) {
  const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** A round length, 1, 2 or 5 times a power of ten, of at most so much. */
function roundLength(most) {
  const power = 10 ** Math.floor(Math.log10(most));
  return power * [5, 2, 1].find((factor) => factor * power <= most);
}

function middleOf(box) {
  return box.map(([from, to]) => (from + to) >> 1);
}

class VolumeViewer {
  constructor(root, stored) {
    Object.assign(this, { root, stored, at: stored.at, level: 127.5, width: 255 });
    const [, rows, columns] = stored.shape;
    this.strides = [rows * columns, columns, 1];
    this.box = this.whole = stored.shape.map((side) => [0, side]);
    root.addEventListener("keydown", (event) => event.stopPropagation()); // other keys are the slices' below
  }

  async start() {
    const { stored } = this;
    const [base, bits, ...layers] = await Promise.all(
      [stored.voxels, stored.masked, ...stored.layers.map((layer) => layer.voxels)].map(unpacked));
    this.masked = base.map((_, at) => (bits[at >> 3] >> (7 - (at & 7))) & 1);
    this.layers = stored.truth ? [{ name: "original", voxels: base }] : [];
    this.layers.push({ name: "masked", voxels: base, holes: true });
    stored.layers.forEach(({ name, top }, number) => {
      const voxels = top === undefined ? base.slice() : new Uint8Array(base.length);
      for (let at = 0, place = 0; at < voxels.length; at += 1) {
        if (this.masked[at]) voxels[at] = layers[number][place++];
      }
      this.layers.push({ name, voxels, top });
    });
    this.shown = this.layers.find((layer) => layer.voxels !== base);
    this.views = VIEWS.map((view) => ({ ...view, canvas: this.view(view) }));
    this.grid = element("div", { class: "orthogonal" }, ...this.views.map((view) => view.canvas));
    this.output = element("output", { "aria-live": "polite" });
    this.bar = element("div", { class: "ruler" });
    const note = `${stored.told[0].toUpperCase()}${stored.told.slice(1)}, in 8 bits. The files in images/ have all.`;
    this.root.append(this.choices(), this.sliders(), this.grid, this.bar, this.output, element("p", { class: "note" }, note));
    this.root.hidden = false;
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  view({ through, rows, columns }) {
    const canvas = element("canvas", { role: "img", tabindex: 0 });
    const move = (event) => {
      if (event.type === "pointermove" && !event.buttons) return;
      const area = canvas.getBoundingClientRect(), at = [...this.at];
      for (const [axis, share] of [
        [columns, (event.clientX - area.left) / area.width], [rows, (event.clientY - area.top) / area.height],
      ]) at[axis] = this.box[axis][0] + Math.floor(share * (this.box[axis][1] - this.box[axis][0]));
      this.go(at);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      move(event);
    });
    canvas.addEventListener("pointermove", move);
    const steps = { ArrowLeft: [columns, -1], ArrowRight: [columns, 1], ArrowUp: [rows, -1], ArrowDown: [rows, 1],
      PageUp: [through, -1], PageDown: [through, 1] };
    canvas.addEventListener("keydown", (event) => {
      if (!(event.key in steps) || event.ctrlKey || event.altKey || event.metaKey) return;
      const [axis, step] = steps[event.key];
      this.go(this.at.map((place, one) => place + (one === axis ? step : 0)));
      event.preventDefault();
    });
    return canvas;
  }

  choices() {
    this.buttons = this.layers.map((layer) => button({}, () => {
      this.shown = layer;
      this.draw();
    }, layer.name));
    this.zoom = button({}, () => {
      const region = this.near(this.at);
      this.box = this.box === this.whole ? this.around(region) : this.whole;
      const inside = region.every(([from, to], axis) => from <= this.at[axis] && this.at[axis] < to);
      this.go(inside || this.box === this.whole ? this.at : middleOf(region));
    }, "zoom to the mask");
    this.next = button({}, () => {
      const { regions } = this.stored;
      this.turn = ((this.turn ?? regions.indexOf(this.near(this.at))) + 1) % regions.length;
      if (this.box !== this.whole) this.box = this.around(regions[this.turn]);
      this.go(middleOf(regions[this.turn]));
    }, "next region");
    this.outline = true;
    this.outlineButton = button({}, () => {
      this.outline = !this.outline;
      this.draw();
    }, "outline of the mask");
    this.zoom.hidden = !this.stored.regions.length;
    this.next.hidden = this.stored.regions.length < 2;
    const layers = element("div", { class: "bar", role: "group", "aria-label": "What the three views show" }, ...this.buttons);
    layers.append(this.outlineButton, this.zoom, this.next);
    return layers;
  }

  sliders() {
    const slider = (name, key, low) => {
      const range = element("input", { type: "range", min: low, max: 255, step: 0.5, value: this[key], "aria-label": name });
      const output = element("output");
      const tell = () => {
        const { low: black, high } = this.stored, offset = key === "level" ? black : 0;
        output.textContent = Number((offset + (this[key] / 255) * (high - black)).toPrecision(4));
        range.setAttribute("aria-valuetext", output.textContent);
      };
      range.addEventListener("input", () => {
        this[key] = Number(range.value);
        tell();
        this.draw();
      });
      tell();
      return element("label", { class: "bar slider" }, name, range, output);
    };
    return element("div", { class: "windowing" }, slider("level", "level", 0), slider("window", "width", 1));
  }

  /** The box of the masked region that a voxel lies in, or nearest to. */
  near(at) {
    const distance = (box) => Math.hypot(...box.map(([from, to], axis) => Math.max(0, from - at[axis], at[axis] - to + 1)));
    return this.stored.regions.reduce((best, box) => (distance(box) < distance(best) ? box : best));
  }

  /** A box with a margin. */
  around(region) {
    const margin = (from, to) => Math.max(4, (to - from) >> 2);
    return region.map(([from, to], axis) =>
      [Math.max(0, from - margin(from, to)), Math.min(this.stored.shape[axis], to + margin(from, to))]);
  }

  go(at) {
    this.at = at;
    this.draw();
  }

  draw() {
    const { stored, shown, box } = this;
    this.at = this.at.map((place, axis) => Math.min(box[axis][1] - 1, Math.max(box[axis][0], place)));
    const sides = box.map(([from, to], axis) => (to - from) * stored.size[axis]);
    const room = [this.root.clientWidth - GAP, Math.max(360, 0.85 * window.innerHeight) - GAP];
    this.scale = Math.min(room[0] / (sides[2] + sides[0]), room[1] / (sides[1] + sides[0])); // pixels a unit
    this.palette = Uint32Array.from({ length: 256 }, (_, value) => this.colour(value));
    for (const view of this.views) this.drawView(view, sides);
    this.buttons.forEach((button, number) => button.setAttribute("aria-pressed", this.layers[number] === shown));
    this.zoom.setAttribute("aria-pressed", box !== this.whole);
    this.outlineButton.setAttribute("aria-pressed", this.outline);
    this.tell();
    const length = roundLength(0.3 * room[0] / this.scale);
    this.bar.style.width = `${length * this.scale}px`;
    this.bar.textContent = `${length} ${stored.unit}`;
  }

  /** Of a voxel's value in the window, or on the scale of uncertainty; as a pixel. */
  colour(value) {
    if (this.shown.top !== undefined) return pixel(...colours.subarray(3 * value, 3 * value + 3));
    const grey = Math.round(255 * Math.min(1, Math.max(0, (value - this.level) / this.width + 0.5)));
    return pixel(grey, grey, grey);
  }

  drawView({ canvas, through, rows, columns }, sides) {
    const { box, at, strides, palette, masked } = this, { voxels, holes } = this.shown;
    const [top, bottom] = box[rows], [left, right] = box[columns];
    const image = new ImageData(right - left, bottom - top);
    const pixels = new Uint32Array(image.data.buffer), hole = pixel(...HOLE), outline = pixel(...OUTLINE);
    const beside = (row, column, voxel) =>
      (column > left && masked[voxel - strides[columns]]) || (column < right - 1 && masked[voxel + strides[columns]])
      || (row > top && masked[voxel - strides[rows]]) || (row < bottom - 1 && masked[voxel + strides[rows]]);
    for (let row = top, place = 0; row < bottom; row += 1) {
      let voxel = at[through] * strides[through] + row * strides[rows] + left * strides[columns];
      for (let column = left; column < right; column += 1, voxel += strides[columns]) {
        const edge = this.outline && !masked[voxel] && beside(row, column, voxel);
        pixels[place++] = edge ? outline : holes && masked[voxel] ? hole : palette[voxels[voxel]];
      }
    }
    const small = element("canvas");
    show(small, image);
    const width = Math.max(1, sides[columns] * this.scale), height = Math.max(1, sides[rows] * this.scale);
    const sharp = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: Math.round(width * sharp), height: Math.round(height * sharp) });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
    context.fillStyle = CROSS;
    const x = ((at[columns] + 0.5 - left) / (right - left)) * canvas.width;
    const y = ((at[rows] + 0.5 - top) / (bottom - top)) * canvas.height;
    const free = 6 * sharp + 0.5 * this.scale * sharp; // around the voxel itself
    for (const [from, to] of [[0, x - free], [x + free, canvas.width]]) context.fillRect(from, y - sharp / 2, to - from, sharp);
    for (const [from, to] of [[0, y - free], [y + free, canvas.height]]) context.fillRect(x - sharp / 2, from, sharp, to - from);
    const place = (axis) => `${AXES[axis]} ${this.number(axis)}`;
    context.font = `${12 * sharp}px system-ui, sans-serif`;
    context.lineWidth = 3 * sharp;
    context.lineJoin = "round";
    context.strokeStyle = "#000";
    context.strokeText(place(through), 6 * sharp, 16 * sharp);
    context.fillText(place(through), 6 * sharp, 16 * sharp);
    canvas.setAttribute("aria-label",
      `${this.shown.name}, slice ${place(through)}; cross at ${place(rows)}, ${place(columns)}; arrow keys move it`);
  }

  /** The number in the input of the slice through the cross. */
  number(axis) {
    return this.stored.first[axis] + this.at[axis] * this.stored.step;
  }

  /** Where the cross is, and all values there. */
  tell() {
    const { low, high } = this.stored;
    const voxel = this.at.reduce((sum, place, axis) => sum + place * this.strides[axis], 0), hidden = this.masked[voxel];
    const value = ({ voxels, top }) => {
      const share = voxels[voxel] / 255;
      if (top === undefined) return Number((low + share * (high - low)).toPrecision(3));
      return `${Number((share * top).toPrecision(3))}${share === 1 ? " or more" : ""}`;
    };
    const told = hidden ? this.layers.filter((layer) => !layer.holes) : [{ ...this.layers[0], name: "not masked" }];
    const place = AXES.map((axis, number) => `${axis} ${this.number(number)}`).join(", ");
    this.output.textContent = `${place}: ${told.map((layer) => `${layer.name} ${value(layer)}`).join("; ")}`;
    this.root.dataset.at = AXES.map((_, axis) => this.number(axis)); // what stands on the screen, for whoever drives the page
    this.root.dataset.shown = this.shown.name;
  }
}

function pixel(red, green, blue) {
  return new Uint32Array(Uint8Array.of(red, green, blue, 255).buffer)[0];
}

for (const block of document.querySelectorAll("script.voxels")) {
  const root = document.querySelector(`.series[data-series="${block.dataset.series}"] .volume`);
  new VolumeViewer(root, JSON.parse(block.textContent)).start();
}
