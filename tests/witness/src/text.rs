//! Reads the text of a PTX module.

use std::collections::HashMap;

/// A module.
pub struct Module {
    /// Constant variables: their names and bytes.
    pub constants: Vec<(String, Vec<u8>)>,
    /// Kernels.
    pub entries: Vec<Entry>,
}

/// A kernel.
#[derive(Default)]
pub struct Entry {
    pub name: String,
    /// Names of the parameters, and their bytes.
    pub params: Vec<(String, usize)>,
    /// Bits of the registers whose names begin like this, or are this; 1 for predicates.
    pub registers: HashMap<String, u32>,
    /// Variables in shared memory, and their offsets.
    pub shared: Vec<(String, usize)>,
    /// Bytes of shared memory.
    pub shared_bytes: usize,
    pub lines: Vec<Line>,
}

/// A line of a kernel.
pub enum Line {
    Label(String),
    Instruction(Instruction),
}

/// An instruction.
pub struct Instruction {
    /// Line of the text, from 1.
    pub number: usize,
    /// Register of a predicate, and whether the instruction runs where it is set.
    pub guard: Option<(String, bool)>,
    /// The operation between its dots.
    pub operation: Vec<String>,
    pub operands: Vec<String>,
}

/// Bits of a type.
pub fn bits(kind: &str) -> Result<u32, String> {
    match kind.trim_start_matches('.') {
        "pred" => Ok(1),
        kind => kind.get(1..).and_then(|n| n.parse().ok()).ok_or_else(|| format!("no type: {kind}")),
    }
}

/// `name[n]` as its parts; 1 if there is no number.
fn array(text: &str) -> Result<(String, usize), String> {
    let Some((name, n)) = text.split_once('[') else { return Ok((text.to_owned(), 1)) };
    let n = n.split(']').next().unwrap_or_default();
    Ok((name.to_owned(), n.parse().map_err(|_| format!("no number: {n}"))?))
}

/// What stands between commas, unless these are within brackets or braces.
fn operands(text: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut depth = 0;
    for c in text.chars() {
        depth += i32::from(matches!(c, '{' | '[')) - i32::from(matches!(c, '}' | ']'));
        match c {
            ',' if depth == 0 => found.push(String::new()),
            c if c.is_whitespace() => {}
            c => found.last_mut().expect("never empty").push(c),
        }
    }
    found.retain(|operand| !operand.is_empty());
    found
}

impl Module {
    /// # Errors
    /// The line that is not understood.
    pub fn read(text: &str) -> Result<Module, String> {
        let mut module = Module { constants: Vec::new(), entries: Vec::new() };
        let mut head: Option<String> = None;
        let mut entry: Option<Entry> = None;
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split("//").next().unwrap_or_default().trim();
            let at = |what: String| format!("line {number}, {line}: {what}");
            if let Some(begun) = &mut head {
                begun.push_str(line);
                if line.contains(')') {
                    entry = Some(Entry::of(begun).map_err(at)?);
                    head = None;
                }
            } else if line.starts_with(".visible .entry") {
                head = Some(line.to_owned());
            } else if let Some(of) = &mut entry {
                match line {
                    "" | "{" => {}
                    "}" => module.entries.extend(entry.take()),
                    line => of.line(line, number).map_err(at)?,
                }
            } else if let Some(rest) = line.strip_prefix(".global") {
                module.constants.push(constant(rest).map_err(at)?);
            } else if !(line.is_empty()
                || [".version", ".target", ".address_size 64"].iter().any(|known| line.starts_with(known)))
            {
                return Err(at("unknown".into()));
            }
        }
        Ok(module)
    }
}

/// ` .align 1 .b8 name[3] = {0, 1, 2};`
fn constant(text: &str) -> Result<(String, Vec<u8>), String> {
    let (left, right) = text.split_once('=').ok_or("no value")?;
    let name = left.split_whitespace().last().ok_or("no name")?;
    if !left.contains(".b8") {
        return Err("not of bytes".into());
    }
    let numbers = right.trim().trim_end_matches(';').trim_matches(['{', '}']).split(',');
    let bytes = numbers.map(|n| n.trim().parse().map_err(|_| format!("no byte: {n}")));
    Ok((array(name)?.0, bytes.collect::<Result<_, _>>()?))
}

