"use strict";

// Pictures of a slice, decoded from the page's inert blocks when they are looked at.

const HOLE = [46, 110, 168];
const OUTLINE = [255, 176, 0];
const REMEMBERED = 12; // slices whose pixels are kept

const colours = (() => {
  const text = atob(document.getElementById("colours").textContent);
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
})();

/** Pixels (red, green, blue, alpha) of an image file in base64; of none, null. */
async function pixelsOf(base64, type) {
  if (!base64) return null;
  const image = new Image();
  image.src = `data:image/${type};base64,${base64}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = image.naturalWidth;
  canvas.height = image.naturalHeight;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

async function allPixels(files) {
  const modes = Object.keys(files || {});
  const images = await Promise.all(modes.map((mode) => pixelsOf(files[mode], "webp")));
  return new Map(modes.map((mode, place) => [mode, images[place]]));
}

function maskOf(key) {
  return pixelsOf(key && document.getElementById(`mask-${key}`).textContent, "png");
}

/** The blocks of one series. `numbers`: its slices that have pictures, in order. */
class Pictures {
  constructor(series) {
    const blocks = document.querySelectorAll(`script.picture[data-series="${series}"]`);
    this.blocks = new Map([...blocks].map((block) => [Number(block.dataset.number), block]));
    this.numbers = [...this.blocks.keys()].sort((a, b) => a - b);
    this.decoded = new Map();
  }

  /** A promise of the decoded pictures of a slice. */
  slice(number) {
    if (!this.decoded.has(number)) {
      if (this.decoded.size >= REMEMBERED) this.decoded.delete(this.decoded.keys().next().value);
      this.decoded.set(number, this.decode(JSON.parse(this.blocks.get(number).textContent)));
    }
    return this.decoded.get(number);
  }

  async decode(stored) {
    const [original, hole, unknown, restored, error, uncertainty, low, high, image] = await Promise.all([
      pixelsOf(stored.original, "webp"), maskOf(stored.hole), maskOf(stored.unknown), allPixels(stored.restored),
      allPixels(stored.error), allPixels(stored.uncertainty), allPixels(stored.low), allPixels(stored.high),
      allPixels(stored.images),
    ]);
    return { ...stored, original, hole, unknown, restored, error, uncertainty, low, high, image };
  }
}

/** Whether a decoded slice has a picture of this kind and preset. */
function hasPicture(slice, kind, mode) {
  if (kind === "original") return slice.original !== null;
  if (kind === "masked") return slice.hole !== null;
  return slice[kind].has(mode);
}

/** Pixels of one kind of picture, for a canvas. */
function composed(slice, kind, mode) {
  if (kind === "image") return slice.image.get(mode);
  if (kind === "original") return replaced(slice.original, slice.unknown, () => HOLE);
  if (kind === "masked") return replaced(slice.original, slice.hole, () => HOLE);
  const { data } = slice[kind].get(mode);
  if (["restored", "low", "high"].includes(kind)) return replaced(slice.original, slice.hole, (at) => data.subarray(at, at + 4));
  return coloured(slice[kind].get(mode));
}

/** A copy with other pixels under the mask. pixel: by its place. */
function replaced(image, mask, pixel) {
  const result = new ImageData(image.data.slice(), image.width, image.height);
  for (let at = 0; mask && at < result.data.length; at += 4) {
    if (mask.data[at] > 127) result.data.set(pixel(at), at);
  }
  return result;
}

/** A copy with the known pixels beside the mask in the colour of its outline. */
function outlined(image, mask) {
  const { width, height } = image, result = new ImageData(image.data.slice(), width, height);
  const masked = (x, y) => x >= 0 && x < width && y >= 0 && y < height && mask.data[4 * (y * width + x)] > 127;
  for (let at = 0; mask && at < width * height; at += 1) {
    const [x, y] = [at % width, Math.floor(at / width)];
    const beside = masked(x - 1, y) || masked(x + 1, y) || masked(x, y - 1) || masked(x, y + 1);
    if (beside && !masked(x, y)) result.data.set(OUTLINE, 4 * at);
  }
  return result;
}

/** Grey values in the colours of the scale. */
function coloured(grey) {
  const result = new ImageData(grey.width, grey.height);
  for (let at = 0; at < result.data.length; at += 4) {
    const colour = 3 * grey.data[at];
    result.data.set(colours.subarray(colour, colour + 3), at);
    result.data[at + 3] = 255;
  }
  return result;
}

function show(canvas, image) {
  if (canvas.width !== image.width) canvas.width = image.width;
  if (canvas.height !== image.height) canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
}
