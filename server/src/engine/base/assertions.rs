//! Captures the text of failed assertions in kernels, which belongs on the standard error of the client whose kernel
//! failed.
//!
//! The driver writes it, one line per thread, to the C library's `stderr` of the process that owns the context, and has
//! written all of it when a call returns `CUDA_ERROR_ASSERT` (measured, docs/faults.md). This module therefore replaces
//! `stderr` with a stream that keeps such lines and passes everything else on to the process's own standard error, the
//! log.

use crate::engine::base::bounds::PRINTED;
use parking_lot::Mutex;
use std::ffi::{c_char, c_int, c_void};
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::ptr::{null, null_mut};
use std::sync::Once;
use std::time::{Duration, Instant};

/// Maximum bytes of an unterminated line; longer text is passed on.
const LINE: usize = 64 << 10;
/// Maximum number of lines per assertion.
const MOST_LINES: usize = 16;

/// The driver writes lines a microsecond apart; after this pause it has written all of them.
const PAUSE: Duration = Duration::from_millis(2);

static CAPTURED: Mutex<Captured> = Mutex::new(Captured::new());

/// Captured assertions, and text that may become one.
#[derive(Debug)]
struct Captured {
    text: Vec<u8>,
    pending: Vec<u8>,
    /// Time of the last captured assertion.
    latest: Option<Instant>,
}

impl Captured {
    const fn new() -> Captured {
        Captured {
            text: Vec::new(),
            pending: Vec::new(),
            latest: None,
        }
    }

    /// Adds text. Returns the text that belongs to no assertion.
    fn add(&mut self, text: &[u8]) -> Vec<u8> {
        let mut others = Vec::new();
        self.pending.extend_from_slice(text);
        loop {
            let lines = self.pending.iter().enumerate();
            let ends: Vec<usize> = lines
                .filter(|(_, byte)| **byte == b'\n')
                .map(|(at, _)| at + 1)
                .take(MOST_LINES)
                .collect();
            let Some(&first) = ends.first() else {
                break;
            };
            if !begins(&self.pending[..first]) {
                others.extend(self.pending.drain(..first));
                continue;
            }
            let whole = ends.iter().find(|end| is_whole(&self.pending[..**end]));
            match whole {
                Some(&end) => {
                    let line: Vec<u8> = self.pending.drain(..end).collect();
                    self.latest = Some(Instant::now());
                    // When the buffer is full, the first lines are kept, since they show the cause.
                    if self.text.len() + line.len() <= PRINTED {
                        self.text.extend(line);
                    }
                }
                None if ends.len() < MOST_LINES && self.pending.len() < LINE => break,
                None => others.extend(self.pending.drain(..first)),
            }
        }
        if self.pending.len() >= LINE {
            others.append(&mut self.pending);
        }
        others
    }
}

/// Whether the line contains `: block: [1,0,0], thread: [3,0,0] Assertion ``.
fn begins(line: &[u8]) -> bool {
    position(line).is_some()
}

/// Positions of the block and thread, and of the expression.
fn position(line: &[u8]) -> Option<(usize, usize)> {
    const BLOCK: &[u8] = b": block: [";
    const SAID: &[u8] = b"] Assertion `";
    let block = memchr::memmem::find(line, BLOCK)?;
    let said = memchr::memmem::find(&line[block..], SAID)?;
    Some((block, block + said + SAID.len()))
}

/// Whether the text, whose expression may span several lines, is complete.
fn is_whole(text: &[u8]) -> bool {
    text.ends_with(b"failed.\n")
}

/// Parsed first line of an assertion's text.
#[derive(Debug, PartialEq, Eq)]
pub struct Assertion<'a> {
    /// The source file.
    pub file: &'a [u8],
    /// The function, as `__PRETTY_FUNCTION__` writes it.
    pub function: &'a [u8],
    /// The expression that was false.
    pub expression: &'a [u8],
}

