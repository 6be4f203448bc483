//! Compares the signatures of the shim's functions with the driver's declarations ([`driver`]): as many arguments, each
//! of the same size and passed in the same way, pointers to values of the same size.
//!
//! A pointer or a handle may be a 64-bit number here: C passes them alike.

mod driver;
mod tests;

use std::any::TypeId;
use std::ffi::c_void;

use mpsshim_api::cuda::{CUipcEventHandle, CUipcMemHandle, CUmemLocation, CUresult};

use crate::ffi::{In, Out, Text};

/// How C passes a value. Sizes are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    Integer(usize),
    Float(usize),
    /// A struct by value.
    Struct(usize),
    /// A pointer, to a value of this size and alignment; nothing is known of what a `void *` or a handle leads to.
    Pointer {
        writable: bool,
        to: Option<(usize, usize)>,
    },
}

impl Class {
    /// Whether a function that takes `self` can be called as one that takes `driver`.
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
    fn class() -> Class;
}

fn pointer<T: 'static>(writable: bool) -> Class {
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

/// A callback.
impl<F: 'static> Passed for Option<F> {
    fn class() -> Class {
        assert_eq!(size_of::<Self>(), size_of::<extern "C" fn()>());
        pointer::<c_void>(false)
    }
}

macro_rules! passed {
    ($class:ident: $($ty:ty),* $(,)?) => {$(
        impl $crate::signature::Passed for $ty {
            fn class() -> $crate::signature::Class {
                $crate::signature::Class::$class(size_of::<$ty>())
            }
        }
    )*};
}
pub(crate) use passed;

passed!(Integer: u8, u16, u32, u64, usize, i32, i64, CUresult);
passed!(Float: f32, f64);
passed!(Struct: CUipcEventHandle, CUipcMemHandle, CUmemLocation);

/// Arguments and result.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    pub arguments: Vec<Class>,
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
macro_rules! signature {
    ($($argument:ty),* $(,)?) => {
        $crate::signature::Signature {
            arguments: vec![$(<$argument as $crate::signature::Passed>::class()),*],
            result: <mpsshim_api::cuda::CUresult as $crate::signature::Passed>::class(),
        }
    };
}
pub(crate) use signature;

/// A symbol, and the signature of a function that serves or calls it.
pub type Named = (&'static str, Signature);

/// The type of a function.
pub trait Function {
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
