//! A descriptor that does not close.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;

/// A connection whose last close blocks for an hour: nobody reads what was written into it. The listener keeps it so.
///
/// # Panics
/// When this machine gives no connection.
pub fn lingering() -> (TcpListener, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let mut stream = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    stream.set_nonblocking(true).expect("non-blocking");
    while stream.write(&[0; 1 << 16]).is_ok() {}
    stream.set_nonblocking(false).expect("blocking");
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 3600,
    };
    // SAFETY: a plain system call on our own descriptor; the option is as long as said.
    let set = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size_of_val(&linger) as libc::socklen_t,
        )
    };
    assert_eq!(set, 0);
    (listener, stream)
}
