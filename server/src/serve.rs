//! What mps-server does besides executing calls: it takes orders from the control daemon, reports what happens
//! to its clients, and writes server.log.
//!
//! It ends when it is told to, when its context is lost, and when the daemon has gone and no client is left: a
//! daemon that dies takes no running program with it.

use crate::engine::{ClientInfo, Credentials, DeviceInfo, Engine, EngineEvent};
use crate::link::{Arrival, Link, LinkError, Order, ToDaemon};
use crossbeam_channel::{Receiver, RecvTimeoutError, select, unbounded};
use mpsshim_proto::cuda::CUresult;
use mpsshim_proto::handshake::ClientHello;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long clients have to see the error of a lost context before the process ends.
const FAULT_PATIENCE: Duration = Duration::from_secs(1);

/// What serves clients: the engine, or a stand-in in a test.
pub trait Host {
    /// See [`Engine::add_client`].
    fn add_client(&self, socket: OwnedFd, hello: ClientHello, who: Credentials);
    /// See [`Engine::devices`].
    fn devices(&self) -> Vec<DeviceInfo>;
    /// See [`Engine::terminate`].
    fn terminate(&self, session: u64);
    /// See [`Engine::shutdown`].
    fn shutdown(self);
}

impl Host for Engine {
    fn add_client(&self, socket: OwnedFd, hello: ClientHello, who: Credentials) {
        Engine::add_client(self, socket, hello, who);
    }
    fn devices(&self) -> Vec<DeviceInfo> {
        Engine::devices(self)
    }
    fn terminate(&self, session: u64) {
        Engine::terminate(self, session);
    }
    fn shutdown(self) {
        Engine::shutdown(self);
    }
}

/// How serving has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// As told, or because nobody was left.
    Orderly,
    /// The context is lost; nothing in this process that concerns the device can be relied upon any more.
    Fault,
}

/// Serves until the end. `events` are the host's.
pub fn serve<H: Host>(link: Link, host: H, events: &Receiver<EngineEvent>) -> End {
    let link = Arc::new(link);
    let orders = read_orders(Arc::clone(&link));
    let mut serving = Serving {
        link,
        host,
        clients: BTreeMap::new(),
        expected: 0,
        stopping: false,
    };
    serving.announce();
    let end = serving.run(&orders, events);
    match end {
        Ok(()) => {
            serving.report(&ToDaemon::Stopping);
            let devices = serving.host.devices();
            serving.host.shutdown();
            for (ordinal, device) in devices.iter().enumerate() {
                tracing::info!(
                    "Destroy server context on device {ordinal} ({})",
                    device.name
                );
            }
            tracing::info!("Exiting");
            End::Orderly
        }
        Err(Lost(status)) => {
            serving.fault(status, events);
            // A lost context may not even be destroyed without hanging; the process's end does it.
            std::mem::forget(serving.host);
            End::Fault
        }
    }
}

/// The context is lost with this status.
struct Lost(u32);

/// `None`: the daemon has gone.
fn read_orders(link: Arc<Link>) -> Receiver<Option<Order>> {
    let (sender, receiver) = unbounded();
    std::thread::spawn(move || {
        loop {
            let order = match link.next_order() {
                Ok(order) => order,
                Err(LinkError::Io(error)) => {
                    tracing::error!("The link to the control daemon failed: {error}");
                    None
                }
                Err(error) => {
                    tracing::error!("{error}");
                    continue;
                }
            };
            let last = order.is_none();
            if sender.send(order).is_err() || last {
                return;
            }
        }
    });
    receiver
}

struct Serving<H> {
    link: Arc<Link>,
    host: H,
    clients: BTreeMap<u64, ClientInfo>,
    /// Clients given to the host whose outcome is not known yet.
    expected: usize,
    /// Ends with the last client.
    stopping: bool,
}

impl<H: Host> Serving<H> {
    fn announce(&self) {
        tracing::info!("Active Threads Percentage set to 100.0");
        tracing::info!("Server Priority set to 0");
        tracing::info!("Server has started");
        self.report(&ToDaemon::Ready {
            devices: self.host.devices(),
        });
    }

    fn report(&self, report: &ToDaemon) {
        // A daemon that has gone is noticed where its orders are read.
        if let Err(error) = self.link.report(report) {
            tracing::debug!("{error}");
        }
    }

