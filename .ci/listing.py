"""Reads listings of `nvdisasm -c`: the instructions of kernels, their loops, and the loops over the words of full pages.

A turn of a loop takes an SM at least the clocks in which its four schedulers issue the instructions, one a clock each, and its load units
take the loads and shuffles of a warp, one clock for each 32 bits a lane.
"""
import re

WORD = 128  # Bytes of a page that a load of 32 bits by 32 lanes reads.


def kernels(path):
    """Of every kernel the instructions, (guard, opcode, operands), and where its labels stand."""
    out, code = {}, None
    for line in open(path):
        if m := re.match(r"\.text\.(\w+):", line):
            code, labels = out.setdefault(m[1], ([], {}))
        elif code is None:
            continue
        elif m := re.match(r"(\.L_\w+):", line):
            labels[m[1]] = len(code)
        elif m := re.match(r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)\s*(.*?);", line):
            code.append((m[1], m[2], m[3]))
    return out


def successors(code, labels):
    """Of every instruction those that may follow it, by index."""
    out = []
    for i, (guard, op, rest) in enumerate(code):
        # BRA.DIV is for lanes that parted before a shuffle: here they never do.
        jumps = op.startswith(("BRA", "CALL")) and op != "BRA.DIV"
        to = [labels[t] for t in re.findall(r"`\((\.L_\w+)\)", rest) if t in labels] if jumps else []
        ends = guard is None and op in ("BRA", "EXIT", "RET.REL.NODEC", "BPT.TRAP") and not re.match(r"!?U?P\d", rest)
        out.append(to + ([] if ends or i + 1 == len(code) else [i + 1]))
    return out


class Blocks:
    """Basic blocks of a kernel: `code[first[n]:last[n]]` is block `n`, `edges[n]` the blocks that may follow it."""

    def __init__(self, code, labels):
        succ = successors(code, labels)
        heads = sorted({0} | set(labels.values()) | {i + 1 for i, s in enumerate(succ) if s != [i + 1]} - {len(code)})
        self.code = code
        self.first = [h for h in heads if h < len(code)]
        self.last = self.first[1:] + [len(code)]
        of = {h: n for n, h in enumerate(self.first)}
        self.edges = [[of[s] for s in succ[e - 1]] for e in self.last]

    def instructions(self, blocks):
        return [self.code[i] for n in blocks for i in range(self.first[n], self.last[n])]

    def loops(self):
        """Natural loops, as (head, set of blocks) without the blocks of loops inside, from dominators by sets of blocks."""
        reached, work = {0}, [0]
        while work:
            for n in self.edges[work.pop()]:
                if n not in reached:
                    reached.add(n)
                    work.append(n)
        before = [[] for _ in self.first]
        for a in reached:
            for b in self.edges[a]:
                before[b].append(a)
        dominators = self._dominators(before)
        loops = {}
        for a, to in enumerate(self.edges):
            for head in to:
                if a in reached and dominators[a] >> head & 1:
                    body, work = loops.setdefault(head, {head}), [a]
                    while work:
                        n = work.pop()
                        if n not in body:
                            body.add(n)
                            work += before[n]
        inside = {head: set().union(*(loops[h] for h in loops if h != head and h in body)) for head, body in loops.items()}
        return [(head, body - inside[head]) for head, body in sorted(loops.items()) if head not in inside[head]]

    def _dominators(self, before):
        whole = (1 << len(self.first)) - 1
        out = [1] + [whole] * (len(self.first) - 1)
        changed = True
        while changed:
            changed = False
            for n in range(1, len(self.first)):
                new = whole
                for p in before[n]:
                    new &= out[p]
                new |= 1 << n
                changed |= new != out[n]
                out[n] = new
        return out

    def turns(self, head, body, key):
        """Ways once round a loop, past the loops inside. Of all ways with the same sum of `key(instruction)`, a tuple of numbers,
        the one with the fewest instructions, as the instructions: by that sum."""
        order, seen = [], set()

        def visit(n):
            seen.add(n)
            for to in self.edges[n]:
                if to in body and to != head and to not in seen:
                    visit(to)
            order.append(n)

        visit(head)
        keys = {n: [key(i) for i in self.instructions([n])] for n in order}
        own = {n: tuple(map(sum, zip(*keys[n]))) for n in order}
        size = {n: self.last[n] - self.first[n] for n in order}
        best, ends = {head: {own[head]: (size[head], (head,))}}, {}
        for n in reversed(order):
            for sums, (cost, path) in best.get(n, {}).items():
                for to in self.edges[n]:
                    if to == head:
                        if sums not in ends or cost < ends[sums][0]:
                            ends[sums] = cost, path
                    elif to in body:
                        then = tuple(map(int.__add__, sums, own[to]))
                        ways = best.setdefault(to, {})
                        if then not in ways or cost + size[to] < ways[then][0]:
                            ways[then] = cost + size[to], path + (to,)
        return {sums: self.instructions(path) for sums, (_, path) in ends.items()}


def count(instructions, prefix):
    return sum(op.startswith(prefix) for _, op, _ in instructions)


def text(instructions):
    return " ".join(op + " " + rest for _, op, rest in instructions)


def lsu_clocks(op):
    """Clocks of an SM's load units."""
    if op.startswith("SHFL"):
        return 1
    if not op.startswith(("LD", "ST")):
        return 0
    return 4 if ".128" in op else 2 if ".64" in op else 1


def is_page_load(op):
    # Pages are read by generic loads: their addresses lie in a list.
    return op.startswith("LD.")


def clocks(turn):
    """Clocks of an SM for a turn of a warp, at least."""
    return max(len(turn) / 4, sum(lsu_clocks(op) for _, op, _ in turn))


def in_flight(turn):
    """Bytes that a warp has asked for when it waits for a page's word, the most of a turn: the second of two turns is looked at."""
    waiting, most = [], 0
    for at, (_, op, rest) in enumerate(turn * 2):
        used = re.findall(r"\bR\d+\b", rest)
        used = used[1:] if is_page_load(op) else used
        first = next((i for i, register in enumerate(waiting) if register in used), None)
        if first is not None:
            most = max(most, len(waiting)) if at >= len(turn) else most
            waiting = waiting[first + 1:]
        if is_page_load(op):
            waiting.append(re.match(r"R\d+", rest)[0])
    return most * WORD


def page_loops(blocks, rows):
    """Turns of the loops over K and over V of each dtype, {(dtype, "K" or "V"): turn}: those that load most words."""
    out = {}
    for head, body in blocks.loops():
        whole = blocks.instructions(body)
        if not count(whole, "LD."):
            continue
        turns = blocks.turns(head, body, lambda i: (int(is_page_load(i[1])), int(i[1] == "FFMA"), int(i[1].startswith("SHFL"))))
        halves, dtype = "0xffff0000" in text(whole), "f32"
        if "0x8fffe000" in text(whole):
            dtype = "f16"
        elif halves:
            dtype = "bf16"
        for (loads, products, shuffles), turn in turns.items():
            channels = 1 if dtype == "f32" else 2
            if loads == 0 or products != loads * rows * channels or shuffles not in (0, loads * rows):
                continue
            at = dtype, "V" if shuffles else "K"
            if at not in out or count(out[at], "LD.") < loads:
                out[at] = turn
    return out
