"""How a report looks, in light and dark. Used by `page.py`."""

STYLE = """
:root{color-scheme:light dark;--page:#fdfdfc;--panel:#f4f4f1;--text:#1b1b1a;--dim:#63625d;--line:#d9d8d2;
--good:#18703c;--bad:#b3261e;--c0:#2a6fc9;--c1:#c9541d;--c2:#12836b;--c3:#8a4bb8;--c4:#a87800;--c5:#c23b73}
@media(prefers-color-scheme:dark){:root{--page:#161615;--panel:#20201e;--text:#ececea;--dim:#a3a29b;--line:#3b3a37;
--good:#5cc98a;--bad:#ff8b80;--c0:#6ba6f2;--c1:#f08a56;--c2:#3fc2a3;--c3:#c08be8;--c4:#dcae3c;--c5:#f07fab}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--text);background:var(--page);max-width:76rem;
margin:2rem auto;padding:0 1.2rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.15rem;margin:2.2rem 0 .5rem;border-bottom:1px solid var(--line)}
p{margin:.4rem 0}p:not(.verdict){max-width:80ch}.dim,figcaption,.key{color:var(--dim)}
.verdict{border-left:6px solid;padding:.5rem .9rem;background:var(--panel);font-size:1.1rem;margin:1rem 0}
.passed{color:var(--good)}.failed{color:var(--bad)}.skipped{color:var(--dim)}
.verdict.passed,.verdict.failed{border-color:currentColor}.passed,.failed{font-weight:600}
.wide{overflow-x:auto}table{border-collapse:collapse;margin:.5rem 0}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--dim);font-weight:500}.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(27rem,100%),1fr));gap:1rem;align-items:start}
figure{margin:.5rem 0;padding:.7rem;background:var(--panel);min-width:0;max-width:46rem}figcaption{font-size:.85rem}
figure b{color:var(--text);font-size:.95rem}.key{display:inline-block;margin-right:1rem;white-space:nowrap}
figure>svg{width:100%;height:auto;display:block}.key svg{vertical-align:middle;margin-right:.3rem}
svg text{fill:var(--dim);font-size:12px;paint-order:stroke;stroke:var(--panel);stroke-width:4px;
stroke-linejoin:round}.grid{stroke:var(--line);stroke-width:1}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}.limit{stroke:var(--dim);stroke-dasharray:3 3;fill:none}
pre{background:var(--panel);padding:.7rem;overflow-x:auto;font-size:.85rem;white-space:pre-wrap}
summary{cursor:pointer;color:var(--dim)}
""".strip()
