//! Writes a kernel as C: a function that runs one lane until it ends, or waits for other lanes.

use crate::text::{Entry, Instruction, Line, Module, bits};
use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

/// C code that precedes every kernel.
const PRELUDE: &str = include_str!("prelude.c");

/// A C program whose function `launch` runs a kernel.
///
/// # Errors
/// An instruction that is not understood.
pub fn program(module: &Module, entry: &Entry) -> Result<String, String> {
    let mut out = PRELUDE.to_owned();
    for (name, bytes) in &module.constants {
        let list: Vec<String> = bytes.iter().map(u8::to_string).collect();
        let (name, list) = (plain(name), list.join(","));
        let _ = writeln!(out, "static const u8 {name}[] __attribute__((aligned(16))) = {{{list}}};");
    }
    let mut writer = Writer { module, entry, kept: HashSet::new(), waits: 0, labels: HashMap::new() };
    let body = writer.body()?;
    let (kept, own) = writer.declarations();
    let resumes: String = (1..=writer.waits).map(|n| format!("case {n}: goto WAIT{n};\n")).collect();
    let _ = write!(
        out,
        "struct state {{ struct lane lane;\n{kept}}};\n\
         static u32 run(struct lane *of, const u8 *const *P, u8 *SHARED, u32 TID, u32 CTA, u32 NTID, u32 NCTA) {{\n\
         struct state *S = (struct state *)of;\n{own}\
         switch (of->at) {{\n{resumes}default:;\n}}\n{body}return ENDED;\n}}\n\
         u32 launch(const u8 *const *P, u32 grid, u32 block, u32 highest, u32 *where) {{\n\
         return run_grid(run, sizeof(struct state), {}, P, grid, block, highest, where);\n}}\n",
        entry.shared_bytes
    );
    Ok(out)
}

/// A name without what C does not allow.
fn plain(name: &str) -> String {
    name.chars().map(|c| if c.is_alphanumeric() { c } else { '_' }).collect()
}

/// Names in an operand.
fn names(operand: &str) -> impl Iterator<Item = &str> {
    operand.split(['{', '}', '[', ']', ',', '+', '|'])
}

/// Names in an instruction: its registers, parameters and labels.
fn registers(of: &Instruction) -> impl Iterator<Item = &str> {
    of.operands.iter().chain(of.guard.iter().map(|(name, _)| name)).flat_map(|operand| names(operand))
}

/// Whether lanes wait for each other here.
fn is_collective(of: &Instruction) -> bool {
    matches!(of.operation[0].as_str(), "bar" | "shfl" | "vote")
}

struct Writer<'a> {
    module: &'a Module,
    entry: &'a Entry,
    /// Registers that outlast a wait or a jump; the others are variables of the function.
    kept: HashSet<&'a str>,
    /// Places where lanes wait, so far.
    waits: usize,
    /// Index of the line of each label.
    labels: HashMap<&'a str, usize>,
}

impl<'a> Writer<'a> {
    fn body(&mut self) -> Result<String, String> {
        let entry = self.entry;
        self.find_kept();
        for (at, line) in entry.lines.iter().enumerate() {
            if let Line::Label(name) = line {
                self.labels.insert(name, at);
            }
        }
        let mut out = String::new();
        for (at, line) in entry.lines.iter().enumerate() {
            match line {
                Line::Label(name) => {
                    let _ = writeln!(out, "{}:;", plain(name));
                }
                Line::Instruction(of) => {
                    let text = self.instruction(of, at);
                    let text = text.map_err(|what| {
                        let Instruction { number, operation, operands, .. } = of;
                        format!("{}, line {number}: {} {operands:?}: {what}", entry.name, operation.join("."))
                    })?;
                    let _ = match &of.guard {
                        Some((p, set)) => {
                            let not = if *set { "" } else { "!" };
                            writeln!(out, "if ({not}{}) {{ {text} }}", self.value(p)?)
                        }
                        None => writeln!(out, "{text}"),
                    };
                }
            }
        }
        Ok(out)
    }

