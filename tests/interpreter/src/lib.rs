//! A test-only interpreter of the PTX that LLVM emits: warps of 32 lanes in lock-step, on memory that checks every access.
//!
//! It fails on behaviour that a device would leave undefined: see [`Cause`]. When lanes of a warp diverge, those at the lowest
//! instruction run first; a `.sync` operation waits for the lanes of its mask, and if no lane can continue, that is [`Cause::Divergent`].
//! The warps of a block run one after another, each up to its end or to a barrier of the block.
//! Registers hold junk until they are written; f32 results that are NaN are the device's canonical one.

mod alu;
mod decode;
mod exec;
mod memory;
mod parse;

pub use self::exec::{Machine, Program};
pub use self::memory::Memory;

use std::fmt;

/// Lanes of a warp.
pub const LANES: usize = 32;
/// First address of every thread's own local memory.
pub const LOCAL: u64 = 1 << 56;
/// First address of the shared memory of every block.
pub const SHARED: u64 = 1 << 55;

/// A text that is not a module that can be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line of the text, counted from 1.
    pub line: u32,
    pub what: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for ParseError {}

/// A launch that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Line of the text, counted from 1; 0 if no instruction is to blame.
    pub line: u32,
    pub opcode: String,
    pub warp: u32,
    pub lane: u32,
    pub cause: Cause,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fault { line, opcode, warp, lane, cause } = self;
        write!(f, "line {line}, {opcode}, warp {warp}, lane {lane}: {cause:x?}")
    }
}

impl std::error::Error for Fault {}

/// Fault of an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A `.sync` operation that these lanes of its mask never reach, or with masks that differ between lanes.
    Divergent { missing: u32 },
    /// A shuffle that reads a lane outside its mask.
    AbsentLane { source: u32 },
    /// An address in no allocation, or in one of another state space.
    OutOfBounds { address: u64 },
    /// An address that is no multiple of the access's size.
    Misaligned { address: u64 },
    /// An address in an allocation that was freed.
    Freed { address: u64 },
    /// A read of bytes that were never written.
    Uninitialised { address: u64 },
    /// A barrier of the block that this warp never reaches.
    Deserted { other: u32 },
    /// A word that another warp of the launch wrote, or that it read and this one writes, with no barrier of a common block since.
    WarpRace { address: u64, other: u32 },
    /// A word that other lanes of the warp wrote, or read before a write, with no barrier since.
    LaneRace { address: u64, others: u32 },
    /// An integer division by zero.
    DivideByZero,
    /// The instruction `trap`.
    Trap,
    /// More instructions than the launch may execute.
    Budget,
    /// Arguments that do not fit the entry; nothing was executed.
    Launch(String),
}

/// Index into one of the three register files; immediates and special registers have places of their own there.
pub type R = u32;

/// An instruction, and whether lanes execute it.
#[derive(Clone, Debug)]
pub struct Inst {
    pub op: Op,
    /// Only lanes in which this predicate register is set (for true, not set) execute it.
    pub guard: Option<(R, bool)>,
    pub line: u32,
    /// The operation as written.
    pub opcode: String,
}

/// The operation of an instruction. The destination is first.
#[derive(Clone, Debug)]
pub enum Op {
    Un32(Un32, R, R),
    Bin32(Bin32, R, R, R),
    Tri32(Tri32, R, R, R, R),
    Un64(Un64, R, R),
    Bin64(Bin64, R, R, R),
    /// `a * b + c`, low bits.
    Mad64(R, R, R, R),
    /// 64 bits shifted by a 32-bit register.
    Shift64(Shift, R, R, R),
    /// The bits of a 64-bit register from a place on, so many: both in 32-bit registers.
    Bfe64(R, R, R, R),
    /// 32 bits to 64, signed or not.
    Widen(bool, R, R),
    /// u32 to f64.
    Double(R, R),
    /// 64 bits to 32.
    Narrow(Narrow, R, R),
    /// 32 times 32 bits to 64, signed or not, plus a 64-bit register.
    MadWide(bool, R, R, R, R),
    /// `{low, high}` to 64 bits.
    Pack(R, R, R),
    /// 64 bits to `{low, high}`.
    Unpack(R, R, R),
    /// A predicate of a comparison: the sign bit, 0 for unsigned, and of [`Order`]s those that make it true.
    Set32(u32, u8, R, R, R),
    /// The same, signed or not.
    Set64(bool, u8, R, R, R),
    SetF(u8, R, R, R),
    /// `p ? a : b`; the predicate is last.
    Sel32(R, R, R, R),
    Sel64(R, R, R, R),
    UnP(bool, R, R),
    SetP(R, bool),
    BinP(Logic, R, R, R),
    LdParam(Data, u32),
    Ld(Space, Data, R, i64),
    St(Space, Data, R, i64),
    /// Combines 64 bits in global memory with a register, in memory; returns the old value.
    Atom64(Atom, R, R, i64, R),
    Shfl {
        kind: Shfl,
        d: R,
        ok: Option<R>,
        a: R,
        b: R,
        c: R,
        mask: R,
    },
    Ballot(R, R, R),
    SyncWarp(R),
    /// A barrier of all warps of the block, which all lanes of a warp reach together.
    SyncBlock,
    Bra(u32),
    Ret,
    Trap,
}

