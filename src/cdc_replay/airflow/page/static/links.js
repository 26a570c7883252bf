// Airflow's frame for plugins may not leave itself, so a link is followed by the page around it.
"use strict";

document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link || window.parent === window) return;
  event.preventDefault();
  const outer = window.parent.document.createElement("a");
  outer.href = link.href;
  if (event.ctrlKey || event.metaKey) outer.target = "_blank";
  outer.click();
});
