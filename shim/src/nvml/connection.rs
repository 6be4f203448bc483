//! A connection to the daemon for commands.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use mpsshim_proto::answer::{self, Mark, PACKET_LIMIT};
use mpsshim_proto::handshake::MAGIC_UI;
use mpsshim_proto::shm;

use super::clients::Error;
use crate::daemon;

/// Longest answer that is read, bytes.
const MOST: usize = 16 << 20;

/// A connection, and the process that opened it.
#[derive(Debug)]
pub struct Connection {
    socket: OwnedFd,
    process: u32,
    inode: u64,
}

impl Connection {
    /// Connects to the daemon of this process.
    ///
    /// # Errors
    /// None listens, or it does not take the connection in time.
    pub fn open(patience: Duration) -> Result<Connection, Error> {
        let directory = daemon::directory_to_query(patience).ok_or(Error::Absent)?;
        let opened = daemon::open_within(&directory.join("control"), patience);
        let socket = opened.map_err(|_| Error::NoAnswer)?.ok_or(Error::Absent)?;
        Ok(Connection {
            inode: inode(&socket).ok_or(Error::NoAnswer)?,
            process: std::process::id(),
            socket,
        })
    }

    /// The connection if it is still this process's own. A forked child shares its parent's connection, and a program that
    /// closes all descriptors may have another file under the number.
    pub fn if_intact(self) -> Option<Connection> {
        if inode(&self.socket) != Some(self.inode) {
            mem::forget(self.socket);
            return None;
        }
        (self.process == std::process::id()).then_some(self)
    }

    /// Whether the daemon's process ids are this process's, too.
    pub fn has_our_process_ids(&self) -> bool {
        let peer = shm::peer(self.socket.as_fd());
        let Some(daemon) = peer.ok().map(|peer| peer.pid).filter(|pid| *pid > 0) else {
            return false;
        };
        // A process of an inner namespace has a number in each.
        let status = fs::read_to_string(format!("/proc/{daemon}/status")).unwrap_or_default();
        let mut numbers = status
            .lines()
            .filter_map(|line| line.strip_prefix("NSpid:"));
        numbers.all(|numbers| numbers.split_whitespace().count() == 1)
    }

    /// The answer to a command.
    ///
    /// # Errors
    /// There is none before the deadline, or the command fails.
    pub fn ask(&self, command: &str, deadline: Instant) -> Result<String, Error> {
        let packet = [&MAGIC_UI[..], command.as_bytes()].concat();
        shm::send_packet_now(self.socket.as_fd(), &packet, &[]).map_err(|_| Error::NoAnswer)?;
        let mut text = Vec::new();
        let mut buffer = vec![0; PACKET_LIMIT];
        loop {
            let len = self.receive(&mut buffer, deadline).ok_or(Error::NoAnswer)?;
            let (mark, part) = answer::parse(&buffer[..len]).ok_or(Error::NoAnswer)?;
            match mark {
                Mark::Note => continue,
                Mark::Failed => return Err(Error::NoAnswer),
                Mark::Done | Mark::More => text.extend_from_slice(part),
            }
            if mark == Mark::Done {
                return Ok(String::from_utf8_lossy(&text).into_owned());
            }
            if text.len() > MOST {
                return Err(Error::NoAnswer);
            }
        }
    }

    /// The length of the next packet. `None`: there is none before the deadline, or the connection is lost.
    fn receive(&self, buffer: &mut [u8], deadline: Instant) -> Option<usize> {
        loop {
            let left = deadline.checked_duration_since(Instant::now())?;
            let mut wait = libc::pollfd {
                fd: self.socket.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one structure. An interrupted call is repeated below.
            if unsafe { libc::poll(&raw mut wait, 1, left.as_millis() as i32 + 1) } == 0 {
                return None;
            }
            match shm::recv_packet(self.socket.as_fd(), buffer, false) {
                Ok((0, _)) => return None,
                Ok((len, _)) => return Some(len),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    }
}

/// The inode of a socket, which no other open file has. `None`: the descriptor is closed, or no socket.
fn inode(socket: &OwnedFd) -> Option<u64> {
    // SAFETY: zero is a valid value.
    let mut found: libc::stat = unsafe { mem::zeroed() };
    // SAFETY: writes one structure.
    let status = unsafe { libc::fstat(socket.as_raw_fd(), &raw mut found) };
    (status == 0 && found.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(found.st_ino)
}
