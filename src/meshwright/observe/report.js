// Pointer answers for the charts, and the light/dark switch. Everything it needs is in the page.
(function () {
  "use strict";
  var root = document.documentElement, tip = document.getElementById("tip");

  function stored(value) {
    try {
      if (value === undefined) { return localStorage.getItem("meshwright-theme"); }
      localStorage.setItem("meshwright-theme", value);
    } catch (error) { /* private windows and file pages may refuse storage: the switch still works for this view */ }
    return null;
  }
  if (stored()) { root.dataset.theme = stored(); }
  document.getElementById("theme").addEventListener("click", function () {
    var dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored(root.dataset.theme);
  });

  // Paper has no pointer to open anything with.
  addEventListener("beforeprint", function () {
    document.querySelectorAll("details").forEach(function (part) { part.open = true; });
  });

  function nearest(places, x) {
    var low = 0, high = places.length - 1;
    while (high - low > 1) {
      var middle = (low + high) >> 1;
      if (places[middle] < x) { low = middle; } else { high = middle; }
    }
    return x - places[low] < places[high] - x ? low : high;
  }

  function line(name, value, colour) {
    var row = document.createElement("div"), mark = document.createElement("i"), text = document.createElement("span"), bold = document.createElement("b");
    mark.className = colour ? "swatch c" + colour : "swatch dash";
    text.textContent = name;
    bold.textContent = value;
    row.append(mark, text, bold);
    return row;
  }

  function dots(hover, data, at) {
    hover.querySelectorAll("circle").forEach(function (dot) { dot.remove(); });
    data.rows.forEach(function (row) {
      if (!row.y || row.y[at] === null) { return; }
      var dot = document.createElementNS(hover.namespaceURI, "circle");
      dot.setAttribute("cx", data.x[at]);
      dot.setAttribute("cy", row.y[at]);
      dot.setAttribute("r", 4);
      dot.setAttribute("class", "c" + row.colour);
      hover.append(dot);
    });
  }

  function place(event) {
    var box = tip.getBoundingClientRect(), x = event.clientX + 16, y = event.clientY - box.height - 12;
    if (x + box.width > innerWidth - 8) { x = event.clientX - box.width - 16; }
    tip.style.left = Math.max(x, 8) + "px";
    tip.style.top = (y < 8 ? event.clientY + 16 : y) + "px";
  }

  document.querySelectorAll("svg[data-chart]").forEach(function (svg) {
    var data = JSON.parse(svg.dataset.chart), hover = svg.querySelector(".hover"), cross = svg.querySelector(".cross");
    if (!data.step.length) { return; }
    svg.addEventListener("pointermove", function (event) {
      var box = svg.getBoundingClientRect(), at = nearest(data.x, (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width);
      cross.setAttribute("x1", data.x[at]);
      cross.setAttribute("x2", data.x[at]);
      dots(hover, data, at);
      var title = document.createElement("strong");
      title.textContent = "step " + data.step[at];
      tip.replaceChildren(title);
      data.rows.forEach(function (row) {
        var text = typeof row.text === "string" ? row.text : row.text[at];
        if (text !== null) { tip.append(line(row.name, text, row.colour)); }
      });
      hover.classList.add("on");
      tip.classList.add("on");
      place(event);
    });
    svg.addEventListener("pointerleave", function () {
      hover.classList.remove("on");
      tip.classList.remove("on");
    });
  });
})();
