//! Descriptors received from clients are closed on separate threads.
//!
//! `close(2)` can block for as long as the file's creator likes: a TCP socket with `SO_LINGER` and unsent data, a file
//! of a FUSE file system that does not answer. The same holds for the last close of a connection in whose queue such
//! descriptors lie unread. So shared threads never close such descriptors, but hand them to a closer. A user whose
//! descriptors do not close occupies a few closers of its own, and no other user's.

use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

/// Closers of one user's descriptors at a time: all but one may be stuck and the others of the user's still close.
const CLOSERS: usize = 4;
/// Descriptors of one user that may wait for a closer; with more of them the user is refused
/// ([`has_room`]).
const WAITING: usize = 256;
/// How long a closer without work stays.
const IDLE: Duration = Duration::from_secs(5);
/// Stack of a closer, bytes.
const STACK: usize = 64 << 10;

/// Descriptors of one user that wait to be closed, and its closers.
#[derive(Debug, Default)]
struct User {
    waiting: VecDeque<OwnedFd>,
    closers: usize,
    idle: usize,
}

/// Closers of all users.
#[derive(Debug, Default)]
struct Closers {
    users: Mutex<HashMap<u32, User>>,
    work: Condvar,
}

impl Closers {
    fn close(self: &Arc<Closers>, uid: u32, fd: OwnedFd) {
        let mut users = self.users.lock();
        let user = users.entry(uid).or_default();
        user.waiting.push_back(fd);
        if user.idle < user.waiting.len() && user.closers < CLOSERS {
            let closers = Arc::clone(self);
            let spawned = thread::Builder::new()
                .name("closer".into())
                .stack_size(STACK)
                .spawn(move || closers.run(uid));
            match spawned {
                Ok(_) => user.closers += 1,
                // An existing closer, or the next thread that can be started, will close it.
                Err(error) => tracing::warn!("no thread to close descriptors: {error}"),
            }
        }
        self.work.notify_all();
    }

    fn has_room(&self, uid: u32) -> bool {
        let users = self.users.lock();
        users
            .get(&uid)
            .is_none_or(|user| user.waiting.len() < WAITING)
    }

    fn run(&self, uid: u32) {
        let mut users = self.users.lock();
        loop {
            let user = users.entry(uid).or_default();
            if let Some(fd) = user.waiting.pop_front() {
                drop(users);
                drop(fd);
                users = self.users.lock();
                continue;
            }
            user.idle += 1;
            let waited = self.work.wait_for(&mut users, IDLE);
            let user = users.entry(uid).or_default();
            user.idle -= 1;
            if waited.timed_out() && user.waiting.is_empty() {
                user.closers -= 1;
                if user.closers == 0 {
                    users.remove(&uid);
                }
                return;
            }
        }
    }
}

fn all() -> &'static Arc<Closers> {
    static ALL: OnceLock<Arc<Closers>> = OnceLock::new();
    ALL.get_or_init(Arc::default)
}

/// Closes a descriptor that a stranger, a process of user `uid`, sent, or a connection to one. Never blocks.
pub fn close(uid: u32, fd: OwnedFd) {
    if is_memory(fd.as_fd()) {
        drop(fd);
    } else {
        all().close(uid, fd);
    }
}

/// Whether further descriptors of a user are accepted: not while too many of them wait to be closed.
pub fn has_room(uid: u32) -> bool {
    all().has_room(uid)
}

/// Whether it is a file in memory: its close does not block, nor does the question, which only such files answer.
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: a plain system call on a borrowed descriptor.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// A descriptor that a stranger sent, or a connection to one: dropped, it goes to the closers.
#[derive(Debug)]
pub struct Stranger {
    fd: Option<OwnedFd>,
    uid: u32,
}

impl Stranger {
    /// One of user `uid`.
    pub fn new(fd: OwnedFd, uid: u32) -> Stranger {
        Stranger { fd: Some(fd), uid }
    }
}

impl Deref for Stranger {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        self.fd.as_ref().expect("until it is dropped")
    }
}

