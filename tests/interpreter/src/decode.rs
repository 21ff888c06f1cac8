//! Decodes the text of one instruction to an [`Op`].

use super::parse::{Body, File, Result, number, operands};
use super::{Atom, Bin32, Bin64, Logic, Narrow, Op, Order, Shfl, Shift, Space, Tri32, Un32, Un64};

/// The orders that make a comparison true, by its name.
fn orders(name: &str, float: bool) -> Result<u8> {
    use Order as O;
    let ordered = O::LESS | O::EQUAL | O::GREATER;
    Ok(match (name, float) {
        ("eq", _) => O::EQUAL,
        ("ne", _) => O::LESS | O::GREATER,
        ("lt", _) | ("lo", false) => O::LESS,
        ("le", _) | ("ls", false) => O::LESS | O::EQUAL,
        ("gt", _) | ("hi", false) => O::GREATER,
        ("ge", _) | ("hs", false) => O::GREATER | O::EQUAL,
        ("equ", true) => O::EQUAL | O::UNORDERED,
        ("neu", true) => O::LESS | O::GREATER | O::UNORDERED,
        ("ltu", true) => O::LESS | O::UNORDERED,
        ("leu", true) => O::LESS | O::EQUAL | O::UNORDERED,
        ("gtu", true) => O::GREATER | O::UNORDERED,
        ("geu", true) => O::GREATER | O::EQUAL | O::UNORDERED,
        ("num", true) => ordered,
        ("nan", true) => O::UNORDERED,
        _ => return Err(format!("unknown comparison {name:?}")),
    })
}

