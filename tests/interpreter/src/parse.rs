//! Parses PTX text to resolved instructions. Unknown text is an error with its line.

use super::{Data, Inst, LOCAL, Op, ParseError, R, SHARED};
use std::collections::HashMap;

/// Bytes of shared memory that a kernel may declare.
const MOST_SHARED: usize = 48 << 10;

/// The three register files. Registers of 16 bits live in that of 32, their upper half 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum File {
    Pred,
    B32,
    B64,
}

/// Initial value of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Bits(u64),
    /// The address of a module's variable.
    Global(usize),
    Tid,
    Ntid,
    Ctaid,
    Nctaid,
    Lane,
}

/// A `.global` variable.
#[derive(Clone, Debug)]
pub struct Global {
    pub name: String,
    pub bytes: Vec<u8>,
}

/// A kernel's parameter.
#[derive(Clone, Debug)]
pub struct Param {
    pub name: String,
    pub size: usize,
    /// Offset in the parameter space.
    pub at: usize,
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    pub params: Vec<Param>,
    /// Bytes of local memory of a thread.
    pub local: usize,
    /// Bytes of shared memory of a block.
    pub shared: usize,
    /// Registers of the three files, those of `sources` included.
    pub registers: [usize; 3],
    pub sources: Vec<(File, R, Source)>,
    pub code: Vec<Inst>,
}

/// A module.
#[derive(Clone, Debug, Default)]
pub struct Module {
    pub target: String,
    pub globals: Vec<Global>,
    pub entries: Vec<Entry>,
}

pub(super) type Result<T, E = String> = std::result::Result<T, E>;

impl Module {
    /// Reads a module.
    pub fn parse(text: &str) -> Result<Module, ParseError> {
        let mut module = Module::default();
        let mut lines =
            text.lines().zip(1..).map(|(text, line)| (text.split("//").next().unwrap_or("").trim(), line));
        while let Some((text, line)) = lines.next() {
            let fail = |what: String| ParseError { line, what };
            match text.split_whitespace().collect::<Vec<_>>().as_slice() {
                [] | [".version" | ".address_size", ..] => {}
                [".target", target] => module.target = (*target).to_owned(),
                [".visible", ".entry", ..] | [".entry", ..] => {
                    let mut head = text.to_owned();
                    while !head.contains(')') {
                        head += lines.next().ok_or_else(|| fail("no ')'".into()))?.0;
                    }
                    let (name, params) = header(&head).map_err(fail)?;
                    module.entries.push(Body::new(&module, name, params).read(&mut lines, line)?);
                }
                [".visible", ".global", rest @ ..] | [".global", rest @ ..] => {
                    module.globals.push(global(&rest.join(" ")).map_err(fail)?);
                }
                _ => return Err(fail(format!("unknown directive {text:?}"))),
            }
        }
        Ok(module)
    }
}

fn bytes_of(kind: &str) -> Result<usize> {
    match kind.trim_start_matches(['.', 'b', 'u', 's', 'f']) {
        "8" => Ok(1),
        "16" => Ok(2),
        "32" => Ok(4),
        "64" => Ok(8),
        _ => Err(format!("unknown type {kind:?}")),
    }
}

pub(super) fn number<T: std::str::FromStr>(s: &str) -> Result<T> {
    s.trim().parse().map_err(|_| format!("no number: {s:?}"))
}

/// `name[12]` to the name and 12; without brackets 1.
fn array(s: &str) -> Result<(&str, usize)> {
    match s.split_once('[') {
        Some((name, size)) => Ok((name, number(size.trim_end_matches(']'))?)),
        None => Ok((s, 1)),
    }
}

fn header(text: &str) -> Result<(String, Vec<Param>)> {
    let (name, rest) = text.split_once(".entry").unwrap_or(("", "")).1.split_once('(').ok_or("no '('")?;
    let mut params = Vec::new();
    let mut end = 0usize;
    for param in rest.split(')').next().unwrap_or("").split(',').filter(|p| !p.trim().is_empty()) {
        let words: Vec<_> = param.split_whitespace().collect();
        let kinds = ["8", "16", "32", "64"];
        let kind = words.iter().find(|w| kinds.contains(&w.get(2..).unwrap_or(""))).ok_or("no type")?;
        let element = bytes_of(kind)?;
        let align = match words.as_slice() {
            [".param", ".align", n, ..] => number(n)?,
            _ => element,
        };
        let (name, count) = array(words.last().ok_or("no name")?)?;
        let at = end.next_multiple_of(align);
        end = at + element * count;
        params.push(Param { name: name.to_owned(), size: element * count, at });
    }
    Ok((name.trim().to_owned(), params))
}

