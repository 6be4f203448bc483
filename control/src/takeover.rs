//! How a server whose daemon has died connects to the next daemon.
//!
//! As long as it has clients, the server tries to connect to the socket `control` and introduces itself: one packet
//! of [`MAGIC_SERVER`] and an [`Introduction`]. The daemon answers with one packet, a [`Verdict`]. A connection that
//! was taken over is the link from then on, and the server reports on it everything that the daemon has to know.

use crate::link::{LINK_VERSION, Link, LinkError, OLDEST_LINK};
use crate::program::Program;
use crate::releases::Spoken;
use crate::seqpacket;
use crossbeam_channel::{Receiver, bounded};
use mpsshim_model::limits::Limits;
use mpsshim_proto::handshake::PROTOCOL_VERSION;
use serde::{Deserialize, Serialize};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// First bytes of an introduction.
pub const MAGIC_SERVER: [u8; 4] = *b"MPSV";
/// How often a server looks for a daemon: a refused `connect`, some microseconds.
const INTERVAL: Duration = Duration::from_millis(100);

/// The versions that one side of the link speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// [`PROTOCOL_VERSION`] of its own library.
    pub protocol: u32,
    /// [`LINK_VERSION`].
    pub link: u32,
    /// [`OLDEST_LINK`]; releases without this field speak no other version.
    #[serde(default)]
    pub oldest_link: u32,
}

impl Versions {
    /// Of this executable.
    pub const OWN: Versions = Versions {
        protocol: PROTOCOL_VERSION,
        link: LINK_VERSION,
        oldest_link: OLDEST_LINK,
    };

    /// Whether daemon and server can work together, each with the versions of the link that it speaks.
    pub fn fit(self, other: Versions) -> bool {
        let oldest = |of: Versions| match of.oldest_link {
            0 => of.link,
            oldest => oldest,
        };
        self.link >= oldest(other) && other.link >= oldest(self)
    }
}

/// A server's description of itself. Its user and process id come from the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Introduction {
    /// The server's versions; in an introduction of a version that does not fit only this field is parsed.
    pub versions: Versions,
    /// Its release; `None`: this one.
    #[serde(default)]
    pub release: Option<Spoken>,
    /// Number of its clients.
    pub clients: usize,
    /// Limits of future clients.
    pub limits: Limits,
    /// It serves the processes of this quarantined program only.
    pub quarantined: Option<Program>,
}

/// Why an introduction cannot be parsed.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    /// A server of another release.
    #[error(
        "the server speaks protocol version {}.{}, this daemon speaks version {}.{}",
        .0.protocol, .0.link, Versions::OWN.protocol, Versions::OWN.link
    )]
    Version(Versions),
    /// Not an introduction.
    #[error("not a server's introduction: {0}")]
    Malformed(#[from] serde_json::Error),
}

impl Introduction {
    /// The packet.
    ///
    /// # Errors
    /// None for any value.
    pub fn packet(&self) -> Result<Vec<u8>, serde_json::Error> {
        Ok([&MAGIC_SERVER[..], &serde_json::to_vec(self)?].concat())
    }

    /// Parses the part of the packet after [`MAGIC_SERVER`].
    ///
    /// # Errors
    /// It is of another version, or malformed.
    pub fn read(json: &[u8]) -> Result<Introduction, Unknown> {
        #[derive(Deserialize)]
        struct OfAnyVersion {
            versions: Versions,
        }
        let OfAnyVersion { versions } = serde_json::from_slice(json)?;
        if !versions.fit(Versions::OWN) {
            return Err(Unknown::Version(versions));
        }
        Ok(serde_json::from_slice(json)?)
    }
}

/// The daemon's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// The connection is the link from here on.
    TakenOver,
    /// The server stays without a daemon until its clients have gone.
    Refused {
        /// Why.
        reason: String,
    },
}

/// Looks for a daemon until one takes this server over. If a daemon refuses, the channel closes without a message,
/// since repeating the request would not help.
pub fn seek(control: PathBuf, introduction: &Introduction) -> io::Result<Receiver<Link>> {
    let packet = introduction.packet()?;
    let (sender, receiver) = bounded(1);
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(INTERVAL);
            match ask(&control, &packet) {
                Ok(Some(link)) => {
                    // The receiver is gone if the last client has left meanwhile.
                    let _ = sender.send(link);
                    return;
                }
                Ok(None) => {}
                Err(reason) => {
                    tracing::warn!(
                        "The control daemon does not take this server over: {reason}. It ends with its clients"
                    );
                    return;
                }
            }
        }
    });
    Ok(receiver)
}