    /// Fills `kept`: all registers but those that are set first, and used only, in one stretch of lines without a wait or a jump.
    fn find_kept(&mut self) {
        let entry = self.entry;
        let mut stretch = 0;
        let mut seen: HashMap<&str, usize> = HashMap::new();
        for line in &entry.lines {
            let Line::Instruction(of) = line else {
                stretch += 1;
                continue;
            };
            let ends = matches!(of.operation[0].as_str(), "bra" | "ret" | "exit" | "trap");
            let is_store = of.operands.first().is_some_and(|first| first.starts_with('['));
            let results = if is_store { "" } else { of.operands.first().map_or("", String::as_str) };
            let results: Vec<&str> = results.split(['{', '}', ',', '|']).collect();
            let read = |name: &&str| {
                of.operands[1..]
                    .iter()
                    .chain(of.guard.iter().map(|(p, _)| p))
                    .any(|o| names(o).any(|n| n == *name))
            };
            for name in registers(of).filter(|name| entry.bits(name).is_some()) {
                let sets = results.contains(&name) && !read(&name) && of.guard.is_none();
                match seen.get(name) {
                    // Results of a collective are there after the wait.
                    _ if is_collective(of) => {
                        self.kept.insert(name);
                    }
                    None if sets => {
                        seen.insert(name, stretch);
                    }
                    Some(at) if *at == stretch => {}
                    _ => {
                        self.kept.insert(name);
                    }
                }
            }
            stretch += usize::from(ends || is_collective(of));
        }
    }

    /// Declarations of registers that are kept, and of the others.
    fn declarations(&self) -> (String, String) {
        let mut names: Vec<&str> = Vec::new();
        for line in &self.entry.lines {
            if let Line::Instruction(of) = line {
                names.extend(registers(of).filter(|name| self.entry.bits(name).is_some()));
            }
        }
        names.sort_unstable();
        names.dedup();
        let declare = |name: &&str| {
            let bits = self.entry.bits(name).unwrap_or(64).max(8);
            format!("u{bits} {};\n", plain(name))
        };
        let (kept, own): (Vec<&str>, Vec<&str>) =
            names.into_iter().partition(|name| self.kept.contains(name));
        (kept.iter().map(declare).collect(), own.iter().map(declare).collect())
    }

    /// The place of a register.
    fn place(&self, name: &str) -> Result<String, String> {
        self.entry.bits(name).ok_or_else(|| format!("no register: {name}"))?;
        Ok(if self.kept.contains(name) { format!("S->{}", plain(name)) } else { plain(name) })
    }

    /// An operand, unsigned.
    fn value(&self, operand: &str) -> Result<String, String> {
        let special = match operand {
            "%tid.x" => Some("TID"),
            "%ctaid.x" => Some("CTA"),
            "%ntid.x" => Some("NTID"),
            "%nctaid.x" => Some("NCTA"),
            "%laneid" => Some("(TID & 31)"),
            _ => None,
        };
        if let Some(special) = special {
            return Ok(special.to_owned());
        }
        if self.entry.bits(operand).is_some() {
            return self.place(operand);
        }
        if let Some((_, at)) = self.entry.shared.iter().find(|(name, _)| name == operand) {
            return Ok(format!("(u64)(uintptr_t)(SHARED + {at})"));
        }
        if self.module.constants.iter().any(|(name, _)| name == operand) {
            return Ok(format!("(u64)(uintptr_t){}", plain(operand)));
        }
        let hex = ["0x", "0f", "0d", "0F", "0D"].iter().find_map(|prefix| operand.strip_prefix(prefix));
        let number = match hex {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => operand.parse::<i128>().ok().map(|n| n as u64),
        };
        number.map(|n| format!("{n:#x}ull")).ok_or_else(|| format!("no value: {operand}"))
    }

    /// An operand as a value of a type.
    fn typed(&self, operand: &str, kind: &str) -> Result<String, String> {
        let value = self.value(operand)?;
        Ok(match kind {
            "f32" => format!("F({value})"),
            "f64" => format!("D({value})"),
            "pred" => format!("({value} & 1)"),
            _ => format!("(({}){value})", c_type(kind)?),
        })
    }

    /// Sets a register to a value of a type.
    fn set(&self, register: &str, kind: &str, value: &str) -> Result<String, String> {
        let place = self.place(register)?;
        Ok(match kind {
            "f32" => format!("{place} = U({value});"),
            "f64" => format!("{place} = UD({value});"),
            "pred" => format!("{place} = ({value}) & 1;"),
            _ => format!("{place} = ({})({value});", c_type(kind)?),
        })
    }

