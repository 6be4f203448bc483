//! The format of commands and answers between a user interface and the daemon.
//!
//! A command is one packet: [`MAGIC_UI`] or [`MAGIC_UI_3`], and the command line. An answer is one or more packets: [`MAGIC_ANSWER`],
//! a [`Mark`] byte, and text. Several commands may follow each other on one connection.

use mpsshim_proto::answer::{HEADER, MAGIC_ANSWER};
pub use mpsshim_proto::answer::{Mark, PACKET_LIMIT, parse as parse_answer};
use mpsshim_proto::handshake::{MAGIC_UI, MAGIC_UI_3};

/// Longest command line, bytes.
pub const COMMAND_LIMIT: usize = 4096;

/// Versions of the interface, which select the commands that a user interface may give.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Interface {
    /// Commands of [`crate::commands`].
    #[default]
    Two,
    /// Those, and the modules of [`crate::modules`].
    Three,
}

/// Result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether the command succeeded.
    pub ok: bool,
    /// Text for standard output, in whole lines.
    pub text: String,
    /// Text for standard error, in whole lines.
    pub note: String,
}

impl Answer {
    /// A successful command. The last line may lack its newline.
    pub fn done(text: impl Into<String>) -> Answer {
        Answer {
            ok: true,
            text: whole_lines(text.into()),
            note: String::new(),
        }
    }

    /// A failed command. The last line may lack its newline.
    pub fn failed(text: impl Into<String>) -> Answer {
        Answer {
            ok: false,
            ..Answer::done(text)
        }
    }

    /// With a note.
    pub fn with_note(self, note: impl Into<String>) -> Answer {
        Answer {
            note: whole_lines(note.into()),
            ..self
        }
    }
}

fn whole_lines(mut text: String) -> String {
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// The packet of a command line. `None`: the line is too long.
pub fn command_packet(interface: Interface, line: &str) -> Option<Vec<u8>> {
    let magic = match interface {
        Interface::Two => MAGIC_UI,
        Interface::Three => MAGIC_UI_3,
    };
    (line.len() <= COMMAND_LIMIT).then(|| [&magic[..], line.as_bytes()].concat())
}

/// The packets of an answer.
pub fn answer_packets(answer: &Answer) -> Vec<Vec<u8>> {
    let last = if answer.ok { Mark::Done } else { Mark::Failed };
    let packet = |mark: Mark, part: &[u8]| [&MAGIC_ANSWER[..], &[mark.byte()], part].concat();
    let room = PACKET_LIMIT - HEADER;
    let note = answer.note.as_bytes().chunks(room);
    let mut packets: Vec<Vec<u8>> = note.map(|part| packet(Mark::Note, part)).collect();
    let mut parts = answer.text.as_bytes().chunks(room).peekable();
    loop {
        let part = parts.next().unwrap_or_default();
        if parts.peek().is_none() {
            packets.push(packet(last, part));
            return packets;
        }
        packets.push(packet(Mark::More, part));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last mark, text, note, and the number of packets.
    fn joined(answer: &Answer) -> (Mark, String, String, usize) {
        let packets = answer_packets(answer);
        let (mut text, mut note) = (Vec::new(), Vec::new());
        let mut mark = Mark::More;
        for packet in &packets {
            assert!(matches!(mark, Mark::More | Mark::Note));
            assert!(packet.len() <= PACKET_LIMIT);
            let (next, part) = parse_answer(packet).expect("an answer");
            mark = next;
            let to = if mark == Mark::Note {
                &mut note
            } else {
                &mut text
            };
            to.extend_from_slice(part);
        }
        let text = String::from_utf8(text).expect("text");
        (
            mark,
            text,
            String::from_utf8(note).expect("note"),
            packets.len(),
        )
    }

    #[test]
    fn answers_of_any_length() {
        let none = String::new;
        assert_eq!(joined(&Answer::done("")), (Mark::Done, none(), none(), 1));
        assert_eq!(
            joined(&Answer::failed("no").with_note("never")),
            (Mark::Failed, "no\n".into(), "never\n".into(), 2)
        );
        assert_eq!(
            joined(&Answer::done("\n")),
            (Mark::Done, "\n".into(), none(), 1)
        );
        let long = "é".repeat(PACKET_LIMIT) + "\n";
        assert_eq!(
            joined(&Answer::done(long.clone())),
            (Mark::Done, long, none(), 3)
        );
    }

    #[test]
    fn nonsense_is_no_answer() {
        for packet in [&b""[..], b"MPS", b"MPSR", b"MPSR?", b"XXXX0"] {
            assert_eq!(parse_answer(packet), None);
        }
        let long = "x".repeat(COMMAND_LIMIT + 1);
        assert_eq!(command_packet(Interface::Two, &long), None);
    }
}
