//! Device `printf`: what a client's kernels print belongs on that client's standard output.
//!
//! The driver writes the text to the standard output of the process that owns the context, when a stream is
//! synchronized or a kernel launched, without a word on which kernel printed it. So the server's standard output
//! is a memory file, and one session at a time has printing kernels in flight: whatever is in the file when its
//! streams are idle is its own. Sessions whose images have no code that names `vprintf` ([`cubin::prints`]) are not concerned.

use super::Shared;
use super::cubin;
use super::images::Content;
use super::session::Session;
use mpsshim_api::cuda::{CUDA_ERROR_NOT_READY, CUresult};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// What one session's kernels may leave unread; more is dropped, oldest first.
const KEPT: usize = 16 << 20;
/// Images about which it is remembered whether they print; then all are forgotten.
const MOST_KNOWN: usize = 16 << 10;
/// How long a client that asks for its text is held up at most while its streams still work.
const SETTLING: Duration = Duration::from_millis(1);

/// The captured standard output and whose turn it is.
#[derive(Debug)]
pub struct Printing {
    output: Mutex<File>,
    holder: Mutex<Option<u64>>,
    /// Which images print, by SHA-256.
    images: Mutex<HashMap<[u8; 32], bool>>,
}

/// A session's side of it.
#[derive(Debug, Default)]
pub struct Printed {
    /// It has the turn.
    holds: bool,
    /// Text not yet fetched by the client.
    text: Vec<u8>,
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
        Ok(Printing {
            output: Mutex::new(file),
            holder: Mutex::new(None),
            images: Mutex::default(),
        })
    }

    /// Drops what was printed while nobody had the turn: it is nobody's.
    fn drop_unclaimed(&self) {
        if self.holder.lock().is_none() {
            self.drop_output();
        }
    }

    fn drop_output(&self) {
        flush();
        if let Err(error) = self.output.lock().set_len(0) {
            tracing::warn!("unclaimed printed text stays: {error}");
        }
    }

    fn take_output(&self) -> Vec<u8> {
        flush();
        let mut file = self.output.lock();
        let mut text = Vec::new();
        if file
            .rewind()
            .and_then(|()| file.read_to_end(&mut text))
            .is_err()
            || file.set_len(0).is_err()
        {
            tracing::warn!("printed text could not be read");
        }
        text
    }
}

/// Has the C library write out what it has; the driver prints through one of its streams.
fn flush() {
    // SAFETY: a plain call; no stream is named.
    unsafe { libc::fflush(std::ptr::null_mut()) };
}

impl Shared {
    /// Whether an image may print on some device. Its content is looked into once.
    pub fn image_prints(&self, hash: &[u8; 32], content: &Content) -> bool {
        let images = &self.printing.images;
        let known = images.lock().get(hash).copied();
        if let Some(prints) = known {
            return prints;
        }
        let archs: Vec<u32> = self.devices.iter().map(|one| one.capability).collect();
        let prints = cubin::prints(&content[..content.len() - 1], &archs);
        let mut images = images.lock();
        if images.len() >= MOST_KNOWN {
            images.clear();
        }
        images.insert(*hash, prints);
        prints
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
            *holder = Some(self.shared.info.session);
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
        *shared.printing.holder.lock() = None;
    }

    /// Whether the driver says that all streams are idle. What [`Session::has_work_in_flight`] goes by may be known
    /// a moment before the driver notices, and synchronizing must not wait.
    fn is_idle(&self, shared: &Shared) -> bool {
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
        let text = shared.printing.take_output();
        self.printed.text.extend_from_slice(&text);
        let surplus = self.printed.text.len().saturating_sub(KEPT);
        self.printed.text.drain(..surplus);
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
                let text = shared.printing.take_output();
                self.printed.text.extend_from_slice(&text);
            } else {
                self.stop_printing(shared);
            }
        }
        let count = self.printed.text.len().min(room);
        let text = self.printed.text.drain(..count).collect();
        Ok((text, self.printed.text.len()))
    }
}
