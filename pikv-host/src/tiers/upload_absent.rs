//! Builds without the feature `cuda` have no devices to copy pages to.

use crate::base::error::Error;
use crate::device::Device;
use crate::tiers::StoredPage;
use std::sync::Arc;

/// Pages on a device; there are none.
#[derive(Debug)]
pub(crate) enum UploadedPages {}

impl Device {
    pub fn lift<'a>(
        self: &Arc<Self>,
        _pages: impl Iterator<Item = (&'a Arc<StoredPage>, &'a [u32])>,
    ) -> Result<UploadedPages, Error> {
        match **self {}
    }
}

impl UploadedPages {
    pub fn address(&self, _: &Arc<StoredPage>) -> Option<u64> {
        match *self {}
    }

    pub fn before(&self) -> Result<(), Error> {
        match *self {}
    }
}
