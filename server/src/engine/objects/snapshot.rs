//! Variables of a session's images, saved while the session is at rest.
//!
//! Another server loads the images again, which gives variables the content that they had at first. So a session is bound
//! from the moment that something is submitted that may write one: a launch from an image whose kernels may write
//! variables, or anything that names a variable by its address. When the session has then been at rest for a moment, a
//! thread of its own reads those variables and writes down what differs from the first content, and the session is
//! portable again.
//!
//! An address of a variable means something else in the next server. One that the client names is translated
//! ([`Session::place_of`]); one that kernels have left in a variable cannot be, and the session stays bound.

pub mod session;

use crate::engine::base::ordinal::Ordinal;
use mpsshim_model::bonds::Bonds;
use mpsshim_proto::arena;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long a session is at rest before its variables are saved: longer than the pauses between the launches and the copies
/// of one request, short beside the time until a program is asked for something again.
const REST: Duration = Duration::from_millis(2);
/// It is at rest for so many times as long as its last snapshot took, so that a program with many short requests is not held
/// up by them.
const REST_PER_SNAPSHOT: u32 = 8;
/// How soon to look again when another session's variables are being saved.
const BUSY: Duration = Duration::from_micros(200);
/// A word of a variable that is an address so close to a variable is taken for one into the image, of a literal say, bytes.
const NEAR: u64 = 32 << 20;

/// What binds a session only until it has been saved at rest.
pub const SAVED_AT_REST: Bonds =
    Bonds(Bonds::IMAGES.0 | Bonds::VARIABLES.0 | Bonds::CHANGED_GRAPHS.0 | Bonds::TIMES.0);

/// The variables of an image on a device.
type Place = (u64, Ordinal);

/// How a session's description is about its variables.
#[derive(Debug, Default)]
pub struct Saved {
    /// Kernels that may write variables were launched since the last snapshot.
    launched: Cell<bool>,
    /// Variables were named by their addresses since.
    named: Cell<bool>,
    /// All that the client knows were.
    all_named: Cell<bool>,
    /// A graph was launched since: which kernels and addresses it has is not known.
    graphs: bool,
    /// They cannot be saved.
    refused: bool,
    /// Position in the ring, and since when it is there.
    rests: Option<(u64, Instant)>,
    /// How long the last snapshot took.
    took: Duration,
    /// What is described.
    contents: BTreeMap<Place, Vec<u8>>,
}

impl Saved {
    /// What binds the session.
    pub fn bonds(&self) -> Bonds {
        Bonds::default()
            .with(Bonds::IMAGES, self.launched.get() || self.graphs)
            .with(Bonds::VARIABLES, self.named.get())
    }

    /// Something may have been written since the last snapshot, and can be saved.
    #[inline]
    fn is_stale(&self) -> bool {
        let stale = self.launched.get() || self.named.get() || self.graphs;
        stale && !self.refused
    }

    /// Whether no address that is named would say anything new.
    #[inline]
    pub fn all_named(&self) -> bool {
        self.all_named.get()
    }

    /// There are other variables that the client knows.
    pub fn note_known(&self) {
        self.all_named.set(false);
    }

    /// An image is unloaded, and its variables with it.
    pub fn forget(&mut self, image: u64) {
        self.contents.retain(|(of, _), _| *of != image);
    }
}

/// Whether an address is of memory that is at the same place in the next server.
pub fn keeps_its_address(word: u64) -> bool {
    arena::is_device(word) || arena::is_host(word) || arena::is_virtual(word)
}

/// Whether content has a word that is an address of a variable, or so near one that it may be one of the same image.
pub fn has_address(bytes: &[u8], ranges: &[(u64, u64)]) -> bool {
    let is_near = |word: u64| {
        ranges.iter().any(|(start, len)| {
            let first = start.saturating_sub(NEAR);
            (first..start.saturating_add(*len).saturating_add(NEAR)).contains(&word)
        })
    };
    let words = bytes.as_chunks::<8>().0.iter();
    let mut words = words.map(|word| u64::from_le_bytes(*word));
    words.any(|word| !keeps_its_address(word) && is_near(word))
}

/// Names and contents as a record has them: both lengths, then both.
fn encode<'a>(contents: impl Iterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, content) in contents {
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend((content.len() as u32).to_le_bytes());
        bytes.extend(name);
        bytes.extend(content);
    }
    bytes
}

/// What [`encode`] has written.
fn decode(mut bytes: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut contents = Vec::new();
    while !bytes.is_empty() {
        let mut len = || {
            let (len, rest) = bytes.split_first_chunk::<4>()?;
            bytes = rest;
            Some(u32::from_le_bytes(*len) as usize)
        };
        let (name, content) = (len()?, len()?);
        let (name, rest) = bytes.split_at_checked(name)?;
        let (content, rest) = rest.split_at_checked(content)?;
        contents.push((name, content));
        bytes = rest;
    }
    Some(contents)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VARIABLE: u64 = 0x7f12_3400_0000;
    const RANGES: [(u64, u64); 1] = [(VARIABLE, 256)];

    fn has(words: &[u64]) -> bool {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        has_address(&bytes, &RANGES)
    }

    #[test]
    fn an_address_of_a_variable_in_a_variable_is_found() {
        assert!(has(&[VARIABLE]));
        assert!(has(&[5, VARIABLE + 255]));
        // Of a literal beside it, or of a function.
        assert!(has(&[VARIABLE + 4096]) && has(&[VARIABLE - 4096]));
        assert!(!has(&[VARIABLE + (1 << 30), u64::MAX]));
    }

    #[test]
    fn memory_that_keeps_its_address_may_be_named() {
        assert!(!has(&[
            arena::DEVICE_ARENA,
            arena::HOST_ARENA + 8,
            arena::VIRTUAL_ARENA + 4096
        ]));
    }

    #[test]
    fn words_that_are_not_aligned_are_no_addresses() {
        let bytes = [&[0; 4][..], &VARIABLE.to_le_bytes(), &[0; 4]].concat();
        assert!(!has_address(&bytes, &RANGES));
        assert!(!has_address(&VARIABLE.to_le_bytes()[..7], &RANGES));
    }

    #[test]
    fn contents_are_read_as_they_were_written() {
        let contents: [(&[u8], &[u8]); 3] =
            [(b"a\0", &[1, 2, 3, 4]), (b"b\0", &[]), (b"\0", &[7; 300])];
        let bytes = encode(contents.into_iter());
        assert_eq!(decode(&bytes).as_deref(), Some(&contents[..]));
        assert_eq!(decode(&[]), Some(vec![]));
        for len in 1..bytes.len() {
            let whole = decode(&bytes[..len]).is_none_or(|some| some.len() < 3);
            assert!(whole, "{len}");
        }
        assert_eq!(decode(&[255; 64]), None);
    }
}
