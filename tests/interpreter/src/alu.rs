//! Instructions on registers alone.

use super::parse::File;
use super::{Bin32, Bin64, Cause, LANES, Logic, Narrow, Op, Order, R, Shift, Tri32, Un32, Un64};
use std::array::from_fn;

/// All lanes.
pub const ALL: u32 = u32::MAX;

/// A lane, and its fault.
pub type Failure = (u32, Cause);

/// The three files of a warp: a register is its 32 lanes.
pub struct Registers {
    pub r32: Vec<[u32; LANES]>,
    pub r64: Vec<[u64; LANES]>,
    pub p: Vec<u32>,
}

#[inline(always)]
fn bits(f: impl Fn(usize) -> bool) -> u32 {
    (0..LANES).fold(0, |m, i| m | u32::from(f(i)) << i)
}

/// f32 results: a NaN is the canonical one.
#[inline(always)]
fn canon(x: f32) -> u32 {
    if x.is_nan() { 0x7fff_ffff } else { x.to_bits() }
}

/// The same of f64.
#[inline(always)]
fn canon64(x: f64) -> u64 {
    if x.is_nan() { 0x7fff_ffff_ffff_ffff } else { x.to_bits() }
}

#[inline(always)]
fn double(x: u64) -> f64 {
    f64::from_bits(x)
}

#[inline(always)]
fn f(x: u32) -> f32 {
    f32::from_bits(x)
}

/// Of two numbers the one that `first` prefers, of a number and a NaN the number.
#[inline(always)]
fn pick(a: u32, b: u32, first: impl Fn(f32, f32) -> bool, zero: u32) -> u32 {
    let (x, y) = (f(a), f(b));
    match (x.is_nan(), y.is_nan()) {
        (true, _) => canon(y),
        (false, true) => a,
        _ if x == 0.0 && y == 0.0 => zero,
        _ => [b, a][usize::from(first(x, y))],
    }
}

/// The bit of [`Order`] for a comparison's result.
#[inline(always)]
fn order(o: Option<std::cmp::Ordering>) -> u8 {
    match o {
        Some(std::cmp::Ordering::Less) => Order::LESS,
        Some(std::cmp::Ordering::Equal) => Order::EQUAL,
        Some(std::cmp::Ordering::Greater) => Order::GREATER,
        None => Order::UNORDERED,
    }
}

impl Registers {
    pub fn new(count: [usize; 3]) -> Registers {
        Registers {
            r32: vec![[0; LANES]; count[File::B32 as usize]],
            r64: vec![[0; LANES]; count[File::B64 as usize]],
            p: vec![0; count[File::Pred as usize]],
        }
    }

    /// Junk in every register.
    pub fn clear(&mut self) {
        self.r32.fill([0xdead_beef; LANES]);
        self.r64.fill([0xdead_beef_dead_beef; LANES]);
        self.p.fill(0x5555_aaaa);
    }

    #[inline(always)]
    pub fn put32(&mut self, on: u32, d: R, v: [u32; LANES]) {
        let d = &mut self.r32[d as usize];
        *d = if on == ALL { v } else { from_fn(|i| if on >> i & 1 == 1 { v[i] } else { d[i] }) };
    }

    #[inline(always)]
    pub fn put64(&mut self, on: u32, d: R, v: [u64; LANES]) {
        let d = &mut self.r64[d as usize];
        *d = if on == ALL { v } else { from_fn(|i| if on >> i & 1 == 1 { v[i] } else { d[i] }) };
    }

    #[inline(always)]
    pub fn put_p(&mut self, on: u32, d: R, v: u32) {
        let d = &mut self.p[d as usize];
        *d = *d & !on | v & on;
    }

    #[inline(always)]
    fn map32(&mut self, on: u32, d: R, a: R, g: impl Fn(u32) -> u32) {
        let a = &self.r32[a as usize];
        let v = from_fn(|i| g(a[i]));
        self.put32(on, d, v);
    }

