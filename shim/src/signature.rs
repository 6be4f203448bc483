//! Compares the signatures of the shim's functions with the driver's declarations.

use mpsshim_signatures::{Class, Passed, differences, pointer};
pub use mpsshim_signatures::{Function, Named, signature};

use crate::ffi::{In, Out, Text};
use crate::proxy::calls;
use crate::{direct, mode};

impl<T: 'static> Passed for In<T> {
    fn class() -> Class {
        pointer::<T>(false)
    }
}

impl<T: 'static> Passed for Out<T> {
    fn class() -> Class {
        pointer::<T>(true)
    }
}

impl Passed for Text {
    fn class() -> Class {
        pointer::<u8>(false)
    }
}

#[test]
fn functions_have_the_signatures_of_the_driver() {
    let found = differences(
        calls::signatures()
            .into_iter()
            .chain(mode::signatures())
            .chain(direct::signatures()),
    );
    assert!(found.is_empty(), "{}", found.join("\n"));
}
