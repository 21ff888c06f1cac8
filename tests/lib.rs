//! Tests of pikv: see README.md in this folder. A package needs a target besides its tests.
