//! Builds without the feature `cuda` have no devices, and so no attention on one.

/// Attention on a device; there is none.
pub mod executor {
    use crate::attend::executor::{Executor, Results, TaskLists};
    use crate::attend::forest::Forest;
    use crate::attend::job::{Job, Widest};
    use crate::attend::mass::WeightSets;
    use crate::base::error::Error;
    use crate::device::Device;
    use std::sync::Arc;

    /// A device that attends; there is none.
    #[derive(Debug)]
    pub(crate) struct Cuda(pub Arc<Device>);

    impl Executor for Cuda {
        fn widest(&self) -> Widest {
            match *self.0 {}
        }

        fn run(
            &self,
            _: &mut Job<'_>,
            _: &[Forest<'_>],
            _: Option<&[WeightSets]>,
            _: Results<'_>,
            _: &mut TaskLists,
        ) -> Result<(), Error> {
            match *self.0 {}
        }
    }
}

/// Modules of kernels; there are none.
pub mod modules {
    use crate::base::error::CudaError;
    use crate::config::shape::CacheShape;
    use crate::device::Device;

    pub(crate) fn load(device: &Device, _: &CacheShape) -> Result<(), CudaError> {
        match *device {}
    }
}
