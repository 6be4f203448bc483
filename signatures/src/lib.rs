//! For tests: compares the signatures of functions with the driver's declarations ([`declarations`]): as many arguments,
//! each of the same size and passed in the same way, pointers to values of the same size. The shim's handlers, the
//! functions that the server calls and those that softgpu exports are compared in this way.
//!
//! A pointer or a handle may be a 64-bit number here: C passes them alike.

mod driver;

pub use driver::declarations;

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::c_void;

use mpsshim_api::cuda::{
    CUarray, CUcontext, CUdevResourceDesc, CUevent, CUexternalMemory, CUfunction, CUgraph,
    CUgraphExec, CUgraphNode, CUgreenCtx, CUipcEventHandle, CUipcMemHandle, CUkernel, CUlibrary,
    CUlinkState, CUmemGenericAllocationHandle, CUmemLocation, CUmemoryPool, CUmipmappedArray,
    CUmodule, CUresult, CUstream, CUsurfObject, CUsurfref, CUtexObject, CUtexref,
};

/// How C passes a value. Sizes are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// An integer, an enumeration or a handle.
    Integer(usize),
    /// A floating-point number.
    Float(usize),
    /// A struct by value.
    Struct(usize),
    /// A pointer.
    Pointer {
        /// The function may write there.
        writable: bool,
        /// Size and alignment of the value it points to; `None` for a `void *` or a handle.
        to: Option<(usize, usize)>,
    },
}

impl Class {
    /// Whether a function that takes `self` can be called as if it took `driver`.
    fn stands_for(self, driver: Class) -> bool {
        match (self, driver) {
            (Class::Integer(8), Class::Pointer { .. }) => true,
            (
                Class::Pointer { writable, to },
                Class::Pointer {
                    writable: may_write,
                    to: target,
                },
            ) => {
                let fits = |(size, align): (usize, usize), (driver_size, driver_align)| {
                    size == driver_size && align <= driver_align
                };
                (may_write || !writable)
                    && to.zip(target).is_none_or(|(to, target)| fits(to, target))
            }
            _ => self == driver,
        }
    }
}

/// A type of an argument or a result.
pub trait Passed {
    /// How C passes it.
    fn class() -> Class;
}

/// The class of a pointer to a `T`.
pub fn pointer<T: 'static>(writable: bool) -> Class {
    let untyped = TypeId::of::<T>() == TypeId::of::<c_void>() || size_of::<T>() == 0;
    Class::Pointer {
        writable,
        to: (!untyped).then_some((size_of::<T>(), align_of::<T>())),
    }
}

impl<T: 'static> Passed for *const T {
    fn class() -> Class {
        pointer::<T>(false)
    }
}

impl<T: 'static> Passed for *mut T {
    fn class() -> Class {
        pointer::<T>(true)
    }
}

impl<T: 'static> Passed for &mut T {
    fn class() -> Class {
        pointer::<T>(true)
    }
}

impl<T: 'static> Passed for &T {
    fn class() -> Class {
        pointer::<T>(false)
    }
}

/// A callback.
impl<F: 'static> Passed for Option<F> {
    fn class() -> Class {
        assert_eq!(size_of::<Self>(), size_of::<extern "C" fn()>());
        pointer::<c_void>(false)
    }
}

/// Declares that types are passed as a class, by their size.
#[macro_export]
macro_rules! passed {
    ($class:ident: $($ty:ty),* $(,)?) => {$(
        impl $crate::Passed for $ty {
            fn class() -> $crate::Class {
                $crate::Class::$class(size_of::<$ty>())
            }
        }
    )*};
}
passed!(Integer: u8, u16, u32, u64, usize, i32, i64, CUresult);
passed!(Integer:
    CUarray, CUcontext, CUdevResourceDesc, CUevent, CUexternalMemory, CUfunction, CUgraph, CUgraphExec, CUgraphNode,
    CUgreenCtx, CUkernel, CUlibrary, CUlinkState, CUmemGenericAllocationHandle, CUmemoryPool, CUmipmappedArray, CUmodule, CUstream,
    CUsurfObject, CUsurfref, CUtexObject, CUtexref,
);
passed!(Float: f32, f64);
passed!(Struct: CUipcEventHandle, CUipcMemHandle, CUmemLocation);

/// Arguments and result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    /// In their order.
    pub arguments: Vec<Class>,
    /// The returned type.
    pub result: Class,
}

impl Signature {
    fn stands_for(&self, driver: &Signature) -> bool {
        let mut arguments = self.arguments.iter().zip(&driver.arguments);
        self.arguments.len() == driver.arguments.len()
            && arguments.all(|(ours, driver)| ours.stands_for(*driver))
            && self.result == driver.result
    }
}

/// The signature of a function with arguments of these types that returns a status.
#[macro_export]
macro_rules! signature {
    ($($argument:ty),* $(,)?) => {
        $crate::Signature {
            arguments: vec![$(<$argument as $crate::Passed>::class()),*],
            result: <mpsshim_api::cuda::CUresult as $crate::Passed>::class(),
        }
    };
}
/// A symbol, and the signature of a function that serves or calls it.
pub type Named = (&'static str, Signature);

/// The type of a function.
pub trait Function {
    /// Its signature.
    fn signature(self) -> Signature;
}

macro_rules! function {
    ($($argument:ident)*) => {
        impl<$($argument: Passed,)* R: Passed> Function for unsafe extern "C" fn($($argument),*) -> R {
            fn signature(self) -> Signature {
                Signature { arguments: vec![$($argument::class()),*], result: R::class() }
            }
        }

        impl<$($argument: Passed,)* R: Passed> Function for unsafe fn($($argument),*) -> R {
            fn signature(self) -> Signature {
                Signature { arguments: vec![$($argument::class()),*], result: R::class() }
            }
        }
    };
}

macro_rules! functions {
    () => {
        function!();
    };
    ($first:ident $($rest:ident)*) => {
        function!($first $($rest)*);
        functions!($($rest)*);
    };
}

functions!(A B C D E F G H I J K L M N O P);

/// The functions that are not as the driver declares them, each with both signatures.
pub fn differences(ours: impl IntoIterator<Item = Named>) -> Vec<String> {
    let declared: BTreeMap<_, _> = declarations().into_iter().collect();
    let differs = |(symbol, ours): Named| {
        // Both flavours of the default stream take the same arguments.
        let name = symbol
            .strip_suffix("_ptds")
            .or_else(|| symbol.strip_suffix("_ptsz"))
            .unwrap_or(symbol);
        match declared.get(name) {
            Some(driver) if ours.stands_for(driver) => None,
            Some(driver) => Some(format!("{symbol}:\n  driver {driver:?}\n  here   {ours:?}")),
            None => Some(format!(
                "{symbol} has no declaration in signatures/src/driver.rs"
            )),
        }
    };
    ours.into_iter().filter_map(differs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_found() {
        let differs = |signature| differences([("cuMemAlloc_v2", signature)]).len() == 1;
        assert!(differs(signature!(*mut usize, u32)));
        assert!(differs(signature!(*mut u32, usize)));
        assert!(differs(signature!(*mut u64)));
        assert!(differs(signature!(*mut u64, f64)));
        assert!(!differs(signature!(*mut u64, usize)));
    }
}