    /// `[name+offset]` as a pointer to bytes.
    fn address(&self, operand: &str) -> Result<String, String> {
        let inner = operand.strip_prefix('[').and_then(|o| o.strip_suffix(']')).ok_or("no address")?;
        let (base, offset) = inner.split_once('+').unwrap_or((inner, "0"));
        let offset: i64 = offset.parse().map_err(|_| format!("no offset: {offset}"))?;
        match self.entry.params.iter().position(|(name, _)| name == base) {
            Some(n) => Ok(format!("(P[{n}] + {offset})")),
            None => Ok(format!("((u8 *)(uintptr_t)({} + {offset}ll))", self.value(base)?)),
        }
    }

    fn instruction(&mut self, of: &Instruction, at: usize) -> Result<String, String> {
        if is_collective(of) {
            return self.collective(of);
        }
        let parts: Vec<&str> = of.operation.iter().map(String::as_str).collect();
        let o: Vec<&str> = of.operands.iter().map(String::as_str).collect();
        let kind = parts[parts.len() - 1];
        match (parts[0], &*o) {
            ("bra", [label]) => self.jump(label, at, of.number),
            ("ret" | "exit", []) => Ok("return ENDED;".into()),
            ("trap", []) => Ok(format!("FAULT(TRAPPED, {});", of.number)),
            ("ld", [to, from]) => self.load(to, from, kind, of.number),
            ("st", [to, from]) => self.store(to, from, kind, of.number),
            ("atom", [old, place, x]) => self.atomic(&parts, (old, place, x), of.number),
            ("mov", [to, from]) => self.mov(to, from, kind),
            ("cvta", [to, from]) => self.set(to, kind, &self.value(from)?),
            ("cvt", [to, from]) => self.convert(&parts, to, from),
            ("setp", [to, a, b]) => {
                let test = self.compare(parts[1], kind, a, b)?;
                self.set(to, "pred", &test)
            }
            ("selp", [to, a, b, p]) => {
                let value = format!("{} ? {} : {}", self.value(p)?, self.value(a)?, self.value(b)?);
                Ok(format!("{} = {value};", self.place(to)?))
            }
            (name, [to, rest @ ..]) => {
                let divides = matches!(name, "div" | "rem") && !kind.starts_with('f');
                let check = match (divides, rest) {
                    (true, [_, b]) => {
                        format!("if (!{}) FAULT(DIVIDED, {}); ", self.typed(b, kind)?, of.number)
                    }
                    _ => String::new(),
                };
                let (result, value) = self.arithmetic(&parts, rest)?;
                Ok(check + &self.set(to, &result, &value)?)
            }
            _ => Err("unknown".into()),
        }
    }

    /// A jump; those back are counted, so that a kernel that hangs ends.
    fn jump(&self, label: &str, at: usize, number: usize) -> Result<String, String> {
        let target = self.labels.get(label).ok_or_else(|| format!("no label: {label}"))?;
        let count =
            if *target < at { format!("if (!--of->turns) FAULT(HANGS, {number}); ") } else { String::new() };
        Ok(format!("{count}goto {};", plain(label)))
    }

    fn load(&self, to: &str, from: &str, kind: &str, number: usize) -> Result<String, String> {
        let (bytes, at) = (bits(kind)? / 8, self.address(from)?);
        let to: Vec<&str> = to.trim_matches(['{', '}']).split(',').collect();
        let mut out = format!("{{ const u8 *at = {at}; ");
        // Parameters lie where the caller has them.
        if !at.starts_with("(P[") {
            let _ = write!(
                out,
                "if ((uintptr_t)at % {}) FAULT(MISALIGNED, {number}); ",
                bytes as usize * to.len()
            );
        }
        for (i, to) in to.iter().enumerate() {
            let place = self.place(to)?;
            let _ = write!(
                out,
                "{{ {} x; memcpy(&x, at + {}, {bytes}); {place} = x; }} ",
                c_type(kind)?,
                i * bytes as usize
            );
        }
        Ok(out + "}")
    }

