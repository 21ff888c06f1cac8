//! Builds without the feature `cuda` have no devices that hold pages of a rank.

use crate::base::error::Error;
use crate::device::Device;
use crate::fabric::ask::Ask;
use pikv_core::page::Layout;

impl Device {
    pub fn is_lost(&self) -> bool {
        match *self {}
    }

    pub fn write_all(&self, _: &[(u64, &[u32])]) -> Result<(), Error> {
        match *self {}
    }

    pub fn place(
        &self,
        _: &Layout,
        _count: usize,
        _token: impl Fn(usize, &mut [u32], u32) -> (u64, u32),
    ) -> Result<(), Error> {
        match *self {}
    }

    pub fn partials(&self, _: &[Ask<'_>], _: &mut Vec<u32>) -> Result<(), Error> {
        match *self {}
    }
}
