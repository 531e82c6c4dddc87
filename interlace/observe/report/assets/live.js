// Keeps a live page up to date: it requests the content again and again, and replaces the sections that changed.
"use strict";
{
  const EVERY_MS = 2000;
  const shown = {}; // name of a section -> its HTML
  const connection = document.getElementById("connection");
  let tag = "", timer = 0, asked = 0;

  function tell(text, isLost) {
    if (connection.textContent !== text) connection.textContent = text;
    connection.classList.toggle("lost", isLost);
  }

  // Names a control, so that its successor in a replaced section can be found. The text of a summary may change.
  function nameControl(one) {
    const text = (one.tagName === "SUMMARY" && one.parentElement.dataset.key) || (one.getAttribute("aria-label") ?? one.textContent);
    return `${one.tagName} ${one.id} ${text} ${one.closest("figure")?.querySelector("figcaption")?.textContent}`;
  }

  // Shows the new content of a section. The menu of its step stays, because a reader may have opened it.
  function update(section, html) {
    const fresh = document.createElement("template");
    fresh.innerHTML = html;
    const [menu, next] = [section, fresh.content].map((place) => place.querySelector("select[data-steps]"));
    if (!menu || !next) return replace(section, html);
    menu.dataset.steps = next.dataset.steps;
    replace(section.querySelector("[data-figures]"), fresh.content.querySelector("[data-figures]").innerHTML);
  }

  // Replaces the content of a section or of a part; opened details, inputs and the focus stay as they were.
  function replace(section, html) {
    const open = new Set([...section.querySelectorAll("details[open][data-key]")].map((one) => one.dataset.key));
    const known = new Set([...section.querySelectorAll("details[data-key]")].map((one) => one.dataset.key));
    const smoothing = section.querySelector("#smoothing")?.value, bands = section.querySelector("#bands")?.checked;
    const focused = section.contains(document.activeElement) ? nameControl(document.activeElement) : null;
    section.innerHTML = html;
    section.hidden = !html;
    for (const one of section.querySelectorAll("details[data-key]")) {
      if (known.has(one.dataset.key)) one.open = open.has(one.dataset.key);
    }
    const controls = focused ? [...section.querySelectorAll("[tabindex], a, button, input, select, summary, video")] : [];
    controls.find((one) => nameControl(one) === focused)?.focus({ preventScroll: true });
    if (smoothing != null && section.querySelector("#smoothing")) {
      section.querySelector("#smoothing").value = smoothing;
      section.querySelector("#smoothing-value").value = Number(smoothing).toFixed(2);
      section.querySelector("#bands").checked = bands;
    }
  }

  function show(content) {
    document.title = `interlace: ${content.title}`;
    for (const [name, html] of Object.entries(content.sections)) {
      if (shown[name] === html) continue;
      shown[name] = html;
      update(document.getElementById(name), html);
    }
    Steps.fill();
    Charts.show(content.charts);
    tag = content.tag;
  }

  async function poll() {
    const number = ++asked;
    clearTimeout(timer);
    try {
      const response = await fetch(`content?tag=${tag}&step=${Steps.choice}`);
      const content = response.status === 200 ? await response.json() : null;
      if (number !== asked) return; // the reader has chosen another step meanwhile
      if (content) show(content);
      if (response.ok) tell("Live: the page follows the files of the run.", false);
      else tell(`The run cannot be read: ${await response.text()}`, true);
    } catch {
      tell("interlace watch has ended. The page shows the last content.", true);
    }
    if (number === asked) timer = setTimeout(poll, EVERY_MS);
  }

  Steps.onChoose = poll;
  poll();
}