impl Entry {
    /// Bits of a register; none if the name is not one's.
    pub fn bits(&self, name: &str) -> Option<u32> {
        let of = &self.registers;
        of.get(name).or_else(|| of.get(name.trim_end_matches(char::is_numeric))).copied()
    }

    /// A kernel without its lines, from its name and parameters.
    fn of(head: &str) -> Result<Entry, String> {
        let head = head.trim_start_matches(".visible .entry");
        let (name, params) = head.split_once('(').ok_or("no parameters")?;
        let mut entry = Entry { name: name.trim().to_owned(), ..Entry::default() };
        for param in params.split(')').next().unwrap_or_default().split(',') {
            let words: Vec<&str> = param.split_whitespace().collect();
            let Some(last) = words.last() else { continue };
            let kind = words.iter().find(|word| word.starts_with(['.']) && word.ends_with(char::is_numeric));
            let (name, count) = array(last)?;
            entry.params.push((name, bits(kind.ok_or("no type")?)? as usize / 8 * count));
        }
        Ok(entry)
    }

    fn line(&mut self, line: &str, number: usize) -> Result<(), String> {
        if let Some(label) = line.strip_suffix(':') {
            self.lines.push(Line::Label(label.to_owned()));
            return Ok(());
        }
        // A scope on one line: its registers get names of their own.
        let scope = line.strip_prefix('{').and_then(|rest| rest.strip_suffix('}'));
        let mut own = Vec::new();
        for statement in scope.unwrap_or(line).split(';').map(str::trim).filter(|text| !text.is_empty()) {
            match statement.strip_prefix('.') {
                Some(directive) => {
                    let declared = self.directive(directive)?;
                    own.extend(declared.filter(|_| scope.is_some()));
                }
                None => self.statement(statement, number, &own)?,
            }
        }
        for name in own {
            let bits = self.registers.remove(&name).ok_or("no register")?;
            self.registers.insert(format!("{name}_{number}"), bits);
        }
        Ok(())
    }

    /// Declares what a directive says; returns the name of a single register.
    fn directive(&mut self, text: &str) -> Result<Option<String>, String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        match *words {
            ["reg", kind, name] => {
                let name = name.split('<').next().unwrap_or(name);
                self.registers.insert(name.to_owned(), bits(kind)?);
                return Ok(Some(name.to_owned()));
            }
            ["shared", ".align", align, ".b8", name] => {
                let align: usize = align.parse().map_err(|_| "no alignment")?;
                let (name, bytes) = array(name)?;
                let at = self.shared_bytes.next_multiple_of(align);
                self.shared.push((name, at));
                self.shared_bytes = at + bytes;
            }
            ["pragma", ..] => {}
            _ => return Err("unknown directive".into()),
        }
        Ok(None)
    }

    /// `own`: registers of the scope, to be called by the line too.
    fn statement(&mut self, text: &str, number: usize, own: &[String]) -> Result<(), String> {
        let (guard, text) = match text.strip_prefix('@') {
            Some(rest) => {
                let (predicate, rest) = rest.split_once(char::is_whitespace).ok_or("no operation")?;
                let plain = predicate.strip_prefix('!');
                (Some((plain.unwrap_or(predicate).to_owned(), plain.is_none())), rest.trim())
            }
            None => (None, text),
        };
        let (operation, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let mut operands = operands(rest);
        for name in own {
            operands
                .iter_mut()
                .for_each(|operand| *operand = operand.replace(name, &format!("{name}_{number}")));
        }
        let operation = operation.split('.').map(str::to_owned).collect();
        self.lines.push(Line::Instruction(Instruction { number, guard, operation, operands }));
        Ok(())
    }
}
