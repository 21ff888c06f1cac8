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
