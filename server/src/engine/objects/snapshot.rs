//! Variables of a session's images, saved while the session is at rest.
//!
//! The next server loads the images again, so that variables have their initial content. A session is therefore bound
//! to its context as soon as work is submitted that may write a variable: a launch from an image whose kernels may
//! write variables, or an operation on a variable by its address. When the session has then been at rest for a short
//! while ([`Saved::rest`]), a dedicated thread reads those variables and saves their differences from the initial content,
//! and the session is portable again.
//!
//! In the next server, variables may have other addresses. An address that the client passes is translated
//! ([`crate::engine::session::lasting::Lasting::place_of`]); an address that kernels have stored in a variable cannot
//! be, and the session stays bound.

pub mod session;

use crate::engine::base::ordinal::Ordinal;
use mpsshim_model::bonds::Bonds;
use mpsshim_proto::arena;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long a session must be at rest before its variables are saved, while its snapshots have taken a small part of the
/// time: a program that has its results may be at rest for long, and is bound until then.
const SHORT_REST: Duration = Duration::from_micros(200);
/// Snapshots after a short rest may take 1/`PART` of the time, so that pauses between the launches and copies of one request
/// do not slow a program down; and this much of it in a row.
const PART: u32 = 32;
const IN_A_ROW: Duration = Duration::from_millis(1);
/// How long a session must be at rest otherwise: longer than such pauses, short compared with the time between requests to
/// a program.
const REST: Duration = Duration::from_millis(2);
/// Then, the session must also be at rest for this multiple of the time that its snapshots take, so that they do not slow down
/// a program that serves many short requests.
const REST_PER_SNAPSHOT: u32 = 8;
/// Longest rest before a snapshot, whatever it takes: a session that is idle for longer is portable.
const LONGEST_REST: Duration = Duration::from_millis(100);
/// How long a session must be at rest before a snapshot if its client has not waited for work that may be executed again. After
/// the snapshot it cannot be, until the client has waited.
const UNAWAITED_REST: Duration = Duration::from_secs(1);
/// A snapshot that takes longer than the one before counts as twice as long as that one, and at least as this: a single
/// one may have waited for a lock of the driver, for example while another client loaded an image.
const SHORT: Duration = Duration::from_micros(250);
/// Poll interval while another session's variables are being saved.
const BUSY: Duration = Duration::from_micros(200);
/// A word within this many bytes of a variable is treated as an address in its image (of a literal, for example).
const NEAR: u64 = 32 << 20;

/// An image handle and a device, which together identify a set of variables.
type Place = (u64, Ordinal);

/// Whether the session's description covers its variables.
#[derive(Debug, Default)]
pub struct Saved {
    /// Kernels that may write variables were launched since the last snapshot.
    launched: Cell<bool>,
    /// Whether variables were used by address since the last snapshot.
    named: Cell<bool>,
    /// Whether all variables that the client knows were used by address since the last snapshot.
    all_named: Cell<bool>,
    /// Whether a graph was launched since the last snapshot. Its kernels and addresses are not known here.
    graphs: bool,
    /// Whether saving failed; it is not tried again.
    refused: bool,
    /// Position in the ring, and since when it has been there.
    rests: Option<(u64, Instant)>,
    /// Duration of the recent snapshots.
    took: Duration,
    /// Part of [`IN_A_ROW`] that snapshots had used up when the last one ended.
    spent: Duration,
    /// When the last snapshot ended.
    ended: Option<Instant>,
    /// The content saved in the session's description.
    contents: BTreeMap<Place, Described>,
}

/// Saved contents of an image's variables.
#[derive(Debug)]
pub enum Described {
    /// In the description.
    Here(Contents),
    /// In a file.
    File {
        /// SHA-256 of the contents.
        hash: [u8; 32],
        /// Their bytes, as [`bytes_of`].
        bytes: usize,
        /// Of the file.
        generation: u32,
    },
}

/// State of a record of contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum VariablesState<C = Contents> {
    /// The contents.
    Here(C),
    /// They are in a file, which the keeper holds.
    File {
        /// Of the file.
        generation: u32,
        /// Bytes of the file.
        len: u64,
    },
}

