//! The kernels by name, and the modules in which they are loaded.
//!
//! The PTX is one text. The driver compiles a module as a whole, which takes seconds where its cache does not have the result, so the text is
//! loaded in parts, each when it is first needed. [`text`] has such a part.

use std::iter;

/// Makes the enumerations of modules and of their kernels.
macro_rules! modules {
    ($($(#[$of:meta])* $module:ident $name:literal { $($kernel:ident $entry:literal,)* })*) => {
        /// A part of the kernels that is compiled and loaded at once.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Module { $($(#[$of])* $module,)* }

        impl Module {
            /// All modules.
            pub const ALL: &[Module] = &[$(Module::$module),*];

            /// Name for errors.
            pub const fn name(self) -> &'static str {
                match self { $(Module::$module => $name,)* }
            }

            /// The kernels of the module.
            pub const fn kernels(self) -> &'static [Kernel] {
                match self { $(Module::$module => &[$(Kernel::$kernel),*],)* }
            }
        }

        /// A kernel.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kernel { $($($kernel,)*)* }

        impl Kernel {
            /// All kernels.
            #[cfg(test)]
            pub const ALL: &[Kernel] = &[$($(Kernel::$kernel,)*)*];

            /// The kernel's entry in the PTX.
            pub const fn entry(self) -> &'static str {
                match self { $($(Kernel::$kernel => $entry,)*)* }
            }

            /// The module of the kernel.
            pub const fn module(self) -> Module {
                match self { $($(Kernel::$kernel => Module::$module,)*)* }
            }
        }
    };
}

modules! {
    /// Writes and copies of tokens, attention of 4 and of 8 rows over full pages, queries and outputs: loaded with the device.
    Full "full" {
        Append "append",
        AppendRows "append_rows",
        AppendHalves "append_halves",
        CopyTokens "copy_tokens",
        AttendR4 "attend_r4",
        AttendR8 "attend_r8",
        GatherQueries "gather_queries",
        GatherHalves "gather_halves",
        JoinRows "join_rows",
        FinishRows "finish_rows",
        FinishInPlace "finish_in_place",
        FinishHalves "finish_halves",
        MassPages "mass_pages",
    }
    /// Attention of 1 and of 2 rows over full pages.
    FullNarrow "full_narrow" {
        AttendR1 "attend_r1",
        AttendR2 "attend_r2",
    }
    /// Pages packed by codecs.
    Pack "pack" {
        PackPages "pack_pages",
    }
    /// Queries of the device, turned into channels of codecs.
    Fold "fold" {
        FoldQueries "fold_queries",
        FoldHalves "fold_halves",
    }
    /// Attention of 4 rows over packed pages.
    Packed "packed" {
        AttendPackedR4 "attend_packed_r4",
    }
    /// Attention of 1 and of 2 rows over packed pages.
    PackedNarrow "packed_narrow" {
        AttendPackedR1 "attend_packed_r1",
        AttendPackedR2 "attend_packed_r2",
    }
    /// Attention of 4 rows over packed pages whose keys are rotated when they are read.
    Rebuilt "rebuilt" {
        AttendRebuiltR4 "attend_rebuilt_r4",
    }
    /// The same of 1 and of 2 rows.
    RebuiltNarrow "rebuilt_narrow" {
        AttendRebuiltR1 "attend_rebuilt_r1",
        AttendRebuiltR2 "attend_rebuilt_r2",
    }
    /// Attention over pages of means, or of coefficients in a basis.
    Factors "factors" {
        AttendFactors "attend_factors",
    }
    /// Routing among up to 256 experts, and what routers learn.
    Route "route" {
        RouteR1 "route_r1",
        RouteR8 "route_r8",
        FoldEntropies "fold_entropies",
        LearnRouter "learn_router",
    }
    /// Routing among more experts.
    RouteWide "route_wide" {
        RouteR32 "route_r32",
    }
}

impl Kernel {
    /// Attention over full pages, by the logarithm of the number of rows.
    pub const ATTEND: [Kernel; 4] = [Kernel::AttendR1, Kernel::AttendR2, Kernel::AttendR4, Kernel::AttendR8];
    /// Attention over packed pages, likewise.
    pub const ATTEND_PACKED: [Kernel; 3] =
        [Kernel::AttendPackedR1, Kernel::AttendPackedR2, Kernel::AttendPackedR4];
    /// Attention over packed pages whose keys are rotated when they are read, likewise.
    pub const ATTEND_REBUILT: [Kernel; 3] =
        [Kernel::AttendRebuiltR1, Kernel::AttendRebuiltR2, Kernel::AttendRebuiltR4];

    /// Place of the kernel in its module's list.
    pub const fn place(self) -> usize {
        let (kernels, mut place) = (self.module().kernels(), 0);
        while kernels[place] as usize != self as usize {
            place += 1;
        }
        place
    }

