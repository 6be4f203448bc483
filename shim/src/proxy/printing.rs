//! Device `printf` and `assert`: the output of this program's kernels appears on its standard output when it synchronizes,
//! as natively, and the text of failed assertions on its standard error before a call returns `CUDA_ERROR_ASSERT`.
//!
//! The text is produced in the server. A program that has launched a function of a module that prints
//! ([`FUNCTION_PRINTS`](mpsshim_proto::message::FUNCTION_PRINTS)) requests it whenever it has waited for work.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use mpsshim_proto::message::{Op, Value};
use zerocopy::FromBytes;

use crate::proxy::stream;
use crate::proxy::submit::Session;
use crate::proxy::waited::{self, Seen};

/// There may be text that was not fetched.
static EXPECTED: AtomicBool = AtomicBool::new(false);

/// A kernel that may print was launched.
#[inline]
pub fn expect() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| waited::add(collect));
    EXPECTED.store(true, Ordering::Relaxed);
}

/// Writes the text printed so far to standard output.
fn collect(session: &Session, seen: Seen) {
    if seen != Seen::Query && EXPECTED.load(Ordering::Relaxed) {
        fetch(session);
    }
}

fn fetch(session: &Session) {
    // Work that still runs may print more.
    if !stream::any_busy(session) {
        EXPECTED.store(false, Ordering::Relaxed);
    }
    loop {
        let Ok(answer) = session.request(Op::Printed, &Value::default(), &[]) else {
            return;
        };
        let Ok((left, text)) = Value::read_from_prefix(&answer.payload) else {
            return;
        };
        write(text, Stream::Output);
        if left.value == 0 {
            return;
        }
    }
}

/// Writes the text that this program's kernels produced before the context was lost: the server sends it in a memory
/// file before it ends the session ([`LAST_WORDS`](mpsshim_proto::handshake::LAST_WORDS)). Its first `printed` bytes go
/// to standard output, the rest, the text of failed assertions, to standard error.
pub fn write_last(file: OwnedFd, printed: u64) {
    let mut text = Vec::new();
    if let Err(error) = File::from(file).read_to_end(&mut text) {
        tracing::warn!("what kernels wrote last cannot be read: {error}");
        return;
    }
    let printed = text
        .len()
        .min(usize::try_from(printed).unwrap_or(usize::MAX));
    write(&text[..printed], Stream::Output);
    write(&text[printed..], Stream::Error);
}

/// A stream of the C library's.
#[derive(Clone, Copy)]
enum Stream {
    Output,
    Error,
}

/// Through the C library's stream, as the driver does: the order beside the program's own `printf` is kept.
fn write(text: &[u8], to: Stream) {
    unsafe extern "C" {
        static stdout: *mut libc::FILE;
        static stderr: *mut libc::FILE;
    }
    if text.is_empty() {
        return;
    }
    // SAFETY: the C library's stream, which it locks itself, and a buffer of this length.
    unsafe {
        let to = match to {
            Stream::Output => stdout,
            Stream::Error => stderr,
        };
        libc::fwrite(text.as_ptr().cast(), 1, text.len(), to);
        libc::fflush(to);
    }
}
