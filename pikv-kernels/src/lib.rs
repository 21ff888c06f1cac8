//! Device entry points of pikv.
#![no_std]
