// The dialog that explains a row. The answer is text of a server: it is set as text.
"use strict";

let whySubscription = "";

function openWhy(subscription, tables) {
  whySubscription = subscription;
  document.getElementById("why-title").textContent = `Explain a row of ${subscription}`;
  document.getElementById("why-table").replaceChildren(...tables.map((name) => node("option", { value: name }, name)));
  showWhy("");
  document.getElementById("why").showModal();
  document.getElementById("why-key").focus();
}

function showWhy(text) {
  const answer = document.getElementById("why-answer");
  answer.textContent = text;
  answer.hidden = !text;
}

// `id=5 name='New York'` to its arguments, as a shell splits words: quotes join, and are left out.
function words(line) {
  const found = line.matchAll(/(?:[^\s'"]+|'[^']*'|"[^"]*")+/g);
  return [...found].map(([word]) => word.replace(/'([^']*)'|"([^"]*)"/g, (_, single, double) => single ?? double));
}

async function askWhy() {
  const button = document.getElementById("why-ask"), subscription = whySubscription;
  button.disabled = true;
  showWhy("Reading the change log…");
  try {
    const response = await fetch(`subscriptions/${encodeURIComponent(subscription)}/why`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ table: document.getElementById("why-table").value, key: words(document.getElementById("why-key").value) }),
    });
    const answer = await response.json();
    const reason = typeof answer.detail === "string" ? answer.detail : "this is not a key";
    if (subscription === whySubscription) showWhy(response.ok ? answer.text : reason);
  } catch (error) {
    showWhy(`No answer from Airflow: ${error.message}`);
  } finally {
    button.disabled = false;
  }
}

document.getElementById("why-close").addEventListener("click", () => document.getElementById("why").close());
document.getElementById("why-form").addEventListener("submit", (event) => {
  event.preventDefault();
  askWhy();
});
