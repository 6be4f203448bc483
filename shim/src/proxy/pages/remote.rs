//! Managed memory that another process copies with `process_vm_readv` or `process_vm_writev`.
//!
//! The kernel gets EFAULT at pages of another process that are on the device. So each process with managed memory listens on
//! a socket, whose abstract name has its process id, and makes pages accessible on request. A caller that got EFAULT asks
//! there, and calls again. The processes must be in the same network and process namespaces.
//!
//! No side gives up because the other one is slow. A caller waits as long as the other process runs.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::fs::MetadataExt;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use mpsshim_proto::shm;

use crate::thread;

/// How often a caller that waits looks whether the other process still runs.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes of a request: address, length, and whether the pages are stored to.
const REQUEST: usize = 24;
/// Most callers at a time; further ones wait until one of them ends.
const MOST_CALLERS: usize = 64;
/// Most bytes of a request.
const MOST: u64 = 64 << 30;

/// The socket that this process listens on.
static LISTENER: AtomicI32 = AtomicI32::new(-1);

/// Process namespaces with the same network have processes with the same number.
fn name(process: u32) -> io::Result<SocketAddr> {
    let space = fs::metadata("/proc/self/ns/pid").map_or(0, |space| space.st_ino());
    SocketAddr::from_abstract_name(format!("mpsshim-pages-{space}-{process}"))
}

/// Starts to listen. To be called once. `touch` makes pages accessible: address, bytes, whether they are stored to.
pub fn start(touch: fn(u64, u64, bool)) {
    let started = name(std::process::id())
        .and_then(|name| UnixListener::bind_addr(&name))
        .and_then(|listener| {
            LISTENER.store(listener.as_raw_fd(), Ordering::Relaxed);
            let builder = std::thread::Builder::new()
                .name("mpsshim-remote".into())
                .stack_size(256 << 10);
            thread::without_signals(|| builder.spawn(move || serve(&listener, touch)))
        });
    if let Err(error) = started {
        tracing::debug!(%error, "other processes do not copy managed memory that is on the device");
    }
}

/// In a forked child: closes the parent's socket. Async-signal-safe.
pub fn leave() {
    if let fd @ 0.. = LISTENER.swap(-1, Ordering::Relaxed) {
        // SAFETY: this process does not use it.
        unsafe { libc::close(fd) };
    }
}

/// A conversation with a caller.
struct Talk {
    stream: UnixStream,
    request: [u8; REQUEST],
    /// How many bytes of the request have come.
    came: usize,
}

impl Talk {
    /// Refuses callers of other users, except root.
    fn new(stream: UnixStream, own: u32) -> Option<Talk> {
        let is_permitted =
            shm::peer(stream.as_fd()).is_ok_and(|peer| peer.uid == own || peer.uid == 0);
        let is_ready = is_permitted && stream.set_nonblocking(true).is_ok();
        is_ready.then_some(Talk {
            stream,
            request: [0; REQUEST],
            came: 0,
        })
    }

    /// Reads the bytes that are there, and answers a request that is complete. Returns whether the conversation goes on.
    fn go_on(&mut self, touch: fn(u64, u64, bool)) -> bool {
        match self.stream.read(&mut self.request[self.came..]) {
            Ok(0) => return false,
            Ok(more) => self.came += more,
            Err(error) => return is_for_now(&error),
        }
        if self.came < REQUEST {
            return true;
        }
        self.came = 0;
        let [address, len, write] = [0, 8, 16].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&self.request[at..at + 8]);
            u64::from_le_bytes(word)
        });
        touch(address, len.min(MOST), write != 0);
        // There is room for it: a caller reads the answer before it goes on.
        self.stream.write_all(&[1]).is_ok()
    }
}

fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn serve(listener: &UnixListener, touch: fn(u64, u64, bool)) {
    // SAFETY: no arguments.
    let own = unsafe { libc::geteuid() };
    let mut talks: Vec<Talk> = Vec::new();
    loop {
        let entry = |fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        let streams = talks.iter().map(|talk| entry(talk.stream.as_raw_fd()));
        let mut entries: Vec<libc::pollfd> = streams.collect();
        if talks.len() < MOST_CALLERS {
            entries.push(entry(listener.as_raw_fd()));
        }
        // SAFETY: as many entries.
        let found = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, -1) };
        if found <= 0 {
            continue;
        }
        let mut ready = entries.iter().map(|entry| entry.revents != 0);
        talks.retain_mut(|talk| ready.next() != Some(true) || talk.go_on(touch));
        if ready.next() == Some(true) {
            match listener.accept() {
                Ok((stream, _)) => talks.extend(Talk::new(stream, own)),
                Err(error) if error.kind() == ErrorKind::InvalidInput => return,
                // Perhaps without a free descriptor: tries later.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

/// Whether a process exists and is not stopped.
fn runs(process: u32) -> bool {
    match fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => stat
            .rsplit_once(") ")
            .is_none_or(|(_, rest)| !rest.starts_with(['T', 't', 'Z', 'X'])),
        // SAFETY: no signal is sent.
        Err(_) => unsafe { libc::kill(process as libc::pid_t, 0) == 0 },
    }
}

/// Waits for the answer to a request.
fn hear(mut stream: &UnixStream, process: u32) -> io::Result<()> {
    loop {
        match stream.read_exact(&mut [0]) {
            Err(error) if is_for_now(&error) && runs(process) => {}
            done => return done,
        }
    }
}

/// Asks a process to make pages of its managed memory accessible. Returns whether it says that they are.
pub fn ask(process: u32, parts: impl Iterator<Item = (u64, u64)>, write: bool) -> bool {
    let asked = || -> io::Result<bool> {
        let mut stream = UnixStream::connect_addr(&name(process)?)?;
        // Anyone can listen under that name.
        if !shm::peer(stream.as_fd()).is_ok_and(|peer| peer.pid as u32 == process) {
            return Ok(false);
        }
        stream.set_read_timeout(Some(LOOK))?;
        for (address, len) in parts {
            let words = [address, len, write.into()].map(u64::to_le_bytes);
            stream.write_all(words.as_flattened())?;
            hear(&stream, process)?;
        }
        Ok(true)
    };
    asked().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn a_process_is_asked_for_each_part() {
        static ASKED: Mutex<Vec<(u64, u64, bool)>> = Mutex::new(Vec::new());
        let own = std::process::id();
        assert!(!ask(own, [(1, 2)].into_iter(), false), "nobody listens");
        start(|address, len, write| ASKED.lock().expect("asked").push((address, len, write)));
        assert!(ask(own, [(1, 2), (3, 4)].into_iter(), false));
        assert!(ask(own, [(5, u64::MAX)].into_iter(), true));
        let asked = std::mem::take(&mut *ASKED.lock().expect("asked"));
        assert_eq!(asked, [(1, 2, false), (3, 4, false), (5, MOST, true)]);
        // A caller that has sent a part of its request only holds up no other, and may send the rest at any time.
        let mut slow = UnixStream::connect_addr(&name(own).expect("a name")).expect("connected");
        let words = [6u64, 7, 0].map(u64::to_le_bytes);
        let (first, rest) = words.as_flattened().split_at(9);
        slow.write_all(first).expect("sent");
        assert!(ask(own, [(8, 9)].into_iter(), false));
        slow.write_all(rest).expect("sent");
        slow.read_exact(&mut [0]).expect("an answer");
        let asked = ASKED.lock().expect("asked");
        assert_eq!(*asked, [(8, 9, false), (6, 7, false)]);
    }

    #[test]
    fn a_slow_process_is_waited_for_and_a_stopped_one_is_not() {
        let (own, other) = UnixStream::pair().expect("a pair");
        own.set_read_timeout(Some(Duration::from_millis(1)))
            .expect("a limit");
        let waits = std::thread::spawn(move || hear(&own, std::process::id()));
        // Many times the limit.
        std::thread::sleep(Duration::from_millis(50));
        (&other).write_all(&[1]).expect("sent");
        waits.join().expect("no panic").expect("heard");

        let (own, _other) = UnixStream::pair().expect("a pair");
        own.set_read_timeout(Some(Duration::from_millis(1)))
            .expect("a limit");
        let mut child = std::process::Command::new("sleep").arg("1000").spawn();
        let child = child.as_mut().expect("a child");
        assert!(runs(child.id()));
        let stop = |signal| {
            // SAFETY: a child of this process that was not waited for.
            unsafe { libc::kill(child.id() as libc::pid_t, signal) }
        };
        stop(libc::SIGSTOP);
        let heard = hear(&own, child.id());
        stop(libc::SIGKILL);
        assert!(heard.is_err());
        child.wait().expect("waited for");
        assert!(!runs(child.id()));
    }
}
