//! Unix sockets that keep packets whole (`SOCK_SEQPACKET`), with descriptors and credentials.

use crate::closers::Stranger;
use mpsshim_model::client::Credentials;
use mpsshim_proto::shm;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    connect as nix_connect, getsockopt, listen as nix_listen, recv as nix_recv, sendmsg, socket,
    socketpair, sockopt,
};
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;

/// Maximum number of connections that wait to be accepted. A thousand clients may start at once.
const BACKLOG: i32 = 1024;

/// Repeats a call that a signal interrupted.
fn uninterrupted<T>(mut call: impl FnMut() -> nix::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            other => return other.map_err(io::Error::from),
        }
    }
}

/// A non-blocking listening socket at `path`.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let listener = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    bind(listener.as_raw_fd(), &UnixAddr::new(path)?)?;
    nix_listen(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener)
}

/// The next connection, non-blocking; `WouldBlock` when there is none.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let raw = uninterrupted(|| accept4(listener.as_raw_fd(), flags))?;
    // SAFETY: accept4 just returned this descriptor, so it is open and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// A blocking connection to the listener at `path`.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let connection = socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    let address = UnixAddr::new(path)?;
    uninterrupted(|| nix_connect(connection.as_raw_fd(), &address))?;
    Ok(connection)
}

/// Two connected blocking sockets.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )?)
}

/// Who connected: the kernel's word (`SO_PEERCRED`). The pid is 0 for a process of a PID namespace that this
/// one cannot see.
pub fn peer(connection: BorrowedFd<'_>) -> io::Result<Credentials> {
    let found = getsockopt(&connection, sockopt::PeerCredentials)?;
    Ok(Credentials {
        pid: found.pid(),
        uid: found.uid(),
        gid: found.gid(),
    })
}

/// Sends one packet, with at most one descriptor. Never raises `SIGPIPE`.
pub fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let raw: Vec<i32> = descriptor.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let control = if raw.is_empty() { &[][..] } else { &rights[..] };
    uninterrupted(|| {
        sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(bytes)],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        )
    })?;
    Ok(())
}

/// Receives one packet into `buffer`; descriptors that came with it are dropped by the kernel. 0: the peer has
/// closed. A packet longer than the buffer is cut.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    uninterrupted(|| nix_recv(socket.as_raw_fd(), buffer, MsgFlags::empty()))
}

/// A packet as [`receive_with_descriptor`] found it.
pub struct Packet {
    /// Bytes written to the buffer; 0: the peer has closed.
    pub len: usize,
    /// The buffer was too small or there were several descriptors; the rest is lost.
    pub cut: bool,
    /// The descriptor that came with it.
    pub descriptor: Option<Stranger>,
}

/// Receives one packet of a process of user `uid` with at most one descriptor; further ones are closed and reported as
/// `cut`. This thread closes none of them, since closing a stranger's descriptor can block for any length of time.
pub fn receive_with_descriptor(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    uid: u32,
) -> io::Result<Packet> {
    let mut descriptors = Vec::new();
    let received = shm::recv_packet_with(socket, buffer, true, &mut descriptors);
    let descriptors = descriptors.into_iter().map(|fd| Stranger::new(fd, uid));
    let descriptors: Vec<Stranger> = descriptors.collect();
    let (len, is_whole) = match received {
        Ok(len) => (len, true),
        // The buffer is filled; the rest of the packet is lost.
        Err(error) if error.kind() == io::ErrorKind::InvalidData => (buffer.len(), false),
        Err(error) => return Err(error),
    };
    Ok(Packet {
        len,
        cut: !is_whole || descriptors.len() > 1,
        descriptor: descriptors.into_iter().next(),
    })
}

/// Sets or clears `O_NONBLOCK`.
pub fn set_nonblocking(socket: impl AsFd, on: bool) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    let mut flags = OFlag::from_bits_retain(fcntl(socket.as_fd(), FcntlArg::F_GETFL)?);
    flags.set(OFlag::O_NONBLOCK, on);
    fcntl(socket.as_fd(), FcntlArg::F_SETFL(flags))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn a_descriptor_travels() {
        let (left, right) = pair().expect("pair");
        let (mut reader, writer) = std::io::pipe().expect("pipe");
        send(left.as_fd(), b"take this", Some(writer.as_fd())).expect("send");
        drop(writer);
        let mut buffer = [0; 64];
        let packet = receive_with_descriptor(right.as_fd(), &mut buffer, 0).expect("receive");
        assert_eq!(&buffer[..packet.len], b"take this");
        assert!(!packet.cut);
        let mut writer = std::fs::File::from(OwnedFd::from(packet.descriptor.expect("descriptor")));
        writer.write_all(b"hello").expect("write");
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("read");
        assert_eq!(text, "hello");
    }

    #[test]
    fn too_many_descriptors_are_closed_and_reported() {
        let (left, right) = pair().expect("pair");
        let raw = [left.as_raw_fd(), left.as_raw_fd(), left.as_raw_fd()];
        let control = [ControlMessage::ScmRights(&raw)];
        sendmsg::<()>(
            left.as_raw_fd(),
            &[IoSlice::new(b"x")],
            &control,
            MsgFlags::empty(),
            None,
        )
        .expect("send");
        let packet = receive_with_descriptor(right.as_fd(), &mut [0; 8], 0).expect("receive");
        assert!(packet.cut);
    }

    #[test]
    fn a_long_packet_is_reported_as_cut() {
        let (left, right) = pair().expect("pair");
        send(left.as_fd(), &[7; 100], None).expect("send");
        let packet = receive_with_descriptor(right.as_fd(), &mut [0; 10], 0).expect("receive");
        assert!(packet.cut && packet.len == 10);
    }

    #[test]
    fn sending_to_a_closed_peer_is_an_error_not_a_signal() {
        let (left, right) = pair().expect("pair");
        drop(right);
        let error = send(left.as_fd(), b"x", None).expect_err("closed");
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(receive(left.as_fd(), &mut [0; 4]).expect("end of file"), 0);
    }

    #[test]
    fn the_peer_is_this_process() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("s");
        let listener = listen(&path).expect("listen");
        assert_eq!(
            accept(listener.as_fd()).expect_err("nobody").kind(),
            io::ErrorKind::WouldBlock
        );
        let _client = connect(&path).expect("connect");
        let who = peer(accept(listener.as_fd()).expect("accept").as_fd()).expect("peer");
        assert_eq!(who.pid as u32, std::process::id());
        assert_eq!(who.uid, nix::unistd::getuid().as_raw());
    }
}
