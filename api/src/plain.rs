//! Structs that travel as bytes: messages, and the driver's own where they are carried or kept as they are.

/// Declares structs with C layout that consist of plain words, with all fields public. The file that uses it imports
/// the `zerocopy` traits that they derive.
#[macro_export]
macro_rules! plain_structs {
    ($($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident: $ty:ty,)* })*) => {
        /// Name, fields and bytes of each, for the fingerprint of the protocol.
        pub(crate) const STRUCTS: &[(&str, &str, usize)] = &[$((
            stringify!($name),
            concat!($(stringify!($field), ": ", stringify!($ty), ","),*),
            size_of::<$name>(),
        )),*];
        $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty,)* }
        )*
    };
}
