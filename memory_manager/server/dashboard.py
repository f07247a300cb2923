"""The HTML page of `tensor-dedup serve --dashboard`: what is in memory, and what sharing saves.

The page loads nothing from other hosts and changes nothing. It requests `/overview.json` from its
own server every two seconds, and inserts text from there as text, never as HTML.
"""

from typing import Final

# Nothing may be loaded from elsewhere, not even if a name held markup.
HEADERS: Final = (
    "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'\r\n"
    "X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCache-Control: no-store\r\n"
)

PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>tensor-dedup</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --ink: #1c2430; --soft: #566070; --line: #d5dae2; --paper: #fff;
  --saved: #1a7f4b; --used: #2f62b5; --idle: #9db7e2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #a3adbc; --line: #3a4351; --paper: #14181f;
    --saved: #54c98a; --used: #6f9ff0; --idle: #35507f; } }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.45 system-ui, sans-serif; }
h1 { font-size: 1rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.headline { font-size: 2rem; font-weight: 600; margin: 1rem 0 0; }
.headline b { color: var(--saved); }
.soft { color: var(--soft); margin: .2rem 0; overflow-wrap: anywhere; }
.bar { display: flex; height: 1.5rem; margin: 1rem 0 .4rem; border: 1px solid var(--line); }
.bar span { width: 0; } .used { background: var(--used); } .idle { background: var(--idle); }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .3em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: anywhere; } .n { text-align: right; white-space: nowrap; }
</style>
</head>
<body>
<main>
<h1>tensor-dedup: the memory manager</h1>
<p class="soft" id="where"></p>
<p class="headline" aria-live="off"><b id="saved">…</b> saved by sharing</p>
<p class="soft" id="without"></p>
<div class="bar" id="bar" role="img" aria-label="Budget"><span class="used"
  id="bar-used"></span><span class="idle" id="bar-idle"></span></div>
<p class="soft"><span class="key used"></span>in use <span id="leased"></span> ·
  <span class="key idle"></span>kept for later, and what the manager remembers
  <span id="kept"></span> · budget <span id="budget"></span></p>
<p class="soft" role="status" id="state">Asking the manager…</p>
<noscript>This page needs JavaScript; <code>tensor-dedup status</code> says the same.</noscript>
<h2 id="who">Who uses it</h2>
<div class="scroll" tabindex="0" role="region" aria-labelledby="who"><table><thead><tr>
<th scope="col">Client</th><th scope="col" class="n">Process</th>
<th scope="col" class="n">Tensors</th><th scope="col" class="n">Uses</th>
</tr></thead><tbody id="clients"></tbody></table></div>
<h2 id="what">What is held</h2>
<div class="scroll" tabindex="0" role="region" aria-labelledby="what"><table><thead><tr>
<th scope="col">Checkpoint</th><th scope="col" class="n">Tensors</th>
<th scope="col" class="n">Size</th><th scope="col" class="n">In use</th><th scope="col">Pinned</th>
</tr></thead><tbody id="checkpoints"></tbody></table></div>
<p class="soft">Tensors that several checkpoints share are counted for each of them.</p>
</main>
<script>
"use strict";
const at = id => document.getElementById(id);
const human = bytes => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
  return (unit ? bytes.toFixed(1) : bytes) + " " + units[unit];
};
const size = (element, bytes) => {
  element.textContent = human(bytes);
  element.dataset.bytes = bytes;
  element.title = bytes.toLocaleString("en") + " bytes";
};
const row = (cells) => {
  const line = document.createElement("tr");
  for (const [value, kind] of cells) {
    const cell = document.createElement("td");
    if (kind === "bytes") size(cell, value); else cell.textContent = value;
    if (kind) cell.className = "n";
    line.append(cell);
  }
  return line;
};
const fill = (id, rows, width, empty) => {
  if (!rows.length) {
    const cell = document.createElement("td");
    cell.colSpan = width;
    cell.textContent = empty;
    rows = [document.createElement("tr")];
    rows[0].append(cell);
  }
  at(id).replaceChildren(...rows);
};
const show = found => {
  const t = found.totals, kept = Math.max(0, t.charged - t.leased_bytes);
  at("where").textContent = `process ${t.pid} at ${t.name}`;
  size(at("saved"), found.saved_bytes);
  at("without").textContent = `${human(t.leased_bytes)} in use instead of ` +
    human(t.leased_bytes + found.saved_bytes) + (t.leaf_shared_bytes
      ? `; ${human(t.leaf_shared_bytes)} shared by leaf` : "");
  size(at("leased"), t.leased_bytes);
  size(at("kept"), kept);
  size(at("budget"), t.budget);
  const share = bytes => Math.min(100, 100 * bytes / t.budget);
  at("bar-used").style.width = share(t.leased_bytes) + "%";
  at("bar-idle").style.width = share(kept) + "%";
  at("bar").setAttribute("aria-label",
    `${human(t.charged)} of the budget of ${human(t.budget)} are taken`);
  fill("clients", found.clients.map(c => row([[c.name], [c.pid, "number"], [c.leases, "number"],
    [c.leased_bytes, "bytes"]])), 4, "Nobody is connected.");
  fill("checkpoints", found.checkpoints.map(c => row([[c.name], [c.residents, "number"],
    [c.nbytes, "bytes"], [c.leased_bytes, "bytes"], [c.pinned ? "yes" : ""]])), 5,
    "Nothing is held yet.");
};
let said = "";
const say = text => { if (text !== said) at("state").textContent = said = text; };
const look = async () => {
  try {
    const reply = await fetch("overview.json", { cache: "no-store" });
    if (!reply.ok) throw new Error("status " + reply.status);
    show(await reply.json());
    say("Live, every two seconds.");
  } catch (error) {
    say("The manager does not answer; these numbers are old.");
  }
  setTimeout(look, 2000);
};
look();
</script>
</body>
</html>
"""
