//! Device `printf`: text printed by a client's kernels belongs on that client's standard output.
//!
//! The driver writes the text to the standard output of the process that owns the context, when a stream is
//! synchronized or a kernel launched, without telling which kernel printed it. So the server's standard output is a
//! memory file, and only one session at a time has printing kernels in flight: all text in the file when its streams
//! are idle is its own. Sessions whose images contain no code that names `vprintf` (`cubin::calls`) are not affected.
//!
//! The driver's own buffer (`CU_LIMIT_PRINTF_FIFO_SIZE`) loses its oldest text when it is full. So does the memory
//! file, to which the driver keeps writing while the session has work in flight: [`Printing::contain`].

pub mod session;

use crate::engine::base::assertions::flush;
use crate::engine::base::bounds::PRINTED;
use parking_lot::Mutex;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};

/// The captured standard output and the session whose turn it is to print.
#[derive(Debug)]
pub struct Printing {
    output: Mutex<Output>,
    holder: Mutex<Option<u64>>,
    /// Whether a session has the turn.
    held: AtomicBool,
}

/// The memory file. The driver appends to it.
#[derive(Debug)]
struct Output {
    file: File,
    /// Number of dropped bytes at its beginning.
    dropped: u64,
}

impl Output {
    /// Drops the oldest text beyond [`PRINTED`]. The file is not shortened, since the driver may append to it at any
    /// time; instead its first pages are freed.
    fn contain(&mut self) -> std::io::Result<()> {
        let len = self.file.metadata()?.len();
        let Some(keep_from) = len.checked_sub(PRINTED as u64) else {
            return Ok(());
        };
        if keep_from - self.dropped < PRINTED as u64 {
            return Ok(());
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let file = self.file.as_raw_fd();
        // SAFETY: a plain system call on a descriptor of ours.
        if unsafe { libc::fallocate(file, mode, 0, keep_from as libc::off_t) } < 0 {
            return Err(std::io::Error::last_os_error());
        }
        self.dropped = keep_from;
        Ok(())
    }

    /// Takes the text out of the file.
    fn take(&mut self) -> std::io::Result<Vec<u8>> {
        let mut text = Vec::new();
        self.file.seek(SeekFrom::Start(self.dropped))?;
        self.file.read_to_end(&mut text)?;
        self.clear()?;
        Ok(text)
    }

    fn clear(&mut self) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.dropped = 0;
        Ok(())
    }
}

/// A session's part of printing.
#[derive(Debug, Default)]
pub struct Printed {
    /// It has the turn.
    pub holds: bool,
    /// Text not yet fetched by the client.
    pub text: Vec<u8>,
}

impl Printed {
    /// Appends printed text; the latest [`PRINTED`] bytes stay.
    pub fn add(&mut self, text: &[u8]) {
        self.text.extend_from_slice(text);
        let surplus = self.text.len().saturating_sub(PRINTED);
        self.text.drain(..surplus);
    }
}

impl Printing {
    /// Replaces standard output with a memory file.
    ///
    /// # Errors
    /// Errors of the system calls.
    pub fn capture() -> std::io::Result<Printing> {
        // SAFETY: plain system calls; the descriptor is new and ours.
        let file = unsafe {
            let raw = libc::memfd_create(c"mpsshim-stdout".as_ptr(), libc::MFD_CLOEXEC);
            if raw < 0 {
                return Err(std::io::Error::last_os_error());
            }
            <File as std::os::fd::FromRawFd>::from_raw_fd(raw)
        };
        // SAFETY: as above. Append mode, so that truncating the file after each reading leaves no hole.
        unsafe {
            if libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) < 0
                || libc::dup2(file.as_raw_fd(), 1) < 0
            {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(Printing::of(file))
    }

    /// With this file in the place of standard output.
    pub fn of(file: File) -> Printing {
        Printing {
            output: Mutex::new(Output { file, dropped: 0 }),
            holder: Mutex::new(None),
            held: AtomicBool::new(false),
        }
    }

    /// Whether a session has the turn, and so may have printing kernels in flight.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Drops the oldest text if there is too much. To be called regularly while a session has the turn, because any
    /// submission may make the driver write.
    pub fn contain(&self) {
        if let Err(error) = self.output.lock().contain() {
            tracing::warn!("printed text is not dropped: {error}");
        }
    }

    /// Gives a session the turn if it is free. Returns whether it was.
    pub fn take_turn(&self, session: u64) -> bool {
        let mut holder = self.holder.lock();
        if holder.is_some() {
            return false;
        }
        self.drop_output();
        *holder = Some(session);
        self.held.store(true, Ordering::Relaxed);
        true
    }

    /// Ends the turn.
    pub fn end_turn(&self) {
        let mut holder = self.holder.lock();
        *holder = None;
        self.held.store(false, Ordering::Relaxed);
    }

    /// Drops text that was printed while no session had the turn, since its origin is unknown.
    pub fn drop_unclaimed(&self) {
        if self.holder.lock().is_none() {
            self.drop_output();
        }
    }

    fn drop_output(&self) {
        flush();
        if let Err(error) = self.output.lock().clear() {
            tracing::warn!("cannot discard unclaimed printf output: {error}");
        }
    }

    /// The session that has the turn, and the text printed since its last fetch.
    pub fn take_last(&self) -> Option<(u64, Vec<u8>)> {
        let holder = (*self.holder.lock())?;
        Some((holder, self.take_output()))
    }

    /// Takes the text that was printed since the last call.
    pub fn take_output(&self) -> Vec<u8> {
        flush();
        self.output.lock().take().unwrap_or_else(|error| {
            tracing::warn!("printed text could not be read: {error}");
            Vec::new()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::MetadataExt;

    /// The driver writes its whole buffer at a time.
    const FLUSHED: usize = 1 << 20;

    #[test]
    fn printing_without_a_fetch_grows_nothing() {
        // SAFETY: plain system calls; the descriptor is new and ours.
        let file = unsafe {
            let raw = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC);
            assert!(raw >= 0 && libc::fcntl(raw, libc::F_SETFL, libc::O_APPEND) >= 0);
            File::from_raw_fd(raw)
        };
        let mut driver = file.try_clone().expect("a descriptor");
        let printing = Printing::of(file);
        for round in 0..3 {
            for at in 0..200u8 {
                driver.write_all(&[at; FLUSHED]).expect("printed");
                printing.contain();
                let held = driver.metadata().expect("a file").blocks() * 512;
                assert!(held <= 2 * PRINTED as u64, "{round} {at}: {held} bytes");
            }
            let text = printing.take_output();
            assert!(text.len() >= PRINTED && text.len() <= 2 * PRINTED);
            let expected = |at: usize| 200 - (text.len() - at).div_ceil(FLUSHED);
            let mut ends = (0..text.len()).step_by(FLUSHED / 2);
            assert!(ends.all(|at| usize::from(text[at]) == expected(at)));
            assert_eq!(printing.take_output(), b"");
        }
    }

    #[test]
    fn the_latest_text_stays_for_the_client() {
        let mut printed = Printed::default();
        for at in 0..40u8 {
            printed.add(&[at; FLUSHED]);
            assert!(printed.text.len() <= PRINTED);
        }
        assert_eq!((printed.text[0], printed.text[PRINTED - 1]), (24, 39));
    }
}
