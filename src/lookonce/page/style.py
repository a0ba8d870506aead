"""The style sheet: colours and fonts, light or dark as the reader's system asks for."""

from __future__ import annotations

STYLE = """
:root {
  --paper: #fbfbf9; --card: #ffffff; --ink: #1d232b; --soft: #5d6873; --line: #e2e5e8;
  --bar: #3b7a9e; --dot: #3b7a9e99;
  --error: #b3362c; --warning: #9a6200; --note: #3b6f8f;
  --shade1: #a6cde0; --shade2: #f2cf9d; --shade3: #bddaaf; --shade4: #d8c1e2; --shade5: #efbab2; --rest: #e3e6ea;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14181d; --card: #1b2026; --ink: #e6eaee; --soft: #98a3ae; --line: #2d343c;
    --bar: #6fb0d4; --dot: #6fb0d488;
    --error: #ff8b7e; --warning: #f0b65a; --note: #86bfe0;
    --shade1: #2c5b73; --shade2: #765421; --shade3: #446539; --shade4: #644673; --shade5: #7b3f39; --rest: #363d46;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: break-word;
}
main { max-width: 66rem; margin: 0 auto; padding: 3.5rem 1.5rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; font-weight: 650; letter-spacing: -0.01em; margin: 0 0 0.6rem; }
h2 { font-size: 1.25rem; line-height: 1.3; font-weight: 620; margin: 3.5rem 0 0.3rem; }
p { margin: 0 0 1rem; max-width: 46rem; }
.lead { font-size: 1.125rem; }
.soft, .lead + p { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 0.75rem; margin: 2rem 0 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 0.9rem 1.1rem; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.25; font-weight: 620; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 0.875rem; }
.notice {
  background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--tone); border-radius: 8px;
  margin: 0.6rem 0; padding: 0.75rem 1.1rem;
}
.notice p { margin: 0; max-width: none; }
.notice b {
  color: var(--tone); text-transform: uppercase; font-size: 0.72rem; letter-spacing: 0.06em; margin-right: 0.6rem;
}
code { font-size: 0.9em; }
.error { --tone: var(--error); } .warning { --tone: var(--warning); } .note { --tone: var(--note); }
details { margin-top: 0.35rem; font-size: 0.875rem; color: var(--soft); }
summary { cursor: pointer; }
details ul { margin: 0.4rem 0 0.2rem; padding-left: 1.2rem; }
details li { margin: 0.2rem 0; }
.scroll { overflow-x: auto; margin: 0.8rem 0 0; }
table { border-collapse: collapse; min-width: min(26rem, 100%); font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.42rem 0.8rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
th:last-child, td:last-child { padding-right: 0; }
figure { margin: 1rem 0 0; }
figure > svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); }
svg text.name, svg text.inside { fill: var(--ink); } svg text.name { font-size: 13px; }
svg text.value { fill: var(--ink); }
.grid { stroke: var(--line); stroke-width: 1; }
.bar { fill: var(--bar); } .dot { fill: var(--dot); stroke: var(--bar); }
.shade1 { fill: var(--shade1); } .shade2 { fill: var(--shade2); } .shade3 { fill: var(--shade3); }
.shade4 { fill: var(--shade4); } .shade5 { fill: var(--shade5); } .rest { fill: var(--rest); }
.gallery {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1.25rem 1rem; margin-top: 1rem;
}
.gallery figure { margin: 0; font-size: 0.85rem; line-height: 1.4; }
.gallery img {
  display: block; width: 100%; aspect-ratio: 4 / 3; object-fit: contain; background: #000; border-radius: 8px;
}
.gallery figcaption { padding-top: 0.45rem; color: var(--soft); }
.gallery b { display: block; color: var(--ink); font-weight: 600; }
.gallery small { display: block; opacity: 0.8; }
footer { margin-top: 4rem; color: var(--soft); font-size: 0.85rem; }
"""
