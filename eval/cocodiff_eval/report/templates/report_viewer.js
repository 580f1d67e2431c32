// The viewer of a series: a slider over slices, a picture to flip in place, all pictures beside it, curves, worst slices.

const KINDS = { original: "original", masked: "masked", restored: "restored", error: "difference",
  uncertainty: "uncertainty", low: "low 90 %", high: "high 90 %", image: "image" };
const OF_A_PRESET = ["restored", "error", "uncertainty", "low", "high", "image"];
const WORST_SHOWN = 10;

class Viewer {
  constructor(section) {
    this.section = section;
    this.numbers = JSON.parse(section.querySelector(".numbers").textContent);
    this.pictures = new Pictures(section.dataset.series);
    this.modes = this.numbers.modes;
    this.mode = this.modes[0];
    this.place = 0;
    this.drawn = 0;
    this.worstShown = WORST_SHOWN;
    this.root = section.querySelector(".viewer");
    if (!this.pictures.numbers.length) return;
    const restored = this.numbers.numbers.find((number) => this.pictures.blocks.has(number));
    this.worked = restored ?? this.pictures.numbers[0]; // the first slice that was restored
    this.generated = this.first().images !== undefined;
    this.kind = this.generated ? "image" : "restored";
    this.outline = true;
    this.root.append(this.slider(), this.choices(), this.panes(), this.curves());
    const pictured = this.pictures.numbers.length, { total } = this.numbers;
    if (this.numbers.stack !== null && pictured < total) {
      const text = `Pictures of ${pictured} of ${total} slices: evenly spread, and the worst. Numbers are of all.`;
      this.root.append(element("p", { class: "note" }, text));
    }
    this.root.hidden = false;
    this.place = this.pictures.numbers.indexOf(this.worked);
    this.draw();
    this.list();
  }

  first() {
    return JSON.parse(this.pictures.blocks.get(this.worked).textContent);
  }

  get number() {
    return this.pictures.numbers[this.place];
  }

  name(number) {
    return this.numbers.names ? this.numbers.names[number] : `slice ${number}`;
  }

  slider() {
    const last = this.pictures.numbers.length - 1;
    const what = this.numbers.names ? "Image" : "Slice";
    this.range = element("input", { type: "range", min: 0, max: last, step: 1, value: 0, "aria-label": what });
    this.output = element("output", { "aria-live": "polite" });
    this.range.addEventListener("input", () => this.go(Number(this.range.value)));
    const back = button({ "aria-label": "one back" }, () => this.go(this.place - 1), "‹");
    const on = button({ "aria-label": "one on" }, () => this.go(this.place + 1), "›");
    const bar = element("div", { class: "bar slider" }, back, this.range, on, this.output);
    bar.hidden = last === 0;
    return bar;
  }

  /** Buttons of the presets, which are the curves' legend as well. */
  choices() {
    this.modeButtons = new Map(this.modes.map((mode) => {
      const swatch = element("span", { class: "swatch", style: `background: ${colourOf(this.modes, mode)}` });
      const choose = () => this.choose(OF_A_PRESET.includes(this.kind) ? this.kind : "restored", mode);
      return [mode, button({}, choose, swatch, mode)];
    }));
    this.outlineButton = button({}, () => this.turnOutline(), "outline of the mask");
    this.outlineButton.hidden = this.generated;
    const bar = element("div", { class: "bar", role: "group", "aria-label": "Preset" }, ...this.modeButtons.values());
    bar.append(this.outlineButton);
    return bar;
  }

  turnOutline() {
    this.outline = !this.outline;
    this.draw();
  }

  panes() {
    this.canvas = element("canvas", { role: "img" });
    this.canvas.addEventListener("click", () => this.flip());
    this.caption = element("figcaption");
    this.ramp = element("div", { class: "scale" });
    const stage = element("figure", { class: "stage" }, this.canvas, this.caption, this.ramp);
    const kinds = this.generated ? [] : ["original", "masked"];
    this.cells = kinds.map((kind, row) => this.cell(kind, null, 0, row));
    this.modes.forEach((mode, column) => {
      const ofPreset = this.generated ? ["image"] : ["restored"];
      if (mode in this.numbers.psnr_db) ofPreset.push("error");
      if (this.numbers.uncertain.includes(mode)) ofPreset.push("uncertainty", "low", "high");
      ofPreset.forEach((kind, row) => this.cells.push(this.cell(kind, mode, column + kinds.length / 2, row)));
    });
    const columns = this.modes.length + kinds.length / 2;
    const grid = element("div", { class: "cells", role: "group", "aria-label": "Pictures", style: `--columns: ${columns}` });
    grid.append(...this.cells.map((cell) => cell.button));
    return element("div", { class: "panes" }, stage, grid);
  }