/// `.align 4 .b8 name[4] = {0, 1, 2, 3};`
fn global(text: &str) -> Result<Global> {
    let (left, right) =
        text.trim_end_matches(';').split_once('=').unwrap_or((text.trim_end_matches(';'), ""));
    let words: Vec<_> = left.split_whitespace().collect();
    let [.., kind, name] = words.as_slice() else { return Err(format!("unknown variable {text:?}")) };
    let element = bytes_of(kind)?;
    let (name, count) = array(name)?;
    let mut bytes = Vec::new();
    for x in right.trim().trim_matches(['{', '}']).split(',').filter(|x| !x.trim().is_empty()) {
        bytes.extend_from_slice(&(immediate(x.trim())?).to_le_bytes()[..element]);
    }
    bytes.resize(element * count, 0);
    Ok(Global { name: name.to_owned(), bytes })
}

fn immediate(s: &str) -> Result<u64> {
    let (negative, digits) = s.strip_prefix('-').map_or((false, s), |s| (true, s));
    let value = if let Some(float) = digits.strip_prefix("0f") {
        u32::from_str_radix(float, 16).map(u64::from)
    } else if let Some(hex) = digits.strip_prefix("0x").or(digits.strip_prefix("0d")) {
        u64::from_str_radix(hex, 16)
    } else {
        digits.parse()
    };
    let value = value.map_err(|_| format!("no register, number or name: {s:?}"))?;
    Ok(if negative { value.wrapping_neg() } else { value })
}

/// Operands at the top level of commas.
pub(super) fn operands(text: &str) -> Vec<&str> {
    let (mut depth, mut from, mut out) = (0, 0, Vec::new());
    for (i, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                out.push(text[from..i].trim());
                from = i + 1;
            }
            _ => {}
        }
    }
    if !text[from..].trim().is_empty() {
        out.push(text[from..].trim());
    }
    out
}

/// A kernel's text between its braces.
pub(super) struct Body<'m> {
    module: &'m Module,
    pub(super) entry: Entry,
    /// By prefix: the file, bits of a register, and the index of number 0.
    registers: HashMap<String, (File, u32, R)>,
    pool: HashMap<(File, Source), R>,
    depot: HashMap<String, u64>,
    labels: HashMap<String, u32>,
    /// Branches to labels that may not have been read yet.
    pub(super) jumps: Vec<(usize, String)>,
}

impl<'m> Body<'m> {
    fn new(module: &'m Module, name: String, params: Vec<Param>) -> Self {
        let (local, shared, registers, sources, code) = (0, 0, [0; 3], Vec::new(), Vec::new());
        Body {
            module,
            entry: Entry { name, params, local, shared, registers, sources, code },
            registers: HashMap::new(),
            pool: HashMap::new(),
            depot: HashMap::new(),
            labels: HashMap::new(),
            jumps: Vec::new(),
        }
    }

    fn read<'t>(
        mut self,
        lines: &mut impl Iterator<Item = (&'t str, u32)>,
        first: u32,
    ) -> Result<Entry, ParseError> {
        let mut last = first;
        for (text, line) in lines {
            last = line;
            if text == "}" {
                for (at, label) in std::mem::take(&mut self.jumps) {
                    let Inst { op, line, .. } = &mut self.entry.code[at];
                    let Some(&target) = self.labels.get(&label) else {
                        return Err(ParseError { line: *line, what: format!("no label {label:?}") });
                    };
                    *op = Op::Bra(target);
                }
                return Ok(self.entry);
            }
            self.line(text, line).map_err(|what| ParseError { line, what })?;
        }
        Err(ParseError { line: last, what: "no '}'".into() })
    }

    fn line(&mut self, text: &str, line: u32) -> Result<()> {
        if text.is_empty() || text == "{" {
            return Ok(());
        }
        if let Some(label) = text.strip_suffix(':') {
            self.labels.insert(label.to_owned(), self.entry.code.len() as u32);
            return Ok(());
        }
        // A scope of its own on one line; its registers are new ones.
        let text = text.strip_prefix('{').and_then(|t| t.strip_suffix('}')).map_or(text, str::trim);
        let Some(text) = text.strip_suffix(';') else { return Err(format!("no ';' after {text:?}")) };
        for statement in text.split(';').map(str::trim) {
            if let Some(rest) = statement.strip_prefix('.') {
                self.directive(rest)?;
                continue;
            }
            let (guard, rest) = match statement.strip_prefix('@') {
                Some(s) => {
                    let (p, rest) = s.split_once(char::is_whitespace).ok_or("no operation")?;
                    let (p, set) = p.strip_prefix('!').map_or((p, true), |p| (p, false));
                    (Some((self.reg(p, File::Pred)?, set)), rest.trim())
                }
                None => (None, statement),
            };
            let (opcode, args) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            let parts: Vec<_> = opcode.split('.').collect();
            let op = self.op(&parts, &operands(args)).map_err(|what| format!("{statement:?}: {what}"))?;
            self.entry.code.push(Inst { op, guard, line, opcode: opcode.to_owned() });
        }
        Ok(())
    }

