//! The keeper: a process that holds descriptors for a server, so that the objects behind them outlive it. Device
//! memory, pinned and registered memory, segments, connections and descriptions of sessions remain available to the
//! next server when a server is killed, crashes, or loses its context.
//!
//! It does nothing else, does not use the driver, and ends when the last copy of its connection is closed: the server
//! has one, and the daemon has one for the next server. No other process can request a descriptor.

use mpsshim_control::seqpacket;
use mpsshim_proto::shm;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The option that makes an mps-server a keeper; its connection is its standard input.
pub const OPTION: &str = "--keeper";
/// Name of the process.
const NAME: &std::ffi::CStr = c"mps-keeper";
/// Time limit for the keeper to accept or answer a packet.
const PATIENCE: Duration = Duration::from_secs(2);
/// Descriptors that the process needs for itself.
const OWN: usize = 32;

/// The object behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Kind {
    /// A session's description; by the session's number, as the next three.
    Description = 1,
    /// Its segment.
    Segment = 2,
    /// Its doorbell.
    Bell = 3,
    /// The connection to its client.
    Socket = 4,
    /// Device memory, by its address.
    Memory = 5,
    /// Pinned memory, by its address.
    Host = 6,
    /// The content of an image, by its hash.
    Content = 7,
    /// Physical memory that a program manages itself, by its handle and the session's number.
    Physical = 8,
    /// Small contents of images, by a number of its own.
    Pack = 9,
    /// File with the content of device memory, by the memory's address.
    Stored = 10,
    /// A client's file that is registered memory, by the memory's address.
    File = 11,
    /// Memory of arrays, by a number of its own.
    Arrays = 12,
}

/// Changes with the meaning of the kinds.
pub const FORMAT: u64 = 5;

impl Kind {
    const ALL: [Kind; 12] = [
        Kind::Description,
        Kind::Segment,
        Kind::Bell,
        Kind::Socket,
        Kind::Memory,
        Kind::Host,
        Kind::Content,
        Kind::Physical,
        Kind::Pack,
        Kind::Stored,
        Kind::File,
        Kind::Arrays,
    ];
    /// Kinds of which each session has exactly one.
    pub const OF_SESSION: [Kind; 4] = [Kind::Description, Kind::Segment, Kind::Bell, Kind::Socket];
}

/// The name of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// Kind of its object.
    pub kind: Kind,
    /// A number, or a hash.
    pub id: [u8; 32],
}

impl Name {
    /// A name with a number.
    pub fn numbered(kind: Kind, number: u64) -> Name {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&number.to_le_bytes());
        Name { kind, id }
    }

    /// The number given to [`Name::numbered`].
    pub fn number(&self) -> u64 {
        let mut number = [0; 8];
        number.copy_from_slice(&self.id[..8]);
        u64::from_le_bytes(number)
    }
}

/// Requests to the keeper, and its answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Verb {
    /// Hold the descriptor sent with this packet.
    Hold = 1,
    /// Close a descriptor.
    Drop = 2,
    /// Send all descriptors, then an [`Verb::End`]. In the answer: one of the descriptors.
    List = 3,
    /// Answer with [`Verb::End`].
    Settle = 4,
    /// The answer is complete.
    End = 5,
}

/// A packet, in both directions.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Packet {
    verb: u32,
    kind: u32,
    id: [u8; 32],
    /// Number of the request, repeated in its answers.
    question: u64,
}

impl Packet {
    fn new(verb: Verb, name: Option<Name>) -> Packet {
        Packet {
            verb: verb as u32,
            kind: name.map_or(0, |name| name.kind as u32),
            id: name.map_or([0; 32], |name| name.id),
            question: 0,
        }
    }

    fn of(self, question: u64) -> Packet {
        Packet { question, ..self }
    }

    fn verb(&self) -> Option<Verb> {
        let all = [Verb::Hold, Verb::Drop, Verb::List, Verb::Settle, Verb::End];
        all.into_iter().find(|verb| *verb as u32 == self.verb)
    }

    fn name(&self) -> Option<Name> {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| *kind as u32 == self.kind)?;
        Some(Name { kind, id: self.id })
    }
}

/// A server's connection to its keeper.
#[derive(Debug)]
pub struct Keeper {
    socket: OwnedFd,
    /// It has failed, and holds nothing any more.
    lost: AtomicBool,
    /// Maximum number of descriptors that it can hold.
    most: usize,
    /// It was started by another server.
    is_old: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The descriptors that it holds, and how often each was held.
    held: BTreeMap<Name, usize>,
    /// A descriptor was dropped since the last [`Keeper::settle`].
    dropped: bool,
    /// Number of the last request, different from the numbers used by previous servers.
    question: u64,
}