    fn store(&self, to: &str, from: &str, kind: &str, number: usize) -> Result<String, String> {
        let (bytes, at) = (bits(kind)? / 8, self.address(to)?);
        let from: Vec<&str> = from.trim_matches(['{', '}']).split(',').collect();
        let mut out = format!(
            "{{ u8 *at = {at}; if ((uintptr_t)at % {}) FAULT(MISALIGNED, {number}); ",
            bytes as usize * from.len()
        );
        for (i, from) in from.iter().enumerate() {
            let value = self.value(from)?;
            let _ = write!(
                out,
                "{{ {} x = {value}; memcpy(at + {}, &x, {bytes}); }} ",
                c_type(kind)?,
                i * bytes as usize
            );
        }
        Ok(out + "}")
    }

    /// The other lanes and warps are not running.
    fn atomic(
        &self,
        parts: &[&str],
        (old, at, x): (&str, &str, &str),
        number: usize,
    ) -> Result<String, String> {
        let kind = parts[parts.len() - 1];
        let (c, bytes, at, x) = (c_type(kind)?, bits(kind)? / 8, self.address(at)?, self.typed(x, kind)?);
        let value = match parts[parts.len() - 2] {
            "min" => "x < was ? x : was",
            "max" => "x > was ? x : was",
            "add" => "was + x",
            _ => return Err("unknown".into()),
        };
        Ok(format!(
            "{{ {c} *at = ({c} *){at}; if ((uintptr_t)at % {bytes}) FAULT(MISALIGNED, {number}); {c} was = *at, x = {x}; \
             *at = {value}; {} }}",
            self.set(old, kind, "was")?
        ))
    }

    /// A copy, or two halves of a register put together or taken apart.
    fn mov(&self, to: &str, from: &str, kind: &str) -> Result<String, String> {
        let halves = |text: &str| {
            let inner = text.strip_prefix('{')?.strip_suffix('}')?;
            inner.split_once(',').map(|(low, high)| (low.to_owned(), high.to_owned()))
        };
        let half = if kind.ends_with("64") { 32 } else { 16 };
        match (halves(to), halves(from)) {
            (Some((low, high)), None) => {
                let (low, high) = (self.place(&low)?, self.place(&high)?);
                Ok(format!(
                    "{{ u64 x = {}; {low} = (u{half})x; {high} = (u{half})(x >> {half}); }}",
                    self.value(from)?
                ))
            }
            (None, Some((low, high))) => {
                let (low, high) = (self.value(&low)?, self.value(&high)?);
                self.set(to, kind, &format!("(u64)(u{half}){low} | (u64)(u{half}){high} << {half}"))
            }
            (None, None) => match kind {
                "f32" | "f64" => Ok(format!("{} = {};", self.place(to)?, self.value(from)?)),
                _ => self.set(to, kind, &self.value(from)?),
            },
            _ => Err("unknown".into()),
        }
    }

    fn convert(&self, parts: &[&str], to: &str, from: &str) -> Result<String, String> {
        let [how @ .., kind, of] = &parts[1..] else { return Err("no types".into()) };
        let x = self.typed(from, of)?;
        match (how, kind.starts_with('f'), of.starts_with('f')) {
            ([], false, false) => self.set(to, kind, &x),
            (["rn"], true, false) | (["rn"], true, true) | ([], true, true) => {
                self.set(to, kind, &format!("({}){x}", if *kind == "f32" { "float" } else { "double" }))
            }
            (["rzi"], false, true) if *of == "f32" => self.set(to, kind, &format!("to_{kind}({x})")),
            _ => Err("unknown".into()),
        }
    }

    fn compare(&self, how: &str, kind: &str, a: &str, b: &str) -> Result<String, String> {
        let (a, b) = (self.typed(a, kind)?, self.typed(b, kind)?);
        let nan = format!("({a} != {a} || {b} != {b})");
        let sign = |how: &str| match how {
            "eq" => Ok("=="),
            "ne" => Ok("!="),
            "lt" | "lo" => Ok("<"),
            "le" | "ls" => Ok("<="),
            "gt" | "hi" => Ok(">"),
            "ge" | "hs" => Ok(">="),
            _ => Err(format!("no comparison: {how}")),
        };
        Ok(match (kind.starts_with('f'), how) {
            (true, "nan") => nan,
            (true, "num") => format!("!{nan}"),
            (true, how) if how.len() == 3 && how.ends_with('u') => {
                format!("{nan} || {a} {} {b}", sign(&how[..2])?)
            }
            (true, how) => format!("!{nan} && {a} {} {b}", sign(how)?),
            (false, how) => format!("{a} {} {b}", sign(how)?),
        })
    }