    fn directive(&mut self, text: &str) -> Result<()> {
        let words: Vec<_> = text.split_whitespace().collect();
        match words.as_slice() {
            ["reg", kind, names @ ..] => {
                let bits = if *kind == ".pred" { 1 } else { bytes_of(kind)? as u32 * 8 };
                let file = [File::B32, File::B64, File::Pred][if bits == 1 { 2 } else { bits as usize / 64 }];
                for name in names.join(" ").split(',').map(str::trim) {
                    let (prefix, count) = match name.split_once('<') {
                        Some((prefix, n)) => (prefix, number(n.trim_end_matches('>'))?),
                        None => (name, 1),
                    };
                    let used = &mut self.entry.registers[file as usize];
                    self.registers.insert(prefix.to_owned(), (file, bits, *used as R));
                    *used += count;
                }
            }
            [space @ ("local" | "shared"), ".align", align, kind, name] => {
                let (first, end) = match *space {
                    "local" => (LOCAL, &mut self.entry.local),
                    _ => (SHARED, &mut self.entry.shared),
                };
                let at = end.next_multiple_of(number(align)?);
                let (name, count) = array(name)?;
                self.depot.insert(name.to_owned(), first + at as u64);
                *end = at + bytes_of(kind)? * count;
                if self.entry.shared > MOST_SHARED {
                    return Err(format!("more shared memory than the {MOST_SHARED} bytes of a block"));
                }
            }
            ["pragma", ..] => {}
            _ => return Err(format!("unknown directive {text:?}")),
        }
        Ok(())
    }

    fn lookup(&self, name: &str) -> Result<(File, u32, R)> {
        if let Some(&found) = self.registers.get(name) {
            return Ok(found);
        }
        let prefix = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let &(file, bits, first) =
            self.registers.get(prefix).ok_or_else(|| format!("no register {name:?}"))?;
        Ok((file, bits, first + number::<R>(&name[prefix.len()..])?))
    }

    /// A register that an instruction writes, or a predicate.
    pub(super) fn reg(&self, name: &str, file: File) -> Result<R> {
        let (found, _, r) = self.lookup(name)?;
        if found == file { Ok(r) } else { Err(format!("{name} is in the file {found:?}, not {file:?}")) }
    }

    fn constant(&mut self, file: File, source: Source) -> R {
        let (entry, pool) = (&mut self.entry, &mut self.pool);
        *pool.entry((file, source)).or_insert_with(|| {
            let used = &mut entry.registers[file as usize];
            entry.sources.push((file, *used as R, source));
            *used += 1;
            *used as R - 1
        })
    }

    /// An operand that an instruction of `bits` bits reads.
    pub(super) fn value(&mut self, name: &str, bits: u32) -> Result<R> {
        let file = if bits == 64 { File::B64 } else { File::B32 };
        let source = match name {
            "%tid.x" => Source::Tid,
            "%ntid.x" => Source::Ntid,
            "%ctaid.x" => Source::Ctaid,
            "%nctaid.x" => Source::Nctaid,
            "%laneid" => Source::Lane,
            _ if name.starts_with('%') => return self.reg(name, file),
            _ => match (self.module.globals.iter().position(|g| g.name == name), self.depot.get(name)) {
                (Some(global), _) => Source::Global(global),
                (None, Some(&local)) => Source::Bits(local),
                (None, None) => Source::Bits(immediate(name)? & (u64::MAX >> (64 - bits))),
            },
        };
        Ok(self.constant(file, source))
    }

    /// `[register+offset]`, `[variable+offset]`
    pub(super) fn address(&mut self, text: &str) -> Result<(R, i64)> {
        let text = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).ok_or("no address")?;
        let (base, offset) = text.split_once('+').unwrap_or((text, "0"));
        Ok((self.value(base, 64)?, number(offset)?))
    }

    /// `x` or `{x, y, ..}`; `bits` of an element.
    pub(super) fn data(&mut self, text: &str, kind: &str, reads: bool) -> Result<Data> {
        let bits = bytes_of(kind)? as u32 * 8;
        if let "s8" | "s16" = kind {
            return Err("unknown operation: it extends the sign".into());
        }
        let list = operands(text.trim_matches(['{', '}']));
        let mut regs = [(0, false); 4];
        if list.len() > regs.len() {
            return Err("more than 4 elements".into());
        }
        for (r, name) in regs.iter_mut().zip(&list) {
            *r = if name.starts_with('%') {
                let (file, _, r) = self.lookup(name)?;
                (r, file == File::B64)
            } else if reads {
                (self.value(name, bits)?, bits == 64)
            } else {
                return Err(format!("{name} is no register"));
            };
        }
        Ok(Data { size: (bits / 8) as u8, count: list.len() as u8, regs })
    }
}
