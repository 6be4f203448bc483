//! A client in direct mode made by hand: it takes turns as the page says, or breaks the rules, and submits nothing.

use crate::PATIENCE;
use crate::peer::{greet, hello};
use mpsshim_api::cuda::CUresult;
use mpsshim_proto::direct::{self, DIRECT, PAGE_LEN, Page};
use mpsshim_proto::handshake::{ClientHello, DIRECT_DESCRIPTORS, Welcome};
use mpsshim_proto::shm::{self, Doorbell, Mapping, futex_wait};
use mpsshim_proto::user_memory::{USER_MEMORY_LEN, UserMemory};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// A client with a page.
pub struct DirectPeer {
    /// What the server welcomed it with.
    pub welcome: Welcome,
    /// The connection.
    pub socket: OwnedFd,
    mapping: Mapping,
    user: Mapping,
    bell: Doorbell,
}

/// The hello of a client that asks for direct mode.
pub fn direct_hello() -> ClientHello {
    ClientHello {
        mode: DIRECT,
        ..hello()
    }
}

impl DirectPeer {
    /// Connects to the daemon behind the socket `control` and waits for a page.
    ///
    /// # Errors
    /// Those of the socket and the mapping; a refusal, with its status.
    pub fn connect(control: &Path) -> io::Result<DirectPeer> {
        DirectPeer::connect_as(control, &direct_hello())
    }

    /// The same with this hello.
    ///
    /// # Errors
    /// As [`DirectPeer::connect`].
    pub fn connect_as(control: &Path, hello: &ClientHello) -> io::Result<DirectPeer> {
        let (socket, answer) = greet(control, hello.as_bytes())?;
        let (welcome, descriptors) =
            answer.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionReset))?;
        if welcome.status != 0 {
            return Err(io::Error::other(CUresult(welcome.status)));
        }
        let [page, bell, user]: [OwnedFd; DIRECT_DESCRIPTORS.len()] = descriptors
            .try_into()
            .map_err(|_| io::Error::other("a welcome with other descriptors"))?;
        let sealed = shm::is_sealed(page.as_fd(), PAGE_LEN as u64)
            && shm::is_sealed(user.as_fd(), USER_MEMORY_LEN as u64);
        if welcome.mode != DIRECT || !sealed {
            return Err(io::Error::other("a welcome to another mode"));
        }
        Ok(DirectPeer {
            welcome,
            socket,
            mapping: Mapping::new(page.as_fd(), PAGE_LEN)?,
            user: Mapping::new(user.as_fd(), USER_MEMORY_LEN)?,
            bell: Doorbell::from_fd(bell),
        })
    }

    /// The page.
    pub fn page(&self) -> &Page {
        // SAFETY: the mapping has PAGE_LEN bytes and lives as long as self; Page is all atomics.
        unsafe { &*self.mapping.base().cast::<Page>() }
    }

    /// What its user's clients hold.
    pub fn user(&self) -> &UserMemory {
        // SAFETY: the mapping has USER_MEMORY_LEN bytes and lives as long as self; UserMemory is all atomics.
        unsafe { &*self.user.base().cast::<UserMemory>() }
    }

    /// Its place there.
    pub fn place(&self) -> usize {
        self.page().place.load(Ordering::Relaxed) as usize
    }

    /// Its state.
    pub fn state(&self) -> u32 {
        self.page().turn.state.0.load(Ordering::Acquire)
    }

    /// How it is asked for its turn.
    pub fn asked(&self) -> u32 {
        self.page().turn.asked.0.load(Ordering::Acquire)
    }

    /// Changes its state and tells the server.
    pub fn become_state(&self, state: u32) {
        self.page().turn.state.0.store(state, Ordering::Release);
        self.bell.ring();
    }

    /// Wants a turn of these devices.
    pub fn want(&self, devices: u32) {
        self.page().turn.devices.store(devices, Ordering::Relaxed);
        self.become_state(direct::WANTS);
    }

    /// Waits until it is granted; `false`: it was not, in that time.
    pub fn is_granted_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        loop {
            let state = self.state();
            let left = until.saturating_duration_since(Instant::now());
            if state == direct::HELD || left.is_zero() {
                return state == direct::HELD;
            }
            futex_wait(&self.page().turn.state.0, state, left);
        }
    }

    /// Wants a turn and waits for it.
    ///
    /// # Panics
    /// When it is not granted in [`PATIENCE`].
    pub fn take(&self, devices: u32) {
        self.want(devices);
        assert!(self.is_granted_within(PATIENCE), "no turn");
    }

    /// Waits until it is asked like this, or more urgently; `false`: it was not, in that time.
    pub fn is_asked_within(&self, asked: u32, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        loop {
            let now = self.asked();
            let left = until.saturating_duration_since(Instant::now());
            if now >= asked || left.is_zero() {
                return now >= asked;
            }
            futex_wait(&self.page().turn.asked.0, now, left);
        }
    }

    /// Gives its turn up as one does: drains, and is idle or wants the next one.
    pub fn give(&self, wants: bool) {
        self.become_state(direct::GIVING);
        self.become_state(if wants { direct::WANTS } else { direct::IDLE });
    }

    /// Holds turn after turn, each until it is asked for it, for so long; then it is idle.
    ///
    /// # Panics
    /// When it waits in vain.
    pub fn work(&self, devices: u32, time: Duration) {
        let until = Instant::now() + time;
        self.want(devices);
        while Instant::now() < until {
            if !self.is_granted_within(Duration::from_millis(50)) {
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if self.is_asked_within(direct::NOW, left) {
                self.give(true);
            }
        }
        self.become_state(direct::IDLE);
    }

    /// Counts submissions.
    pub fn submit(&self, count: u64) {
        let submissions = &self.page().turn.submissions;
        submissions.fetch_add(count, Ordering::Relaxed);
    }

    /// Nanoseconds that it held turns.
    pub fn held_ns(&self) -> u64 {
        self.page().turn.held_ns.load(Ordering::Relaxed)
    }
}
