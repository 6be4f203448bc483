//! Managed memory that another process copies with `process_vm_readv` or `process_vm_writev`.
//!
//! The kernel gets EFAULT at pages of another process that are on the device. So each process with managed memory listens on
//! a socket, whose abstract name has its process id, and makes pages accessible on request. A caller that got EFAULT asks
//! there, and calls again. The processes must be in the same network and process namespaces.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use crate::thread;

/// How long one side waits for the other.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of a request: address, length, and whether the pages are stored to.
const REQUEST: usize = 24;
/// Most bytes of a request.
const MOST: u64 = 64 << 30;

/// The socket that this process listens on.
static LISTENER: AtomicI32 = AtomicI32::new(-1);

fn name(process: u32) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("mpsshim-pages-{process}"))
}

/// Process and user at the other end.
fn peer(stream: &UnixStream) -> Option<libc::ucred> {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: a struct of this length.
    let status = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    (status == 0).then_some(found)
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

fn serve(listener: &UnixListener, touch: fn(u64, u64, bool)) {
    // SAFETY: no arguments.
    let own = unsafe { libc::geteuid() };
    loop {
        match listener.accept() {
            Ok((stream, _))
                if peer(&stream).is_some_and(|peer| peer.uid == own || peer.uid == 0) =>
            {
                // An error ends this conversation only.
                let _ = answer(stream, touch);
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

fn answer(mut stream: UnixStream, touch: fn(u64, u64, bool)) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    loop {
        let mut request = [0u8; REQUEST];
        stream.read_exact(&mut request)?;
        let [address, len, write] = [0, 8, 16].map(|at| {
            let mut word = [0; 8];
            word.copy_from_slice(&request[at..at + 8]);
            u64::from_le_bytes(word)
        });
        touch(address, len.min(MOST), write != 0);
        stream.write_all(&[1])?;
    }
}

/// Asks a process to make pages of its managed memory accessible. Returns whether it says that they are.
pub fn ask(process: u32, parts: impl Iterator<Item = (u64, u64)>, write: bool) -> bool {
    let asked = || -> io::Result<bool> {
        let mut stream = UnixStream::connect_addr(&name(process)?)?;
        // Anyone can listen under that name.
        if peer(&stream).is_none_or(|peer| peer.pid as u32 != process) {
            return Ok(false);
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        for (address, len) in parts {
            let words = [address, len, write.into()].map(u64::to_le_bytes);
            stream.write_all(words.as_flattened())?;
            stream.read_exact(&mut [0])?;
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
        let asked = ASKED.lock().expect("asked");
        assert_eq!(*asked, [(1, 2, false), (3, 4, false), (5, MOST, true)]);
    }
}
