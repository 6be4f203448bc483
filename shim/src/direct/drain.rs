//! Waits for the program's work when a turn is given up: for its contexts or, while a stream captures, its streams.

use mpsshim_api::cuda::{CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS, CUresult};
use parking_lot::Mutex;

use super::wrap::Genuine;

/// Contexts by handle. Held while one is destroyed and while all are drained.
pub static CONTEXTS: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Streams in capture.
pub static CAPTURING: Mutex<Vec<u64>> = Mutex::new(Vec::new());
/// Streams that the program made since a context last ended: it is unknown which of them ended with it, and the driver
/// must not be called with one that has ended. Held while one is destroyed and while all are drained.
pub static STREAMS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// Waits for the work of all contexts. While a stream captures, waiting for a context or its default stream would end
/// the capture; then it waits for the streams that the program made, except those that capture.
pub fn drain() {
    type Push = extern "C" fn(u64) -> CUresult;
    type Pop = extern "C" fn(*mut u64) -> CUresult;
    type Synchronize = extern "C" fn() -> CUresult;
    type Exchange = extern "C" fn(*mut u32) -> CUresult;
    static PUSH: Genuine = Genuine::new("cuCtxPushCurrent_v2");
    static POP: Genuine = Genuine::new("cuCtxPopCurrent_v2");
    static SYNCHRONIZE: Genuine = Genuine::new("cuCtxSynchronize");
    static EXCHANGE: Genuine = Genuine::new("cuThreadExchangeStreamCaptureMode");
    const RELAXED: u32 = 2;
    if let Some(exchange) = EXCHANGE.address() {
        // SAFETY: the driver's function of this name has this signature.
        let exchange = unsafe { std::mem::transmute::<*const (), Exchange>(exchange) };
        let mut mode = RELAXED;
        let _ = exchange(&raw mut mode);
    }
    if is_capturing() {
        drain_streams();
        return;
    }
    let (Some(push), Some(pop), Some(synchronize)) =
        (PUSH.address(), POP.address(), SYNCHRONIZE.address())
    else {
        return;
    };
    // SAFETY: the driver's functions of these names have these signatures.
    let (push, pop, synchronize) = unsafe {
        (
            std::mem::transmute::<*const (), Push>(push),
            std::mem::transmute::<*const (), Pop>(pop),
            std::mem::transmute::<*const (), Synchronize>(synchronize),
        )
    };
    let contexts = CONTEXTS.lock();
    for context in contexts.iter() {
        // A primary context that no longer exists cannot be made current.
        if !push(*context).is_ok() {
            continue;
        }
        let status = synchronize();
        if status != CUDA_SUCCESS {
            tracing::debug!(%status, "a context was not drained");
        }
        let _ = pop(std::ptr::null_mut());
    }
}

/// Waits for the streams that do not capture.
fn drain_streams() {
    type Synchronize = extern "C" fn(u64) -> CUresult;
    static SYNCHRONIZE: Genuine = Genuine::new("cuStreamSynchronize");
    let Some(address) = SYNCHRONIZE.address() else {
        return;
    };
    // SAFETY: the driver's function of this name has this signature.
    let synchronize = unsafe { std::mem::transmute::<*const (), Synchronize>(address) };
    STREAMS
        .lock()
        .retain(|stream| match is_in_capture(*stream) {
            Ok(true) => true,
            Ok(false) => {
                let _ = synchronize(*stream);
                true
            }
            Err(_) => false,
        });
}

/// Whether a stream may capture.
pub fn any_capture() -> bool {
    !CAPTURING.lock().is_empty()
}

/// Whether a stream captures. Streams that do not any more (destroyed, or ended by an error) are forgotten.
fn is_capturing() -> bool {
    let mut capturing = CAPTURING.lock();
    capturing.retain(|stream| is_in_capture(*stream) == Ok(true));
    !capturing.is_empty()
}

fn is_in_capture(stream: u64) -> Result<bool, CUresult> {
    type IsCapturing = extern "C" fn(u64, *mut u32) -> CUresult;
    static IS_CAPTURING: Genuine = Genuine::new("cuStreamIsCapturing");
    let address = IS_CAPTURING.address().ok_or(CUDA_ERROR_NOT_SUPPORTED)?;
    // SAFETY: the driver's function of this name has this signature.
    let query = unsafe { std::mem::transmute::<*const (), IsCapturing>(address) };
    let mut state = 0;
    query(stream, &raw mut state).ok()?;
    Ok(state != 0)
}
