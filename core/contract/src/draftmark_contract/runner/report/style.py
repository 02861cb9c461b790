"""The page's one style sheet: system fonts, light and dark, readable on paper."""

STYLE = """
:root { --ink:#16202b; --soft:#5b6775; --line:#dde3ea; --paper:#fff; --wash:#f5f7f9; --sea:#0b6e8f; --deep:#0a3d52;
  --foam:#cfe6ee; --good:#1d7a46; --bad:#b3261e; --warn:#8a5a00; --tail:#e08e2b; --null:#c8ced6; }
@media (prefers-color-scheme: dark) { :root { --ink:#e6ebf0; --soft:#9aa7b4; --line:#2b3641; --paper:#11181f;
  --wash:#18212a; --sea:#3fa7c9; --deep:#8fd0e6; --foam:#1d4353; --good:#58c287; --bad:#ff8a80; --warn:#e7b45c;
  --tail:#e6a04b; --null:#46525e; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui,sans-serif; }
main { max-width:1120px; margin:0 auto; padding:32px 24px 64px; }
h1 { font-size:15px; font-weight:600; letter-spacing:.02em; color:var(--soft); margin:0 0 8px; }
h2 { font-size:19px; margin:44px 0 4px; } h3 { font-size:14px; margin:0 0 8px; color:var(--soft); font-weight:600; }
p { margin:4px 0 14px; max-width:78ch; } .soft { color:var(--soft); }
.verdict { font-size:27px; line-height:1.25; font-weight:650; margin:0 0 14px; max-width:34ch; }
.verdict b { font-weight:650; } .good { color:var(--good); } .bad { color:var(--bad); } .none { color:var(--warn); }
.line { font:13px/1.5 ui-monospace,monospace; background:var(--wash); padding:10px 14px; border-radius:6px;
  overflow-wrap:anywhere; }
.facts { display:flex; flex-wrap:wrap; gap:8px 36px; margin:18px 0 0; padding:0; list-style:none; }
.facts b { display:block; font-size:22px; font-weight:600; font-variant-numeric:tabular-nums; }
.facts span { color:var(--soft); font-size:13px; }
table { border-collapse:collapse; width:100%; font-size:13.5px; }
th { text-align:left; color:var(--soft); font-weight:600; border-bottom:1px solid var(--line); padding:6px 12px 6px 0; }
td { border-bottom:1px solid var(--line); padding:7px 12px 7px 0; vertical-align:top; }
td.n, th.n { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap; }
code, td.m { font:12.5px/1.5 ui-monospace,monospace; } .scroll { overflow-x:auto; }
.row { display:flex; flex-wrap:wrap; gap:36px 56px; margin:18px 0; }
figure { margin:0; max-width:100%; overflow-x:auto; }
figcaption { color:var(--soft); font-size:13px; margin-top:8px; max-width:52ch; }
details { border:1px solid var(--line); border-left:3px solid var(--bad); border-radius:6px; margin:10px 0; }
details.known { border-left-color:var(--warn); }
summary { padding:9px 14px; cursor:pointer; font:13px/1.5 ui-monospace,monospace; overflow-wrap:anywhere; }
pre { margin:0; padding:12px 14px; background:var(--wash); white-space:pre-wrap; overflow-wrap:anywhere;
  font:12.5px/1.55 ui-monospace,monospace; user-select:all; }
.also { font-size:12.5px; margin:8px 14px; max-width:none; }
svg text { font:11px system-ui,sans-serif; fill:var(--soft); text-anchor:middle; } svg .start { text-anchor:start; }
svg .on { fill:#fff; font-weight:600; } svg .page { fill:#fff; font-weight:600; }
svg .edge { fill:none; stroke:var(--soft); stroke-width:1.4; } svg .node { fill:#0b6e8f; }
svg .prefix { fill:#2b7f9c; } svg .seen { fill:#5fb0ca; } svg .self { fill:#0a4d66; } svg .hidden { fill:var(--wash);
  stroke:var(--line); } svg .tail { fill:#c9751a; } svg .null { fill:#7b8794; }
svg .empty { fill:#aab4be; } svg .declared { fill:var(--foam); } svg .needed { fill:var(--sea); }
svg .lacking { fill:var(--bad); } .key i { display:inline-block; width:11px; height:11px; border-radius:2px;
  margin:0 5px 0 14px; vertical-align:-1px; }
@media print { details { break-inside:avoid; } }
"""
