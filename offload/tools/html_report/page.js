// What one can do with a timeline, and how the page begins. It asks nobody for anything and stores
// nothing.

const NEAR = 3; // pixels beside an event that still mean it

class Timeline extends Drawing {
  constructor(canvas, run) {
    super(canvas, run);
    this.detail = canvas.parentElement.querySelector(".detail");
    this.pointers = new Map(); // fingers and mice that are down
    this.partner = null;
    this.listen();
    this.place();
  }

  // --- moving ------------------------------------------------------------------------------

  show(from, to, isLead = true) {
    [this.from, this.to] = this.bounded(from, to);
    this.redraw();
    const both = document.getElementById("together");
    if (isLead && this.partner && both && both.checked) {
      const offset = this.from - this.run.first[0], begin = this.partner.run.first[0] + offset;
      this.partner.show(begin, begin + (this.to - this.from), false);
    }
  }

  zoom(factor, us = (this.from + this.to) / 2) {
    const whole = this.high - this.low;
    const span = clamp((this.to - this.from) * factor, Math.min(1, whole), whole);
    const share = (us - this.from) / (this.to - this.from);
    this.show(us - share * span, us - share * span + span);
  }

  move(share) {
    const by = share * (this.to - this.from);
    this.show(this.from + by, this.to + by);
  }

  iteration(by) {
    const ends = this.run.steps.map((s) => s[2]).sort((a, b) => a - b);
    const spans = [[this.low, ends[0]], ...ends.map((end, n) => [end, ends[n + 1] ?? this.high])]
      .filter(([a, b]) => b > a);
    const middle = (this.from + this.to) / 2;
    const now = Math.max(0, spans.findIndex(([a, b]) => middle >= a && middle < b));
    this.show(...spans[clamp(now + by, 0, spans.length - 1)]);
  }

  // --- asking ------------------------------------------------------------------------------

  eventAt(x, y) {
    const row = this.rows.find((r) => y >= r.top - 2 && y <= r.top + r.high + 2);
    if (!row || x < this.gutter) return null;
    let best = null, near = Infinity;
    for (const e of row.events) {
      const left = this.x(e.begin), right = this.x(e.end);
      const [at, share] = row.spot(e);
      const top = row.top + at * row.high, low = top + share * row.high;
      const aside = Math.max(left - x, x - right, 0) + Math.max(top - y, y - low, 0);
      const far = aside + (right - left) * 1e-6;
      if (aside <= NEAR && far < near) [best, near] = [e, far];
    }
    return best;
  }

  tell(e) {
    const parts = [this.run.names[e.name], this.run.kinds[e.kind].replace("-", " ")];
    if (e.unit >= 0) parts.push(`unit ${this.run.units[e.unit]}`);
    parts.push(seconds(e.end - e.begin));
    if (e.size) parts.push(bytes(e.size), rate(e.size, e.end - e.begin));
    parts.push(`at ${seconds(e.begin)}`);
    return parts.filter(Boolean).join(" · ");
  }

  tellMemory(x, y) {
    const panel = this.panels.find((p) => y >= p.top - 14 && y <= p.top + p.high);
    if (!panel || x < this.gutter) return "";
    const us = this.time(x), { tier } = panel;
    let at = tier.times.findIndex((t) => t > us) - 1;
    if (at < -1) at = tier.times.length - 1;
    at = Math.max(at, 0);
    const each = tier.bands.map((b) => `${b.label} ${bytes(b.bytes[at])}`);
    const total = tier.bands.reduce((sum, b) => sum + b.bytes[at], 0);
    const limit = tier.budget === null ? "" : ` of ${bytes(tier.budget)}`;
    return `${tier.tier} at ${seconds(us)}: ${bytes(total)}${limit} (${each.join(", ")})`;
  }

  pick(e) {
    this.picked = e;
    if (e) this.detail.textContent = this.tell(e);
    this.redraw();
  }

  pickNext(by) {
    const order = this.events, now = order.indexOf(this.picked);
    const start = order.findIndex((e) => e.end >= this.from);
    const next = order[now < 0 ? Math.max(start, 0) : clamp(now + by, 0, order.length - 1)];
    if (!next) return;
    if (next.begin < this.from || next.end > this.to) {
      const span = Math.max(this.to - this.from, 1.2 * (next.end - next.begin));
      this.show(next.begin - span / 4, next.begin - span / 4 + span);
    }
    this.pick(next);
  }

