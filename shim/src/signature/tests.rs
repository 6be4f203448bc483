//! The comparison.

use std::collections::BTreeMap;

use mpsshim_api::cuda::CUresult;

use super::{Function, Named, driver};
use crate::ffi::Out;
use crate::proxy::calls;
use crate::{direct, mode};

/// The functions that are not as the driver declares them.
fn differences(ours: impl IntoIterator<Item = Named>) -> Vec<String> {
    let declared: BTreeMap<_, _> = driver::declarations().into_iter().collect();
    let differs = |(symbol, ours): Named| {
        // Either flavour of the default stream has the same arguments.
        let name = symbol
            .strip_suffix("_ptds")
            .or_else(|| symbol.strip_suffix("_ptsz"))
            .unwrap_or(symbol);
        match declared.get(name) {
            Some(driver) if ours.stands_for(driver) => None,
            Some(driver) => Some(format!("{symbol}:\n  driver {driver:?}\n  here   {ours:?}")),
            None => Some(format!(
                "{symbol} has no declaration in signature/driver.rs"
            )),
        }
    };
    ours.into_iter().filter_map(differs).collect()
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

#[test]
fn a_difference_is_found() {
    unsafe extern "C" fn two(_: Out<usize>, _: u32) -> CUresult {
        CUresult(0)
    }
    unsafe extern "C" fn narrow(_: Out<u32>, _: usize) -> CUresult {
        CUresult(0)
    }
    unsafe extern "C" fn right(_: Out<u64>, _: usize) -> CUresult {
        CUresult(0)
    }
    let differs = |signature| differences([("cuMemAlloc_v2", signature)]).len() == 1;
    assert!(differs(
        (two as unsafe extern "C" fn(_, _) -> _).signature()
    ));
    assert!(differs(
        (narrow as unsafe extern "C" fn(_, _) -> _).signature()
    ));
    assert!(!differs(
        (right as unsafe extern "C" fn(_, _) -> _).signature()
    ));
}