    /// The type of a result, and the result.
    fn arithmetic(&self, parts: &[&str], o: &[&str]) -> Result<(String, String), String> {
        let kind = parts[parts.len() - 1];
        let x = o.iter().map(|o| self.typed(o, kind)).collect::<Result<Vec<_>, _>>();
        let same = |value: String| Ok((kind.to_owned(), value));
        if kind.starts_with('f') {
            return same(floating(parts, &x?)?);
        }
        let how = parts.get(1).copied().unwrap_or_default();
        let width = bits(kind)?;
        // Products and sums wrap: as unsigned numbers of 64 bits, whose low bits are kept.
        let raw =
            o.iter().map(|o| Ok(format!("(u64)({})", self.value(o)?))).collect::<Result<Vec<_>, String>>()?;
        let amount = |b: &str| Ok::<_, String>(format!("(u32)({})", self.value(b)?));
        match (parts[0], how, o) {
            ("mul" | "mad", "wide", [..]) => {
                let x = x?;
                let (wide, bits) = (format!("{}{}", &kind[..1], 2 * width), 2 * width);
                let product = format!("(u64)(({wide}){} * ({wide}){})", x[0], x[1]);
                let sum = o.get(2).map_or(Ok(String::new()), |c| self.value(c).map(|c| format!(" + {c}")))?;
                Ok((format!("u{bits}"), product + &sum))
            }
            ("mul", "lo", [..]) => same(format!("{} * {}", raw[0], raw[1])),
            ("mad", "lo", [..]) => same(format!("{} * {} + {}", raw[0], raw[1], raw[2])),
            ("mul", "hi", [..]) if kind.starts_with('u') => {
                let x = x?;
                same(format!("(u128){} * {} >> {width}", x[0], x[1]))
            }
            ("add" | "sub", _, [_, _]) if how == kind => {
                same(format!("{} {} {}", raw[0], if parts[0] == "add" { "+" } else { "-" }, raw[1]))
            }
            ("neg", _, [_]) => same(format!("-{}", raw[0])),
            ("and", _, [_, _]) => same(format!("{} & {}", raw[0], raw[1])),
            ("or", _, [_, _]) => same(format!("{} | {}", raw[0], raw[1])),
            ("xor", _, [_, _]) => same(format!("{} ^ {}", raw[0], raw[1])),
            ("not", _, [_]) if kind == "pred" => same(format!("{} ^ 1", raw[0])),
            ("not", _, [_]) => same(format!("~{}", raw[0])),
            ("div" | "rem", _, [_, _]) => {
                let x = x?;
                same(format!("{} {} {}", x[0], if parts[0] == "div" { "/" } else { "%" }, x[1]))
            }
            ("min" | "max", _, [_, _]) => {
                let (x, sign) = (x?, if parts[0] == "min" { "<" } else { ">" });
                same(format!("{} {sign} {} ? {} : {}", x[0], x[1], x[0], x[1]))
            }
            ("shl", _, [_, b]) => {
                let by = amount(b)?;
                same(format!("{by} >= {width} ? 0 : {} << ({by} & {})", raw[0], width - 1))
            }
            ("shr", _, [_, b]) => {
                let (x, by) = (x?, amount(b)?);
                let past = if kind.starts_with('s') { format!("{} < 0 ? -1 : 0", x[0]) } else { "0".into() };
                same(format!("{by} >= {width} ? ({past}) : {} >> ({by} & {})", x[0], width - 1))
            }
            ("shf", "l", [a, b, c]) if parts[2] == "wrap" => {
                same(format!("funnel_left({}, {}, {})", self.value(a)?, self.value(b)?, amount(c)?))
            }
            ("shf", "r", [a, b, c]) if parts[2] == "wrap" => {
                same(format!("funnel_right({}, {}, {})", self.value(a)?, self.value(b)?, amount(c)?))
            }
            ("bfe", "u32", [a, b, c]) => {
                same(format!("field({}, {}, {})", self.value(a)?, amount(b)?, amount(c)?))
            }
            ("bfe", "u64", [a, b, c]) => {
                same(format!("wide_field({}, {}, {})", self.value(a)?, amount(b)?, amount(c)?))
            }
            ("bfe", "s32", [a, b, c]) => {
                same(format!("signed_field({}, {}, {})", self.value(a)?, amount(b)?, amount(c)?))
            }
            ("popc", _, [_]) => Ok(("u32".into(), format!("__builtin_popcountll({})", x?[0]))),
            ("clz", _, [_]) => {
                let x = &x?[0];
                Ok(("u32".into(), format!("{x} ? __builtin_clzll({x}) - {} : {width}", 64 - width)))
            }
            ("brev", "b32", [_]) => same(format!("reversed({})", x?[0])),
            _ => Err("unknown".into()),
        }
    }

