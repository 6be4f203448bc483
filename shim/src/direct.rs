//! Direct mode: the program runs on the genuine driver with contexts of its own. The server grants turns to submit
//! work ([`turn`]) and limits memory ([`memory`]). If the server ends, the program goes on ([`session`]).
//!
//! Every slot leads to the genuine function, except for the entry points that these modules wrap and those that submit
//! work, which have a gate in front ([`crate::exports`]). docs/design/0012-direct-mode.md has the reasons.

mod contexts;
mod memory;
mod session;
mod turn;

use std::os::fd::AsRawFd;
use std::sync::OnceLock;

use crate::exports::Target;
use crate::genuine;

use session::direct;

pub use memory::lower_limit;
pub use mpsshim_api::table::submits;
pub use session::begin;
pub use turn::pass;

/// The server's ordinal of a device of the program's.
fn server_device(ordinal: i32) -> Option<usize> {
    let devices = &direct()?.devices;
    let server = devices.get(usize::try_from(ordinal).ok()?)?;
    server.map(|server| server as usize)
}

/// The entry points that are wrapped, and what wraps them.
pub fn wrapped() -> Vec<(&'static str, Target)> {
    [contexts::WRAPPED, memory::WRAPPED].concat()
}

/// The symbols that are wrapped, and those that this mode calls, with their signatures here.
#[cfg(test)]
pub fn signatures() -> Vec<crate::signature::Named> {
    [
        contexts::signatures(),
        memory::signatures(),
        memory::driver_signatures(),
    ]
    .concat()
}

/// The threads that give turns up and see the server go.
pub fn start() {
    if let Some(direct) = direct() {
        turn::start(direct);
        session::watch(direct);
    }
}

/// In a forked child: the session is the parent's, and no server grants turns to this process.
pub fn leave() {
    memory::leave();
    if let Some(direct) = direct() {
        // While the child has it open, the server would not see the parent's end.
        // SAFETY: closes a descriptor of this process's; the child uses the session no more.
        unsafe { libc::close(direct.socket.as_raw_fd()) };
    }
    turn::open_for_good();
}

/// A function of the genuine driver, looked up once.
#[derive(Debug)]
struct Genuine {
    symbol: &'static str,
    address: OnceLock<Option<Target>>,
}

impl Genuine {
    const fn new(symbol: &'static str) -> Genuine {
        Genuine {
            symbol,
            address: OnceLock::new(),
        }
    }

    /// Its address, to be called with the signature that the driver gives it.
    fn address(&self) -> Option<*const ()> {
        let find = || genuine::symbol(self.symbol).map(Target::new);
        self.address.get_or_init(find).map(Target::address)
    }
}

/// One wrapper: see [`wrappers`].
macro_rules! wrapper {
    ($symbol:ident ($($arg:ident: $ty:ty),* $(,)?) |$genuine:ident| $body:block) => {
        pub unsafe extern "C" fn $symbol($($arg: $ty),*) -> CUresult {
            static GENUINE: $crate::direct::Genuine =
                $crate::direct::Genuine::new(stringify!($symbol));
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
use wrapper;

/// The signature of a wrapper, from its list of arguments.
#[cfg(test)]
macro_rules! signature_of {
    (($($arg:ident: $ty:ty),* $(,)?)) => {
        $crate::signature::signature!($($ty),*)
    };
}
#[cfg(test)]
use signature_of;

/// Wrappers of entry points: `fn NAME => [SYMBOL, SYMBOL] (ARGUMENTS) |genuine| { … }` makes an `extern "C"` function of
/// each symbol, in whose body `genuine(…)` calls the driver's own of that name.
macro_rules! wrappers {
    ($table:ident; $(fn $name:ident => [$($symbol:ident),+] $args:tt |$genuine:ident| $body:block)*) => {
        $(
            #[allow(non_snake_case, reason = "the driver's names")]
            mod $name {
                use super::*;
                $($crate::direct::wrapper! { $symbol $args |$genuine| $body })+
            }
        )*
        /// What this module wraps.
        pub static $table: &[(&str, $crate::exports::Target)] = &[
            $($((stringify!($symbol), $crate::exports::Target::new($name::$symbol as *const ())),)+)*
        ];

        #[cfg(test)]
        pub fn signatures() -> Vec<$crate::signature::Named> {
            vec![$($((stringify!($symbol), $crate::direct::signature_of!($args)),)+)*]
        }
    };
}
use wrappers;
