//! A second witness of the committed PTX, beside the interpreter, with which it shares nothing: each kernel is translated to C, compiled
//! by the system's C compiler without contraction of products and sums, and run on memory of this process.
//!
//! Each lane runs as far as it can alone, until it waits for others at a shuffle, a ballot or a barrier: the lowest lane first, or the
//! highest ([`Order`]). So do the warps of a block, each up to a barrier of the block. A kernel whose lanes or warps exchange data through
//! memory without a barrier gives other results in one of the two. A shuffle counts as a barrier here, and accesses are checked for
//! alignment only: the interpreter is stricter in both.
//!
//! As a library that is opened in place of the CUDA driver ([`driver`]) it serves the tests of the CUDA back end:
//! `PIKV_LIBCUDA=target/debug/libpikv_witness.so`.

mod c;
mod compile;
pub mod driver;
mod text;

use std::sync::OnceLock;

/// The lanes that run first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Lane 0, warp 0 and block 0 first.
    LowestFirst,
    /// Lane 31, the last warp and the last block first.
    HighestFirst,
}

/// A module of PTX. Each kernel is compiled when it is first launched.
pub struct Program {
    module: text::Module,
    compiled: Vec<OnceLock<Result<compile::Kernel, String>>>,
}

impl Program {
    /// Reads the text of a module.
    ///
    /// # Errors
    /// The line that is not understood.
    pub fn new(text: &str) -> Result<Program, String> {
        let module = text::Module::read(text)?;
        let compiled = module.entries.iter().map(|_| OnceLock::new()).collect();
        Ok(Program { module, compiled })
    }

    /// Names of the kernels.
    pub fn entries(&self) -> impl Iterator<Item = &str> {
        self.module.entries.iter().map(|entry| entry.name.as_str())
    }

    /// Parameters of a kernel; none if there is no such kernel.
    pub fn parameters(&self, entry: &str) -> Option<usize> {
        self.module.entries.iter().find(|of| of.name == entry).map(|of| of.params.len())
    }

    /// Compiles a kernel, unless that was done before.
    ///
    /// # Errors
    /// No such kernel, an instruction that is not understood, or what the C compiler says.
    pub fn compile(&self, entry: &str) -> Result<(), String> {
        self.kernel(entry).map(|_| ())
    }

    fn kernel(&self, entry: &str) -> Result<(&text::Entry, &compile::Kernel), String> {
        let at = self.module.entries.iter().position(|of| of.name == entry);
        let at = at.ok_or_else(|| format!("no kernel {entry}"))?;
        let of = &self.module.entries[at];
        let kernel = self.compiled[at].get_or_init(|| compile::kernel(&c::program(&self.module, of)?));
        Ok((of, kernel.as_ref().map_err(Clone::clone)?))
    }

    /// Runs a kernel over `grid` blocks of `block` threads; `arguments` are addresses of the parameters' bytes.
    ///
    /// # Errors
    /// The errors of [`Program::compile`], or a kernel that fails: by `trap`, a misaligned access, a division by zero, lanes that never meet, or
    /// too many jumps back.
    ///
    /// # Safety
    /// The arguments must be those of the kernel, and the kernel must be sound with them: addresses are those of this process.
    pub unsafe fn launch(
        &self,
        entry: &str,
        (grid, block): (u32, u32),
        arguments: &[*const u8],
        order: Order,
    ) -> Result<(), String> {
        let (of, kernel) = self.kernel(entry)?;
        if arguments.len() != of.params.len() || block == 0 || !block.is_multiple_of(32) {
            return Err(format!("{entry}: {} arguments, blocks of {block} threads", arguments.len()));
        }
        // SAFETY: the caller's own promise; there are as many arguments as the kernel has parameters.
        unsafe { kernel.launch((grid, block), arguments, order == Order::HighestFirst) }
            .map_err(|what| format!("{entry}, {what}"))
    }
}
