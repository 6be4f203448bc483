//! What the daemon gets that it should not get: garbage, connections by the thousand, peers that do not read or do
//! not end. Nobody else notices.

use mpsshim_control::seqpacket;
use mpsshim_proto::handshake::PROTOCOL_VERSION;
use mpsshim_tests::PATIENCE;
use mpsshim_tests::control_daemon::{
    Client, Done, Place, as_user, hello, other_user, raise_descriptor_limit, wait_until,
};
use nix::sys::socket::{Shutdown, shutdown};
use std::fs;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

const SOCKETS: [&str; 2] = ["control", "control_privileged"];

fn connect(place: &Place, socket: &str) -> OwnedFd {
    seqpacket::connect(&place.pipe().join(socket)).expect("connect")
}

fn send(connection: &OwnedFd, packet: &[u8]) {
    seqpacket::send(connection.as_fd(), packet, None).expect("send");
}

/// What comes next; `None`: the end.
fn receive(connection: &OwnedFd) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 1 << 16];
    let len = seqpacket::receive(connection.as_fd(), &mut buffer).unwrap_or(0);
    buffer.truncate(len);
    (len > 0).then_some(buffer)
}

fn descriptors(place: &Place) -> usize {
    let pid = place.daemon_pid();
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
    entries.count()
}

/// A daemon with a client, before and after something is done to it.
struct Witness {
    client: Client,
    server: u32,
    descriptors: usize,
}

impl Witness {
    fn new(place: &Place) -> Witness {
        let client = Client::connect(place);
        let server = client.welcome().expect("welcome").server_pid;
        let mut witness = Witness {
            client,
            server,
            descriptors: 0,
        };
        witness.is_served_on(place);
        std::thread::sleep(Duration::from_millis(50));
        witness.descriptors = descriptors(place);
        witness
    }

    /// The client is there, another one is served, and commands are answered, all of it at once.
    fn is_served_on(&self, place: &Place) {
        let began = Instant::now();
        assert!(self.client.is_connected());
        let another = Client::connect(place).welcome().expect("welcome");
        assert_eq!(another.server_pid, self.server);
        let Done { code, out, .. } = place.control(&["get_server_list"]);
        assert_eq!((code, out), (0, format!("{}\n", self.server)));
        assert!(began.elapsed() < PATIENCE);
    }

    /// And the daemon has closed what it had opened.
    fn sees_nothing_left(&self, place: &Place) {
        self.is_served_on(place);
        wait_until("the daemon has closed what it had", || {
            descriptors(place) <= self.descriptors
        });
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.next() as u8).collect()
    }
}

#[test]
fn random_packets_on_both_sockets() {
    let place = Place::with_daemon();
    let witness = Witness::new(&place);
    let mut random = Random(0x5eed);
    let begins: [&[u8]; 6] = [b"", b"MPS", b"MPSC", b"MPSU", b"MPSV", b"MPSV{"];
    for round in 0..300 {
        let connection = connect(&place, SOCKETS[round % 2]);
        for _ in 0..=random.next() % 3 {
            let begin = begins[random.next() as usize % begins.len()];
            let len = 1 + random.next() as usize % 6000;
            let packet = [begin, &random.bytes(len)].concat();
            // Some come with a descriptor, which nobody asked for.
            let gift = random.next().is_multiple_of(4).then(|| connection.as_fd());
            // It may have been closed by then.
            let _ = seqpacket::send(connection.as_fd(), &packet, gift);
        }
        if round % 50 == 0 {
            witness.is_served_on(&place);
        }
    }
    witness.sees_nothing_left(&place);
    // A line of the log is a line, whatever came.
    for line in place.log("control.log").lines() {
        assert!(
            line.starts_with("[20") && !line.contains('\x1b'),
            "{line:?}"
        );
    }
}

#[test]
fn a_packet_of_no_bytes_is_no_end_of_anything_else() {
    let place = Place::with_daemon();
    let witness = Witness::new(&place);
    for socket in SOCKETS {
        let connection = connect(&place, socket);
        send(&connection, b"");
        assert_eq!(receive(&connection), None);
    }
    witness.sees_nothing_left(&place);
}