impl Described {
    /// Contents in the description, or in a file of this generation.
    fn of(contents: Contents, generation: Option<u32>) -> Described {
        match generation {
            None => Described::Here(contents),
            Some(generation) => Described::File {
                hash: hash_of(&contents),
                bytes: bytes_of(&contents),
                generation,
            },
        }
    }

    fn is(&self, contents: &Contents) -> bool {
        match self {
            Described::Here(saved) => saved == contents,
            Described::File { hash, bytes, .. } => {
                *bytes == bytes_of(contents) && *hash == hash_of(contents)
            }
        }
    }

    fn generation(&self) -> Option<u32> {
        match self {
            Described::Here(_) => None,
            Described::File { generation, .. } => Some(*generation),
        }
    }
}

fn hash_of(contents: &Contents) -> [u8; 32] {
    let mut hash = Sha256::new();
    for part in contents.iter().flat_map(|(name, content)| [name, content]) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

impl Saved {
    /// Returns the bonds by which unsaved variables tie the session to its context.
    pub fn bonds(&self) -> Bonds {
        Bonds::default()
            .with(Bonds::IMAGES, self.launched.get() || self.graphs)
            .with(Bonds::VARIABLES, self.named.get())
    }

    /// Whether variables may have been written since the last snapshot and can be saved.
    #[inline]
    fn is_stale(&self) -> bool {
        let stale = self.launched.get() || self.named.get() || self.graphs;
        stale && !self.refused
    }

    /// Notes the duration of a snapshot that ends now.
    fn note_time(&mut self, time: Duration, now: Instant) {
        self.spent = (self.spent_by(now) + time).min(IN_A_ROW);
        self.ended = Some(now);
        self.took = time.min((2 * self.took).max(SHORT));
    }

    /// Part of [`IN_A_ROW`] that is used up now: 1/[`PART`] of the time since the last snapshot is available again.
    fn spent_by(&self, now: Instant) -> Duration {
        let since = self.ended.map(|at| now.saturating_duration_since(at));
        self.spent.saturating_sub(since.unwrap_or_default() / PART)
    }

    /// For how long the session must be at rest before a snapshot.
    fn rest(&self, now: Instant) -> Duration {
        if self.spent_by(now) + self.took <= IN_A_ROW {
            return SHORT_REST;
        }
        (self.took * REST_PER_SNAPSHOT).clamp(REST, LONGEST_REST)
    }

    /// Whether all known variables are marked as used by address, so that further uses need not be recorded.
    #[inline]
    pub fn all_named(&self) -> bool {
        self.all_named.get()
    }

    /// Records that the client has learnt the address of another variable.
    pub fn note_known(&self) {
        self.all_named.set(false);
    }

    /// Takes the saved contents of images that are being unloaded.
    pub fn take_contents(&mut self, is_of_it: impl Fn(u64) -> bool) -> Vec<(Place, Described)> {
        let all = std::mem::take(&mut self.contents).into_iter();
        let (gone, left): (Vec<_>, Vec<_>) = all.partition(|((image, _), _)| is_of_it(*image));
        self.contents = left.into_iter().collect();
        gone
    }

    /// Bytes of the contents of other places: those in the description, and those in files.
    fn others(&self, place: Place) -> (usize, usize) {
        let others = self.contents.iter().filter(|(of, _)| **of != place);
        others.fold((0, 0), |(here, files), (_, one)| match one {
            Described::Here(contents) => (here + bytes_of(contents), files),
            Described::File { bytes, .. } => (here, files + bytes),
        })
    }
}

/// Whether a word is an address of memory that is mapped at the same address in the next server.
pub fn keeps_its_address(word: u64) -> bool {
    arena::is_device(word) || arena::is_host(word) || arena::is_virtual(word)
}

/// The addresses of variables, and those within [`NEAR`] bytes of one.
#[derive(Debug, Default)]
pub struct Neighbourhood(Vec<Range<u64>>);

impl Neighbourhood {
    /// That of variables with these first addresses and bytes.
    pub fn of(mut variables: Vec<(u64, u64)>) -> Neighbourhood {
        variables.sort_unstable();
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for (start, len) in variables {
            let first = start.saturating_sub(NEAR);
            let end = start.saturating_add(len).saturating_add(NEAR);
            match ranges.last_mut() {
                Some(last) if first <= last.end => last.end = last.end.max(end),
                _ => ranges.push(first..end),
            }
        }
        Neighbourhood(ranges)
    }

    /// Whether content contains one of these addresses.
    pub fn has_address(&self, bytes: &[u8]) -> bool {
        let is_near = |word: u64| self.0.iter().any(|range| range.contains(&word));
        let words = bytes.as_chunks::<8>().0.iter();
        let mut words = words.map(|word| u64::from_le_bytes(*word));
        words.any(|word| is_near(word) && !keeps_its_address(word))
    }
}

/// Contents of variables that differ from their first content: name, NUL included, and bytes.
pub type Contents = Vec<(Vec<u8>, Vec<u8>)>;

/// Bytes of contents in a description.
pub fn bytes_of(contents: &Contents) -> usize {
    let bytes = contents
        .iter()
        .map(|(name, content)| name.len() + content.len());
    bytes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Snapshots that take this long, one after the other. Returns the rest before the next one.
    fn take(saved: &mut Saved, count: u32, time: Duration, now: Instant) -> Duration {
        for _ in 0..count {
            saved.note_time(time, now);
        }
        saved.rest(now)
    }

    #[test]
    fn one_slow_snapshot_does_not_keep_a_session_from_the_next() {
        let (mut saved, now) = (Saved::default(), Instant::now());
        assert_eq!(saved.rest(now), SHORT_REST);
        assert_eq!(take(&mut saved, 1, 100 * MS, now), REST);
        // Snapshots that always take long are made after a longer rest.
        assert_eq!(take(&mut saved, 10, 5 * MS, now), 40 * MS);
        assert_eq!(take(&mut saved, 10, 500 * MS, now), LONGEST_REST);
        assert_eq!(take(&mut saved, 1, MS / 10, now), REST);
        assert_eq!(saved.rest(now + IN_A_ROW * PART), SHORT_REST);
    }

    #[test]
    fn snapshots_after_short_rests_take_a_small_part_of_the_time() {
        let (mut saved, mut now) = (Saved::default(), Instant::now());
        let (begin, mut taken) = (now, Duration::ZERO);
        while now - begin < 10_000 * MS {
            now += saved.rest(now);
            if saved.rest(now) == SHORT_REST {
                now += MS / 10;
                saved.note_time(MS / 10, now);
                taken += MS / 10;
            }
        }
        assert!(taken > IN_A_ROW * 10, "{taken:?}");
        assert!(taken <= IN_A_ROW + (now - begin) / PART, "{taken:?}");
    }

    const VARIABLE: u64 = 0x7f12_3400_0000;
    const RANGES: [(u64, u64); 1] = [(VARIABLE, 256)];

    fn has(words: &[u64]) -> bool {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Neighbourhood::of(RANGES.to_vec()).has_address(&bytes)
    }

    #[test]
    fn an_address_of_a_variable_in_a_variable_is_found() {
        assert!(has(&[VARIABLE]));
        assert!(has(&[5, VARIABLE + 255]));
        // The address of a literal near the variable, or of a function.
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
        let near = Neighbourhood::of(RANGES.to_vec());
        assert!(!near.has_address(&bytes));
        assert!(!near.has_address(&VARIABLE.to_le_bytes()[..7]));
    }

    #[test]
    fn neighbours_have_one_neighbourhood() {
        let near = Neighbourhood::of(vec![(4 * NEAR, 8), (0, 4), (NEAR, 4), (u64::MAX - 8, 8)]);
        let ends = near.0.iter().map(|range| (range.start, range.end));
        let expected = [
            (0, 2 * NEAR + 4),
            (3 * NEAR, 5 * NEAR + 8),
            (u64::MAX - 8 - NEAR, u64::MAX),
        ];
        assert_eq!(ends.collect::<Vec<_>>(), expected);
        assert!(near.has_address(&(2 * NEAR).to_le_bytes()));
        assert!(!near.has_address(&(2 * NEAR + 4).to_le_bytes()));
        assert!(!Neighbourhood::default().has_address(&[0; 64]));
    }
}
