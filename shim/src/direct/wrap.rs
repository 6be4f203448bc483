//! Wrappers of entry points, and the functions of the genuine driver that they call.

use std::sync::OnceLock;

use crate::loader::genuine;
use crate::loader::symbols::Target;

/// A function of the genuine driver, looked up once.
#[derive(Debug)]
pub struct Genuine {
    symbol: &'static str,
    address: OnceLock<Option<Target>>,
}

impl Genuine {
    pub const fn new(symbol: &'static str) -> Genuine {
        Genuine {
            symbol,
            address: OnceLock::new(),
        }
    }

    /// Its address, to be called with the signature that the driver gives it.
    pub fn address(&self) -> Option<*const ()> {
        let find = || genuine::symbol(self.symbol).map(Target::new);
        self.address.get_or_init(find).map(Target::address)
    }
}

/// One wrapper: see [`wrappers`].
macro_rules! wrapper {
    ($symbol:ident ($($arg:ident: $ty:ty),* $(,)?) |$genuine:ident| $body:block) => {
        #[allow(non_snake_case, reason = "the driver's names")]
        unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            static GENUINE: $crate::direct::wrap::Genuine =
                $crate::direct::wrap::Genuine::new(stringify!($symbol));
            let Some(address) = GENUINE.address() else {
                return mpsshim_api::cuda::CUDA_ERROR_NOT_SUPPORTED;
            };
            // SAFETY: the driver's function of this name has this signature.
            let function = unsafe {
                std::mem::transmute::<*const (), unsafe extern "C" fn($($ty),*) -> CUresult>(address)
            };
            // SAFETY: called with the program's arguments, or with ones as valid.
            let $genuine = |$($arg: $ty),*| unsafe { function($($arg),*) };
            $body
        }
    };
}
pub(crate) use wrapper;

/// The signature of a wrapper, from its list of arguments.
#[cfg(test)]
macro_rules! signature_of {
    (($($arg:ident: $ty:ty),* $(,)?)) => {
        $crate::signature::signature!($($ty),*)
    };
}
#[cfg(test)]
pub(crate) use signature_of;

/// Wrappers of entry points: `fn NAME => [SYMBOL, SYMBOL] (ARGUMENTS) |genuine| { … }` makes an `extern "C"` function of
/// each symbol, in whose body `genuine(…)` calls the driver's own of that name.
macro_rules! wrappers {
    ($table:ident; $(fn $name:ident => [$($symbol:ident),+] $args:tt |$genuine:ident| $body:block)*) => {
        $(
            $($crate::direct::wrap::wrapper! { $symbol $args |$genuine| $body })+
        )*
        /// The wrappers of this module.
        pub static $table: &[(&str, $crate::loader::symbols::Target)] = &[
            $($((stringify!($symbol), $crate::loader::symbols::Target::new($symbol as *const ())),)+)*
        ];

        #[cfg(test)]
        pub fn signatures() -> Vec<$crate::signature::Named> {
            vec![$($((stringify!($symbol), $crate::direct::wrap::signature_of!($args)),)+)*]
        }
    };
}
pub(crate) use wrappers;
