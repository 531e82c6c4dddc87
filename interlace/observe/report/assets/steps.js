// Lets a reader choose the step on the devices and in the lanes. A report contains the figures of some steps; the script
// of a live page requests those of any step instead (Steps.onChoose).
"use strict";
const Steps = (() => {
  const NAMES = ["middle", "slowest", "first", "last"];
  const first = new Map(); // place of a figure -> its HTML at first
  const page = { choice: "", onChoose: showStored, fill };

  // "1-3,9" -> ["1", "2", "3", "9"]
  function listNumbers(ranges) {
    return ranges.split(",").flatMap((part) => {
      const [low, high = low] = part.split("-").map(Number);
      return Array.from({ length: high - low + 1 }, (_, at) => String(low + at));
    });
  }

  // Adds the missing options, so that a list that a reader has opened stays open while a run grows.
  function fillMenu(menu) {
    page.choice ||= menu.dataset.chosen;
    if (!menu.options.length) for (const name of NAMES) menu.add(new Option(`${name} step`, name));
    const known = new Set([...menu.options].map((option) => option.value));
    for (const number of listNumbers(menu.dataset.steps)) if (!known.has(number)) menu.add(new Option(number, number));
    if (![...menu.options].some((option) => option.value === page.choice)) menu.add(new Option(page.choice, page.choice));
    menu.value = page.choice;
    menu.closest(".step-menu").hidden = false;
    menu.onchange = () => choose(menu.value);
  }

  function fill() {
    document.querySelectorAll("select[data-steps]").forEach(fillMenu);
  }

  function choose(choice) {
    page.choice = choice;
    for (const menu of document.querySelectorAll("select[data-steps]")) menu.value = choice;
    page.onChoose(choice);
  }

  // A report shows one step at first, and has the figures of others in templates.
  function showStored(choice) {
    const chosen = document.querySelector("select[data-steps]").dataset.chosen;
    for (const section of ["timeline", "lanes"]) {
      for (const place of document.querySelectorAll(`#${section} [data-run]`)) {
        if (!first.has(place)) first.set(place, place.innerHTML);
        const [step, shown] = [choice, chosen].map((one) => place.dataset[one] ?? one);
        const stored = document.querySelector(`template[data-section=${section}][data-run="${place.dataset.run}"][data-step="${step}"]`);
        const open = [...place.querySelectorAll("details[open][data-key]")].map((one) => one.dataset.key);
        if (step === shown) place.innerHTML = first.get(place);
        else if (stored) place.replaceChildren(stored.content.cloneNode(true));
        else place.textContent = `This file does not contain step ${step} of this run.`;
        for (const one of place.querySelectorAll("details[data-key]")) one.open = open.includes(one.dataset.key);
      }
    }
  }

  fill();
  return page;
})();
