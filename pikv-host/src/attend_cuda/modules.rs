//! Which modules of kernels a cache needs: its device loads them when the cache is built, so that no step waits for a compiler.

use crate::attend_cuda::wave::most;
use crate::base::error::CudaError;
use crate::codec::HeadCodec;
use crate::config::shape::CacheShape;
use crate::device::Device;
use crate::device::kernels::Module;
use pikv_core::plan::LayerShape;
use std::iter;

/// Rows of bundles of the modules that are not called narrow: 4, and 8 over full pages.
const WIDE: usize = 4;

/// Loads the modules that steps of a cache of this shape, or a fabric's rank with its pages, launch kernels of.
///
/// # Errors
/// [`CudaError::Module`].
pub(crate) fn load(device: &Device, shape: &CacheShape) -> Result<(), CudaError> {
    let layers = shape.config.layers.iter().zip(&shape.codecs);
    device.load(layers.flat_map(|(layer, heads)| {
        let codecs = heads.iter().flatten();
        let plain = [Module::Full].into_iter().chain(is_narrow(layer, None).then_some(Module::FullNarrow));
        plain.chain(codecs.flat_map(|codec| of_codec(layer, codec)))
    }))
}

/// Whether rows of a layer are read in bundles of 1 or 2, which a group of heads, or a codec, makes of a token's rows. Items of rows are
/// whole tokens, or as many rows as a multiple of 8, so a group of a multiple of 4 heads leaves no narrower bundle at their end.
fn is_narrow(layer: &LayerShape, codec: Option<&HeadCodec>) -> bool {
    !(layer.group() as usize).is_multiple_of(WIDE) || most(codec.into_iter()) < WIDE
}

/// Modules for pages of a head's codec, and of its second one.
fn of_codec(layer: &LayerShape, codec: &HeadCodec) -> Vec<Module> {
    let mut modules = Vec::new();
    let both = || iter::once(codec).chain(codec.aged.as_ref().map(|aged| &aged.codec));
    // Pages of both codecs, and full ones, are read in bundles of one width.
    let narrow = both().any(|codec| is_narrow(layer, Some(codec)));
    let rotates = layer.rope.is_some();
    let [wide, thin] = match rotates {
        true => [Module::Rebuilt, Module::RebuiltNarrow],
        false => [Module::Packed, Module::PackedNarrow],
    };
    for codec in both() {
        match codec.packed.factored() {
            true => modules.push(Module::Factors),
            false => modules.extend([wide].into_iter().chain(narrow.then_some(thin))),
        }
    }
    modules.extend(narrow.then_some(Module::FullNarrow));
    // Other pages are packed by the host.
    modules.extend((!codec.packed.factored()).then_some(Module::Pack));
    modules.extend((!rotates).then_some(Module::Fold));
    modules
}
