//! Builds without the feature `cuda` have no devices to defer work for.

use super::MovedToken;
use crate::base::error::Error;
use crate::codec::HeadCodec;
use crate::device::Device;
use crate::memory::writes::Tokens;
use pikv_core::page::Layout;
use pikv_lanes::Lanes;
use std::sync::Arc;

/// Deferred work of a step; there is none.
#[derive(Debug)]
pub(crate) enum Pending {}

impl Pending {
    pub fn new(device: Arc<Device>) -> Pending {
        match *device {}
    }

    pub fn write(&mut self, _page: u64, _position: u32, _row: u32) {
        match *self {}
    }

    pub fn copy(&mut self, _: &Layout, _source: (u64, u32), _target: (u64, u32)) {
        match *self {}
    }

    pub fn pack(&mut self, _: &HeadCodec, _: Lanes, _: &Layout, _page: u64, _fill: u32, _packed: u64) {
        match *self {}
    }

    pub fn repack(&mut self, _: &HeadCodec, _: Lanes, _: &Layout, _page: (u64, u32, u32), _packed: u64) {
        match *self {}
    }

    pub fn forget_pack(&mut self, _packed: u64) {
        match *self {}
    }

    pub fn forget_copy(&mut self, _target: u64, _to: u32) {
        match *self {}
    }

    pub fn forget_writes(&mut self) {
        match *self {}
    }

    pub fn launch_writes(&mut self, _: &Layout, _: &Tokens<'_>) -> Result<(), Error> {
        match *self {}
    }

    pub fn launch_copies(&mut self) -> Result<(), Error> {
        match *self {}
    }

    pub fn launch_packs(&mut self) -> Result<(), Error> {
        match *self {}
    }
}

impl Device {
    pub fn compact(
        &self,
        _: &Layout,
        _: &[MovedToken],
        _pages: usize,
        _assembled: Option<&[Vec<u32>]>,
    ) -> Result<(), Error> {
        match *self {}
    }
}