    /// Leaves the function with what the lane brings, and goes on here when the others were there.
    fn collective(&mut self, of: &Instruction) -> Result<String, String> {
        if of.guard.is_some() {
            return Err("unknown".into());
        }
        self.waits += 1;
        let parts: Vec<&str> = of.operation.iter().map(String::as_str).collect();
        let o: Vec<&str> = of.operands.iter().map(String::as_str).collect();
        let (kind, value, by, clamp, mask, after) = match (&*parts, &*o) {
            (["bar", "sync"], ["0"]) => ("BLOCK", "0", "0", "0", "-1", String::new()),
            (["bar", "warp", "sync"], [mask]) => ("BARRIER", "0", "0", "0", *mask, String::new()),
            (["vote", "sync", "ballot", "b32"], [to, p, mask]) => {
                ("BALLOT", *p, "0", "0", *mask, format!("{} = of->result;", self.place(to)?))
            }
            (["shfl", "sync", how, "b32"], [to, x, by, clamp, mask]) => {
                let kind = match *how {
                    "bfly" => "BUTTERFLY",
                    "idx" => "INDEX",
                    "up" => "UP",
                    "down" => "DOWN",
                    _ => return Err("unknown".into()),
                };
                let (to, inside) = to.split_once('|').map_or((*to, None), |(to, p)| (to, Some(p)));
                let mut after = format!("{} = of->result;", self.place(to)?);
                if let Some(p) = inside {
                    let _ = write!(after, " {} = of->inside;", self.place(p)?);
                }
                (kind, *x, *by, *clamp, *mask, after)
            }
            _ => return Err("unknown".into()),
        };
        let [value, by, clamp, mask] = [value, by, clamp, mask].map(|operand| self.value(operand));
        let (value, by, clamp, mask) = (value?, by?, clamp?, mask?);
        let n = self.waits;
        Ok(format!(
            "of->at = {n}; of->line = {}; of->kind = {kind}; of->value = {value}; of->by = {by}; of->clamp = {clamp}; of->mask = {mask}; \
             return WAITS; WAIT{n}:; {after}",
            of.number
        ))
    }
}

/// A result in floating point, rounded to nearest, with small numbers kept.
fn floating(parts: &[&str], x: &[String]) -> Result<String, String> {
    let kind = parts[parts.len() - 1];
    let exact = matches!(parts[0], "neg" | "abs" | "min" | "max");
    if parts.len() != 2 + usize::from(!exact) || !exact && parts[1] != "rn" {
        return Err("unknown".into());
    }
    let wide = if kind == "f64" { "" } else { "f" };
    Ok(match (parts[0], x) {
        ("add", [a, b]) => format!("{a} + {b}"),
        ("sub", [a, b]) => format!("{a} - {b}"),
        ("mul", [a, b]) => format!("{a} * {b}"),
        ("div", [a, b]) => format!("{a} / {b}"),
        ("fma", [a, b, c]) => format!("__builtin_fma{wide}({a}, {b}, {c})"),
        ("rcp", [a]) => format!("1 / {a}"),
        ("sqrt", [a]) => format!("__builtin_sqrt{wide}({a})"),
        ("neg", [a]) => format!("-{a}"),
        ("abs", [a]) => format!("__builtin_fabs{wide}({a})"),
        ("max", [a, b]) if kind == "f32" => format!("maximum({a}, {b})"),
        ("min", [a, b]) if kind == "f32" => format!("minimum({a}, {b})"),
        _ => return Err("unknown".into()),
    })
}

/// The type of C that has the values of a type of PTX.
fn c_type(kind: &str) -> Result<String, String> {
    let width = bits(kind)?;
    match kind.as_bytes()[0] {
        b's' => Ok(format!("s{width}")),
        b'u' | b'b' => Ok(format!("u{width}")),
        _ => Err(format!("no integers: {kind}")),
    }
}
