//! How proxy mode serves an entry point, for those it serves at all.
//!
//! A class belongs to a base name (`cuMemcpyHtoD`), not to one of its symbols: all versions and default-stream
//! flavours of a call go the same way. What is not listed is [`Class::Absent`]. The order is free; group by
//! subject.

use crate::table::Class;

/// The class of each served base name.
#[rustfmt::skip]
pub static CLASSES: &[(&str, Class)] = &[
    // Start
    ("cuInit", Class::Custom),
    ("cuGetProcAddress", Class::Local),
    ("cuGetExportTable", Class::Local),
];