  cell(kind, mode, column, row) {
    const canvas = element("canvas", { "aria-hidden": "true" });
    const of = mode === null || kind === "image" ? "" : element("span", { class: "of" }, `: ${mode}`);
    const label = element("span", {}, kind === "image" ? mode : KINDS[kind], of);
    const value = element("span", { class: "value" });
    const place = `--column: ${column + 1}; --row: ${row + 1}`;
    const choose = () => this.choose(kind, mode ?? this.mode);
    return { kind, mode, canvas, value, button: button({ class: "cell", style: place }, choose, canvas, label, value) };
  }

  curves() {
    const { psnr_db, ssim, numbers, stack, first, total } = this.numbers;
    const box = element("div", { class: "curves" });
    this.drawnCurves = [];
    if (!Object.keys(psnr_db).length || numbers.length < (stack ? 2 : 3)) return box;
    if (stack) {
      const left = element("div");
      for (const [title, values] of [["PSNR, dB", psnr_db], ["SSIM", ssim]]) {
        const curve = new Curve(title, values, numbers, this.modes, first, total, (number) => this.nearest(number));
        this.drawnCurves.push(curve);
        left.append(curve.figure);
      }
      box.append(left);
      new ResizeObserver(() => this.drawnCurves.forEach((curve) => curve.draw(left.clientWidth))).observe(left);
    }
    this.worstTitle = element("h3");
    this.worst = element("ol");
    this.more = button({ class: "more" }, () => {
      this.worstShown += 5 * WORST_SHOWN;
      this.list();
    }, "show more");
    box.append(element("div", { class: "worst" }, this.worstTitle, this.worst, this.more));
    return box;
  }

  /** The worst slices of the chosen preset. */
  list() {
    if (!this.worst) return;
    const { psnr_db, ssim, numbers } = this.numbers;
    const values = psnr_db[this.mode] ?? Object.values(psnr_db)[0];
    const order = numbers.map((number, at) => at).filter((at) => values[at] !== null);
    order.sort((a, b) => values[a] - values[b]);
    this.worstTitle.textContent = `Worst first: ${this.mode}`;
    this.worst.replaceChildren(...order.slice(0, this.worstShown).map((at) => {
      const number = numbers[at], similarity = ssim[this.mode]?.[at];
      const text = `${values[at].toFixed(2)} dB${similarity == null ? "" : `, ${similarity.toFixed(3)}`}`;
      const place = this.pictures.numbers.indexOf(number);
      const told = [this.name(number), element("small", {}, text)];
      const item = place < 0 ? element("span", {}, ...told) : button({ "data-number": number }, () => this.go(place), ...told);
      return element("li", {}, item);
    }));
    this.more.hidden = order.length <= this.worstShown;
    this.markWorst();
  }

  markWorst() {
    for (const item of this.worst ? this.worst.querySelectorAll("button") : []) {
      item.setAttribute("aria-current", Number(item.dataset.number) === this.number);
    }
  }

  go(place) {
    this.place = Math.min(this.pictures.numbers.length - 1, Math.max(0, place));
    this.draw();
  }

  nearest(number) {
    const distances = this.pictures.numbers.map((one) => Math.abs(one - number));
    this.go(distances.indexOf(Math.min(...distances)));
  }

  choose(kind, mode) {
    const other = mode !== this.mode;
    this.kind = kind;
    this.mode = mode;
    this.draw();
    if (other) this.list();
  }

  /** Between before and after: of what was restored, the original where it is known, else the masked slice. */
  flip() {
    if (this.generated) return this.turn(1);
    const before = this.unknown ? "masked" : "original";
    return this.choose(this.kind === "restored" ? before : "restored", this.mode);
  }

  /** To the next preset. */
  turn(step) {
    const at = this.modes.indexOf(this.mode) + step;
    this.choose(this.kind, this.modes[(at + this.modes.length) % this.modes.length]);
  }

  async draw() {
    const turn = (this.drawn += 1), number = this.number;
    this.range.value = this.place;
    this.range.setAttribute("aria-valuetext", this.name(number));
    const position = element("small", {}, ` ${this.place + 1} / ${this.pictures.numbers.length}`);
    this.output.replaceChildren(this.name(number), position);
    for (const curve of this.drawnCurves ?? []) curve.mark(number);
    this.markWorst();
    for (const [mode, button] of this.modeButtons) button.setAttribute("aria-pressed", mode === this.mode);
    const slice = await this.pictures.slice(number);
    if (turn !== this.drawn) return; // another slice was chosen meanwhile
    this.unknown = slice.unknown !== null;
    let kind = this.kind;
    if (!hasPicture(slice, kind, this.mode)) kind = this.generated ? "image" : "original";
    this.cells.forEach((cell) => this.fill(cell, slice, kind));
    this.outlineButton.setAttribute("aria-pressed", this.outline);
    if (hasPicture(slice, kind, this.mode)) {
      const image = composed(slice, kind, this.mode);
      show(this.canvas, this.outline ? outlined(image, slice.hole) : image);
    }
    this.describe(slice, kind);
    this.section.dataset.shown = number; // what stands on the screen, for whoever drives the page
    this.section.dataset.kind = kind;
  }

