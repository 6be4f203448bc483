//! Answers of the daemon to commands, as packets: [`MAGIC_ANSWER`], a [`Mark`] byte, and text.
//!
//! A command is a packet of [`MAGIC_UI`](crate::handshake::MAGIC_UI) or
//! [`MAGIC_UI_3`](crate::handshake::MAGIC_UI_3) and the command line.

/// First bytes of an answer.
pub const MAGIC_ANSWER: [u8; 4] = *b"MPSR";
/// Longest packet in either direction, bytes.
pub const PACKET_LIMIT: usize = 16 * 1024;
/// Bytes before the text.
pub const HEADER: usize = MAGIC_ANSWER.len() + 1;

/// How an answer continues after a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Nothing; the command was done.
    Done,
    /// Nothing; the command failed.
    Failed,
    /// Another packet.
    More,
    /// Another packet; this one belongs to the note.
    Note,
}

impl Mark {
    /// The byte that stands for it.
    pub fn byte(self) -> u8 {
        match self {
            Mark::Done => b'0',
            Mark::Failed => b'1',
            Mark::More => b'+',
            Mark::Note => b'!',
        }
    }

    fn from_byte(byte: u8) -> Option<Mark> {
        [Mark::Done, Mark::Failed, Mark::More, Mark::Note]
            .into_iter()
            .find(|mark| mark.byte() == byte)
    }
}

/// Mark and text of one packet of an answer. `None`: the packet is not part of an answer.
pub fn parse(packet: &[u8]) -> Option<(Mark, &[u8])> {
    let rest = packet.strip_prefix(&MAGIC_ANSWER)?;
    let (&mark, text) = rest.split_first()?;
    Some((Mark::from_byte(mark)?, text))
}