/// One attempt. `None`: no daemon listens, or it has just ended.
fn ask(control: &Path, packet: &[u8]) -> Result<Option<Link>, String> {
    let Ok(connection) = seqpacket::connect(control) else {
        return Ok(None);
    };
    let Ok(daemon) = seqpacket::peer(connection.as_fd()) else {
        return Ok(None);
    };
    // Orders of the daemon affect this server's clients, so only root's or this user's daemon is accepted.
    if daemon.uid != 0 && daemon.uid != nix::unistd::geteuid().as_raw() {
        return Err(format!("it is user {}'s", daemon.uid));
    }
    if seqpacket::send(connection.as_fd(), packet, None).is_err() {
        return Ok(None);
    }
    let link = Link::new(connection);
    match link.receive::<Verdict>() {
        Ok(Some((Verdict::TakenOver, _))) => Ok(Some(link)),
        Ok(Some((Verdict::Refused { reason }, _))) => Err(reason),
        Ok(None) | Err(LinkError::Io(_)) => Ok(None),
        // The welcome with which a daemon that does not know introductions refuses an unknown peer.
        Err(_) => Err("it is of another release".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn introduction() -> Introduction {
        Introduction {
            versions: Versions::OWN,
            release: None,
            clients: 3,
            limits: Limits::default(),
            quarantined: Some(Program::named(7, "/opt/nbody")),
        }
    }

    #[test]
    fn releases_fit_as_far_as_each_speaks_the_other_s_link() {
        let versions = |oldest_link, link| Versions {
            protocol: 1,
            link,
            oldest_link,
        };
        let fit = |one, other| {
            assert_eq!(Versions::fit(one, other), Versions::fit(other, one));
            Versions::fit(one, other)
        };
        assert!(fit(versions(19, 21), versions(19, 19)));
        assert!(fit(versions(19, 21), versions(21, 25)));
        assert!(!fit(versions(20, 21), versions(18, 19)));
        // A release before the oldest version was named.
        assert!(fit(versions(18, 21), versions(0, 18)));
        assert!(!fit(versions(19, 21), versions(0, 18)));
    }

    #[test]
    fn an_introduction_is_understood_or_refused() {
        let packet = introduction().packet().expect("packet");
        let json = packet.strip_prefix(&MAGIC_SERVER).expect("magic");
        assert_eq!(Introduction::read(json).expect("good"), introduction());
        for nonsense in [&b""[..], b"{}", b"\xff", &json[1..]] {
            assert!(matches!(
                Introduction::read(nonsense),
                Err(Unknown::Malformed(_))
            ));
        }
        // In an introduction of another version only the version is parsed.
        let other = br#"{"versions":{"protocol":77,"link":5},"people":[]}"#;
        let text = Introduction::read(other).expect_err("other").to_string();
        assert!(
            text.contains("77.5") && text.contains(&format!("{PROTOCOL_VERSION}.{LINK_VERSION}"))
        );
    }

    /// The outcome of one attempt, at a daemon that reads the introduction and sends this answer.
    fn answered(answer: Option<&[u8]>) -> Result<Option<Link>, String> {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("control");
        let listener = seqpacket::listen(&path).expect("listen");
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| ask(&path, b"hello"));
            let connection = loop {
                match seqpacket::accept(listener.as_fd()) {
                    Ok(connection) => break connection,
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            };
            // The kernel resets a connection that is closed with unread packets, so the answer could be lost.
            seqpacket::set_nonblocking(&connection, false).expect("blocking");
            let mut introduction = [0; 8];
            let len = seqpacket::receive(connection.as_fd(), &mut introduction);
            assert_eq!(&introduction[..len.expect("read")], b"hello");
            if let Some(answer) = answer {
                seqpacket::send(connection.as_fd(), answer, None).expect("answer");
            }
            drop(connection);
            asks.join().expect("no panic")
        })
    }

    #[test]
    fn a_daemon_may_refuse_or_vanish() {
        let verdict = |verdict| serde_json::to_vec(&verdict).expect("JSON");
        let taken = answered(Some(&verdict(Verdict::TakenOver)));
        assert!(matches!(taken, Ok(Some(_))));
        let reason = "no room".to_owned();
        let refused = answered(Some(&verdict(Verdict::Refused { reason })));
        assert_eq!(refused.expect_err("refused"), "no room");
        let stranger = answered(Some(b"MPSW\0\0\0\0"));
        assert_eq!(stranger.expect_err("refused"), "it is of another release");
        assert!(matches!(answered(None), Ok(None)));
        assert!(matches!(ask(Path::new("/nowhere/control"), b""), Ok(None)));
    }
}
