//! Direct mode: the program runs on the genuine driver with contexts of its own. The server says when it may submit
//! ([`turn`]) and how much memory it may hold ([`memory`]).
//!
//! Every slot leads to the genuine function, except the entry points that these modules wrap and those that submit work,
//! which have a gate in front ([`crate::exports`]). docs/design/0012-direct-mode.md says why it is done so.

mod contexts;
mod memory;
mod turn;

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use mpsshim_proto::direct::{PAGE_LEN, Page};
use mpsshim_proto::shm::{self, Doorbell, Mapping};

use crate::exports::Target;
use crate::genuine;

pub use memory::lower_limit;
pub use turn::pass;

/// What there is of a server in this process.
#[derive(Debug)]
struct Direct {
    page: &'static Page,
    doorbell: Doorbell,
    socket: OwnedFd,
    /// For each device of the program's the server's ordinal.
    devices: Vec<Option<u32>>,
}

static DIRECT: OnceLock<Direct> = OnceLock::new();

/// Takes the page of a new session.
///
/// # Errors
/// The page cannot be mapped, or is not as it should be.
pub fn begin(
    page: &OwnedFd,
    doorbell: OwnedFd,
    socket: OwnedFd,
    devices: Vec<Option<u32>>,
) -> Result<(), String> {
    if !shm::is_sealed(page.as_fd(), PAGE_LEN as u64) {
        return Err("the page is not as it should be".into());
    }
    let mapping = Mapping::new(page.as_fd(), PAGE_LEN)
        .map_err(|error| format!("the page cannot be mapped: {error}"))?;
    let base = mapping.base();
    // It lives as long as the process.
    std::mem::forget(mapping);
    let _ = DIRECT.set(Direct {
        // SAFETY: a mapping of PAGE_LEN bytes, sealed against shrinking and never unmapped; Page is all atomics.
        page: unsafe { &*base.cast::<Page>() },
        doorbell: Doorbell::from_fd(doorbell),
        socket,
        devices,
    });
    Ok(())
}

/// The session of this process; `None` in any other mode.
fn direct() -> Option<&'static Direct> {
    DIRECT.get()
}

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

/// Whether an entry point gives the device something to do, so that it needs the turn.
pub fn submits(symbol: &str) -> bool {
    const SUBMITTING: &[&str] = &[
        "cuLaunch",
        "cuMemcpy",
        "cuMemset",
        "cuGraphLaunch",
        "cuGraphUpload",
        "cuMemAllocAsync",
        "cuMemAllocFromPoolAsync",
        "cuMemFreeAsync",
        "cuMemPrefetch",
        "cuMemDiscard",
        "cuStreamWriteValue",
        "cuStreamWaitValue",
        "cuStreamBatchMemOp",
        "cuStreamAddCallback",
        "cuStreamAttachMemAsync",
    ];
    SUBMITTING.iter().any(|prefix| symbol.starts_with(prefix))
}

/// The thread that gives turns up.
pub fn start() {
    turn::start();
}

/// In a child that was forked: the session is the parent's, and nobody says when this process may submit.
pub fn leave() {
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
                return mpsshim_proto::cuda::CUDA_ERROR_NOT_SUPPORTED;
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
    };
}
use wrappers;
