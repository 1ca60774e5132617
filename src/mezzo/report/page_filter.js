"use strict";
// Elements with data-item are shown if they have the chosen fields (data-network ...) and all words of the search.
// Elements with data-parent hide when none of their items is shown.
{
  const form = document.getElementById("filter");
  const items = Array.from(document.querySelectorAll("[data-item]"));
  const search = document.getElementById("search");
  const selects = Array.from(form.querySelectorAll("select[data-field]"));
  const shown = document.getElementById("shown");
  const counted = items.filter((item) => item.dataset.item === "main");
  const texts = new Map();
  let current = null;

  const textOf = (item) => {
    if (!texts.has(item)) texts.set(item, item.textContent.toLowerCase());
    return texts.get(item);
  };
  const has = (item, select) => !select.value || !(select.dataset.field in item.dataset)
    || item.dataset[select.dataset.field].split("\n").includes(select.value);

  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const item of items) {
      const visible = selects.every((select) => has(item, select)) && words.every((word) => textOf(item).includes(word));
      item.hidden = !visible;
      if (visible && item.dataset.item === "main") count += 1;
    }
    for (const parent of document.querySelectorAll("[data-parent]")) {
      parent.hidden = !parent.querySelector("[data-item]:not([hidden])");
    }
    shown.textContent = `${count} of ${counted.length} ${shown.dataset.what} shown`;
  };

  const move = (by) => {
    const visible = counted.filter((item) => !item.hidden);
    if (!visible.length) return;
    const at = visible.indexOf(current);
    current = visible[at < 0 ? (by > 0 ? 0 : visible.length - 1) : Math.min(Math.max(at + by, 0), visible.length - 1)];
    const target = current.querySelector("summary, a, button") || current;
    if (target === current) current.tabIndex = -1;
    target.focus({ preventScroll: true });
    current.scrollIntoView({ block: "nearest" });
  };

  const clear = () => {
    for (const field of [search, ...selects]) field.value = "";
    apply();
  };

  const failures = () => {
    const verdict = selects.find((select) => select.dataset.field === "verdict");
    if (!verdict) return;
    verdict.value = verdict.value === "failed" ? "" : "failed";
    apply();
  };

  form.hidden = false;
  form.addEventListener("input", apply);
  document.getElementById("clear").addEventListener("click", clear);
  // A link to an item that the filter hides shows it.
  addEventListener("hashchange", () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const item = target && target.closest("[data-item]");
    if (item && item.hidden) clear();
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") {
      clear();
      document.activeElement.blur();
      return;
    }
    if (event.target.closest("input, select, textarea")) return;
    const action = { "/": () => search.focus(), j: () => move(1), k: () => move(-1), f: failures }[event.key];
    if (action) {
      event.preventDefault();
      action();
    }
  });
  apply();
}
