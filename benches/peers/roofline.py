"""Draws peers.svg beside the peers.csv that is its argument: KV GB/s against the context, and the machine's two limits."""

import csv
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "peers", "font.size": 8})
import matplotlib.pyplot as plt

path = pathlib.Path(sys.argv[1])
with path.open() as file:
    rows = list(csv.DictReader(file))
forms = [("f32",), ("bf16",), ("f16",), ("int8", "q8_0"), ("int4", "q4_0")]
threads = sorted({row["threads"] for row in rows})
label = lambda row: f"pikv {row['version'].split()[-1]}" if row["peer"] == "pikv" else row["peer"]
labels = list(dict.fromkeys(map(label, rows)))
colours = dict(zip(labels, plt.get_cmap("tab10").colors))
figure, axes = plt.subplots(len(threads), len(forms), figsize=(13, 6.2), squeeze=False, layout="constrained")
for line, count in enumerate(threads):
    for column, form in enumerate(forms):
        axis = axes[line][column]
        here = [row for row in rows if row["threads"] == count and row["dtype"] in form]
        for name in labels:
            mine = [row for row in here if label(row) == name]
            points = ([int(row["context"]) for row in mine], [float(row["kv_gbps"]) for row in mine])
            if mine:
                axis.plot(*points, marker="o", ms=3, lw=2 if name.startswith("pikv") else 1, color=colours[name], label=name)
        ours = [row for row in here if label(row) == labels[0]]
        contexts = [int(row["context"]) for row in ours]
        for limit, style, text in (("read_gbps", "--", "memory read"), ("fma_gbps", ":", "multiply-adds")):
            axis.plot(contexts, [float(row[limit]) for row in ours], style, color="black", lw=1, label=text)
        axis.set(xscale="log", yscale="log", title=f"{' / '.join(form)}, {count} thread{'s' * (count != '1')}")
        axis.set_xticks(contexts, [f"{c // 1024}k" for c in contexts])
        axis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_yticks([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
        values = [float(row[c]) for row in here for c in ("kv_gbps", "read_gbps", "fma_gbps")]
        axis.set_ylim(min(values) / 1.3, max(values) * 1.3)
    axes[line][0].set_ylabel("KV GB/s")
more = {n: h for axis in axes.flat for h, n in zip(*axis.get_legend_handles_labels())}
figure.legend(more.values(), more.keys(), loc="outside lower center", ncols=6)
figure.suptitle(f"Decode attention, 32 query heads over 8 KV heads of 128, tokens of context; {rows[0]['machine']}")
figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
