"use strict";
// Numbers as htmlreport.shown writes them, and elements made without ever parsing a name as HTML.

const report = JSON.parse(document.getElementById("report").textContent);

function fixed(value, digits) {
  // toFixed rounds a tie up, Python to the even digit. Only a value that is a fraction of a power of two can be one.
  const scaled = value * 10 ** digits, whole = Math.floor(scaled);
  const tie = scaled - whole === 0.5 && Number.isInteger(value * 2 ** (digits + 1));
  return tie ? ((whole % 2 ? whole + 1 : whole) / 10 ** digits).toFixed(digits) : value.toFixed(digits);
}

function shown(value, form) {
  if (value === null) return "–";
  const size = Math.abs(value);
  if (form === "bytes") {
    for (const [name, unit] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (Number(fixed(size / unit, 2)) >= 1) return `${fixed(value / unit, 2)} ${name}`;
    }
    return `${value} B`;
  }
  if (form === "seconds") {
    if (size >= 1) return `${fixed(value, 2)} s`;
    return size >= 1e-3 || value === 0 ? `${fixed(value * 1e3, 1)} ms` : `${fixed(value * 1e6, 0)} µs`;
  }
  if (form === "count") return value.toLocaleString("en-US");
  if (form === "change" && value === 0) return "0%";
  const percent = fixed(value * 100, 1);
  return `${form === "change" && !percent.startsWith("-") ? "+" : ""}${percent}%`;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function number(path, form) {
  const value = path.split(".").reduce((found, part) => found[part], report);
  return element("data", { value: value ?? "", "data-json": path, "data-form": form }, shown(value, form));
}
