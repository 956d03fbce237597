// Numbers for people. The files of this folder are one script: strict, on its own, after the data.
"use strict";
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const seconds = (us) => {
  const size = Math.abs(us);
  if (size >= 1e6) return `${+(us / 1e6).toPrecision(4)} s`;
  return size >= 1e3 ? `${+(us / 1e3).toPrecision(3)} ms` : `${+us.toPrecision(3)} µs`;
};
const bytes = (n) => {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; Math.abs(n) >= 1024 && at < 4; at++) n /= 1024;
  return `${+n.toPrecision(4)} ${names[at]}`;
};
const rate = (n, us) => (us > 0 ? `${+(n / us / 1e3).toPrecision(3)} GB/s` : "");
const nice = (span, most) => {
  const raw = Math.max(span / most, 1e-3), ten = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((n) => n * ten).find((n) => n >= raw) || 10 * ten;
};
