//! The releases of `libmpsshim.so` and `mps-server`, as notes in the files: readable without loading or starting them.

use crate::handshake::{PROTOCOL_VERSION, Wire};

/// ELF section of the note. The linker keeps sections of notes that nothing refers to.
pub const SECTION: &str = ".note.mpsshim";
/// Owner of the note, as ELF has it.
const OWNER: [u8; 8] = *b"mpsshim\0";
/// Longest version, bytes.
const VERSION_LIMIT: usize = 28;

/// The note: an ELF note header, the owner, and the description.
#[repr(C)]
pub struct Note {
    owner_len: u32,
    len: u32,
    kind: u32,
    owner: [u8; 8],
    protocol: u32,
    /// Padded with zeros.
    version: [u8; VERSION_LIMIT],
}

/// Type of the note of a library.
const LIBRARY: u32 = 1;
/// Type of the note of a server.
const SERVER: u32 = 2;
/// Wires, and formats of sessions, in the note of a server.
pub const MOST_SPOKEN: usize = 8;

/// Bytes before the description.
const HEADER: usize = 12 + OWNER.len();

impl Note {
    /// The note of a library of this version.
    pub const fn of(version: &str) -> Note {
        Note {
            owner_len: OWNER.len() as u32,
            len: (size_of::<Note>() - HEADER) as u32,
            kind: LIBRARY,
            owner: OWNER,
            protocol: PROTOCOL_VERSION,
            version: padded(version),
        }
    }
}

const fn padded(version: &str) -> [u8; VERSION_LIMIT] {
    let bytes = version.as_bytes();
    let mut padded = [0; VERSION_LIMIT];
    let mut at = 0;
    while at < bytes.len() {
        padded[at] = bytes[at];
        at += 1;
    }
    padded
}

/// The note of a server: an ELF note header, the owner, and the description.
#[repr(C)]
pub struct ServerNote {
    owner_len: u32,
    len: u32,
    kind: u32,
    owner: [u8; 8],
    link: u32,
    oldest_link: u32,
    /// How many of the wires and formats below are filled.
    wires: u32,
    formats: u32,
    /// Protocol version, lower and upper half of the fingerprint.
    wire: [[u32; 3]; MOST_SPOKEN],
    /// Lower and upper half.
    format: [[u32; 2]; MOST_SPOKEN],
    /// Padded with zeros.
    version: [u8; VERSION_LIMIT],
}

impl ServerNote {
    /// The note of a server of this version: the versions of the link to the daemon that it speaks, from the oldest to its
    /// own; the wires of clients that it speaks and the formats of sessions that it restores, its own first. At most
    /// [`MOST_SPOKEN`] of each.
    pub const fn of(
        version: &str,
        (oldest_link, link): (u32, u32),
        wires: &[Wire],
        formats: &[u64],
    ) -> ServerNote {
        const fn halves(number: u64) -> [u32; 2] {
            [number as u32, (number >> 32) as u32]
        }
        let mut note = ServerNote {
            owner_len: OWNER.len() as u32,
            len: (size_of::<ServerNote>() - HEADER) as u32,
            kind: SERVER,
            owner: OWNER,
            link,
            oldest_link,
            wires: wires.len() as u32,
            formats: formats.len() as u32,
            wire: [[0; 3]; MOST_SPOKEN],
            format: [[0; 2]; MOST_SPOKEN],
            version: padded(version),
        };
        let mut at = 0;
        while at < wires.len() {
            let [low, high] = halves(wires[at].fingerprint);
            note.wire[at] = [wires[at].protocol, low, high];
            at += 1;
        }
        at = 0;
        while at < formats.len() {
            note.format[at] = halves(formats[at]);
            at += 1;
        }
        note
    }
}

/// The release of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerRelease {
    /// Such as `0.1.0`.
    pub version: String,
    /// Version of its link to the daemon.
    pub link: u32,
    /// The oldest version of the link that it speaks.
    pub oldest_link: u32,
    /// The wires of clients that it speaks, its own first.
    pub wires: Vec<Wire>,
    /// The formats of sessions that it restores, its own first.
    pub formats: Vec<u64>,
}

