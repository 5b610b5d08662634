// The model's tree: rows are made when their module is opened, so that a large model costs nothing until then.

(function () {
  const table = document.getElementById("tree-table");
  if (!table) return;
  const nodes = report.tree, body = table.tBodies[0], PAGE = 200, FIRST_ROWS = 24;
  const depths = [], most = []; // of the nodes, and the most bytes of any node of a depth: a bar is a share of that
  nodes.forEach((node, i) => {
    depths[i] = i ? depths[node.parent] + 1 : 0;
    most[depths[i]] = Math.max(most[depths[i]] ?? 1, node.kept_bytes + node.freed_bytes);
  });
  const children = nodes.map(() => []);
  nodes.forEach((node, i) => { if (node.parent >= 0) children[node.parent].push(i); });
  const open = new Set();
  let focused = null;

  function path(i) {
    const parts = [];
    for (; nodes[i].parent >= 0; i = nodes[i].parent) parts.unshift(nodes[i].name);
    return parts.join(".") || nodes[0].name;
  }

  function share(i) {
    const node = nodes[i];
    const bar = element("span", { class: "share", "aria-hidden": "true" });
    for (const [kind, bytes] of [["kept", node.kept_bytes], ["again", node.freed_bytes]]) {
      if (!bytes) continue;
      const part = element("i", { class: kind });
      part.style.width = `${(100 * bytes) / most[depths[i]]}%`;
      bar.append(part);
    }
    return bar;
  }

  function cell(content, wide) { return element("td", { role: "gridcell", ...(wide && { class: "wide" }) }, content); }

  function row(i, depth, label) {
    const node = nodes[i], inside = children[i].length > 0 && !label;
    const made = element("tr", { role: "row", class: node.kind, tabindex: "-1", "data-node": i, "aria-level": depth + 1 });
    const name = element("span", { class: "name" });
    name.style.setProperty("--level", Math.min(depth, 24));
    name.append(element("span", { class: "twist", "aria-hidden": "true" }), element("span", {}, label ?? (node.name || "(no name)")));
    if (node.place) name.lastChild.append(element("span", { class: "place" }, node.place));
    const some = (bytes, key, form) => (bytes ? number(`tree.${i}.${key}`, form) : element("span", { class: "same" }, "–"));
    const again = node.kind === "op"
      ? (node.ops_again ? "yes" : "–")
      : element("span", {}, number(`tree.${i}.ops_again`, "count"), " of ", number(`tree.${i}.ops`, "count"));
    made.append(
      cell(name), cell(share(i), true),
      cell(some(node.kept_bytes, "kept_bytes", "bytes")), cell(some(node.freed_bytes, "freed_bytes", "bytes")),
      cell(again, true),
      cell(number(`tree.${i}.forward_seconds`, "seconds"), true),
      cell(some(node.backward_seconds, "backward_seconds", "seconds"), true),
      cell(some(node.again_seconds, "again_seconds", "seconds")),
    );
    if (inside) mark(made, i);
    return made;
  }

  function mark(tr, i) {
    tr.setAttribute("aria-expanded", open.has(i));
    tr.querySelector(".twist").textContent = open.has(i) ? "▾" : "▸";
  }

  function more(i, from, depth) {
    const left = children[i].length - from;
    const button = element("button", { type: "button" }, `Show ${shown(Math.min(PAGE, left), "count")} more of ${shown(left, "count")}`);
    const tr = element("tr", { role: "row", class: "more", tabindex: "-1", "aria-level": depth + 1 });
    tr.append(element("td", { role: "gridcell", colspan: "8" }, button));
    button.addEventListener("click", () => {
      const rows = batch(i, from, depth);
      tr.replaceWith(...rows);
      focus(rows[0]);
    });
    return tr;
  }

  function batch(i, from, depth) {
    const some = children[i].slice(from, from + PAGE);
    const rows = some.flatMap((child) => [row(child, depth), ...(open.has(child) ? batch(child, 0, depth + 1) : [])]);
    return from + some.length < children[i].length ? [...rows, more(i, from + some.length, depth)] : rows;
  }

  function redraw() {
    body.replaceChildren(row(0, 0), ...(open.has(0) ? batch(0, 0, 1) : []));
    focused = body.rows[0];
    focused.tabIndex = 0;
  }

  function toggle(tr, wanted) {
    const i = Number(tr.dataset.node), depth = Number(tr.getAttribute("aria-level"));
    if (!tr.hasAttribute("aria-expanded") || open.has(i) === wanted) return;
    if (open.has(i)) {
      open.delete(i);
      while (tr.nextSibling && Number(tr.nextSibling.getAttribute("aria-level")) > depth) tr.nextSibling.remove();
    } else {
      open.add(i);
      tr.after(...batch(i, 0, depth));
    }
    mark(tr, i);
  }

  function focus(tr) {
    if (!tr) return;
    if (focused) focused.tabIndex = -1;
    focused = tr;
    tr.tabIndex = 0;
    tr.focus();
  }

  body.addEventListener("click", (event) => {
    const tr = event.target.closest("tr");
    if (!tr || tr.className === "more") return;
    focus(tr);
    toggle(tr, !open.has(Number(tr.dataset.node)));
  });
  body.addEventListener("keydown", (event) => {
    const tr = event.target.closest("tr"), expanded = tr.getAttribute("aria-expanded");
    if (event.target !== tr || event.ctrlKey || event.altKey || event.metaKey) return;
    const up = () => {
      const depth = Number(tr.getAttribute("aria-level"));
      let above = tr.previousSibling;
      while (above && Number(above.getAttribute("aria-level")) >= depth) above = above.previousSibling;
      focus(above);
    };
    const keys = {
      ArrowDown: () => focus(tr.nextSibling),
      ArrowUp: () => focus(tr.previousSibling),
      ArrowRight: () => (expanded === "false" ? toggle(tr, true) : expanded === "true" && focus(tr.nextSibling)),
      ArrowLeft: () => (expanded === "true" ? toggle(tr, false) : up()),
      Home: () => focus(body.firstChild),
      End: () => focus(body.lastChild),
      Enter: () => (tr.className === "more" ? tr.querySelector("button").click() : toggle(tr, expanded === "false")),
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });

  // The levels that fit are open at first: as many as keep the table short, and one in any case.
  function openLevel(most) {
    const next = [...nodes.keys()].filter((i) => children[i].length && !open.has(i) && shownNow(i));
    const adds = next.reduce((sum, i) => sum + children[i].length, 0);
    if (!next.length || (most && size() + adds > most)) return false;
    next.forEach((i) => open.add(i));
    return true;
  }
  const shownNow = (i) => { for (i = nodes[i].parent; i >= 0; i = nodes[i].parent) if (!open.has(i)) return false; return true; };
  const size = () => 1 + [...open].filter(shownNow).reduce((sum, i) => sum + children[i].length, 0);

  const find = document.getElementById("find"), found = document.getElementById("found");
  find.addEventListener("input", () => {
    const wanted = find.value.trim().toLowerCase();
    found.textContent = "";
    if (!wanted) return redraw();
    const hits = [...nodes.keys()].filter((i) => path(i).toLowerCase().includes(wanted));
    const some = hits.slice(0, PAGE);
    found.textContent = hits.length > some.length
      ? `the first ${shown(some.length, "count")} of ${shown(hits.length, "count")}` : `${shown(hits.length, "count")} found`;
    body.replaceChildren(...some.map((i) => row(i, 0, path(i))));
    focused = body.firstChild;
    if (focused) focused.tabIndex = 0;
  });
  document.getElementById("open-more").addEventListener("click", () => { find.value = found.textContent = ""; openLevel(); redraw(); });
  document.getElementById("close-all").addEventListener("click", () => { find.value = found.textContent = ""; open.clear(); redraw(); });

  open.add(0);
  while (openLevel(FIRST_ROWS));
  redraw();
  table.hidden = document.getElementById("tree-tools").hidden = false;
})();
