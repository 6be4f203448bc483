//! What a library or program gives the loader.

use object::{Object, ObjectSymbol};
use std::collections::BTreeSet;

/// The names of all that an ELF file exports.
pub fn exported(file: &[u8]) -> BTreeSet<String> {
    let file = object::File::parse(file).expect("ELF");
    file.dynamic_symbols()
        .filter(|symbol| symbol.is_definition())
        .map(|symbol| symbol.name().expect("name").to_owned())
        .collect()
}
