"use strict";
// A link to a step opens the step, in browsers that do not do so by themselves.
function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target; part; part = part.parentElement) {
    if (part.tagName === "DETAILS") part.open = true;
  }
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", openTarget);
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
if (location.hash) openTarget();

// Two runs side by side; the steps carry what is compared.
{
  const section = document.getElementById("diff");
  const byId = (name) => document.getElementById(`diff-${name}`);
  const cell = (text, className) => {
    const made = document.createElement("td");
    made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  const badge = (step) => {
    const made = cell(step ? "" : "not in this run", step ? "" : "faint");
    if (step) {
      const link = document.createElement("a");
      link.className = step.querySelector("summary .badge").className;
      link.textContent = step.querySelector("summary .badge").textContent;
      link.href = `#${step.querySelector("div[id]").id}`;
      made.append(link);
    }
    return made;
  };
  const numbers = (before, after, name, unit) => {
    const [one, other] = [before, after].map((step) => (step && name in step.dataset ? Number(step.dataset[name]) : NaN));
    const change = one > 0 && other > 0 ? `${other >= one ? "+" : "\u2212"}${Math.abs(100 * (other / one - 1)).toFixed(1)} %` : "";
    return [one, other].map((value) => cell(value > 0 ? `${value.toPrecision(3)} ${unit}` : "", "n")).concat(cell(change, "n"));
  };
  const verdict = (step) => (step ? step.querySelector("summary .badge").textContent : "");

  const show = () => {
    const [before, after] = ["before", "after"].map((name) => {
      const found = new Map();
      for (const step of document.querySelectorAll("details.step")) {
        if (step.dataset.run === byId(name).value) found.set(step.dataset.key, step);
      }
      return found;
    });
    const keys = new Set([...before.keys(), ...after.keys()]);
    const rows = [];
    let changed = 0;
    for (const key of keys) {
      const [one, other] = [before.get(key), after.get(key)];
      const differs = verdict(one) !== verdict(other);
      changed += differs;
      if (!differs && byId("only").checked) continue;
      const row = document.createElement("tr");
      const summary = (other || one).querySelector("summary");
      row.append(cell(`${summary.querySelector("strong").textContent} ${summary.querySelector("small").textContent}`));
      row.append(badge(one), badge(other), ...numbers(one, other, "seconds", "s"), ...numbers(one, other, "ms", "ms"));
      rows.push(row);
    }
    byId("rows").replaceChildren(...rows);
    byId("sum").textContent = `${changed} of ${keys.size} steps changed their verdict`;
  };

  if (section) {
    const [before, after] = [byId("before"), byId("after")];
    after.replaceChildren(...Array.from(before.options, (option) => option.cloneNode(true)));
    // At first the two newest runs of one network, mode and text.
    const options = Array.from(before.options).sort((one, other) => (one.dataset.start < other.dataset.start ? 1 : -1));
    const newest = options.find((one) => options.some((other) => other !== one && other.dataset.group === one.dataset.group)) || options[0];
    const older = options.find((other) => other !== newest && other.dataset.group === newest.dataset.group) || options[1];
    before.value = older.value;
    after.value = newest.value;
    section.hidden = false;
    section.addEventListener("input", show);
    show();
  }
}
