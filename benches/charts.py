"""SVGs of the tables in benches/results that programs draw none of: plain text from the CSV, so that the same file gives the same picture."""

import csv
import math
import pathlib
from html import escape

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
COLOURS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f", "#bcbd22", "#e377c2"]
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, LEGEND = 430, 330, 62, 46, 40, 190


def read(name):
    with open(RESULTS / name, newline="") as file:
        return list(csv.DictReader(file))


def text(x, y, words, size=11, anchor="start", turn=False, colour="#000"):
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{turned}>{escape(str(words))}</text>'


def svg(width, height, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *parts, "</svg>", ""])


def short(value):
    if value >= 1024 and value % 1024 == 0:
        return f"{value // 1024:.0f}k"
    return f"{value:g}"


def lines(title, x_name, y_name, series, left, log_y=False):
    """A panel: series are (name, [(x, y)]), the x axis is logarithmic."""
    xs = sorted({x for _, points in series for x, _ in points})
    ys = [y for _, points in series for _, y in points]
    low, high = (min(ys), max(ys)) if log_y else (min(0, min(ys)), max(ys))
    high = high if high > low else low + 1
    scale = math.log if log_y else float
    x_at = lambda x: left + LEFT + (WIDTH - LEFT - 16) * (math.log(x / xs[0]) / math.log(xs[-1] / xs[0]) if len(xs) > 1 else 0.5)
    y_at = lambda y: HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (scale(y) - scale(low)) / (scale(high) - scale(low))
    parts = [text(left + 12, 20, title, 13)]
    parts.append(f'<path d="M{left + LEFT} {TOP}V{HEIGHT - BOTTOM}H{left + WIDTH - 10}" fill="none" stroke="#000"/>')
    last = -math.inf
    for x in xs:
        if x_at(x) - last >= 26:
            last = x_at(x)
            parts.append(text(last, HEIGHT - BOTTOM + 15, short(x), 10, "middle"))
    for i in range(5):
        y = math.exp(scale(low) + (scale(high) - scale(low)) * i / 4) if log_y else low + (high - low) * i / 4
        parts.append(text(left + LEFT - 6, y_at(y) + 4, f"{y:.3g}", 10, "end"))
        parts.append(f'<path d="M{left + LEFT} {y_at(y):.1f}H{left + WIDTH - 10}" stroke="#ddd"/>')
    parts += [text(left + WIDTH / 2 + 20, HEIGHT - 10, x_name, 11, "middle"), text(left + 16, HEIGHT / 2, y_name, 11, "middle", True)]
    for i, (name, points) in enumerate(series):
        colour, dash = COLOURS[i % len(COLOURS)], "" if i < len(COLOURS) else ' stroke-dasharray="4 3"'
        path = "L".join(f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in sorted(points))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>')
        parts += [f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2.6" fill="{colour}"/>' for x, y in points]
        y = TOP + 8 + 15 * i
        parts.append(f'<path d="M{left + WIDTH} {y}h18" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(text(left + WIDTH + 24, y + 4, name, 10))
    return parts


def panels(*all):
    parts = []
    for i, panel in enumerate(all):
        parts += lines(*panel[:4], i * (WIDTH + LEGEND), *panel[4:])
    return svg(len(all) * (WIDTH + LEGEND), HEIGHT, parts)


def bars(title, groups):
    """Groups are (heading, [(label, mean, deviation or None)]); each has a scale of its own, from 0 on."""
    parts, y = [text(12, 20, title, 13)], 44
    for heading, rows in groups:
        parts.append(text(12, y, heading, 12))
        low, high = (edge(0, *(v + (s or 0) * sign for _, v, s in rows)) for edge, sign in ((min, -1), (max, 1)))
        at = lambda v: 270 + 330 * (v - low) / ((high - low) or 1)
        for label, value, spread in rows:
            y += 17
            a, b = sorted((at(0), at(value)))
            parts += [text(262, y + 4, label, 10, "end"), f'<rect x="{a:.1f}" y="{y - 5}" width="{max(b - a, 0.5):.1f}" height="11" fill="{COLOURS[0]}"/>']
            if spread:
                parts.append(f'<path d="M{at(value - spread):.1f} {y}H{at(value + spread):.1f}" stroke="#000"/>')
            parts.append(text(612, y + 4, f"{value:.4f}" + (f" ± {spread:.4f}" if spread else ""), 10))
        y += 30
    return svg(720, y, parts)


def heat(title, rows, columns, value):
    """Cells of `value(row, column)`, darker where it is larger (by its logarithm, a thousandth above the least is the first step); none where there is None."""
    found = [v for row in rows for column in columns if (v := value(row, column)) is not None]
    low, high = min(found), max(found)
    parts = [text(12, 20, title, 13)]
    parts += [text(180 + 78 * c, 46, column, 11, "middle") for c, column in enumerate(columns)]
    for r, row in enumerate(rows):
        parts.append(text(132, 66 + 18 * r, " ".join(row), 10, "end"))
        for c, column in enumerate(columns):
            v = value(row, column)
            if v is None:
                continue
            part = math.log1p(1000 * (v - low)) / (math.log1p(1000 * (high - low)) or 1)
            colour = f"rgb({255 - int(60 * part)},{250 - int(170 * part)},{240 - int(180 * part)})"
            parts.append(f'<rect x="{142 + 78 * c}" y="{53 + 18 * r}" width="77" height="17" fill="{colour}"/>')
            parts.append(text(180 + 78 * c, 66 + 18 * r, f"{1000 * v:+.1f}", 10, "middle"))
    return svg(max(160 + 78 * len(columns), 24 + 7 * len(title)), 70 + 18 * len(rows), parts)


def by(rows, keys, x, y):
    """Series of rows that are alike in `keys`."""
    names = list(dict.fromkeys(tuple(row[key] for key in keys) for row in rows))
    of = lambda name: [(float(row[x]), float(row[y])) for row in rows if tuple(row[key] for key in keys) == name]
    return [(" ".join(name), of(name)) for name in names]


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def reads():
    rows = [dict(row, what=f"{row['read']} {row['top_k']}/{row['experts']}" if row["read"] == "experts" else row["read"]) for row in read("reads.csv")]
    far = [row for row in rows if row["stream"] == "made up" and row["read"] != "exact" and (row["read"] != "Quest 1/8" or (row["experts"], row["top_k"]) == ("8", "2"))]
    model = [row for row in rows if row["stream"] != "made up" and row["read"] != "exact"]
    return panels(("bytes read over all", "tokens held", "of exact", by(far, ["what"], "length", "bytes_ratio")),
                  ("CPU time of attention", "tokens held", "of exact", by(far, ["what"], "length", "time_ratio")),
                  ("nats a byte more than with all read", "window", "nats", by(model, ["what"], "length", "delta_nats")))


def lengths():
    rows = read("lengths.csv")
    codes = [row for row in rows if row["kind"] == "code" and row["stream"] == "made up"]
    held = [row for row in rows if row["kind"] == "policy" and row["stream"] != "skewed" and row["row"] not in ("none", "newest (no sinks)")]
    stream = [row for row in rows if row["stream"] == "skewed" and row["row"] != "none"]
    return panels(("bytes of all pages, by code", "tokens held", "of bf16", by(codes, ["row"], "length", "bytes_of_bf16")),
                  ("CPU time of attention, by code", "tokens held", "of bf16", by(codes, ["row"], "length", "time_ratio")),
                  ("nats lost with a quarter held", "window", "nats a byte", by(held, ["row"], "length", "delta_nats")),
                  ("made-up stream, an eighth held", "tokens", "looked for and held", by(stream, ["row"], "length", "found_share")))


def experts():
    rows = [dict(row, of=f"{int(row['tokens']):,} tokens") for row in read("experts.csv")]
    return panels(("bytes of pages over one expert's", "experts", "times", by(rows, ["of"], "experts", "bytes_of_one"), True),
                  ("CPU time of attention over one expert's", "experts", "times", by(rows, ["of"], "experts", "attend_of_one"), True),
                  ("routing over attention", "experts", "share", by(rows, ["of"], "experts", "route_of_attend")))


def maps():
    rows = [row for row in read("maps.csv") if row["model"] == "Mixtral-8x7B" and row["context"] == "131072"]
    of = lambda kind: by([row for row in rows if row["experts"] == kind], ["map"], "devices", "of_mean")
    return panels(("Mixtral 8x7B, 128K tokens, even experts", "devices", "fullest over the mean", of("even"), True),
                  ("half of the tokens to one expert", "devices", "fullest over the mean", of("half to one"), True))


def modules():
    rows = read("modules.csv")
    of = lambda column: [(row["what"], float(row[column]), None) for row in rows]
    return bars("Modules: none, all, each alone, all but one", [("bytes, of none's", of("bytes_of_none")), ("CPU time in the cache, of none's", of("time_ratio")),
                                                                ("nats a byte more than none", of("delta_nats"))])


def grouped(rows, key, value):
    names = list(dict.fromkeys(row[key] for row in rows))
    found = {name: [float(row[value]) for row in rows if row[key] == name] for name in names}
    return [(name, mean(values), deviation(values)) for name, values in found.items()]


def mixed():
    rows = [row for row in read("mixed.csv") if row["policy"] != "none"]
    return bars("Four sequences of 256 to 2,048 tokens in one batch, 128 tokens a head; six seeds, mean and deviation",
                [("nats a byte more than with all held", grouped(rows, "policy", "delta_nats")), ("hit rate", grouped(rows, "policy", "hit_rate"))])


def adaptive():
    rows = read("adaptive.csv")
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    return bars("R_A, its arms alone, R_P and R_T; six seeds, mean and deviation",
                [(f"{stream}: hits less 0.1 of the imbalance", grouped([row for row in rows if row["stream"] == stream], "router", "reward")) for stream in streams])


def grid():
    rows = read("grid.csv")
    found = {(row["router"], row["code"], row["policy"]): float(row["delta_nats"]) for row in rows}
    names = list(dict.fromkeys((router, code) for router, code, _ in found))
    return heat("nats a byte more than R_T in bf16 with all held, in thousandths", names, list(dict.fromkeys(p for _, _, p in found)), lambda row, column: found[(*row, column)])


def loop(name):
    """Policies against budgets, with the routers that have all policies; what holds everything is the same at every budget."""
    rows = read(name)
    whole = float(rows[0]["nats"])
    of = lambda router: {row["policy"] for row in rows[1:] if row["router"] == router}
    all = max((of(row["router"]) for row in rows[1:]), key=len)
    found = {(row["policy"], f"{row['router']} {float(row['budget']):g}"): float(row["nats"]) - whole for row in rows[1:] if of(row["router"]) == all}
    columns = sorted({column for _, column in found}, key=lambda column: (float(column.split()[1]), column))
    title = f"{rows[0]['model']}: nats a token more than with everything read ({whole:.4f}), in thousandths; router and part held"
    return heat(title, [(policy,) for policy in dict.fromkeys(policy for policy, _ in found)], columns, lambda row, column: found.get((*row, column)))


CHARTS = {"loop": lambda: loop("loop.csv"), "loop-llama": lambda: loop("loop-llama.csv"), "adaptive": adaptive, "experts": experts, "grid": grid, "lengths": lengths, "maps": maps, "mixed": mixed, "modules": modules, "reads": reads}
