//! Tests of pikv: see README.md beside this file. A package has to have a target besides its tests.