impl AsFd for Stranger {
    fn as_fd(&self) -> BorrowedFd<'_> {
        OwnedFd::as_fd(self)
    }
}

impl AsRawFd for Stranger {
    fn as_raw_fd(&self) -> RawFd {
        OwnedFd::as_raw_fd(self)
    }
}

impl From<Stranger> for OwnedFd {
    /// The new owner is responsible for closing it.
    fn from(mut stranger: Stranger) -> OwnedFd {
        stranger.fd.take().expect("until it is dropped")
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            close(self.uid, fd);
        }
    }
}

/// Receives one packet of a stranger's. Whatever descriptors come with it, wanted or not, go to the closers when they are
/// dropped.
///
/// # Errors
/// As [`mpsshim_proto::shm::recv_packet`].
pub fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    uid: u32,
) -> io::Result<(usize, Vec<Stranger>)> {
    let mut fds = Vec::new();
    let received = mpsshim_proto::shm::recv_packet_with(socket, bytes, false, &mut fds);
    let strangers = fds.into_iter().map(|fd| Stranger::new(fd, uid)).collect();
    Ok((received?, strangers))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    /// A connection whose last close blocks for a minute: the peer does not read the data written into it, as long as
    /// the listener exists.
    pub fn lingering() -> (TcpListener, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut stream = TcpStream::connect(address).expect("a connection");
        stream.set_nonblocking(true).expect("non-blocking");
        let chunk = [0; 1 << 16];
        // Repeats until the socket stays full: the receiver may enlarge its buffer a moment later and acknowledge all of it.
        let mut takes = true;
        while takes {
            while stream.write(&chunk).is_ok() {}
            let mut poll = libc::pollfd {
                fd: stream.as_raw_fd(),
                events: libc::POLLOUT,
                revents: 0,
            };
            // SAFETY: a plain system call on our own descriptor.
            takes = unsafe { libc::poll(&mut poll, 1, 200) } != 0;
        }
        stream.set_nonblocking(false).expect("blocking");
        let linger = libc::linger {
            l_onoff: 1,
            l_linger: 60,
        };
        // SAFETY: a plain system call on our own descriptor; the option is as long as said.
        let set = unsafe {
            libc::setsockopt(
                stream.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of_val(&linger) as u32,
            )
        };
        assert_eq!(set, 0);
        (listener, stream)
    }

    fn closes_soon(uid: u32) {
        let (ours, mut other) = UnixStream::pair().expect("a pair");
        close(uid, ours.into());
        let patience = Some(Duration::from_secs(30));
        other.set_read_timeout(patience).expect("a timeout");
        assert_eq!(other.read(&mut [0]).expect("the other end is closed"), 0);
    }

    #[test]
    fn descriptors_that_do_not_close_hold_up_nobody_but_their_user() {
        let (hostile, slow, other) = (1_000_001, 1_000_002, 1_000_003);
        let mut listeners = Vec::new();
        let began = Instant::now();
        for _ in 0..CLOSERS - 1 {
            let (listener, stream) = lingering();
            listeners.push(listener);
            close(slow, stream.into());
        }
        // One closer is free.
        closes_soon(slow);
        for _ in 0..CLOSERS + 2 {
            let (listener, stream) = lingering();
            listeners.push(listener);
            close(hostile, stream.into());
        }
        closes_soon(other);
        assert!(has_room(hostile), "a few are no reason to refuse");
        for _ in 0..WAITING {
            close(hostile, UnixStream::pair().expect("a pair").0.into());
        }
        assert!(!has_room(hostile));
        assert!(has_room(other));
        closes_soon(other);
        assert!(began.elapsed() < Duration::from_secs(60), "nothing waited");
        // Both ends gone, the kernel gives up.
        drop(listeners);
        let until = Instant::now() + Duration::from_secs(60);
        while all().users.lock().contains_key(&hostile) {
            assert!(Instant::now() < until, "closers end when they have no work");
            thread::sleep(Duration::from_millis(20));
        }
        assert!(has_room(hostile));
    }
}