impl ServerRelease {
    /// Reads the content of the section; `None`: it has another form.
    pub fn read(section: &[u8]) -> Option<ServerRelease> {
        let description = description(section, SERVER)?;
        let (words, version) = description.split_at_checked(4 * (4 + 5 * MOST_SPOKEN))?;
        let words: Vec<u32> = words
            .as_chunks()
            .0
            .iter()
            .map(|word| u32::from_le_bytes(*word))
            .collect();
        let whole = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let (wires, formats) = words[4..].split_at(3 * MOST_SPOKEN);
        let wires = wires
            .as_chunks()
            .0
            .iter()
            .map(|[protocol, low, high]| Wire {
                protocol: *protocol,
                fingerprint: whole(*low, *high),
            });
        let formats = formats.as_chunks().0.iter();
        Some(ServerRelease {
            version: text(version)?,
            link: words[0],
            oldest_link: words[1],
            wires: wires.take(words[2] as usize).collect(),
            formats: formats
                .take(words[3] as usize)
                .map(|[low, high]| whole(*low, *high))
                .collect(),
        })
    }
}

/// The description of the note in a section, if it is of this type.
fn description(section: &[u8], kind: u32) -> Option<&[u8]> {
    let (head, description) = section.split_at_checked(HEADER)?;
    let is_it = head.ends_with(&OWNER) && head.get(8..12)? == kind.to_le_bytes();
    is_it.then_some(description)
}

/// A version padded with zeros.
fn text(version: &[u8]) -> Option<String> {
    let version = version.split(|byte| *byte == 0).next()?;
    std::str::from_utf8(version).ok().map(str::to_owned)
}

/// The release of a library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// Such as `0.1.0`.
    pub version: String,
    /// Its [`PROTOCOL_VERSION`].
    pub protocol: u32,
}

impl Release {
    /// Reads the content of the section; `None`: it has another form.
    pub fn read(section: &[u8]) -> Option<Release> {
        let (protocol, version) = description(section, LIBRARY)?.split_first_chunk()?;
        Some(Release {
            version: text(version)?,
            protocol: u32::from_le_bytes(*protocol),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_of_another_form_has_no_release() {
        let mut section = vec![8, 0, 0, 0, 32, 0, 0, 0, 1, 0, 0, 0];
        section.extend(OWNER);
        section.extend([5, 0, 0, 0]);
        section.extend(b"1.2.3\0\0\0");
        let release = Release::read(&section).expect("a release");
        assert_eq!((release.version.as_str(), release.protocol), ("1.2.3", 5));
        assert_eq!(Release::read(&section[..22]), None);
        assert_eq!(Release::read(b""), None);
        assert_eq!(ServerRelease::read(&section), None);
        section[12] = b'M';
        assert_eq!(Release::read(&section), None);
    }

    #[test]
    fn a_server_s_note_is_read_as_it_was_written() {
        const WIRES: [Wire; 2] = [
            Wire {
                protocol: 8,
                fingerprint: 0x0123_4567_89ab_cdef,
            },
            Wire {
                protocol: 7,
                fingerprint: u64::MAX - 1,
            },
        ];
        let note = ServerNote::of("1.2.3", (19, 21), &WIRES, &[5 << 40, 6]);
        // SAFETY: the note consists of words and bytes, without padding.
        let section = unsafe {
            std::slice::from_raw_parts((&raw const note).cast::<u8>(), size_of::<ServerNote>())
        };
        let read = ServerRelease {
            version: "1.2.3".into(),
            link: 21,
            oldest_link: 19,
            wires: WIRES.into(),
            formats: vec![5 << 40, 6],
        };
        assert_eq!(ServerRelease::read(section), Some(read));
        assert_eq!(Release::read(section), None);
        assert_eq!(ServerRelease::read(&section[..80]), None);
    }
}
