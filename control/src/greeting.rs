//! The first packet of a connection: a client's hello, a command, the introduction of a server whose daemon has died, or
//! something invalid.

use crate::takeover::{self, Introduction, MAGIC_SERVER};
use crate::wire::Interface;
use mpsshim_api::cuda::CUresult;
use mpsshim_proto::handshake::{
    ClientHello, LONGEST_HELLO, MAGIC_CLIENT, MAGIC_UI, MAGIC_UI_3, MAGIC_WELCOME, MAX_DEVICES,
    OLDEST_HELLO, PROTOCOL_VERSION, SHORTEST_HELLO, Welcome,
};

/// Kinds of first packets.
#[derive(Debug)]
pub enum Greeting<'a> {
    /// A client of this or another release.
    Client(Box<ClientHello>),
    /// The command line of a user interface.
    Command(Interface, &'a [u8]),
    /// A server to be taken over, if it is of this release.
    Server(Result<Box<Introduction>, takeover::Unknown>),
    /// None of these; the connection is to be refused with this reason.
    Unfit(Unfit),
}

/// Why a first packet is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Unfit {
    /// A client of a release before the first.
    #[error(
        "the client speaks protocol version {0}, this daemon speaks versions from {OLDEST_HELLO} on; use a libmpsshim.so \
         of a later release"
    )]
    Version(u32),
    /// A hello of a wrong length.
    #[error("a hello of {0} bytes where {SHORTEST_HELLO} to {LONGEST_HELLO} were expected")]
    Length(usize),
    /// Something else.
    #[error("{0} bytes that are neither a client's hello nor a command")]
    Garbage(usize),
}

/// Parses a first packet.
pub fn read(packet: &[u8]) -> Greeting<'_> {
    if let Some(line) = packet.strip_prefix(&MAGIC_UI) {
        return Greeting::Command(Interface::Two, line);
    }
    if let Some(line) = packet.strip_prefix(&MAGIC_UI_3) {
        return Greeting::Command(Interface::Three, line);
    }
    if let Some(json) = packet.strip_prefix(&MAGIC_SERVER) {
        return Greeting::Server(Introduction::read(json).map(Box::new));
    }
    let Some(rest) = packet.strip_prefix(&MAGIC_CLIENT) else {
        return Greeting::Unfit(Unfit::Garbage(packet.len()));
    };
    // The version first: a hello of an older version may well have another length.
    let Some(version) = rest.first_chunk().copied().map(u32::from_ne_bytes) else {
        return Greeting::Unfit(Unfit::Length(packet.len()));
    };
    if version < OLDEST_HELLO {
        return Greeting::Unfit(Unfit::Version(version));
    }
    match ClientHello::read(packet).filter(|_| packet.len() <= LONGEST_HELLO) {
        Some(hello) => Greeting::Client(Box::new(hello)),
        None => Greeting::Unfit(Unfit::Length(packet.len())),
    }
}

/// The welcome that turns a client away.
pub fn refusal(status: CUresult) -> Welcome {
    Welcome {
        magic: MAGIC_WELCOME,
        protocol: PROTOCOL_VERSION,
        status: status.0,
        mode: 0,
        session: 0,
        segment_len: 0,
        host_arena: 0,
        host_arena_len: 0,
        device_arena: 0,
        device_arena_len: 0,
        server_pid: 0,
        device_count: 0,
        devices: [[0; 16]; MAX_DEVICES],
        multiprocessors: [0; MAX_DEVICES],
        memory: [0; MAX_DEVICES],
        active_thread_centipercent: 0,
        priority: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromZeros, IntoBytes};

    fn hello(protocol: u32) -> Vec<u8> {
        let hello = ClientHello {
            magic: MAGIC_CLIENT,
            protocol,
            table_hash: 9,
            pid: 1,
            mode: 0,
            active_thread_centipercent: 0,
            priority: -1,
            ..ClientHello::new_zeroed()
        };
        hello.as_bytes().to_vec()
    }

    fn unfit(packet: &[u8]) -> Unfit {
        match read(packet) {
            Greeting::Unfit(why) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn good_first_packets() {
        assert!(
            matches!(read(&hello(PROTOCOL_VERSION)), Greeting::Client(hello) if hello.table_hash == 9)
        );
        // A later release's hello is as long as it is.
        let later = [&hello(PROTOCOL_VERSION + 1)[..], b"more"].concat();
        assert!(matches!(read(&later), Greeting::Client(_)));
        assert!(matches!(
            read(b"MPSUget_server_list"),
            Greeting::Command(Interface::Two, b"get_server_list")
        ));
        assert!(matches!(
            read(b"MPS3server list"),
            Greeting::Command(Interface::Three, b"server list")
        ));
        let introduction = Introduction {
            versions: takeover::Versions::OWN,
            release: None,
            clients: 0,
            limits: mpsshim_model::limits::Limits::default(),
            quarantined: None,
        };
        let packet = introduction.packet().expect("packet");
        assert!(matches!(read(&packet), Greeting::Server(Ok(_))));
        assert!(matches!(read(b"MPSV"), Greeting::Server(Err(_))));
    }

    #[test]
    fn bad_first_packets() {
        let good = hello(PROTOCOL_VERSION);
        let other = hello(OLDEST_HELLO - 1);
        assert_eq!(unfit(&other), Unfit::Version(OLDEST_HELLO - 1));
        assert_eq!(unfit(&other[..8]), Unfit::Version(OLDEST_HELLO - 1));
        assert_eq!(unfit(&good[..7]), Unfit::Length(7));
        assert_eq!(unfit(&good[..63]), Unfit::Length(63));
        let long = [&good[..], &[0; LONGEST_HELLO]].concat();
        assert_eq!(unfit(&long), Unfit::Length(long.len()));
        assert_eq!(unfit(b"GET / HTTP/1.1\r\n"), Unfit::Garbage(16));
        assert_eq!(unfit(b"M"), Unfit::Garbage(1));
        let text = unfit(&other).to_string();
        for version in [OLDEST_HELLO, OLDEST_HELLO - 1] {
            assert!(
                text.contains(&version.to_string()),
                "both are named: {text}"
            );
        }
    }

    #[test]
    fn a_refusal_says_nothing_but_the_status() {
        let welcome = refusal(mpsshim_api::cuda::CUDA_ERROR_MPS_CONNECTION_FAILED);
        assert_eq!(welcome.status, 805);
        assert!(welcome.as_bytes()[12..].iter().all(|&byte| byte == 0));
    }
}