    #[inline(always)]
    fn zip32(&mut self, on: u32, d: R, a: R, b: R, g: impl Fn(u32, u32) -> u32) {
        let (a, b) = (&self.r32[a as usize], &self.r32[b as usize]);
        let v = from_fn(|i| g(a[i], b[i]));
        self.put32(on, d, v);
    }

    #[inline(always)]
    fn zip64(&mut self, on: u32, d: R, a: R, b: R, g: impl Fn(u64, u64) -> u64) {
        let (a, b) = (&self.r64[a as usize], &self.r64[b as usize]);
        let v = from_fn(|i| g(a[i], b[i]));
        self.put64(on, d, v);
    }

    fn un32(&mut self, op: Un32, on: u32, d: R, a: R) {
        match op {
            Un32::Mov => self.map32(on, d, a, |a| a),
            Un32::Not => self.map32(on, d, a, |a| !a),
            Un32::Not16 => self.map32(on, d, a, |a| !a & 0xffff),
            Un32::Neg => self.map32(on, d, a, u32::wrapping_neg),
            Un32::Popc => self.map32(on, d, a, u32::count_ones),
            Un32::Clz => self.map32(on, d, a, u32::leading_zeros),
            Un32::Brev => self.map32(on, d, a, u32::reverse_bits),
            Un32::Low16 => self.map32(on, d, a, |a| a & 0xffff),
            Un32::FNeg => self.map32(on, d, a, |a| canon(-f(a))),
            Un32::FAbs => self.map32(on, d, a, |a| canon(f(a).abs())),
            Un32::FSqrt => self.map32(on, d, a, |a| canon(f(a).sqrt())),
            Un32::FRcp => self.map32(on, d, a, |a| canon(1.0 / f(a))),
            Un32::Trunc => self.map32(on, d, a, |a| f(a) as i32 as u32),
            Un32::TruncU => self.map32(on, d, a, |a| f(a) as u32),
            Un32::FromS32 => self.map32(on, d, a, |a| (a as i32 as f32).to_bits()),
            Un32::FromU32 => self.map32(on, d, a, |a| (a as f32).to_bits()),
            Un32::FromF16 => self.map32(on, d, a, |a| canon(half::f16::from_bits(a as u16).to_f32())),
        }
    }

