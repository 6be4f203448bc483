//! The arbiter of clients in direct mode: it grants turns and says how much memory each client may hold. It creates no
//! context and makes no driver call.
//!
//! One thread owns all state (`thread.rs`) and waits for doorbells, closed connections, orders and the end of a
//! quantum. [`turns`] decides the order of turns, [`sharing`] whether clients take turns at all; `page.rs` is the page
//! shared with a client.

mod overhead;
mod page;
pub mod sharing;
mod thread;
mod traced;
pub mod turns;

use crate::admission::Admission;
use crossbeam_channel::{Sender, bounded, unbounded};
use mpsshim_control::trace::Run;
use mpsshim_model::client::{EngineEvent, Newcomer};
use mpsshim_model::limits::{Limits, Usage};
use mpsshim_model::policy::TurnPolicy;
use mpsshim_proto::handshake::ClientHello;
use mpsshim_proto::shm::Doorbell;
use overhead::Overheads;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Time limit for its thread, which never blocks, to report the clients' resources.
const PATIENCE: Duration = Duration::from_secs(1);

/// An order to the arbiter's thread.
enum Order {
    Add(OwnedFd, Box<ClientHello>, Newcomer),
    Overheads(Overheads),
    Terminate(u64),
    Limits(Limits),
    Weight(u64, u32),
    Usage(Sender<Vec<Usage>>),
    /// Answered once it is carried out.
    Trace(Option<Arc<Run>>, Sender<()>),
    End,
}

/// A running arbiter.
pub struct Arbiter {
    orders: Sender<Order>,
    bell: Arc<Doorbell>,
    thread: JoinHandle<()>,
}

impl Arbiter {
    /// Starts the thread. `devices`: UUIDs by ordinal. `policy`: when clients take turns.
    ///
    /// # Errors
    /// No descriptors, no thread.
    pub fn start(
        devices: &[[u8; 16]],
        policy: TurnPolicy,
        admission: Arc<Admission>,
        events: Sender<EngineEvent>,
    ) -> io::Result<Arbiter> {
        let bell = Arc::new(Doorbell::new()?);
        let (orders, receiver) = unbounded();
        let arbiting = thread::Arbiting::new(
            devices,
            policy,
            admission,
            events,
            receiver,
            Arc::clone(&bell),
        )?;
        let thread = std::thread::Builder::new()
            .name("arbiter".into())
            .spawn(move || arbiting.run())?;
        Ok(Arbiter {
            orders,
            bell,
            thread,
        })
    }

    fn order(&self, order: Order) {
        // The thread ends with the last `Arbiter` only.
        let _ = self.orders.send(order);
        self.bell.ring();
    }

    /// Starts to query NVML for memory of future clients that they do not count themselves; `library`: path of NVML,
    /// unless the loader finds it.
    pub fn count_overheads(&self, devices: &[[u8; 16]], library: Option<PathBuf>) {
        match Overheads::start(devices, library) {
            Ok(overheads) => self.order(Order::Overheads(overheads)),
            Err(error) => tracing::error!("Memory of contexts is not counted: {error}"),
        }
    }

    /// Takes over a client's connection. Never blocks; the outcome comes as an event.
    pub fn add_client(&self, socket: OwnedFd, hello: ClientHello, newcomer: Newcomer) {
        self.order(Order::Add(socket, Box::new(hello), newcomer));
    }

    /// Ends a client's session: its turn is passed on, its connection closed. Unknown sessions are ignored.
    pub fn terminate(&self, session: u64) {
        self.order(Order::Terminate(session));
    }

    /// Sets the limits of future clients, and the quantum of all clients.
    pub fn set_limits(&self, limits: Limits) {
        self.order(Order::Limits(limits));
    }

    /// Sets a client's weight. Unknown sessions are ignored.
    pub fn set_weight(&self, session: u64, weight: u32) {
        self.order(Order::Weight(session, weight));
    }

    /// The clients' usage, in order of arrival.
    pub fn usage(&self) -> Vec<Usage> {
        let (answer, answers) = bounded(1);
        self.order(Order::Usage(answer));
        answers.recv_timeout(PATIENCE).unwrap_or_default()
    }

    /// Starts or ends tracing of turns; returns when all events so far have been reported.
    pub fn trace(&self, run: Option<Arc<Run>>) {
        let (done, answer) = bounded(1);
        self.order(Order::Trace(run, done));
        // A thread that has ended does not trace.
        let _ = answer.recv_timeout(PATIENCE);
    }

    /// Closes every client's connection and ends the thread.
    pub fn shutdown(self) {
        self.order(Order::End);
        if self.thread.join().is_err() {
            tracing::error!("The arbiter's thread has panicked");
        }
    }
}
