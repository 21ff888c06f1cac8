//! The committed PTX, run by the interpreter, compared with the CPU's lanes bit for bit.

mod bits;
mod packed;
mod route;
