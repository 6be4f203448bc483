//! Device `printf`: what a client's kernels print belongs on that client's standard output.
//!
//! The driver writes the text to the standard output of the process that owns the context, when a stream is
//! synchronized or a kernel launched, without a word on which kernel printed it. So the server's standard output
//! is a memory file, and one session at a time has printing kernels in flight: whatever is in the file when its
//! streams are idle is its own. Sessions whose images have no code that names `vprintf` ([`cubin::prints`]) are not concerned.
//!
//! The driver's own buffer (`CU_LIMIT_PRINTF_FIFO_SIZE`) loses its oldest text when it is full. So does the memory file,
//! which the driver goes on writing to while the session has work in flight: [`Printing::contain`].

use super::Shared;
use super::assertions::flush;
use super::bounds::PRINTED;
use super::cubin;
use super::images::{Content, Findings};
use super::session::Session;
use mpsshim_api::cuda::{CUDA_ERROR_NOT_READY, CUresult};
use parking_lot::Mutex;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Images about which it is remembered whether they print; then all are forgotten.
const MOST_KNOWN: usize = 16 << 10;
/// How long a client that asks for its text is held up at most while its streams still work.
const SETTLING: Duration = Duration::from_millis(1);

/// The captured standard output and whose turn it is.
#[derive(Debug)]
pub struct Printing {
    output: Mutex<Output>,
    holder: Mutex<Option<u64>>,
    /// Whether there is a holder.
    held: AtomicBool,
    /// Which images print, by SHA-256.
    images: Findings<bool>,
}

/// The memory file. The driver appends to it.
#[derive(Debug)]
struct Output {
    file: File,
    /// Bytes at its beginning that were dropped.
    dropped: u64,
}

impl Output {
    /// Drops the oldest text beyond [`PRINTED`]. The file becomes no shorter, since the driver may append to it at any time:
    /// its first pages are given back.
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

    /// What is in the file, which is empty then.
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

/// A session's side of it.
#[derive(Debug, Default)]
pub struct Printed {
    /// It has the turn.
    holds: bool,
    /// Text not yet fetched by the client.
    text: Vec<u8>,
}

impl Printed {
    /// Text that was printed behind what is here; of both the latest [`PRINTED`] bytes stay.
    fn add(&mut self, text: &[u8]) {
        self.text.extend_from_slice(text);
        let surplus = self.text.len().saturating_sub(PRINTED);
        self.text.drain(..surplus);
    }
}

impl Printing {
    /// Puts a memory file in the place of standard output.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn capture() -> std::io::Result<Printing> {
        // SAFETY: plain system calls; the descriptor is new and ours.
        let file = unsafe {
            let raw = libc::memfd_create(c"mpsshim-stdout".as_ptr(), libc::MFD_CLOEXEC);
            if raw < 0 {
                return Err(std::io::Error::last_os_error());
            }
            <File as std::os::fd::FromRawFd>::from_raw_fd(raw)
        };
        // SAFETY: as above. Appending, so that truncating it after each reading leaves no hole.
        unsafe {
            if libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) < 0
                || libc::dup2(file.as_raw_fd(), 1) < 0
            {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(Printing::of(file))
    }

    fn of(file: File) -> Printing {
        Printing {
            output: Mutex::new(Output { file, dropped: 0 }),
            holder: Mutex::new(None),
            held: AtomicBool::new(false),
            images: Findings::new(MOST_KNOWN),
        }
    }

    /// Whether some session has printing kernels in flight.
    #[inline]
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Relaxed)
    }

    /// Drops the oldest text where there is too much. To be called now and then while a session has the turn: whatever is
    /// submitted may have the driver write.
    pub fn contain(&self) {
        if let Err(error) = self.output.lock().contain() {
            tracing::warn!("printed text is not dropped: {error}");
        }
    }

    fn set_holder(&self, holder: &mut Option<u64>, session: Option<u64>) {
        *holder = session;
        self.held.store(session.is_some(), Ordering::Relaxed);
    }

    /// Drops what was printed while nobody had the turn: it is nobody's.
    fn drop_unclaimed(&self) {
        if self.holder.lock().is_none() {
            self.drop_output();
        }
    }

    fn drop_output(&self) {
        flush();
        if let Err(error) = self.output.lock().clear() {
            tracing::warn!("unclaimed printed text stays: {error}");
        }
    }

    /// Whose turn it is, and what was printed since it fetched it last.
    pub fn take_last(&self) -> Option<(u64, Vec<u8>)> {
        let holder = (*self.holder.lock())?;
        Some((holder, self.take_output()))
    }

    fn take_output(&self) -> Vec<u8> {
        flush();
        self.output.lock().take().unwrap_or_else(|error| {
            tracing::warn!("printed text could not be read: {error}");
            Vec::new()
        })
    }
}