    fn run(
        &mut self,
        orders: &Receiver<Option<Order>>,
        events: &Receiver<EngineEvent>,
    ) -> Result<(), Lost> {
        let mut orders = orders.clone();
        while !(self.stopping && self.clients.is_empty() && self.expected == 0) {
            select! {
                recv(orders) -> order => match order.ok().flatten() {
                    Some(Order::NewClient(client)) => self.take(client),
                    Some(Order::Shutdown { force }) => {
                        tracing::info!("Server has been notified to shutdown");
                        if force {
                            return Ok(());
                        }
                        self.stop_after_clients();
                    }
                    Some(Order::Terminate(session)) => {
                        if let Some(client) = self.clients.get(&session) {
                            tracing::info!("Terminating client {}", context_name(client));
                        }
                        self.host.terminate(session);
                    }
                    None => {
                        tracing::info!("The control daemon has gone");
                        self.stop_after_clients();
                        orders = crossbeam_channel::never();
                    }
                },
                recv(events) -> event => match event {
                    Ok(event) => self.note(event)?,
                    // The engine has ended by itself, which only a lost context can explain.
                    Err(_) => return Err(Lost(mpsshim_proto::cuda::CUDA_ERROR_UNKNOWN.0)),
                },
            }
        }
        Ok(())
    }

    fn stop_after_clients(&mut self) {
        self.stopping = true;
        if !self.clients.is_empty() || self.expected > 0 {
            tracing::info!("Waiting for current clients to finish");
        }
    }

    fn take(&mut self, client: Arrival) {
        tracing::info!(
            "Received new client request for {{PID: {}, Context ID: 0}}",
            client.who.pid
        );
        self.expected += 1;
        self.host
            .add_client(client.connection, client.hello, client.who);
    }

    fn note(&mut self, event: EngineEvent) -> Result<(), Lost> {
        match event {
            EngineEvent::Connected(client) => {
                let name = context_name(&client);
                tracing::info!("Client {name} connected");
                for DeviceInfo { name, uuid, .. } in self.host.devices() {
                    tracing::info!("Device {name} (uuid {uuid}) is associated");
                }
                tracing::info!("Status of client {name} is ACTIVE");
                self.report(&ToDaemon::from(&client));
                self.expected = self.expected.saturating_sub(1);
                self.clients.insert(client.session, client);
            }
            EngineEvent::Refused(pid, status, reason) => {
                tracing::info!("Client process {pid} refused with status {status}: {reason}");
                self.report(&ToDaemon::Refused {
                    pid,
                    status,
                    reason,
                });
                self.expected = self.expected.saturating_sub(1);
            }
            EngineEvent::Gone(client, reason) => {
                self.clients.remove(&client.session);
                if let Some(reason) = &reason {
                    tracing::warn!(
                        "Client {} ended by the server: {reason}",
                        context_name(&client)
                    );
                }
                tracing::info!(
                    "Client {} exiting. Number of active client contexts is {}.",
                    context_name(&client),
                    self.clients.len()
                );
                tracing::info!("Client process {} disconnected", client.pid);
                self.report(&ToDaemon::Gone {
                    session: client.session,
                    pid: client.pid,
                    reason,
                });
            }
            EngineEvent::Fault(status) => return Err(Lost(status)),
        }
        Ok(())
    }

    /// Tells the daemon, then waits until the clients have seen the error and gone, or their time is over.
    fn fault(&mut self, status: u32, events: &Receiver<EngineEvent>) {
        let clients = self.clients.len();
        tracing::error!(
            "The context is lost: {:?}. Ending with {clients} clients",
            CUresult(status)
        );
        self.report(&ToDaemon::Fault { status });
        let until = Instant::now() + FAULT_PATIENCE;
        while !self.clients.is_empty() {
            match events.recv_deadline(until) {
                Ok(EngineEvent::Fault(_)) => {}
                // Nothing but a fault is an error here.
                Ok(event) => self.note(event).unwrap_or_default(),
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => {
                    std::thread::sleep(until.saturating_duration_since(Instant::now()));
                    break;
                }
            }
        }
        tracing::info!("Exiting");
    }
}