  fill(cell, slice, kind) {
    const there = hasPicture(slice, cell.kind, cell.mode);
    cell.button.disabled = !there;
    cell.button.classList.toggle("other", cell.mode !== null && cell.mode !== this.mode && !this.generated);
    const chosen = cell.kind === kind && (cell.mode === null || cell.mode === this.mode);
    cell.button.setAttribute("aria-pressed", chosen);
    if (cell.kind === "restored" || cell.kind === "image") cell.value.textContent = this.judged(cell.mode);
    if (there) show(cell.canvas, composed(slice, cell.kind, cell.mode));
    else cell.canvas.getContext("2d").clearRect(0, 0, cell.canvas.width, cell.canvas.height);
  }

  /** The numbers of the shown slice in a preset, as one line. */
  judged(mode) {
    const { psnr_db, ssim, exact, numbers } = this.numbers;
    const at = numbers.indexOf(this.number), words = [];
    if (at >= 0 && psnr_db[mode]?.[at] != null) words.push(`${psnr_db[mode][at].toFixed(2)} dB`);
    if (at >= 0 && ssim[mode]?.[at] != null) words.push(`SSIM ${ssim[mode][at].toFixed(3)}`);
    const distance = exact[mode]?.[this.number];
    if (distance !== undefined) words.push(distance === 0 ? "same bits as with exact exchange" : `${distance} dB from the run with exact exchange`);
    return words.join(", ");
  }

  describe(slice, kind) {
    const of = OF_A_PRESET.includes(kind) ? (kind === "image" ? this.mode : `${KINDS[kind]}: ${this.mode}`) : KINDS[kind];
    let value = OF_A_PRESET.includes(kind) ? this.judged(this.mode) : "";
    if (this.numbers.left.includes(this.number)) value = "masked wholly: the slice was left as in the input";
    else if (slice.hole === null && !this.generated) value = "nothing is masked here: the slice was copied bit for bit";
    else if (kind === "low" || kind === "high") value = "an end of the interval that holds 90 %";
    else if (kind === "original" && this.unknown) value = "the original under the mask is unknown";
    this.caption.replaceChildren(element("strong", {}, of), element("span", { class: "value" }, value));
    this.canvas.setAttribute("aria-label", `${this.name(this.number)}, ${of}. ${value}`);
    this.ramp.replaceChildren();
    if (kind !== "error" && kind !== "uncertainty") return;
    const canvas = element("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const grey = new ImageData(256, 1);
    for (let at = 0; at < 256; at += 1) grey.data.fill(at, 4 * at, 4 * at + 4);
    show(canvas, coloured(grey));
    const what = kind === "error" ? "absolute error" : "half the width of the 90 % interval";
    this.ramp.append(`${what} 0`, canvas, `${slice[`${kind}_top`]} or more of the intensity range`);
  }

  /** Whether the key meant something here. */
  key(name) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    const kinds = [...new Set(this.cells.map((cell) => cell.kind))];
    if (name in steps) this.go(this.place + steps[name]);
    else if (name === "ArrowUp" || name === "ArrowDown") this.turn(name === "ArrowUp" ? -1 : 1);
    else if (name === " ") this.flip();
    else if (name === "o" && !this.generated) this.turnOutline();
    else if (!this.generated && /^[1-7]$/.test(name) && kinds[name - 1]) this.choose(kinds[name - 1], this.mode);
    else if (this.generated && /^[1-9]$/.test(name) && this.modes[name - 1]) this.choose("image", this.modes[name - 1]);
    else return false;
    return true;
  }
}

/** Keys go to the series that holds the focus or was touched last, else to the first that is on the screen. */
function startViewers() {
  const viewers = [...document.querySelectorAll(".series")].map((section) => new Viewer(section));
  const alive = viewers.filter((viewer) => viewer.pictures.numbers.length);
  let touched = null;
  document.addEventListener("pointerdown", (event) => {
    touched = alive.find((viewer) => viewer.section.contains(event.target)) ?? touched;
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("select, summary, a, .scroll")) return;
    const onButton = event.target.closest("button");
    if (onButton && (event.key === " " || event.key === "Enter")) return;
    const seen = (viewer) => {
      const box = viewer.root.getBoundingClientRect();
      return box.bottom > 0 && box.top < window.innerHeight;
    };
    const focused = alive.find((viewer) => viewer.root.contains(document.activeElement));
    const chosen = focused ?? (touched && seen(touched) ? touched : alive.find(seen));
    if (chosen && chosen.key(event.key)) event.preventDefault();
  });
}

startViewers();