impl Shared {
    /// Whether an image may print on some device. Its content is looked into once.
    pub fn image_prints(&self, hash: &[u8; 32], content: &Content) -> bool {
        self.printing.images.look_up(hash, || {
            let archs: Vec<u32> = self.devices.iter().map(|one| one.capability).collect();
            cubin::prints(&content[..content.len() - 1], &archs)
        })
    }
}

impl Session {
    /// Whether this session may launch a kernel that prints now; takes the turn if it is free.
    pub fn may_print(&mut self, shared: &Shared) -> bool {
        if self.printed.holds {
            return true;
        }
        let mut holder = shared.printing.holder.lock();
        if holder.is_none() {
            shared.printing.drop_output();
            let session = Some(self.shared.info.session);
            shared.printing.set_holder(&mut holder, session);
            self.printed.holds = true;
        }
        self.printed.holds
    }

    /// Whether it has the turn.
    pub fn prints(&self) -> bool {
        self.printed.holds
    }

    /// Gives the turn back if nothing is in flight, after fetching what was printed.
    pub fn stop_printing(&mut self, shared: &Shared) {
        if self.printed.holds && !self.has_work_in_flight(shared) && self.is_idle(shared) {
            self.surrender_printing(shared);
        }
    }

    /// Gives the turn back for a session that is over and whose streams are idle. What is known of its work does
    /// not matter: work that no flag covers would count as being in flight for ever.
    pub fn surrender_printing(&mut self, shared: &Shared) {
        if !self.printed.holds {
            return shared.printing.drop_unclaimed();
        }
        // What it has printed nobody will ask for, and it must not be taken for the next holder's.
        if let Err(status) = self.fetch_printed(shared) {
            shared.note_status(status);
        }
        self.printed.holds = false;
        let mut holder = shared.printing.holder.lock();
        shared.printing.set_holder(&mut holder, None);
    }

    /// Whether the driver says that all streams are idle. What [`Session::has_work_in_flight`] goes by may be known
    /// a moment before the driver notices, and synchronizing must not wait.
    pub fn is_idle(&self, shared: &Shared) -> bool {
        let works = self.streams.iter().chain(&self.retired);
        works.filter(|stream| !stream.capturing).all(|stream| {
            let _ = shared.devices[stream.device].make_current(&shared.driver);
            shared.driver.stream_query(stream.raw) != Err(CUDA_ERROR_NOT_READY)
        })
    }

    fn fetch_printed(&mut self, shared: &Shared) -> Result<(), CUresult> {
        let works = self.streams.iter().chain(&self.retired);
        for stream in works.filter(|stream| !stream.capturing) {
            shared.devices[stream.device].make_current(&shared.driver)?;
            shared.driver.stream_synchronize(stream.raw)?;
        }
        self.printed.add(&shared.printing.take_output());
        Ok(())
    }

    /// The next `room` bytes of what its kernels printed, and how many are left after them.
    pub fn take_printed(
        &mut self,
        shared: &Shared,
        room: usize,
    ) -> Result<(Vec<u8>, usize), CUresult> {
        if self.printed.holds {
            // The driver may learn a moment after the client that its work is done.
            let began = Instant::now();
            while !self.is_idle(shared) && began.elapsed() < SETTLING {
                std::thread::yield_now();
            }
            if self.has_work_in_flight(shared) {
                // Work of other streams still runs; the text of what the client waited for is complete nevertheless.
                self.printed.add(&shared.printing.take_output());
            } else {
                self.stop_printing(shared);
            }
        }
        let count = self.printed.text.len().min(room);
        let text = self.printed.text.drain(..count).collect();
        Ok((text, self.printed.text.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::MetadataExt;

    /// What the driver writes at a time: the whole of its buffer.
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
