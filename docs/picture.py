#!/usr/bin/env python3
"""Draws picture.svg, the way of a token through a cache:  docs/picture.py > docs/picture.svg

No blank line may stand in the output: rustdoc includes it as HTML, which a blank line would end.
"""

INK, SOFT, PAPER = "#24292f", "#6e7781", "#ffffff"
BLUE, GREEN, AMBER, VIOLET, GREY = "#cfe3fb", "#cdebd3", "#fbe7c0", "#e3d6f7", "#eaeef2"
out = []


def box(x, y, w, h, fill, label="", dashed=False):
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="{INK}"{dash}/>')
    if label:
        text(x + w / 2, y + h / 2 + 4, label)


def text(x, y, label, size=12, anchor="middle", color=INK, bold=False):
    weight = ' font-weight="bold"' if bold else ""
    out.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{color}"{weight}>{label}</text>')


def arrow(x1, y1, x2, y2):
    out.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5" marker-end="url(#tip)"/>')


def head(x, title, note, more=""):
    text(x, 24, title, 14, bold=True)
    text(x, 41, note, 11, color=SOFT)
    text(x, 55, more, 11, color=SOFT)


head(65, "token", "step.append: k and v", "step.route: experts")
box(20, 120, 90, 30, BLUE, "k, v of t")
box(20, 156, 90, 30, GREY, "expert 2, 0")

head(225, "sinks and ring", "in the layer's dtype:", "f32, f16 or bf16")
box(160, 86, 130, 24, BLUE, "sinks: t = 0..3")
box(160, 124, 130, 60, BLUE)
text(225, 149, "ring: newest 256")
text(225, 167, "tokens, in order", 11, color=SOFT)

head(400, "expert pages", "32 tokens of one layer", "and KV head")
for row in range(4):
    y = 84 + 34 * row
    text(345, y + 17, f"e{row}", 11, "end", SOFT)
    full = [3, 2, 3, 1][row]
    for page in range(full + 1):
        box(350 + 28 * page, y, 24, 24, GREEN if page < full else PAPER, dashed=page == full)
text(405, 236, "dashed: still filling up", 11, color=SOFT)

head(580, "packed", "full pages, by a codec:", "int8, int4, fp8, SVD ..")
for row in range(4):
    for page in range([3, 2, 3, 1][row]):
        box(530 + 28 * page, 90 + 34 * row, 24, 12, AMBER)

head(750, "tier or rank", "pages beyond the budget,", "or of another shard")
box(680, 84, 140, 24, VIOLET, "host memory")
box(680, 114, 140, 24, VIOLET, "file, your store")
box(680, 158, 140, 24, VIOLET, "CUDA device")
box(680, 188, 140, 24, VIOLET, "thread or MPI rank")

arrow(112, 140, 157, 150)
arrow(225, 124, 225, 111)
arrow(292, 154, 322, 154)
arrow(474, 138, 522, 138)
arrow(624, 138, 674, 138)

box(20, 254, 800, 34, GREY)
text(420, 268, "step.attend: one softmax over all of it, added up in one fixed order", 12)
text(420, 282, "the same bits with any threads, SIMD instructions, shards, tiers and ranks", 11, color=SOFT)

print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 300" width="840" font-family="sans-serif" role="img">')
print("<title>The way of a token: into the ring, then into the pages of its expert, packed, and to a tier or rank; attention reads all.</title>")
print(f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>')
print(f'<rect width="840" height="300" fill="{PAPER}"/>')
print("\n".join(out))
print("</svg>")