    fn bin32(&mut self, op: Bin32, on: u32, d: R, a: R, b: R) -> Result<(), Failure> {
        if let Bin32::DivU | Bin32::DivS | Bin32::RemU = op {
            let zero = on & bits(|i| self.r32[b as usize][i] == 0);
            if zero != 0 {
                return Err((zero.trailing_zeros(), Cause::DivideByZero));
            }
        }
        match op {
            Bin32::Add => self.zip32(on, d, a, b, u32::wrapping_add),
            Bin32::Add16 => self.zip32(on, d, a, b, |a, b| a.wrapping_add(b) & 0xffff),
            Bin32::Sub16 => self.zip32(on, d, a, b, |a, b| a.wrapping_sub(b) & 0xffff),
            Bin32::Mul16 => self.zip32(on, d, a, b, |a, b| a.wrapping_mul(b) & 0xffff),
            Bin32::Shl16 => self.zip32(on, d, a, b, |a, b| a.checked_shl(b).unwrap_or(0) & 0xffff),
            Bin32::Sub => self.zip32(on, d, a, b, u32::wrapping_sub),
            Bin32::Mul => self.zip32(on, d, a, b, u32::wrapping_mul),
            Bin32::MulHi => self.zip32(on, d, a, b, |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
            // Lanes that are off may divide by zero.
            Bin32::DivU => self.zip32(on, d, a, b, |a, b| a.checked_div(b).unwrap_or(0)),
            Bin32::RemU => self.zip32(on, d, a, b, |a, b| a.checked_rem(b).unwrap_or(0)),
            Bin32::DivS => self.zip32(on, d, a, b, |a, b| match b {
                0 => 0,
                _ => (a as i32).wrapping_div(b as i32) as u32,
            }),
            Bin32::MinU => self.zip32(on, d, a, b, u32::min),
            Bin32::MaxU => self.zip32(on, d, a, b, u32::max),
            Bin32::MinS => self.zip32(on, d, a, b, |a, b| (a as i32).min(b as i32) as u32),
            Bin32::MaxS => self.zip32(on, d, a, b, |a, b| (a as i32).max(b as i32) as u32),
            Bin32::And => self.zip32(on, d, a, b, |a, b| a & b),
            Bin32::Or => self.zip32(on, d, a, b, |a, b| a | b),
            Bin32::Xor => self.zip32(on, d, a, b, |a, b| a ^ b),
            Bin32::Shl => self.zip32(on, d, a, b, |a, b| a.checked_shl(b).unwrap_or(0)),
            Bin32::ShrU => self.zip32(on, d, a, b, |a, b| a.checked_shr(b).unwrap_or(0)),
            Bin32::ShrS => self.zip32(on, d, a, b, |a, b| (a as i32 >> b.min(31)) as u32),
            Bin32::FAdd => self.zip32(on, d, a, b, |a, b| canon(f(a) + f(b))),
            Bin32::FSub => self.zip32(on, d, a, b, |a, b| canon(f(a) - f(b))),
            Bin32::FMul => self.zip32(on, d, a, b, |a, b| canon(f(a) * f(b))),
            Bin32::FDiv => self.zip32(on, d, a, b, |a, b| canon(f(a) / f(b))),
            Bin32::FMin => self.zip32(on, d, a, b, |a, b| pick(a, b, |x, y| x < y, a | b)),
            Bin32::FMax => self.zip32(on, d, a, b, |a, b| pick(a, b, |x, y| x > y, a & b)),
        }
        Ok(())
    }

    fn tri32(&mut self, op: Tri32, on: u32, d: R, [a, b, c]: [R; 3]) {
        let (a, b, c) = (&self.r32[a as usize], &self.r32[b as usize], &self.r32[c as usize]);
        let v = match op {
            Tri32::Mad => from_fn(|i| a[i].wrapping_mul(b[i]).wrapping_add(c[i])),
            Tri32::Fma => from_fn(|i| canon(f(a[i]).mul_add(f(b[i]), f(c[i])))),
            Tri32::BfeU => from_fn(|i| {
                let (from, count) = (b[i] & 0xff, c[i] & 0xff);
                let x = a[i].checked_shr(from).unwrap_or(0);
                if count >= 32 { x } else { x & ((1 << count) - 1) }
            }),
            Tri32::BfeS => from_fn(|i| {
                let (from, count) = (b[i] & 0xff, c[i] & 0xff);
                if count == 0 {
                    return 0;
                }
                // Past the top there are copies of the sign, which is the last bit of the field or, if that is past the top, bit 31.
                let x = i64::from(a[i] as i32) >> from.min(63);
                if count >= 32 { x as u32 } else { (x << (64 - count) >> (64 - count)) as u32 }
            }),
            Tri32::ShfL => {
                from_fn(|i| ((u64::from(b[i]) << 32 | u64::from(a[i])) << (c[i] & 31) >> 32) as u32)
            }
            Tri32::ShfR => from_fn(|i| ((u64::from(b[i]) << 32 | u64::from(a[i])) >> (c[i] & 31)) as u32),
        };
        self.put32(on, d, v);
    }

    fn bin64(&mut self, op: Bin64, on: u32, d: R, a: R, b: R) -> Result<(), Failure> {
        if let Bin64::DivU | Bin64::RemU = op {
            let zero = on & bits(|i| self.r64[b as usize][i] == 0);
            if zero != 0 {
                return Err((zero.trailing_zeros(), Cause::DivideByZero));
            }
        }
        match op {
            Bin64::Add => self.zip64(on, d, a, b, u64::wrapping_add),
            Bin64::Sub => self.zip64(on, d, a, b, u64::wrapping_sub),
            Bin64::Mul => self.zip64(on, d, a, b, u64::wrapping_mul),
            Bin64::MulHi => self.zip64(on, d, a, b, |a, b| ((u128::from(a) * u128::from(b)) >> 64) as u64),
            Bin64::DivU => self.zip64(on, d, a, b, |a, b| a.checked_div(b).unwrap_or(0)),
            Bin64::RemU => self.zip64(on, d, a, b, |a, b| a.checked_rem(b).unwrap_or(0)),
            Bin64::MinU => self.zip64(on, d, a, b, u64::min),
            Bin64::MaxU => self.zip64(on, d, a, b, u64::max),
            Bin64::MinS => self.zip64(on, d, a, b, |a, b| (a as i64).min(b as i64) as u64),
            Bin64::MaxS => self.zip64(on, d, a, b, |a, b| (a as i64).max(b as i64) as u64),
            Bin64::And => self.zip64(on, d, a, b, |a, b| a & b),
            Bin64::Or => self.zip64(on, d, a, b, |a, b| a | b),
            Bin64::Xor => self.zip64(on, d, a, b, |a, b| a ^ b),
            Bin64::FMul => self.zip64(on, d, a, b, |a, b| canon64(double(a) * double(b))),
            Bin64::FDiv => self.zip64(on, d, a, b, |a, b| canon64(double(a) / double(b))),
        }
        Ok(())
    }

    /// An instruction on registers, for the lanes `on`.
    pub fn step(&mut self, op: &Op, on: u32) -> Result<(), Failure> {
        match *op {
            Op::Un32(op, d, a) => self.un32(op, on, d, a),
            Op::Bin32(op, d, a, b) => self.bin32(op, on, d, a, b)?,
            Op::Tri32(op, d, a, b, c) => self.tri32(op, on, d, [a, b, c]),
            Op::Un64(op, d, a) => {
                let a = &self.r64[a as usize];
                let v = match op {
                    Un64::Mov => *a,
                    Un64::Not => a.map(|x| !x),
                    Un64::Neg => a.map(u64::wrapping_neg),
                    Un64::FromU64 => a.map(|x| (x as f64).to_bits()),
                };
                self.put64(on, d, v);
            }
            Op::Bin64(op, d, a, b) => self.bin64(op, on, d, a, b)?,
            Op::Mad64(d, a, b, c) => {
                let [a, b, c] = [a, b, c].map(|r| &self.r64[r as usize]);
                let v = from_fn(|i| a[i].wrapping_mul(b[i]).wrapping_add(c[i]));
                self.put64(on, d, v);
            }
            Op::Bfe64(d, a, b, c) => {
                let (a, b, c) = (&self.r64[a as usize], &self.r32[b as usize], &self.r32[c as usize]);
                let v = from_fn(|i| {
                    let (from, count) = (b[i] & 0xff, c[i] & 0xff);
                    let x = a[i].checked_shr(from).unwrap_or(0);
                    if count >= 64 { x } else { x & ((1 << count) - 1) }
                });
                self.put64(on, d, v);
            }
            Op::Shift64(op, d, a, b) => {
                let (a, b) = (&self.r64[a as usize], &self.r32[b as usize]);
                let v = match op {
                    Shift::Left => from_fn(|i| a[i].checked_shl(b[i]).unwrap_or(0)),
                    Shift::Right => from_fn(|i| a[i].checked_shr(b[i]).unwrap_or(0)),
                    Shift::RightSigned => from_fn(|i| (a[i] as i64 >> b[i].min(63)) as u64),
                };
                self.put64(on, d, v);
            }
            Op::Widen(signed, d, a) => {
                let a = self.r32[a as usize];
                self.put64(on, d, a.map(|x| if signed { x as i32 as u64 } else { x.into() }));
            }
            Op::Double(d, a) => {
                let a = self.r32[a as usize];
                self.put64(on, d, a.map(|x| f64::from(x).to_bits()));
            }
            Op::Narrow(op, d, a) => {
                let a = self.r64[a as usize];
                let v = match op {
                    Narrow::Low => a.map(|x| x as u32),
                    Narrow::Low16 => a.map(|x| x as u32 & 0xffff),
                    Narrow::Popc => a.map(u64::count_ones),
                    Narrow::Clz => a.map(u64::leading_zeros),
                    Narrow::Single => a.map(|x| canon(double(x) as f32)),
                    Narrow::SingleU64 => a.map(|x| (x as f32).to_bits()),
                };
                self.put32(on, d, v);
            }
            Op::MadWide(signed, d, a, b, c) => {
                let (a, b, c) = (&self.r32[a as usize], &self.r32[b as usize], &self.r64[c as usize]);
                let wide = |x: u32| if signed { x as i32 as u64 } else { x.into() };
                let v = from_fn(|i| wide(a[i]).wrapping_mul(wide(b[i])).wrapping_add(c[i]));
                self.put64(on, d, v);
            }
            Op::Pack(d, lo, hi) => {
                let (lo, hi) = (&self.r32[lo as usize], &self.r32[hi as usize]);
                let v = from_fn(|i| u64::from(hi[i]) << 32 | u64::from(lo[i]));
                self.put64(on, d, v);
            }
            Op::Unpack(lo, hi, a) => {
                let a = self.r64[a as usize];
                self.put32(on, lo, a.map(|x| x as u32));
                self.put32(on, hi, a.map(|x| (x >> 32) as u32));
            }
            Op::Set32(flip, orders, p, a, b) => {
                let (a, b) = (&self.r32[a as usize], &self.r32[b as usize]);
                let v = bits(|i| orders & order((a[i] ^ flip).partial_cmp(&(b[i] ^ flip))) != 0);
                self.put_p(on, p, v);
            }
            Op::Set64(signed, orders, p, a, b) => {
                let (a, b, flip) = (&self.r64[a as usize], &self.r64[b as usize], u64::from(signed) << 63);
                let v = bits(|i| orders & order((a[i] ^ flip).partial_cmp(&(b[i] ^ flip))) != 0);
                self.put_p(on, p, v);
            }
            Op::SetF(orders, p, a, b) => {
                let (a, b) = (&self.r32[a as usize], &self.r32[b as usize]);
                let v = bits(|i| orders & order(f(a[i]).partial_cmp(&f(b[i]))) != 0);
                self.put_p(on, p, v);
            }
            Op::Sel32(d, a, b, p) => {
                let (a, b, p) = (&self.r32[a as usize], &self.r32[b as usize], self.p[p as usize]);
                let v = from_fn(|i| if p >> i & 1 == 1 { a[i] } else { b[i] });
                self.put32(on, d, v);
            }
            Op::Sel64(d, a, b, p) => {
                let (a, b, p) = (&self.r64[a as usize], &self.r64[b as usize], self.p[p as usize]);
                let v = from_fn(|i| if p >> i & 1 == 1 { a[i] } else { b[i] });
                self.put64(on, d, v);
            }
            Op::SetP(d, set) => self.put_p(on, d, if set { ALL } else { 0 }),
            Op::UnP(not, d, a) => self.put_p(on, d, self.p[a as usize] ^ if not { ALL } else { 0 }),
            Op::BinP(op, d, a, b) => {
                let (a, b) = (self.p[a as usize], self.p[b as usize]);
                let v = match op {
                    Logic::And => a & b,
                    Logic::Or => a | b,
                    Logic::Xor => a ^ b,
                };
                self.put_p(on, d, v);
            }
            _ => unreachable!("not an instruction on registers alone: {op:?}"),
        }
        Ok(())
    }
}
