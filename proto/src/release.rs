//! The release of a `libmpsshim.so`, as a note in the file: readable without loading the library.

use crate::handshake::PROTOCOL_VERSION;

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

/// Bytes before the description.
const HEADER: usize = 12 + OWNER.len();

impl Note {
    /// The note of a library of this version.
    pub const fn of(version: &str) -> Note {
        let bytes = version.as_bytes();
        let mut padded = [0; VERSION_LIMIT];
        let mut at = 0;
        while at < bytes.len() {
            padded[at] = bytes[at];
            at += 1;
        }
        Note {
            owner_len: OWNER.len() as u32,
            len: (size_of::<Note>() - HEADER) as u32,
            kind: 1,
            owner: OWNER,
            protocol: PROTOCOL_VERSION,
            version: padded,
        }
    }
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
        let (head, description) = section.split_at_checked(HEADER)?;
        if !head.ends_with(&OWNER) {
            return None;
        }
        let (protocol, version) = description.split_first_chunk()?;
        let version = version.split(|byte| *byte == 0).next()?;
        Some(Release {
            version: std::str::from_utf8(version).ok()?.to_owned(),
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
        section[12] = b'M';
        assert_eq!(Release::read(&section), None);
    }
}
