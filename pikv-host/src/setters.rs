//! Builder methods for structs of options.

/// Adds a method for each field, of the field's name, that returns the struct with that field changed. Fields in `optional` take a value
/// or `None`.
macro_rules! setters {
    ($type:ident$(<$life:lifetime>)? { $($field:ident: $kind:ty),* $(,)? } $(optional { $($option:ident: $inner:ty),* $(,)? })?) => {
        impl$(<$life>)? $type$(<$life>)? {
            $(
                #[doc = concat!("The same with another [`", stringify!($field), "`](#structfield.", stringify!($field), ").")]
                pub fn $field(mut self, $field: $kind) -> Self {
                    self.$field = $field;
                    self
                }
            )*
            $($(
                #[doc = concat!("The same with another [`", stringify!($option), "`](#structfield.", stringify!($option), "), or none.")]
                pub fn $option(mut self, $option: impl Into<Option<$inner>>) -> Self {
                    self.$option = $option.into();
                    self
                }
            )*)?
        }
    };
}
