//! How a command and its answer travel between a user interface and the daemon.
//!
//! A command is one packet: [`MAGIC_UI`] and the command line. An answer is one or more packets: [`MAGIC_ANSWER`],
//! a [`Mark`] byte, and text. Several commands may follow each other on one connection.

use mpsshim_proto::handshake::MAGIC_UI;

/// First bytes of an answer.
pub const MAGIC_ANSWER: [u8; 4] = *b"MPSR";
/// Longest command line, bytes.
pub const COMMAND_LIMIT: usize = 4096;
/// Longest packet in either direction, bytes.
pub const PACKET_LIMIT: usize = 16 * 1024;
const HEADER: usize = MAGIC_ANSWER.len() + 1;

/// What follows a packet of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Nothing; the command was done.
    Done,
    /// Nothing; the command failed.
    Failed,
    /// Another packet.
    More,
}

impl Mark {
    fn byte(self) -> u8 {
        match self {
            Mark::Done => b'0',
            Mark::Failed => b'1',
            Mark::More => b'+',
        }
    }

    fn from_byte(byte: u8) -> Option<Mark> {
        [Mark::Done, Mark::Failed, Mark::More]
            .into_iter()
            .find(|mark| mark.byte() == byte)
    }
}

/// What a command has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Whether the command was done.
    pub ok: bool,
    /// What to print; lines, the last one without its end.
    pub text: String,
}

impl Answer {
    /// The command was done.
    pub fn done(text: impl Into<String>) -> Answer {
        Answer {
            ok: true,
            text: text.into(),
        }
    }

    /// The command was not done.
    pub fn failed(text: impl Into<String>) -> Answer {
        Answer {
            ok: false,
            text: text.into(),
        }
    }
}

/// The packet of a command line. `None`: it is too long.
pub fn command_packet(line: &str) -> Option<Vec<u8>> {
    (line.len() <= COMMAND_LIMIT).then(|| [&MAGIC_UI[..], line.as_bytes()].concat())
}

/// The packets of an answer.
pub fn answer_packets(answer: &Answer) -> Vec<Vec<u8>> {
    let last = if answer.ok { Mark::Done } else { Mark::Failed };
    let mut parts: Vec<&[u8]> = answer
        .text
        .as_bytes()
        .chunks(PACKET_LIMIT - HEADER)
        .collect();
    if parts.is_empty() {
        parts.push(b"");
    }
    let count = parts.len();
    let packet = |(index, part): (usize, &[u8])| {
        let mark = if index + 1 == count { last } else { Mark::More };
        [&MAGIC_ANSWER[..], &[mark.byte()], part].concat()
    };
    parts.into_iter().enumerate().map(packet).collect()
}

/// Mark and text of one packet of an answer. `None`: it is none.
pub fn parse_answer(packet: &[u8]) -> Option<(Mark, &[u8])> {
    let rest = packet.strip_prefix(&MAGIC_ANSWER)?;
    let (&mark, text) = rest.split_first()?;
    Some((Mark::from_byte(mark)?, text))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(answer: &Answer) -> (Mark, String, usize) {
        let packets = answer_packets(answer);
        let mut text = Vec::new();
        let mut mark = Mark::More;
        for packet in &packets {
            assert_eq!(mark, Mark::More);
            assert!(packet.len() <= PACKET_LIMIT);
            let (next, part) = parse_answer(packet).expect("an answer");
            mark = next;
            text.extend_from_slice(part);
        }
        (mark, String::from_utf8(text).expect("text"), packets.len())
    }

    #[test]
    fn answers_of_any_length() {
        assert_eq!(joined(&Answer::done("")), (Mark::Done, String::new(), 1));
        assert_eq!(
            joined(&Answer::failed("no")),
            (Mark::Failed, "no".into(), 1)
        );
        let long = "é".repeat(PACKET_LIMIT);
        assert_eq!(joined(&Answer::done(long.clone())), (Mark::Done, long, 3));
    }

    #[test]
    fn nonsense_is_no_answer() {
        for packet in [&b""[..], b"MPS", b"MPSR", b"MPSR?", b"XXXX0"] {
            assert_eq!(parse_answer(packet), None);
        }
        assert_eq!(command_packet(&"x".repeat(COMMAND_LIMIT + 1)), None);
    }
}