fn context_name(client: &ClientInfo) -> String {
    format!("{{PID: {}, Context ID: {}}}", client.pid, client.session)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seqpacket;
    use crossbeam_channel::Sender;
    use parking_lot::Mutex;
    use std::thread::JoinHandle;
    use zerocopy::FromZeros;

    /// Connects every client at once as session 1, 2, …
    struct Fake {
        events: Sender<EngineEvent>,
        held: Mutex<Vec<OwnedFd>>,
    }

    fn info(session: u64) -> ClientInfo {
        ClientInfo {
            session,
            pid: 100 + session as i32,
            uid: 0,
        }
    }

    impl Host for Fake {
        fn add_client(&self, socket: OwnedFd, _: ClientHello, _: Credentials) {
            let mut held = self.held.lock();
            held.push(socket);
            self.events
                .send(EngineEvent::Connected(info(held.len() as u64)))
                .expect("serving");
        }
        fn devices(&self) -> Vec<DeviceInfo> {
            vec![DeviceInfo {
                name: "Test device".into(),
                uuid: "GPU-0".into(),
                pci: "0000:00:06.0".into(),
            }]
        }
        fn terminate(&self, session: u64) {
            let reason = Some("terminated".into());
            let gone = EngineEvent::Gone(info(session), reason);
            self.events.send(gone).expect("serving");
        }
        fn shutdown(self) {}
    }

    struct Running {
        daemon: Link,
        events: Sender<EngineEvent>,
        thread: JoinHandle<End>,
    }

    impl Running {
        fn start() -> Running {
            let (ours, theirs) = seqpacket::pair().expect("pair");
            let (events, receiver) = unbounded();
            let host = Fake {
                events: events.clone(),
                held: Mutex::default(),
            };
            let thread = std::thread::spawn(move || serve(Link::new(theirs), host, &receiver));
            let running = Running {
                daemon: Link::new(ours),
                events,
                thread,
            };
            assert!(matches!(
                running.report(),
                ToDaemon::Ready { devices } if devices.len() == 1
            ));
            running
        }

        fn report(&self) -> ToDaemon {
            self.daemon.next_report().expect("link").expect("server")
        }

        fn add_client(&self, session: u64) {
            let (_, connection) = seqpacket::pair().expect("pair");
            let who = Credentials {
                pid: 1,
                uid: 0,
                gid: 0,
            };
            let hello = ClientHello::new_zeroed();
            self.daemon
                .hand_over(&Arrival {
                    connection,
                    hello,
                    who,
                })
                .expect("hand over");
            assert_eq!(self.report(), ToDaemon::from(&info(session)));
        }

        fn leave(&self, session: u64) {
            self.events
                .send(EngineEvent::Gone(info(session), None))
                .expect("serving");
        }
    }

    #[test]
    fn a_shutdown_waits_for_clients() {
        let running = Running::start();
        running.add_client(1);
        running.add_client(2);
        running.daemon.order_shutdown(false).expect("order");
        running.leave(1);
        assert!(matches!(
            running.report(),
            ToDaemon::Gone { session: 1, .. }
        ));
        assert!(!running.thread.is_finished());
        running.leave(2);
        assert!(matches!(
            running.report(),
            ToDaemon::Gone { session: 2, .. }
        ));
        assert_eq!(running.report(), ToDaemon::Stopping);
        assert_eq!(running.thread.join().expect("end"), End::Orderly);
    }

    #[test]
    fn a_forced_shutdown_does_not() {
        let running = Running::start();
        running.add_client(1);
        running.daemon.order_shutdown(true).expect("order");
        assert_eq!(running.report(), ToDaemon::Stopping);
        assert_eq!(running.thread.join().expect("end"), End::Orderly);
    }

    #[test]
    fn clients_outlive_the_daemon() {
        let Running {
            daemon,
            events,
            thread,
        } = {
            let running = Running::start();
            running.add_client(1);
            running
        };
        drop(daemon);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!thread.is_finished());
        events
            .send(EngineEvent::Gone(info(1), None))
            .expect("serving");
        assert_eq!(thread.join().expect("end"), End::Orderly);
    }

    #[test]
    fn a_client_is_terminated_and_the_others_stay() {
        let running = Running::start();
        running.add_client(1);
        running.add_client(2);
        running.daemon.order_termination(1).expect("order");
        assert!(matches!(
            running.report(),
            ToDaemon::Gone { session: 1, .. }
        ));
        running.daemon.order_shutdown(false).expect("order");
        running.leave(2);
        assert!(matches!(
            running.report(),
            ToDaemon::Gone { session: 2, .. }
        ));
        assert_eq!(running.report(), ToDaemon::Stopping);
        assert_eq!(running.thread.join().expect("end"), End::Orderly);
    }

    #[test]
    fn a_fault_is_told_and_ends_the_server() {
        let running = Running::start();
        running.add_client(1);
        let start = Instant::now();
        running
            .events
            .send(EngineEvent::Fault(700))
            .expect("serving");
        assert_eq!(running.report(), ToDaemon::Fault { status: 700 });
        running.leave(1);
        assert!(matches!(
            running.report(),
            ToDaemon::Gone { session: 1, .. }
        ));
        assert_eq!(running.thread.join().expect("end"), End::Fault);
        assert!(
            start.elapsed() < FAULT_PATIENCE,
            "nobody was left to wait for"
        );
    }

    #[test]
    fn a_fault_does_not_wait_longer_than_a_second() {
        let running = Running::start();
        running.add_client(1);
        let start = Instant::now();
        running
            .events
            .send(EngineEvent::Fault(719))
            .expect("serving");
        assert_eq!(running.thread.join().expect("end"), End::Fault);
        assert!(start.elapsed() >= FAULT_PATIENCE && start.elapsed() < 3 * FAULT_PATIENCE);
    }
}
