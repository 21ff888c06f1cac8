//! The committed PTX, run by the interpreter, against the CPU's lanes by bits.

mod bits;
mod packed;
mod route;