impl<'a> Assertion<'a> {
    /// Parses the first line; `None` if it has another form.
    pub fn read(text: &'a [u8]) -> Option<Assertion<'a>> {
        const END: &[u8] = b"` failed.";
        let (block, said) = position(text)?;
        let rest = &text[said..];
        let expression = &rest[..memchr::memmem::find(rest, END)?];
        let head = &text[..block];
        // The path ends at the first `:LINE: `, since it may contain colons.
        let is_line = |at: &usize| {
            let digits = head[at + 1..].iter().take_while(|b| b.is_ascii_digit());
            let count = digits.count();
            count > 0 && head[at + 1 + count..].starts_with(b": ")
        };
        let colon = memchr::memchr_iter(b':', head).find(is_line)?;
        let behind = memchr::memmem::find(&head[colon..], b": ")?;
        Some(Assertion {
            file: &head[..colon],
            function: &head[colon + behind + 2..],
            expression,
        })
    }

    /// The function's unqualified name, if it has one, to compare with kernels' names, mangled or not.
    pub fn name(&self) -> Option<&'a [u8]> {
        let is_word = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
        // Arguments begin at the first parenthesis outside of template arguments.
        let mut depth = 0;
        let mut end = self.function.len();
        for (at, byte) in self.function.iter().enumerate() {
            match byte {
                b'<' => depth += 1,
                b'>' => depth -= 1,
                b'(' if depth <= 0 => {
                    end = at;
                    break;
                }
                _ => {}
            }
        }
        let mut name = &self.function[..end];
        if name.ends_with(b">") {
            let mut depth = 0;
            let open = name.iter().rposition(|byte| {
                depth += i32::from(*byte == b'>') - i32::from(*byte == b'<');
                depth == 0
            })?;
            name = &name[..open];
        }
        let from = name
            .iter()
            .rposition(|b| !is_word(b))
            .map_or(0, |at| at + 1);
        let name = &name[from..];
        (!name.is_empty() && name != b"operator").then_some(name)
    }
}

/// Whether the name of a kernel, mangled or not, is that of this function.
pub fn names(kernel: &str, function: &[u8]) -> bool {
    let mut mangled = function.len().to_string().into_bytes();
    mangled.extend_from_slice(function);
    kernel.as_bytes() == function || memchr::memmem::find(kernel.as_bytes(), &mangled).is_some()
}

/// glibc's `cookie_io_functions_t`.
#[repr(C)]
struct Functions {
    read: *const c_void,
    write: unsafe extern "C" fn(*mut c_void, *const c_char, usize) -> isize,
    seek: *const c_void,
    close: *const c_void,
}

unsafe extern "C" {
    static mut stderr: *mut libc::FILE;
    fn fopencookie(
        cookie: *mut c_void,
        mode: *const c_char,
        functions: Functions,
    ) -> *mut libc::FILE;
}

/// # Safety
/// `text` has `len` bytes.
unsafe extern "C" fn take_in(_: *mut c_void, text: *const c_char, len: usize) -> isize {
    // SAFETY: the caller's promise.
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), len) };
    let others = CAPTURED.lock().add(text);
    if !others.is_empty() {
        // There is no way to report a failure.
        let _ = io::stderr().write_all(&others);
    }
    len as isize
}

/// Replaces `stderr` with the capturing stream, once per process. Rust's own writes to standard error bypass it.
///
/// # Errors
/// If no memory is available.
pub fn capture() -> io::Result<()> {
    static DONE: Once = Once::new();
    let mut result = Ok(());
    DONE.call_once(|| {
        let functions = Functions {
            read: null(),
            write: take_in,
            seek: null(),
            close: null(),
        };
        // SAFETY: the functions fit their types, and the stream stays open. The C library's variable may be assigned to
        // (glibc's manual, "Standard Streams"); the driver reads it when it writes.
        unsafe {
            let stream = fopencookie(null_mut(), c"w".as_ptr(), functions);
            if stream.is_null() {
                result = Err(io::Error::last_os_error());
                return;
            }
            let line: c_int = libc::_IOLBF;
            libc::setvbuf(stream, null_mut(), line, LINE);
            stderr = stream;
        }
    });
    result
}

/// Whether the driver is writing assertions: a query of a stream or an event would interrupt it (measured with
/// assertions that fail in 1,000 threads and more).
pub fn are_coming() -> bool {
    let latest = CAPTURED.lock().latest;
    latest.is_some_and(|latest| latest.elapsed() < PAUSE)
}