impl Body<'_> {
    fn un32(&mut self, op: Un32, bits: u32, a: &[&str]) -> Result<Op> {
        let &[d, a] = a else { return Err("not 2 operands".into()) };
        Ok(Op::Un32(op, self.reg(d, File::B32)?, self.value(a, bits)?))
    }

    fn bin32(&mut self, op: Bin32, bits: u32, a: &[&str]) -> Result<Op> {
        let &[d, a, b] = a else { return Err("not 3 operands".into()) };
        Ok(Op::Bin32(op, self.reg(d, File::B32)?, self.value(a, bits)?, self.value(b, bits)?))
    }

    /// 16 bits shifted by a 32-bit register.
    fn shift16(&mut self, op: Bin32, a: &[&str]) -> Result<Op> {
        let &[d, a, b] = a else { return Err("not 3 operands".into()) };
        Ok(Op::Bin32(op, self.reg(d, File::B32)?, self.value(a, 16)?, self.value(b, 32)?))
    }

    fn tri32(&mut self, op: Tri32, a: &[&str]) -> Result<Op> {
        let &[d, a, b, c] = a else { return Err("not 4 operands".into()) };
        let d = self.reg(d, File::B32)?;
        Ok(Op::Tri32(op, d, self.value(a, 32)?, self.value(b, 32)?, self.value(c, 32)?))
    }

    fn un64(&mut self, op: Un64, a: &[&str]) -> Result<Op> {
        let &[d, a] = a else { return Err("not 2 operands".into()) };
        Ok(Op::Un64(op, self.reg(d, File::B64)?, self.value(a, 64)?))
    }

    fn bin64(&mut self, op: Bin64, a: &[&str]) -> Result<Op> {
        let &[d, a, b] = a else { return Err("not 3 operands".into()) };
        Ok(Op::Bin64(op, self.reg(d, File::B64)?, self.value(a, 64)?, self.value(b, 64)?))
    }

    fn shift64(&mut self, op: Shift, a: &[&str]) -> Result<Op> {
        let &[d, a, b] = a else { return Err("not 3 operands".into()) };
        Ok(Op::Shift64(op, self.reg(d, File::B64)?, self.value(a, 64)?, self.value(b, 32)?))
    }

    fn narrow(&mut self, op: Narrow, a: &[&str]) -> Result<Op> {
        let &[d, a] = a else { return Err("not 2 operands".into()) };
        Ok(Op::Narrow(op, self.reg(d, File::B32)?, self.value(a, 64)?))
    }

    fn bin_p(&mut self, op: Logic, a: &[&str]) -> Result<Op> {
        let &[d, a, b] = a else { return Err("not 3 operands".into()) };
        Ok(Op::BinP(op, self.reg(d, File::Pred)?, self.reg(a, File::Pred)?, self.reg(b, File::Pred)?))
    }

    fn mad_wide(&mut self, signed: bool, d: &str, a: &str, b: &str, c: &str) -> Result<Op> {
        let (d, a, b) = (self.reg(d, File::B64)?, self.value(a, 32)?, self.value(b, 32)?);
        Ok(Op::MadWide(signed, d, a, b, self.value(c, 64)?))
    }

    fn mov(&mut self, kind: &str, a: &[&str]) -> Result<Op> {
        let &[d, s] = a else { return Err("not 2 operands".into()) };
        match kind {
            "pred" if s == "0" || s == "-1" => Ok(Op::SetP(self.reg(d, File::Pred)?, s == "-1")),
            "pred" => Ok(Op::UnP(false, self.reg(d, File::Pred)?, self.reg(s, File::Pred)?)),
            "b16" | "u16" | "s16" => self.un32(Un32::Mov, 16, a),
            "b32" | "u32" | "s32" | "f32" if !a.concat().contains('{') => self.un32(Un32::Mov, 32, a),
            "b64" if s.starts_with('{') => {
                let &[lo, hi] = operands(s.trim_matches(['{', '}'])).as_slice() else {
                    return Err("not 2 halves".into());
                };
                Ok(Op::Pack(self.reg(d, File::B64)?, self.value(lo, 32)?, self.value(hi, 32)?))
            }
            "b64" if d.starts_with('{') => {
                let &[lo, hi] = operands(d.trim_matches(['{', '}'])).as_slice() else {
                    return Err("not 2 halves".into());
                };
                Ok(Op::Unpack(self.reg(lo, File::B32)?, self.reg(hi, File::B32)?, self.value(s, 64)?))
            }
            "b64" | "u64" | "s64" => self.un64(Un64::Mov, a),
            _ => Err("unknown operation".into()),
        }
    }

    fn setp(&mut self, order: &str, kind: &str, a: &[&str]) -> Result<Op> {
        let &[p, a, b] = a else { return Err("not 3 operands".into()) };
        let (p, float) = (self.reg(p, File::Pred)?, kind == "f32");
        let mask = orders(order, float)?;
        let bits = match kind {
            "b16" | "u16" | "s16" => 16,
            "b32" | "u32" | "s32" | "f32" => 32,
            "b64" | "u64" | "s64" => 64,
            _ => return Err("unknown operation".into()),
        };
        let (a, b) = (self.value(a, bits)?, self.value(b, bits)?);
        Ok(match (float, bits) {
            (true, _) => Op::SetF(mask, p, a, b),
            (false, 64) => Op::Set64(kind == "s64", mask, p, a, b),
            (false, _) => Op::Set32(u32::from(kind.starts_with('s')) << (bits - 1), mask, p, a, b),
        })
    }

    fn selp(&mut self, bits: u32, a: &[&str]) -> Result<Op> {
        let &[d, a, b, p] = a else { return Err("not 4 operands".into()) };
        let (a, b, p) = (self.value(a, bits)?, self.value(b, bits)?, self.reg(p, File::Pred)?);
        Ok(match bits {
            64 => Op::Sel64(self.reg(d, File::B64)?, a, b, p),
            _ => Op::Sel32(self.reg(d, File::B32)?, a, b, p),
        })
    }

    fn cvt(&mut self, parts: &[&str], a: &[&str]) -> Result<Op> {
        match parts {
            ["u64" | "s64", from @ ("u32" | "s32" | "u16")] => {
                let &[d, s] = a else { return Err("not 2 operands".into()) };
                let bits = if *from == "u16" { 16 } else { 32 };
                Ok(Op::Widen(*from == "s32", self.reg(d, File::B64)?, self.value(s, bits)?))
            }
            ["u32" | "s32", "u64" | "s64"] => self.narrow(Narrow::Low, a),
            ["u16" | "s16", "u64" | "s64"] => self.narrow(Narrow::Low16, a),
            ["u32" | "s32", "u16"] => self.un32(Un32::Mov, 16, a),
            ["u16" | "s16", "u32" | "s32"] => self.un32(Un32::Low16, 32, a),
            ["rzi", "s32", "f32"] => self.un32(Un32::Trunc, 32, a),
            ["rzi", "u32", "f32"] => self.un32(Un32::TruncU, 32, a),
            ["rn", "f32", "s32"] => self.un32(Un32::FromS32, 32, a),
            ["rn", "f32", "u32"] => self.un32(Un32::FromU32, 32, a),
            ["rn", "f64", "u64"] => self.un64(Un64::FromU64, a),
            ["rn", "f64", "u32"] => {
                let &[d, s] = a else { return Err("not 2 operands".into()) };
                Ok(Op::Double(self.reg(d, File::B64)?, self.value(s, 32)?))
            }
            ["rn", "f32", "f64"] => self.narrow(Narrow::Single, a),
            ["rn", "f32", "u64"] => self.narrow(Narrow::SingleU64, a),
            ["f32", "f16"] => self.un32(Un32::FromF16, 16, a),
            _ => Err("unknown operation".into()),
        }
    }

    fn memory(&mut self, parts: &[&str], a: &[&str]) -> Result<Op> {
        let &[x, y] = a else { return Err("not 2 operands".into()) };
        if let ["ld", "param", kind] = parts {
            let (name, offset) =
                y.trim_matches(['[', ']']).split_once('+').unwrap_or((y.trim_matches(['[', ']']), "0"));
            let param = self.entry.params.iter().find(|p| p.name == name).ok_or("no such parameter")?;
            let (at, offset) = (param.at, number::<usize>(offset)?);
            let (size, data) = (param.size, self.data(x, kind, false)?);
            if offset + data.size as usize * data.count as usize > size {
                return Err("past the parameter's end".into());
            }
            return Ok(Op::LdParam(data, (at + offset) as u32));
        }
        let store = parts[0] == "st";
        let (space, rest) = match &parts[1..] {
            ["global", "nc", rest @ ..] if !store => (Space::Global, rest),
            ["global", rest @ ..] => (Space::Global, rest),
            ["local", rest @ ..] => (Space::Local, rest),
            ["shared", rest @ ..] => (Space::Shared, rest),
            rest => (Space::Generic, rest),
        };
        let (count, kind) = match rest {
            ["v2", kind] => (2, kind),
            ["v4", kind] => (4, kind),
            [kind] => (1, kind),
            _ => return Err("unknown operation".into()),
        };
        let (registers, address) = if store { (y, x) } else { (x, y) };
        let (data, (base, offset)) = (self.data(registers, kind, store)?, self.address(address)?);
        if data.count != count {
            return Err("another number of elements than the operation's".into());
        }
        Ok(if store { Op::St(space, data, base, offset) } else { Op::Ld(space, data, base, offset) })
    }

    fn shfl(&mut self, kind: Shfl, a: &[&str]) -> Result<Op> {
        let &[d, a, b, c, mask] = a else { return Err("not 5 operands".into()) };
        let (d, ok) = d.split_once('|').map_or((d, None), |(d, p)| (d, Some(p)));
        let ok = ok.map(|p| self.reg(p, File::Pred)).transpose()?;
        let d = self.reg(d, File::B32)?;
        let (a, b, c) = (self.value(a, 32)?, self.value(b, 32)?, self.value(c, 32)?);
        Ok(Op::Shfl { kind, d, ok, a, b, c, mask: self.value(mask, 32)? })
    }

    pub(super) fn op(&mut self, parts: &[&str], a: &[&str]) -> Result<Op> {
        match parts {
            ["mov", kind] => self.mov(kind, a),
            ["ld" | "st", ..] => self.memory(parts, a),
            ["setp", order, kind] => self.setp(order, kind, a),
            ["selp", "b16" | "u16" | "s16"] => self.selp(16, a),
            ["selp", "b32" | "u32" | "s32" | "f32"] => self.selp(32, a),
            ["selp", "b64" | "u64" | "s64" | "f64"] => self.selp(64, a),
            ["cvt", rest @ ..] => self.cvt(rest, a),
            // Addresses are the same in every state space here.
            ["cvta", "global" | "local" | "shared", "u64"]
            | ["cvta", "to", "global" | "local" | "shared", "u64"] => self.un64(Un64::Mov, a),

            ["add", "rn", "f32"] => self.bin32(Bin32::FAdd, 32, a),
            ["sub", "rn", "f32"] => self.bin32(Bin32::FSub, 32, a),
            ["mul", "rn", "f32"] => self.bin32(Bin32::FMul, 32, a),
            ["div", "rn", "f32"] => self.bin32(Bin32::FDiv, 32, a),
            ["min", "f32"] => self.bin32(Bin32::FMin, 32, a),
            ["max", "f32"] => self.bin32(Bin32::FMax, 32, a),
            ["fma", "rn", "f32"] => self.tri32(Tri32::Fma, a),
            ["neg", "f32"] => self.un32(Un32::FNeg, 32, a),
            ["abs", "f32"] => self.un32(Un32::FAbs, 32, a),
            ["rcp", "rn", "f32"] => self.un32(Un32::FRcp, 32, a),
            ["sqrt", "rn", "f32"] => self.un32(Un32::FSqrt, 32, a),

            ["add", "s32" | "u32"] => self.bin32(Bin32::Add, 32, a),
            ["add", "s16" | "u16"] => self.bin32(Bin32::Add16, 16, a),
            ["sub", "s16" | "u16"] => self.bin32(Bin32::Sub16, 16, a),
            ["mul", "lo", "s16" | "u16"] => self.bin32(Bin32::Mul16, 16, a),
            ["shl", "b16"] => self.shift16(Bin32::Shl16, a),
            ["shr", "u16" | "b16"] => self.shift16(Bin32::ShrU, a),
            ["div", "u16"] => self.bin32(Bin32::DivU, 16, a),
            ["rem", "u16"] => self.bin32(Bin32::RemU, 16, a),
            ["sub", "s32" | "u32"] => self.bin32(Bin32::Sub, 32, a),
            ["mul", "lo", "s32" | "u32"] => self.bin32(Bin32::Mul, 32, a),
            ["mul", "hi", "u32"] => self.bin32(Bin32::MulHi, 32, a),
            ["div", "u32"] => self.bin32(Bin32::DivU, 32, a),
            ["div", "s32"] => self.bin32(Bin32::DivS, 32, a),
            ["rem", "u32"] => self.bin32(Bin32::RemU, 32, a),
            ["min", "u32"] => self.bin32(Bin32::MinU, 32, a),
            ["max", "u32"] => self.bin32(Bin32::MaxU, 32, a),
            ["min", "s32"] => self.bin32(Bin32::MinS, 32, a),
            ["max", "s32"] => self.bin32(Bin32::MaxS, 32, a),
            ["and", "b16"] => self.bin32(Bin32::And, 16, a),
            ["or", "b16"] => self.bin32(Bin32::Or, 16, a),
            ["xor", "b16"] => self.bin32(Bin32::Xor, 16, a),
            ["and", "b32"] => self.bin32(Bin32::And, 32, a),
            ["or", "b32"] => self.bin32(Bin32::Or, 32, a),
            ["xor", "b32"] => self.bin32(Bin32::Xor, 32, a),
            ["shl", "b32"] => self.bin32(Bin32::Shl, 32, a),
            ["shr", "u32" | "b32"] => self.bin32(Bin32::ShrU, 32, a),
            ["shr", "s32"] => self.bin32(Bin32::ShrS, 32, a),
            ["not", "b16"] => self.un32(Un32::Not16, 16, a),
            ["not", "b32"] => self.un32(Un32::Not, 32, a),
            ["neg", "s32"] => self.un32(Un32::Neg, 32, a),
            ["popc", "b32"] => self.un32(Un32::Popc, 32, a),
            ["clz", "b32"] => self.un32(Un32::Clz, 32, a),
            ["brev", "b32"] => self.un32(Un32::Brev, 32, a),
            ["mad", "lo", "s32" | "u32"] => self.tri32(Tri32::Mad, a),
            ["bfe", "u32"] => self.tri32(Tri32::BfeU, a),
            ["bfe", "s32"] => self.tri32(Tri32::BfeS, a),
            ["bfe", "u64"] => {
                let &[d, a, b, c] = a else { return Err("not 4 operands".into()) };
                let d = self.reg(d, File::B64)?;
                Ok(Op::Bfe64(d, self.value(a, 64)?, self.value(b, 32)?, self.value(c, 32)?))
            }
            ["shf", "l", "wrap", "b32"] => self.tri32(Tri32::ShfL, a),
            ["shf", "r", "wrap", "b32"] => self.tri32(Tri32::ShfR, a),

            ["add", "s64" | "u64"] => self.bin64(Bin64::Add, a),
            ["sub", "s64" | "u64"] => self.bin64(Bin64::Sub, a),
            ["mul", "lo", "s64" | "u64"] => self.bin64(Bin64::Mul, a),
            ["mul", "hi", "u64"] => self.bin64(Bin64::MulHi, a),
            ["div", "u64"] => self.bin64(Bin64::DivU, a),
            ["rem", "u64"] => self.bin64(Bin64::RemU, a),
            ["min", "u64"] => self.bin64(Bin64::MinU, a),
            ["max", "u64"] => self.bin64(Bin64::MaxU, a),
            ["min", "s64"] => self.bin64(Bin64::MinS, a),
            ["max", "s64"] => self.bin64(Bin64::MaxS, a),
            ["and", "b64"] => self.bin64(Bin64::And, a),
            ["or", "b64"] => self.bin64(Bin64::Or, a),
            ["mul", "rn", "f64"] => self.bin64(Bin64::FMul, a),
            ["div", "rn", "f64"] => self.bin64(Bin64::FDiv, a),
            ["xor", "b64"] => self.bin64(Bin64::Xor, a),
            ["not", "b64"] => self.un64(Un64::Not, a),
            ["neg", "s64"] => self.un64(Un64::Neg, a),
            ["popc", "b64"] => self.narrow(Narrow::Popc, a),
            ["clz", "b64"] => self.narrow(Narrow::Clz, a),
            ["shl", "b64"] => self.shift64(Shift::Left, a),
            ["shr", "u64" | "b64"] => self.shift64(Shift::Right, a),
            ["shr", "s64"] => self.shift64(Shift::RightSigned, a),
            ["mad", "lo", "s64" | "u64"] => {
                let &[d, a, b, c] = a else { return Err("not 4 operands".into()) };
                let d = self.reg(d, File::B64)?;
                Ok(Op::Mad64(d, self.value(a, 64)?, self.value(b, 64)?, self.value(c, 64)?))
            }
            ["mul", "wide", kind @ ("u32" | "s32")] => {
                let &[d, a, b] = a else { return Err("not 3 operands".into()) };
                self.mad_wide(*kind == "s32", d, a, b, "0")
            }
            ["mad", "wide", kind @ ("u32" | "s32")] => {
                let &[d, a, b, c] = a else { return Err("not 4 operands".into()) };
                self.mad_wide(*kind == "s32", d, a, b, c)
            }

            ["and", "pred"] => self.bin_p(Logic::And, a),
            ["or", "pred"] => self.bin_p(Logic::Or, a),
            ["xor", "pred"] => self.bin_p(Logic::Xor, a),
            ["not", "pred"] => {
                let &[d, a] = a else { return Err("not 2 operands".into()) };
                Ok(Op::UnP(true, self.reg(d, File::Pred)?, self.reg(a, File::Pred)?))
            }

            ["shfl", "sync", "bfly", "b32"] => self.shfl(Shfl::Bfly, a),
            ["shfl", "sync", "idx", "b32"] => self.shfl(Shfl::Idx, a),
            ["shfl", "sync", "up", "b32"] => self.shfl(Shfl::Up, a),
            ["shfl", "sync", "down", "b32"] => self.shfl(Shfl::Down, a),
            ["vote", "sync", "ballot", "b32"] => {
                let &[d, p, mask] = a else { return Err("not 3 operands".into()) };
                Ok(Op::Ballot(self.reg(d, File::B32)?, self.reg(p, File::Pred)?, self.value(mask, 32)?))
            }
            ["bar", "sync"] if a == ["0"] => Ok(Op::SyncBlock),
            ["bar", "warp", "sync"] => {
                let &[mask] = a else { return Err("not 1 operand".into()) };
                Ok(Op::SyncWarp(self.value(mask, 32)?))
            }
            ["atom", "global", kind @ ("min" | "add"), "u64"] | ["atom", kind @ ("min" | "add"), "u64"] => {
                let kind = if *kind == "min" { Atom::Min } else { Atom::Add };
                let &[d, at, x] = a else { return Err("not 3 operands".into()) };
                let (d, (base, offset)) = (self.reg(d, File::B64)?, self.address(at)?);
                Ok(Op::Atom64(kind, d, base, offset, self.value(x, 64)?))
            }
            ["bra"] | ["bra", "uni"] => {
                let &[label] = a else { return Err("not 1 operand".into()) };
                self.jumps.push((self.entry.code.len(), label.to_owned()));
                Ok(Op::Bra(0))
            }
            ["ret" | "exit"] if a.is_empty() => Ok(Op::Ret),
            ["trap"] if a.is_empty() => Ok(Op::Trap),
            _ => Err("unknown operation".into()),
        }
    }
}
