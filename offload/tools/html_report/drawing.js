// How a timeline looks: rows of events, memory below them, and the strip of all steps above.

const STRIP = 30, AXIS = 22, GAP = 10, MEMORY = 62;

class Drawing {
  constructor(canvas, run) {
    this.canvas = canvas;
    this.run = run;
    this.paper = canvas.getContext("2d");
    this.events = run.events.map(([kind, lane, name, unit, begin, time, size]) => ({
      kind, lane, name, unit, begin, end: begin + time, size,
    }));
    const ends = [...this.events.map((e) => e.end), ...run.steps.map((s) => s[2])];
    const begins = [...this.events.map((e) => e.begin), ...run.steps.map((s) => s[1])];
    this.low = begins.reduce((a, b) => Math.min(a, b), Infinity);
    this.high = ends.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!(this.high > this.low)) [this.low, this.high] = [0, 1];
    this.ended = this.high;
    [this.from, this.to] = this.bounded(...run.first);
    this.byUnit = false;
    this.picked = null;
  }

  bounded(from, to) {
    const whole = this.high - this.low;
    const span = clamp(to - from, Math.min(1, whole), whole);
    const begin = clamp(from, this.low, this.high - span);
    return [begin, begin + span];
  }

  // --- where things are --------------------------------------------------------------------

  place() {
    this.width = Math.max(this.canvas.clientWidth, 200);
    this.gutter = this.width < 560 ? 76 : 118;
    this.rows = this.byUnit ? this.unitRows() : this.resourceRows();
    let y = STRIP + AXIS;
    for (const row of this.rows) { row.top = y; y += row.high + row.gap; }
    this.bottom = y;
    this.panels = this.run.memory.map((tier) => {
      y += GAP;
      const panel = { tier, top: y + 14, high: MEMORY - 14 };
      y += MEMORY;
      return panel;
    });
    this.height = Math.ceil(y + 6);
    const scale = window.devicePixelRatio || 1;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.paper.setTransform(scale, 0, 0, scale, 0, 0);
    this.draw();
  }

  resourceRows() {
    const rows = [];
    for (const [label, kinds] of this.run.rows) {
      const numbers = kinds.map((kind) => this.run.kinds.indexOf(kind));
      const events = this.events.filter((e) => numbers.includes(e.kind));
      if (!events.length) continue;
      const lanes = 1 + events.reduce((most, e) => Math.max(most, e.lane), 0);
      const high = lanes === 1 ? 26 : clamp(lanes * 5, 26, 60);
      rows.push({ label, events, high, gap: 6, spot: (e) => [e.lane / lanes, 1 / lanes] });
    }
    return rows;
  }

  unitRows() {
    const names = [...this.run.units, "no unit"], last = names.length - 1;
    const held = names.map(() => []);
    for (const e of this.events) held[e.unit < 0 ? last : e.unit].push(e);
    const high = clamp(640 / names.length, 7, 24);
    // The thread that trains is the upper part of a row, what moves meanwhile the lower one.
    const moves = ["to-device", "to-host", "read", "write"].map((k) => this.run.kinds.indexOf(k));
    const spot = (e) => (moves.includes(e.kind) ? [0.66, 0.34] : [0, 0.62]);
    return names.map((label, n) => ({ label, events: held[n], high, gap: 3, spot }))
      .filter((row) => row.events.length);
  }

  // What is far outside is drawn not so far outside: a canvas does not take any number.
  x(us) {
    const share = (us - this.from) / (this.to - this.from);
    return this.gutter + clamp(share, -10, 10) * this.plot;
  }

  time(x) { return this.from + ((x - this.gutter) / this.plot) * (this.to - this.from); }
  get plot() { return this.width - this.gutter - 2; }

  // --- drawing -----------------------------------------------------------------------------

  colours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(`--${name}`).trim();
    const named = ["panel", "text", "soft", "line", "grid", "band", "budget", "accent"];
    const found = Object.fromEntries(named.map((name) => [name, get(name)]));
    found.kinds = this.run.kinds.map(get);
    found.bands = [0, 1, 2].map((n) => get(`memory-${n}`));
    found.hatch = this.hatch(get("waiting"), found.panel);
    return found;
  }

  hatch(colour, behind) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const paper = tile.getContext("2d");
    paper.fillStyle = colour;
    paper.fillRect(0, 0, 6, 6);
    paper.strokeStyle = behind;
    paper.lineWidth = 0.9;
    paper.beginPath();
    for (const n of [-6, 0, 6]) { paper.moveTo(n, 6); paper.lineTo(n + 6, 0); }
    paper.stroke();
    return this.paper.createPattern(tile, "repeat");
  }

  redraw() {
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => { this.asked = 0; this.draw(); });
  }

  draw() {
    const paper = this.paper, colour = this.colours();
    this.colour = colour;
    paper.fillStyle = colour.panel;
    paper.fillRect(0, 0, this.width, this.height);
    paper.font = "12px system-ui, sans-serif";
    paper.textBaseline = "middle";
    this.drawSteps(); this.drawAxis(); this.drawRows(); this.drawMemory(); this.drawStrip();
  }

  text(words, x, y, room, colour, align = "left") {
    const paper = this.paper;
    if (room < 14) return;
    let shown = words;
    for (let kept = words.length; kept && paper.measureText(shown).width > room;) {
      kept = Math.min(kept - 1, Math.ceil((kept * room) / paper.measureText(shown).width));
      shown = `${words.slice(0, kept)}…`;
    }
    paper.fillStyle = colour;
    paper.textAlign = align;
    paper.fillText(shown, x, y);
  }

  inPlot(act) {
    this.paper.save();
    this.paper.beginPath();
    this.paper.rect(this.gutter, 0, this.plot + 2, this.height);
    this.paper.clip();
    act();
    this.paper.restore();
  }

  drawSteps() {
    const { paper, colour } = this;
    this.inPlot(() => {
      for (const [name, begin, end] of this.run.steps) {
        if (end < this.from || begin > this.to) continue;
        const left = this.x(begin), right = this.x(end);
        paper.fillStyle = colour.band;
        paper.fillRect(left, STRIP, Math.max(right - left, 1), this.height);
        paper.fillStyle = colour.soft;
        paper.fillRect(right - 0.5, STRIP, 1, this.height);
      }
    });
  }

  drawAxis() {
    const { paper, colour } = this;
    const every = nice(this.to - this.from, Math.max(2, this.plot / 90));
    this.inPlot(() => {
      let n = Math.ceil(this.from / every);
      for (let left = 200; n * every <= this.to && left; n++, left--) {
        const x = this.x(n * every);
        paper.fillStyle = colour.grid;
        paper.fillRect(x, STRIP + AXIS - 4, 1, this.height);
        this.text(seconds(n * every), x + 3, STRIP + 9, 90, colour.soft);
      }
    });
    this.text("time", 0, STRIP + 9, this.gutter - 8, colour.soft);
  }

  drawRows() {
    const { paper, colour } = this;
    for (const row of this.rows) {
      if (row.high >= 11) {
        this.text(row.label, 0, row.top + row.high / 2, this.gutter - 8, colour.text);
      }
      this.inPlot(() => {
        const reached = new Map();
        for (const e of row.events) this.drawEvent(row, e, reached);
      });
    }
    if (this.picked) this.drawPicked();
    paper.textAlign = "left";
  }

  drawEvent(row, e, reached) {
    if (e.end < this.from || e.begin > this.to) return;
    const { paper, colour } = this;
    const left = Math.max(this.x(e.begin), this.gutter - 4);
    const right = Math.min(this.x(e.end), this.width + 4);
    const [at, share] = row.spot(e);
    const lane = e.lane + (at > 0.5 ? 1e3 : 0);
    const pixel = Math.floor(right);
    if (right - left < 1 && reached.get(lane) === pixel) return; // that one is painted already
    reached.set(lane, pixel);
    const top = row.top + at * row.high, wide = Math.max(right - left, 0.8);
    const high = Math.max(share * row.high - (share < 1 ? 0.6 : 0), 1);
    const isWait = this.run.kinds[e.kind] === "waiting" && wide > 3;
    paper.fillStyle = isWait ? colour.hatch : colour.kinds[e.kind];
    paper.fillRect(left, top, wide - (wide > 3 ? 0.6 : 0), high);
    if (wide > 16 && high >= 13 && !isWait) this.drawLabel(e, left, top + high / 2 + 0.5, wide);
  }

  drawLabel(e, left, y, wide) {
    const isUnit = e.unit >= 0 && !this.byUnit;
    const name = isUnit ? this.run.units[e.unit] : this.run.kinds[e.kind];
    const last = name.slice(name.lastIndexOf(".") + 1); // layers.12: 12 says it, too
    this.paper.font = "11px system-ui, sans-serif";
    const fits = (words) => this.paper.measureText(words).width <= wide - 6;
    const shown = fits(name) ? name : fits(last) ? last : wide > 60 ? name : "";
    if (shown) this.text(shown, left + 3, y, wide - 6, this.colour.panel);
    this.paper.font = "12px system-ui, sans-serif";
  }

  drawPicked() {
    const row = this.rows.find((r) => r.events.includes(this.picked));
    if (!row) return;
    const e = this.picked, [at, share] = row.spot(e);
    const left = this.x(e.begin), wide = Math.max(this.x(e.end) - left, 2);
    this.inPlot(() => {
      this.paper.strokeStyle = this.colour.text;
      this.paper.lineWidth = 2;
      this.paper.strokeRect(left - 1, row.top + at * row.high - 1, wide + 2, share * row.high + 2);
    });
  }

  drawMemory() {
    for (const panel of this.panels) {
      const { tier, top, high } = panel;
      const totals = tier.times.map((_, n) => tier.bands.reduce((sum, b) => sum + b.bytes[n], 0));
      const peak = totals.reduce((a, b) => Math.max(a, b), 1);
      const isNear = tier.budget !== null && tier.budget <= 4 * peak;
      const most = 1.08 * Math.max(peak, isNear ? tier.budget : 0);
      const y = (n) => top + high - (n / most) * high;
      this.text(tier.tier, 0, top + high / 2, this.gutter - 8, this.colour.text);
      this.inPlot(() => this.drawBands(tier, y));
      if (isNear) this.drawBudget(y(tier.budget));
      const budget = tier.budget === null ? "" : `, budget ${bytes(tier.budget)}`;
      const told = `in use, at most ${bytes(peak)}${budget}`;
      this.text(told, this.gutter + 3, top - 8, this.plot, this.colour.soft);
      this.drawKey(tier, this.gutter + 18 + this.paper.measureText(told).width, top - 8);
      this.paper.fillStyle = this.colour.line;
      this.paper.fillRect(this.gutter, top + high, this.plot, 1);
    }
  }

  drawKey(tier, x, y) {
    if (tier.bands.length < 2) return;
    for (const [number, band] of tier.bands.entries()) {
      const wide = this.paper.measureText(band.label).width;
      if (x + wide + 16 > this.width) return;
      this.paper.fillStyle = this.colour.bands[number % this.colour.bands.length];
      this.paper.fillRect(x, y - 5, 10, 10);
      this.text(band.label, x + 14, y, wide + 2, this.colour.soft);
      x += wide + 28;
    }
  }

  drawBands(tier, y) {
    const { paper, colour } = this, { times, bands } = tier;
    const low = times.map(() => 0), beyond = times.length - 1;
    const last = Math.max(times[beyond], this.ended); // nobody looked once more
    bands.forEach((band, number) => {
      const high = low.map((n, at) => n + band.bytes[at]);
      paper.fillStyle = colour.bands[number % colour.bands.length];
      paper.beginPath();
      times.forEach((t, at) => {
        paper.lineTo(this.x(t), y(high[at]));
        paper.lineTo(this.x(at < beyond ? times[at + 1] : last), y(high[at]));
      });
      for (let at = beyond; at >= 0; at--) {
        paper.lineTo(this.x(at < beyond ? times[at + 1] : last), y(low[at]));
        paper.lineTo(this.x(times[at]), y(low[at]));
      }
      paper.fill();
      high.forEach((n, at) => { low[at] = n; });
    });
  }

  drawBudget(y) {
    const { paper, colour } = this;
    paper.save();
    paper.strokeStyle = colour.budget;
    paper.setLineDash([6, 4]);
    paper.lineWidth = 1.5;
    paper.beginPath();
    paper.moveTo(this.gutter, y);
    paper.lineTo(this.width, y);
    paper.stroke();
    paper.restore();
  }

  drawStrip() {
    const { paper, colour } = this, high = STRIP - 6, whole = this.high - this.low;
    const x = (us) => this.gutter + ((us - this.low) / whole) * this.plot;
    paper.fillStyle = colour.panel;
    paper.fillRect(0, 0, this.width, STRIP);
    paper.fillStyle = colour.band;
    paper.fillRect(this.gutter, 0, this.plot, high);
    for (const [name, begin, end] of this.run.steps) {
      const left = x(begin), wide = Math.max(x(end) - left, 1);
      paper.fillStyle = colour.kinds[this.run.kinds.indexOf("update")];
      paper.fillRect(left, high / 2, wide, high / 2);
      const number = name.replace(/^step /, "");
      if (this.run.steps.length < this.plot / 28) {
        this.text(number, left + wide / 2, high / 4 + 1, 40, colour.soft, "center");
      }
    }
    this.text("steps", 0, high / 2, this.gutter - 8, colour.soft);
    const left = x(this.from), wide = Math.max(x(this.to) - left, 3);
    paper.strokeStyle = colour.accent;
    paper.lineWidth = 2;
    paper.strokeRect(left + 1, 1, Math.max(wide - 2, 2), high - 1);
  }
}