    /// Routing, by the rows of lanes that the experts take.
    pub const fn route(rows: usize) -> Kernel {
        match rows {
            0..=1 => Kernel::RouteR1,
            2..=8 => Kernel::RouteR8,
            _ => Kernel::RouteR32,
        }
    }
}

/// How a kernel begins in the text.
const ENTRY: &str = ".visible .entry ";
/// How a kernel ends: no line within one is a brace alone.
const END: &str = "\n}\n";

/// The text before the first kernel (version, target, tables), and each kernel with its name. Comments between kernels are left out.
fn split(ptx: &str) -> (&str, impl Iterator<Item = (&str, &str)>) {
    let (header, mut rest) = ptx.split_at(ptx.find(ENTRY).unwrap_or(ptx.len()));
    let kernels = iter::from_fn(move || {
        let from = &rest[rest.find(ENTRY)?..];
        let (kernel, after) = from.split_at(from.find(END).map_or(from.len(), |at| at + END.len()));
        rest = after;
        let name = kernel[ENTRY.len()..].split('(').next().unwrap_or_default();
        Some((name, kernel))
    });
    (header, kernels)
}

/// The text of a module: a part of `ptx` with what all kernels share, and the module's kernels. It has room for the driver's 0.
pub fn text(ptx: &str, module: Module) -> String {
    let (header, kernels) = split(ptx);
    let own = |(name, kernel)| module.kernels().iter().any(|of| of.entry() == name).then_some(kernel);
    let kernels: Vec<&str> = kernels.filter_map(own).collect();
    let mut text =
        String::with_capacity(header.len() + kernels.iter().map(|kernel| kernel.len()).sum::<usize>() + 1);
    text.push_str(header);
    text.extend(kernels);
    text
}

#[cfg(test)]
mod tests {
    use super::{ENTRY, Kernel, Module, split, text};
    use pikv_kernels::ptx::TEXT;
    use std::collections::BTreeSet;

    /// Every kernel of the text is in one module, and every kernel of a module is in the text.
    #[test]
    fn each_kernel_is_in_one_module() {
        let names: Vec<&str> = split(TEXT).1.map(|(name, _)| name).collect();
        let known: BTreeSet<&str> = Kernel::ALL.iter().map(|kernel| kernel.entry()).collect();
        assert_eq!(names.iter().copied().collect::<BTreeSet<_>>(), known);
        assert_eq!((names.len(), known.len()), (TEXT.matches(ENTRY).count(), Kernel::ALL.len()));
        for kernel in Kernel::ALL {
            let of = |module: &&Module| module.kernels().contains(kernel);
            assert_eq!(Module::ALL.iter().filter(of).collect::<Vec<_>>(), [&kernel.module()], "{kernel:?}");
            assert_eq!(kernel.module().kernels()[kernel.place()], *kernel);
        }
    }

    /// Nothing but comments lies between kernels, so that no module lacks what one of its kernels calls.
    #[test]
    fn the_text_is_its_header_and_its_kernels() {
        let (header, kernels) = split(TEXT);
        let mut rest = TEXT.strip_prefix(header).unwrap();
        for (name, kernel) in kernels {
            let at = rest.find(kernel).unwrap();
            let between = &rest[..at];
            assert!(
                between.lines().all(|line| line.trim_start().starts_with("//") || line.trim().is_empty()),
                "{name}"
            );
            assert_eq!(kernel.matches('{').count(), kernel.matches('}').count(), "{name}");
            rest = &rest[at + kernel.len()..];
        }
        assert!(rest.trim().is_empty());
    }

    /// The texts of all modules have each kernel once, unchanged, and each is a module of its own.
    #[test]
    fn modules_are_parts_of_the_text() {
        let (header, kernels) = split(TEXT);
        let texts: Vec<String> = Module::ALL.iter().map(|module| text(TEXT, *module)).collect();
        assert!(texts.iter().all(|text| text.starts_with(header) && text.contains(".target sm_70")));
        for (name, kernel) in kernels {
            let having = texts.iter().filter(|text| text.contains(kernel)).count();
            assert_eq!(having, 1, "{name}");
        }
        let bytes: usize = texts.iter().map(|text| text.len() - header.len()).sum();
        assert!(bytes < TEXT.len());
    }

    /// Kernels by rows, in the order in which callers index them.
    #[test]
    fn kernels_by_rows() {
        let names = |kernels: &[Kernel]| kernels.iter().map(|of| of.entry()).collect::<Vec<_>>().join(" ");
        assert_eq!(names(&Kernel::ATTEND), "attend_r1 attend_r2 attend_r4 attend_r8");
        assert_eq!(names(&Kernel::ATTEND_PACKED), "attend_packed_r1 attend_packed_r2 attend_packed_r4");
        assert_eq!(names(&Kernel::ATTEND_REBUILT), "attend_rebuilt_r1 attend_rebuilt_r2 attend_rebuilt_r4");
        assert_eq!(
            names(&[1, 2, 8, 9, 32].map(Kernel::route)),
            "route_r1 route_r8 route_r8 route_r32 route_r32"
        );
    }
}