impl Keeper {
    /// Starts a keeper.
    ///
    /// # Errors
    /// No process, no descriptors.
    pub fn start() -> io::Result<Keeper> {
        Ok(Keeper::spawn()?.0)
    }

    /// Starts a keeper for another server. A thread waits for the end of its process, so that none is left in this one.
    ///
    /// # Errors
    /// As of [`Keeper::start`]; no thread.
    pub fn start_for_next() -> io::Result<Keeper> {
        let (keeper, mut process) = Keeper::spawn()?;
        let thread = std::thread::Builder::new().name("keeper-end".into());
        thread.spawn(move || process.wait())?;
        Ok(keeper)
    }

    fn spawn() -> io::Result<(Keeper, Child)> {
        let (own, others) = seqpacket::pair()?;
        // By its name, an executable that an upgrade has replaced would not be found.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0(NAME.to_str().unwrap_or_default())
            .arg(OPTION)
            // A signal to the server's process group must not end the keeper.
            .process_group(0)
            .stdin(Stdio::from(others))
            .stdout(Stdio::null());
        let process = command.spawn()?;
        let keeper = Keeper::on(own)?;
        let keeper = Keeper {
            is_old: false,
            ..keeper
        };
        Ok((keeper, process))
    }

    /// Uses a connection to a keeper that was started by another server.
    ///
    /// # Errors
    /// The time limit cannot be set.
    pub fn on(socket: OwnedFd) -> io::Result<Keeper> {
        use nix::sys::socket::{setsockopt, sockopt};
        use nix::sys::time::TimeVal;
        let patience = TimeVal::new(PATIENCE.as_secs() as i64, 0);
        setsockopt(&socket, sockopt::SendTimeout, &patience)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &patience)?;
        let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(_, hard)| hard as usize);
        Ok(Keeper {
            socket,
            lost: AtomicBool::new(false),
            most: most.saturating_sub(OWN),
            is_old: true,
            state: Mutex::new(State {
                question: u64::from(std::process::id()) << 32,
                ..State::default()
            }),
        })
    }

    /// Whether it may hold sessions of a previous server.
    pub fn has_sessions(&self) -> bool {
        self.is_old
    }

    /// As [`Keeper::connection`], without a copy for this process.
    pub fn into_connection(self) -> OwnedFd {
        self.socket
    }

    /// Its connection, for the daemon.
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Maximum number of descriptors that it can hold.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Whether it holds a descriptor of this name.
    pub fn holds(&self, name: &Name) -> bool {
        self.state.lock().held.contains_key(name)
    }

    /// A name that it holds no descriptor of.
    pub fn unused(&self, kind: Kind) -> Name {
        let state = self.state.lock();
        let names = state.held.keys().filter(|name| name.kind == kind);
        let used: BTreeSet<u64> = names.map(Name::number).collect();
        let number = (1..).find(|number| !used.contains(number));
        Name::numbered(kind, number.unwrap_or(u64::MAX))
    }

    /// Whether it still accepts descriptors.
    pub fn is_there(&self) -> bool {
        !self.lost.load(Ordering::Relaxed)
    }

    fn send(&self, packet: Packet, fd: Option<BorrowedFd<'_>>) -> bool {
        if !self.is_there() {
            return false;
        }
        let sent = shm::send_packet(self.socket.as_fd(), packet.as_bytes(), fd.as_slice());
        if let Err(error) = &sent {
            self.give_up(error);
        }
        sent.is_ok()
    }

    /// Records a failure. Shuts the connection down in all processes that share it, so that the keeper ends and the
    /// objects that it held are released.
    fn give_up(&self, error: &io::Error) {
        use nix::sys::socket::{Shutdown, shutdown};
        if !self.lost.swap(true, Ordering::Relaxed) {
            tracing::error!("The keeper has failed, sessions do not outlive this server: {error}");
            let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        }
    }

    /// Makes the keeper hold a descriptor until it has been released as often as it was held; with a name already in
    /// use, the new descriptor replaces the old one. Returns whether the descriptor is held.
    #[must_use]
    pub fn hold(&self, name: Name, fd: BorrowedFd<'_>) -> bool {
        let mut state = self.state.lock();
        if state.held.len() >= self.most && !state.held.contains_key(&name) {
            return false;
        }
        let sent = self.send(Packet::new(Verb::Hold, Some(name)), Some(fd));
        if sent {
            *state.held.entry(name).or_default() += 1;
        }
        sent
    }

    /// Releases a descriptor once; the keeper closes it at the last release. Unknown names are ignored. Returns whether
    /// it holds the descriptor no more.
    pub fn release(&self, name: Name) -> bool {
        let mut state = self.state.lock();
        let Some(times) = state.held.get_mut(&name) else {
            return true;
        };
        *times -= 1;
        if *times > 0 {
            return false;
        }
        state.held.remove(&name);
        state.dropped |= self.send(Packet::new(Verb::Drop, Some(name)), None);
        true
    }

    /// Waits until released descriptors are closed, so that their memory has returned to the driver.
    pub fn settle(&self) {
        let mut state = self.state.lock();
        if !std::mem::take(&mut state.dropped) {
            return;
        }
        state.question += 1;
        let question = Packet::new(Verb::Settle, None).of(state.question);
        // The lock is held, so no other thread reads.
        if self.send(question, None)
            && let Err(error) = self.receive(state.question)
        {
            self.give_up(&error);
        }
    }

    /// The next packet of the answer to a request. Answers to earlier requests, possibly left unread by another server,
    /// are skipped.
    fn receive(&self, question: u64) -> io::Result<(Packet, Vec<OwnedFd>)> {
        loop {
            let mut packet = Packet::new_zeroed();
            let (len, fds) = shm::recv_packet(self.socket.as_fd(), packet.as_mut_bytes(), true)?;
            if len != size_of::<Packet>() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if packet.question == question {
                return Ok((packet, fds));
            }
        }
    }

    /// All descriptors that it holds, left by a previous server.
    ///
    /// # Errors
    /// It has failed, and holds nothing any more.
    pub fn list(&self) -> io::Result<BTreeMap<Name, OwnedFd>> {
        let listed = self.ask_for_list();
        listed.inspect_err(|error| self.give_up(error))
    }

    fn ask_for_list(&self) -> io::Result<BTreeMap<Name, OwnedFd>> {
        let mut state = self.state.lock();
        let all = self.list_while_locked(&mut state)?;
        state.held = all.keys().map(|name| (*name, 1)).collect();
        Ok(all)
    }

    fn list_while_locked(&self, state: &mut State) -> io::Result<BTreeMap<Name, OwnedFd>> {
        let mut all = BTreeMap::new();
        state.question += 1;
        let question = Packet::new(Verb::List, None).of(state.question);
        if !self.send(question, None) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        loop {
            let (packet, mut fds) = self.receive(state.question)?;
            match (packet.verb(), packet.name(), fds.pop()) {
                (Some(Verb::List), Some(name), Some(fd)) => drop(all.insert(name, fd)),
                (Some(Verb::End), ..) => break,
                _ => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
        Ok(all)
    }

    /// Makes another keeper hold descriptors with these names too, as `copy` returns them. Returns whether it holds all of
    /// them.
    ///
    /// # Errors
    /// This one has failed, and holds nothing any more; errors of `copy`.
    pub fn copy_to(
        &self,
        other: &Keeper,
        which: impl Fn(&Name) -> bool,
        copy: impl Fn(&Name, OwnedFd) -> io::Result<OwnedFd>,
    ) -> io::Result<bool> {
        let listed = self.list_while_locked(&mut self.state.lock());
        let all = listed.inspect_err(|error| self.give_up(error))?;
        for (name, fd) in all.into_iter().filter(|(name, _)| which(name)) {
            if !other.hold(name, copy(&name, fd)?.as_fd()) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The body of the keeper process.
///
/// # Errors
/// Its connection fails.
pub fn run(socket: OwnedFd) -> io::Result<()> {
    // SAFETY: a plain system call with a NUL-ended name.
    unsafe { libc::prctl(libc::PR_SET_NAME, NAME.as_ptr()) };
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    let mut held: BTreeMap<Name, OwnedFd> = BTreeMap::new();
    loop {
        let mut packet = Packet::new_zeroed();
        let mut fds = Vec::new();
        let bytes = packet.as_mut_bytes();
        let len = shm::recv_packet_with(socket.as_fd(), bytes, true, &mut fds)?;
        if len == 0 {
            return Ok(());
        }
        match (packet.verb(), packet.name(), fds.pop()) {
            (Some(Verb::Hold), Some(name), Some(fd)) => drop(held.insert(name, fd)),
            (Some(Verb::Drop), Some(name), _) => drop(held.remove(&name)),
            (Some(Verb::Settle), ..) => {
                let end = Packet::new(Verb::End, None).of(packet.question);
                shm::send_packet(socket.as_fd(), end.as_bytes(), &[])?;
            }
            (Some(Verb::List), ..) => {
                for (name, fd) in &held {
                    let one = Packet::new(Verb::List, Some(*name)).of(packet.question);
                    shm::send_packet(socket.as_fd(), one.as_bytes(), &[fd.as_fd()])?;
                }
                let end = Packet::new(Verb::End, None).of(packet.question);
                shm::send_packet(socket.as_fd(), end.as_bytes(), &[])?;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::thread::{self, JoinHandle};

    fn keeper() -> (Keeper, JoinHandle<io::Result<()>>) {
        let (own, others) = seqpacket::pair().expect("a pair");
        let thread = thread::spawn(move || run(others));
        (Keeper::on(own).expect("a keeper"), thread)
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        nix::unistd::pipe().expect("a pipe")
    }

    #[test]
    fn what_is_held_comes_back_and_what_is_released_is_closed() {
        let (keeper, thread) = keeper();
        let (first, second) = (pipe(), pipe());
        let name = |number| Name::numbered(Kind::Memory, number);
        assert!(keeper.hold(name(1), first.1.as_fd()));
        assert!(keeper.hold(name(2), second.1.as_fd()));
        drop((first.1, second.1));
        keeper.release(name(1));
        keeper.settle();
        // The last writing end is closed.
        let mut rest = Vec::new();
        File::from(first.0).read_to_end(&mut rest).expect("its end");
        // As the next server does: uses the other server's connection, with an unread answer in it.
        assert!(keeper.send(Packet::new(Verb::Settle, None).of(1), None));
        let copy = keeper.connection().try_clone_to_owned().expect("a copy");
        drop(keeper);
        let next = Keeper::on(copy).expect("a keeper");
        let mut held = next.list().expect("the list");
        assert_eq!(held.keys().copied().collect::<Vec<_>>(), [name(2)]);
        let fd = held.remove(&name(2)).expect("the second");
        File::from(fd).write_all(b"there").expect("written");
        next.release(name(2));
        next.settle();
        File::from(second.0)
            .read_to_end(&mut rest)
            .expect("what was written");
        assert_eq!(rest, b"there");
        assert!(next.list().expect("the list").is_empty());
        drop(next);
        thread.join().expect("ended").expect("without an error");
    }

    #[test]
    fn copies_in_another_keeper_are_released_apart() {
        let ((first, one), (second, two)) = (keeper(), keeper());
        let (reader, writer) = pipe();
        let name = |number| Name::numbered(Kind::Memory, number);
        for number in 1..=3 {
            assert!(first.hold(name(number), writer.as_fd()));
        }
        // Held twice, as the content of an image is for two sessions.
        assert!(first.hold(name(2), writer.as_fd()));
        let copied = first.copy_to(&second, |name| name.number() != 3, |_, fd| Ok(fd));
        assert!(copied.expect("the first keeper works"));
        assert!(!first.release(name(2)), "its holds are still counted");
        for number in 1..=3 {
            first.release(name(number));
        }
        first.settle();
        assert!(first.list().expect("a list").is_empty());
        drop(writer);
        let mut held = second.list().expect("the list");
        assert_eq!(held.keys().copied().collect::<Vec<_>>(), [name(1), name(2)]);
        let fd = held.remove(&name(2)).expect("the second");
        File::from(fd).write_all(b"there").expect("written");
        let mut bytes = [0; 5];
        File::from(reader).read_exact(&mut bytes).expect("bytes");
        assert_eq!(&bytes, b"there");
        drop((first, second));
        for thread in [one, two] {
            thread.join().expect("ended").expect("without an error");
        }
    }

    #[test]
    fn a_keeper_that_has_gone_holds_nothing() {
        let (own, others) = seqpacket::pair().expect("a pair");
        drop(others);
        let keeper = Keeper::on(own).expect("a keeper");
        let (_, fd) = pipe();
        assert!(!keeper.hold(Name::numbered(Kind::Host, 1), fd.as_fd()));
        assert!(!keeper.is_there());
        keeper.release(Name::numbered(Kind::Host, 1));
        keeper.settle();
        assert!(keeper.list().is_err());
    }

    #[test]
    fn names_have_their_numbers() {
        let name = Name::numbered(Kind::Socket, 1 << 40 | 7);
        assert_eq!(name.number(), 1 << 40 | 7);
        let packet = Packet::new(Verb::Hold, Some(name));
        assert_eq!(
            (packet.verb(), packet.name()),
            (Some(Verb::Hold), Some(name))
        );
        assert_eq!(Packet::new(Verb::End, None).name(), None);
    }
}