/// Bits of an [`Op::Set32`] and its siblings.
pub struct Order;

impl Order {
    pub const LESS: u8 = 1;
    pub const EQUAL: u8 = 2;
    pub const GREATER: u8 = 4;
    pub const UNORDERED: u8 = 8;
}

#[derive(Clone, Copy, Debug)]
pub enum Un32 {
    Mov,
    Not,
    Not16,
    Neg,
    Popc,
    Clz,
    Brev,
    Low16,
    FNeg,
    FAbs,
    FSqrt,
    FRcp,
    /// f32 to s32, toward zero.
    Trunc,
    /// f32 to u32, toward zero.
    TruncU,
    FromS32,
    FromU32,
    FromF16,
}

#[derive(Clone, Copy, Debug)]
pub enum Bin32 {
    Add,
    /// The low 16 bits of the sum, of the product, and of a shift.
    Add16,
    Sub16,
    Mul16,
    Shl16,
    Sub,
    Mul,
    MulHi,
    DivU,
    DivS,
    RemU,
    MinU,
    MaxU,
    MinS,
    MaxS,
    And,
    Or,
    Xor,
    Shl,
    ShrU,
    ShrS,
    FAdd,
    FSub,
    FMul,
    FDiv,
    FMin,
    FMax,
}

#[derive(Clone, Copy, Debug)]
pub enum Tri32 {
    Mad,
    Fma,
    BfeU,
    BfeS,
    /// Funnel shifts of `{b, a}`, the amount modulo 32.
    ShfL,
    ShfR,
}

#[derive(Clone, Copy, Debug)]
pub enum Un64 {
    Mov,
    Not,
    Neg,
    /// u64 to f64.
    FromU64,
}

#[derive(Clone, Copy, Debug)]
pub enum Bin64 {
    Add,
    Sub,
    Mul,
    MulHi,
    DivU,
    RemU,
    MinU,
    MaxU,
    MinS,
    MaxS,
    And,
    Or,
    Xor,
    FMul,
    FDiv,
}

/// The value that an atomic operation stores.
#[derive(Clone, Copy, Debug)]
pub enum Atom {
    /// The lesser of the two, unsigned.
    Min,
    /// Their sum.
    Add,
}

#[derive(Clone, Copy, Debug)]
pub enum Shift {
    Left,
    Right,
    RightSigned,
}

#[derive(Clone, Copy, Debug)]
pub enum Narrow {
    Low,
    Low16,
    Popc,
    Clz,
    /// f64 to f32, rounded to nearest even.
    Single,
    /// u64 to f32, rounded to nearest even.
    SingleU64,
}

#[derive(Clone, Copy, Debug)]
pub enum Logic {
    And,
    Or,
    Xor,
}

#[derive(Clone, Copy, Debug)]
pub enum Shfl {
    Bfly,
    Idx,
    Up,
    Down,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    Global,
    Local,
    Shared,
    Generic,
}

/// The registers of a load or a store.
#[derive(Clone, Copy, Debug)]
pub struct Data {
    /// Bytes of an element.
    pub size: u8,
    pub count: u8,
    /// Each register, and whether it is of the 64-bit file.
    pub regs: [(R, bool); 4],
}
