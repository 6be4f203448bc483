//! The driver calls that proxy mode serves, one file per subject.

use crate::exports::Target;

/// The handler of each served symbol. A handler has the signature of the symbol it stands for.
pub static SERVED: &[(&str, Target)] = &[];