/// Flushes the C library's streams, through which the driver writes.
pub fn flush() {
    // SAFETY: a plain call; no stream is named.
    unsafe { libc::fflush(null_mut()) };
}

/// Takes the lines of assertions that failed since the last call.
pub fn take() -> Vec<u8> {
    flush();
    std::mem::take(&mut CAPTURED.lock().text)
}

/// Sends a client the last text of its kernels, for standard output and for standard error, because its requests are
/// not answered any more.
///
/// # Errors
/// If no memory is available, or the client does not receive it.
pub fn send(socket: BorrowedFd<'_>, printed: &[u8], asserted: &[u8]) -> io::Result<()> {
    use mpsshim_proto::handshake::{DescriptorNote, LAST_WORDS};
    use mpsshim_proto::shm;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use zerocopy::IntoBytes;
    let len = printed.len() + asserted.len();
    let file = std::fs::File::from(shm::sealed_memfd(c"mpsshim-last-words", len as u64)?);
    file.write_all_at(printed, 0)?;
    file.write_all_at(asserted, printed.len() as u64)?;
    let note = DescriptorNote {
        token: LAST_WORDS,
        len: printed.len() as u64,
    };
    shm::send_packet_now(socket, note.as_bytes(), &[file.as_fd()])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "/src/a b:c/assert.cu:12: void boom(int, int): block: [1,0,0], thread: [3,0,0] Assertion `v < limit` failed.\n";

    #[test]
    fn lines_of_assertions_are_kept_and_others_pass() {
        let mut captured = Captured::new();
        let other = "driver: something is wrong: 7\n";
        assert_eq!(captured.add(other.as_bytes()), other.as_bytes());
        for piece in LINE.as_bytes().chunks(7) {
            assert_eq!(captured.add(piece), b"");
        }
        let both = format!("{LINE}{other}{LINE}");
        assert_eq!(captured.add(both.as_bytes()), other.as_bytes());
        assert_eq!(captured.text, LINE.repeat(3).as_bytes());
        assert_eq!(captured.add(b"no end"), b"");
        assert_eq!(captured.add(b" yet\n"), b"no end yet\n");
        let long = vec![b':'; super::LINE];
        assert_eq!(captured.add(&long), long);
    }

    #[test]
    fn an_expression_may_have_several_lines() {
        let mut captured = Captured::new();
        let text = LINE.replace("v < limit", "index out of\nbounds");
        let (first, second) = text.split_once('\n').unwrap();
        assert_eq!(captured.add(format!("{first}\n").as_bytes()), b"");
        assert_eq!(captured.add(second.as_bytes()), b"");
        assert_eq!(captured.text, text.as_bytes());
        let endless = format!("{first}\n{}", "more\n".repeat(MOST_LINES));
        assert_eq!(captured.add(endless.as_bytes()), endless.as_bytes());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut captured = Captured::new();
        for _ in 0..PRINTED / LINE.len() + 10 {
            assert_eq!(captured.add(LINE.as_bytes()), b"");
        }
        assert!(captured.text.len() <= PRINTED && captured.text.len() > PRINTED - LINE.len());
    }

    #[test]
    fn a_line_is_read() {
        let said = Assertion::read(LINE.as_bytes()).unwrap();
        assert_eq!(
            said,
            Assertion {
                file: b"/src/a b:c/assert.cu",
                function: b"void boom(int, int)",
                expression: b"v < limit",
            }
        );
        assert_eq!(said.name(), Some(&b"boom"[..]));
        assert_eq!(Assertion::read(b"something else\n"), None);
        let name = |function: &'static str| {
            let one = Assertion {
                function: function.as_bytes(),
                ..said
            };
            one.name()
                .map(|name| String::from_utf8_lossy(name).into_owned())
        };
        assert_eq!(
            name("void a::b::kernel<int, (c)2>(T *) [with T = int]").as_deref(),
            Some("kernel")
        );
        assert_eq!(name("auto f()::operator()(int) const"), Some("f".into()));
        assert_eq!(name("boom").as_deref(), Some("boom"));
        assert_eq!(name(""), None);
        assert!(names("_Z4boomii", b"boom") && names("boom", b"boom"));
        assert!(!names("_Z5boomsv", b"boom") && !names("booms", b"boom"));
    }
}