  // --- hands -------------------------------------------------------------------------------

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("wheel", (e) => this.onWheel(e), { passive: false });
    canvas.addEventListener("pointerdown", (e) => this.onDown(e));
    canvas.addEventListener("pointermove", (e) => this.onMove(e));
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (e) => this.onUp(e));
    }
    canvas.addEventListener("dblclick", (e) => this.zoom(0.4, this.time(e.offsetX)));
    canvas.addEventListener("keydown", (e) => this.onKey(e));
    canvas.parentElement.querySelector(".toolbar").addEventListener("click", (e) => {
      const button = e.target.closest("button");
      if (button) this.do(button.dataset.do, button);
    });
    new ResizeObserver(() => this.place()).observe(canvas.parentElement);
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.redraw());
    // Paper is white: what was painted for the night is painted again.
    const root = document.documentElement;
    window.addEventListener("beforeprint", () => { root.dataset.printing = ""; this.draw(); });
    window.addEventListener("afterprint", () => { delete root.dataset.printing; this.draw(); });
  }

  do(what, button) {
    const acts = {
      in: () => this.zoom(0.5), out: () => this.zoom(2), earlier: () => this.move(-0.5),
      later: () => this.move(0.5), previous: () => this.iteration(-1),
      next: () => this.iteration(1), all: () => this.show(this.low, this.high),
      units: () => {
        this.byUnit = !this.byUnit;
        button.setAttribute("aria-pressed", String(this.byUnit));
        this.place();
      },
    };
    if (Object.hasOwn(acts, what)) acts[what]();
  }

  onKey(e) {
    const acts = {
      ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2),
      "+": () => this.zoom(0.6), "=": () => this.zoom(0.6), "-": () => this.zoom(1.6),
      0: () => this.show(this.low, this.high), Home: () => this.show(...this.run.first),
      ".": () => this.pickNext(1), ",": () => this.pickNext(-1), Escape: () => this.pick(null),
    };
    if (e.ctrlKey || e.metaKey || e.altKey || !Object.hasOwn(acts, e.key)) return;
    e.preventDefault();
    acts[e.key]();
  }

  onWheel(e) {
    if (e.ctrlKey || e.metaKey) {
      e.preventDefault();
      this.zoom(Math.exp(clamp(e.deltaY, -80, 80) * 0.01), this.time(e.offsetX));
    } else if (Math.abs(e.deltaX) > Math.abs(e.deltaY) || e.shiftKey) {
      e.preventDefault();
      this.move((e.deltaX || e.deltaY) / this.plot);
    }
  }

  onDown(e) {
    this.canvas.setPointerCapture(e.pointerId);
    this.pointers.set(e.pointerId, { x: e.offsetX, y: e.offsetY, startX: e.offsetX, moved: false });
    if (e.offsetY < STRIP) this.jump(e.offsetX);
  }

  jump(x) {
    const us = this.low + ((x - this.gutter) / this.plot) * (this.high - this.low);
    const half = (this.to - this.from) / 2;
    this.show(us - half, us + half);
  }

  onMove(e) {
    const held = this.pointers.get(e.pointerId);
    if (!held) {
      if (e.pointerType === "mouse") this.hover(e.offsetX, e.offsetY);
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== e.pointerId).map(([, p]) => p);
    if (others.length) {
      const before = Math.abs(held.x - others[0].x), after = Math.abs(e.offsetX - others[0].x);
      const middle = (e.offsetX + others[0].x) / 2;
      if (before > 8 && after > 8) this.zoom(before / after, this.time(middle));
    } else if (held.y < STRIP) {
      this.jump(e.offsetX);
    } else {
      this.move((held.x - e.offsetX) / this.plot);
    }
    held.moved = held.moved || Math.abs(e.offsetX - held.startX) > 4;
    held.x = e.offsetX;
  }

  onUp(e) {
    const held = this.pointers.get(e.pointerId);
    this.pointers.delete(e.pointerId);
    if (held && !held.moved && e.type === "pointerup") this.hover(e.offsetX, e.offsetY);
  }

  hover(x, y) {
    const found = this.eventAt(x, y);
    if (found) {
      if (found !== this.picked) this.pick(found);
    } else {
      const told = this.tellMemory(x, y);
      if (told) this.detail.textContent = told;
      if (this.picked) this.pick(null);
    }
  }
}

const start = () => {
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  for (const box of document.querySelectorAll(".timeline, .needs-script")) box.hidden = false;
  const lines = [...document.querySelectorAll("canvas[data-run]")].map(
    (canvas) => new Timeline(canvas, runs[Number(canvas.dataset.run)]));
  if (lines.length === 2) {
    [lines[0].partner, lines[1].partner] = [lines[1], lines[0]];
    const longest = Math.max(...lines.map((line) => line.to - line.from));
    // Room behind the shorter one, so that both can begin at the same place.
    for (const line of lines) line.high = Math.max(line.high, line.run.first[0] + longest);
    lines[0].show(lines[0].run.first[0], lines[0].run.first[0] + longest);
  }
  return lines;
};

const problems = [];
window.addEventListener("error", (e) => problems.push(String(e.message)));
document.addEventListener("securitypolicyviolation", (e) => problems.push(e.violatedDirective));

// What a test asks: was everything drawn, did anything fail, was anybody asked for anything, is the
// page wider than the window?
const mark = document.documentElement.dataset;
try {
  const lines = start();
  mark.drawn = String(lines.reduce((sum, line) => sum + line.events.length, 0));
} catch (error) {
  problems.push(String(error));
  throw error;
} finally {
  requestAnimationFrame(() => {
    mark.requests = String(performance.getEntriesByType("resource").length);
    mark.problems = problems.join("; ");
    const { scrollWidth, clientWidth } = document.documentElement;
    mark.beyond = String(scrollWidth - clientWidth);
    mark.page = problems.length ? "broken" : "ready";
  });
}
