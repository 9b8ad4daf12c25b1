/* Draws the charts from the JSON beside them, and makes them usable by mouse, keyboard and screen reader.
   It computes no figure: texts and coordinates come as they are shown. */
"use strict";
(() => {
  const PRINT_WIDTH = 680;
  const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: false };
  const root = document.documentElement;
  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const charts = [];

  function colored(trace) {
    const paint = color(/^p\d/.test(trace.meta.series) ? trace.meta.series : `s${trace.meta.series}`);
    const marker = { ...trace.marker, color: paint, line: { color: trace.type === "bar" ? color("card") : paint, width: 1 } };
    if (marker.pattern) marker.pattern = { ...marker.pattern, fgcolor: color("card"), bgcolor: paint, fillmode: "overlay" };
    return { ...trace, marker, line: { ...trace.line, color: paint } };
  }

  function laidOut(layout, width) {
    const axis = { gridcolor: color("grid"), zerolinecolor: color("soft"), linecolor: color("soft"), tickcolor: color("soft") };
    return {
      ...layout,
      xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
      width, autosize: true, dragmode: false, hovermode: "closest", showlegend: false,
      margin: { l: 12, r: 14, t: 10, b: 12 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: color("ink") },
      hoverlabel: { font: { size: 13 } },
    };
  }

  class Chart {
    constructor(figure) {
      this.plot = figure.querySelector(".plot");
      this.spoken = figure.querySelector(".spoken");
      this.spec = JSON.parse(document.getElementById(this.plot.dataset.figure).textContent);
      this.select = figure.querySelector("[data-choice]");
      this.hidden = new Set();
      this.at = null;
      this.plot.replaceChildren();
      this.select?.addEventListener("change", () => this.draw());
      for (const button of figure.querySelectorAll(".legend button")) {
        button.addEventListener("click", () => this.toggle(button));
      }
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.draw();
      this.plot.on("plotly_hover", ({ points: [point] }) => this.say(point.data.hovertext[point.pointNumber]));
    }

    shown() {
      const chosen = this.select ? new Set(this.spec.choices[this.select.value]) : null;
      return this.spec.traces.filter((trace, place) => (!chosen || chosen.has(place)) && !this.hidden.has(trace.name));
    }

    draw(width) {
      this.at = null;
      const traces = this.shown().map(colored);
      const own = this.select ? this.spec.axes[this.select.value] : null;
      const layout = laidOut({ ...this.spec.layout, ...own }, width);
      Plotly.react(this.plot, traces, layout, config);
      this.plot.firstElementChild?.setAttribute("aria-hidden", "true");
    }

    toggle(button) {
      const name = button.dataset.name;
      const show = this.hidden.delete(name);
      if (!show) this.hidden.add(name);
      button.setAttribute("aria-pressed", String(show));
      this.draw();
    }

    key(event) {
      const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      const data = this.plot.data.map((trace, place) => ({ trace, place })).filter(({ trace }) => trace.hovertext.length);
      if (event.key === "Escape") { Plotly.Fx.unhover(this.plot); this.say(""); return; }
      if (!move || !data.length) return;
      event.preventDefault();
      const [line, point] = this.at ?? [0, -1];
      const next = this.at ? (line + move[0] + data.length) % data.length : 0;
      const last = data[next].trace.hovertext.length - 1;
      this.at = [next, Math.min(Math.max(this.at ? point + move[1] : 0, 0), last)];
      Plotly.Fx.hover(this.plot, [{ curveNumber: data[next].place, pointNumber: this.at[1] }]);
      this.say(data[next].trace.hovertext[this.at[1]]);
    }

    say(text) { this.spoken.textContent = text; }
  }

  function theme() {
    const button = document.getElementById("theme");
    const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    const label = () => { button.textContent = dark() ? "Light colours" : "Dark colours"; };
    const redraw = () => { label(); charts.forEach((chart) => chart.draw()); };
    button.hidden = false;
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; redraw(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    label();
  }

  function printing() {
    let before;
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      root.dataset.theme = "light";
      charts.forEach((chart) => chart.draw(PRINT_WIDTH));
    });
    addEventListener("afterprint", () => {
      if (before) root.dataset.theme = before; else delete root.dataset.theme;
      charts.forEach((chart) => chart.draw());
    });
  }

  function saving() {
    for (const button of document.querySelectorAll("[data-save]")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const text = document.getElementById(button.dataset.save).textContent;
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
        link.download = `${button.dataset.save}.json`;
        link.click();
        URL.revokeObjectURL(link.href);
      });
    }
  }

  for (const figure of document.querySelectorAll("figure.chart")) charts.push(new Chart(figure));
  theme();
  printing();
  saving();
  root.dataset.drawn = "true";
})();
