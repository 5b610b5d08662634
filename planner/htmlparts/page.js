// The theme's button, exact values to point at, and the timeline's cursor.

function theme() {
  const button = document.getElementById("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const label = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  dark.addEventListener("change", label);
  label();
  button.hidden = false;
}

function exactValues() {
  document.addEventListener("mouseover", (event) => {
    const data = event.target.closest?.("data");
    if (!data || data.title || data.value === "") return;
    const value = Number(data.value);
    const unit = { bytes: " B", seconds: " s" }[data.dataset.form] ?? "";
    data.title = (Number.isInteger(value) ? value.toLocaleString("en-US") : String(value)) + unit;
  });
}

function timeline() {
  const chart = document.getElementById("timeline-chart");
  if (!chart) return;
  const t = report.timeline, count = t.first.length, readout = document.getElementById("readout");
  const plot = chart.querySelector(".plot"), cursor = chart.querySelector(".cursor");
  let at = -1;

  function phase(moment) {
    let end = 0;
    for (const part of t.phases) {
      end += part.moments;
      if (moment < end) return part.name;
    }
    return "";
  }

  function show(point) {
    at = Math.min(count - 1, Math.max(0, point));
    const first = t.first[at], end = (t.first[at + 1] ?? t.moments) - 1;
    cursor.hidden = false;
    cursor.style.left = `${(100 * (first + end + 1)) / 2 / t.moments}%`;
    const of = `of ${shown(t.moments, "count")}`;
    const where = first === end
      ? `Moment ${shown(first + 1, "count")} ${of}`
      : `Highest of moments ${shown(first + 1, "count")} to ${shown(end + 1, "count")} ${of}`;
    readout.replaceChildren(
      `${where}, ${phase(first)}: `, element("b", {}, t.during[at]), ". Plain step ",
      number(`timeline.plain_high_bytes.${at}`, "bytes"), ", planned step ",
      number(`timeline.planned_high_bytes.${at}`, "bytes"), ".",
    );
    chart.setAttribute("aria-valuenow", at);
    chart.setAttribute("aria-valuetext", readout.textContent);
  }

  function point(event) {
    const box = plot.getBoundingClientRect();
    const moment = Math.floor(((event.clientX - box.left) / box.width) * t.moments);
    let low = 0, high = count - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (t.first[middle] <= moment) low = middle; else high = middle - 1;
    }
    show(low);
  }

  chart.addEventListener("pointermove", point);
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.round(count / 20));
    const moves = {
      ArrowRight: at + 1, ArrowUp: at + 1, ArrowLeft: at - 1, ArrowDown: at - 1,
      PageUp: at + page, PageDown: at - page, Home: 0, End: count - 1,
    };
    if (!(event.key in moves) || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

theme();
exactValues();
timeline();
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => { d.open = true; }));