#[test]
fn half_closed_connections() {
    let place = Place::with_daemon();
    let witness = Witness::new(&place);
    let half = |connection: &OwnedFd, how| shutdown(connection.as_raw_fd(), how).expect("shutdown");
    let mut open = Vec::new();
    for socket in SOCKETS {
        // Says nothing any more, but listens: what it has asked is answered.
        let connection = connect(&place, socket);
        send(&connection, b"MPSUget_server_list");
        half(&connection, Shutdown::Write);
        let answer = receive(&connection).expect("answer");
        let listed = format!("MPSR0{}", witness.server);
        assert_eq!(String::from_utf8_lossy(&answer).trim_end(), listed);
        assert_eq!(receive(&connection), None);
        open.push(connection);
        // Closed before a word.
        let connection = connect(&place, socket);
        half(&connection, Shutdown::Write);
        assert_eq!(receive(&connection), None);
        open.push(connection);
        // Listens no more, but speaks.
        let connection = connect(&place, socket);
        half(&connection, Shutdown::Read);
        for _ in 0..100 {
            let _ = seqpacket::send(connection.as_fd(), b"MPSUhelp", None);
        }
        open.push(connection);
    }
    // A client that has said all it will say has gone.
    let connection = connect(&place, "control");
    send(&connection, &hello(PROTOCOL_VERSION));
    half(&connection, Shutdown::Write);
    open.push(connection);
    witness.sees_nothing_left(&place);
    let clients = place.control(&["get_client_list", &witness.server.to_string()]);
    assert_eq!(clients.out.lines().count(), 1);
    drop(open);
}

#[test]
fn long_lines() {
    let place = Place::with_daemon();
    let witness = Witness::new(&place);
    for socket in SOCKETS {
        let connection = connect(&place, socket);
        for (len, answer) in [
            (4096, "MPSR1Unknown command \"x"),
            (4097, "MPSR1a command line may have 4096 bytes"),
            (100_000, "MPSR1a command line may have 4096 bytes"),
        ] {
            send(&connection, &[&b"MPSU"[..], &vec![b'x'; len]].concat());
            let found = receive(&connection).expect("answer");
            assert!(found.starts_with(answer.as_bytes()), "{len}");
        }
    }
    let line = "y".repeat(1 << 20);
    let done = place.control_stdin(&format!("{line}\nget_server_list\n"));
    let said = format!("a command line may have 4096 bytes\n{}\n", witness.server);
    assert_eq!((done.code, done.out), (0, said));
    witness.sees_nothing_left(&place);
}

#[test]
fn who_reads_no_answers_is_closed() {
    let place = Place::with_daemon();
    let witness = Witness::new(&place);
    for socket in SOCKETS {
        let connection = connect(&place, socket);
        seqpacket::set_nonblocking(&connection, true).expect("non-blocking");
        let until = Instant::now() + PATIENCE;
        loop {
            match seqpacket::send(connection.as_fd(), b"MPSUhelp", None) {
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => break,
                // Full, as long as the daemon has others to attend to.
                _ => assert!(Instant::now() < until, "never closed"),
            }
        }
        witness.is_served_on(&place);
    }
    witness.sees_nothing_left(&place);
}

#[test]
fn a_thousand_idle_connections() {
    raise_descriptor_limit();
    let place = Place::with_daemon();
    let witness = Witness::new(&place);
    let idle: Vec<OwnedFd> = (0..1000)
        .map(|number| {
            let connection = connect(&place, SOCKETS[number % 2]);
            // Every fourth has asked something once.
            if number % 4 == 0 {
                send(&connection, b"MPSUget_server_list");
                receive(&connection).expect("answer");
            }
            connection
        })
        .collect();
    witness.is_served_on(&place);
    drop(idle);
    witness.sees_nothing_left(&place);
}

#[test]
fn one_who_takes_all_connections_keeps_nobody_out() {
    let Some(user) = other_user() else { return };
    raise_descriptor_limit();
    // The daemon may have few descriptors.
    let place = Place::new();
    let daemon = place.command("mps-control");
    let script = format!(
        "ulimit -n 128 && exec {} -d",
        daemon.get_program().to_string_lossy()
    );
    let mut shell = place.command_like(&daemon, "sh");
    let done: Done = shell.args(["-c", &script]).output().expect("run").into();
    assert_eq!((done.code, done.err.as_str()), (0, ""));
    let witness = Witness::new(&place);
    // First clients that have to wait for the other user's server, then interfaces that may yet want something.
    let held: Vec<OwnedFd> = as_user(user, || {
        let one = |number| {
            let connection = connect(&place, "control");
            let client = hello(PROTOCOL_VERSION);
            let packet = if number < 200 {
                &client
            } else {
                &b"MPSUhelp"[..]
            };
            // It may have been closed by now.
            let _ = seqpacket::send(connection.as_fd(), packet, None);
            std::thread::sleep(Duration::from_millis(1));
            connection
        };
        (0..400).map(one).collect()
    });
    // Others are served, however many.
    let began = Instant::now();
    let own = [(); 20].map(|()| connect(&place, "control_privileged"));
    let another = Client::connect(&place).welcome().expect("welcome");
    assert_eq!(another.server_pid, witness.server);
    assert_eq!(place.control(&["get_server_list"]).code, 0);
    assert!(began.elapsed() < PATIENCE);
    assert!(witness.client.is_connected());
    let log = place.log("control.log");
    for line in [
        format!(" of user {user} closed to make room"),
        format!(" from user {user} refused with status 805: the daemon has too many"),
    ] {
        assert!(log.contains(&line), "{line} in {log}");
    }
    drop((held, own));
    witness.sees_nothing_left(&place);
}
