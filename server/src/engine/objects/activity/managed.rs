//! Managed memory of a client, for monitoring: the copies that the server makes, and the faults that the client counts.

use mpsshim_model::limits::Moved;
use mpsshim_proto::message::Side;
use mpsshim_proto::segment::FaultCounts;
use std::sync::atomic::{AtomicU64, Ordering};

/// Copies of managed memory, by direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// To the host.
    pub to_host: Moved,
    /// To a device.
    pub to_device: Moved,
}

impl Moves {
    /// Counts a copy to this side.
    pub fn add(&mut self, to: Side, bytes: u64) {
        match to {
            Side::Device => self.to_device.add(bytes),
            _ => self.to_host.add(bytes),
        }
    }
}

/// The numbers as other threads see them.
#[derive(Debug, Default)]
pub struct Published {
    to_host: Direction,
    to_device: Direction,
    /// Written by threads that read the client's counts.
    claimed: Claimed,
}

#[derive(Debug, Default)]
struct Direction {
    bytes: AtomicU64,
    copies: AtomicU64,
}

impl Direction {
    fn store(&self, moved: &Moved) {
        self.bytes.store(moved.bytes, Ordering::Relaxed);
        self.copies.store(moved.copies, Ordering::Relaxed);
    }

    fn load(&self) -> Moved {
        Moved {
            bytes: self.bytes.load(Ordering::Relaxed),
            copies: self.copies.load(Ordering::Relaxed),
        }
    }
}

/// The greatest numbers that the client has written. It may write any, and smaller ones later.
#[derive(Debug, Default)]
struct Claimed {
    faults: AtomicU64,
    waited_ns: AtomicU64,
}

impl Claimed {
    /// Faults, and nanoseconds that threads waited for them: not less than before.
    fn take(&self, counts: &FaultCounts) -> (u64, u64) {
        let greatest = |known: &AtomicU64, claim: &AtomicU64| {
            let claim = claim.load(Ordering::Relaxed);
            known.fetch_max(claim, Ordering::Relaxed).max(claim)
        };
        (
            greatest(&self.faults, &counts.faults),
            greatest(&self.waited_ns, &counts.waited_ns),
        )
    }
}

impl Published {
    /// Publishes the copies. Called by the thread that serves the session.
    pub fn store(&self, moves: &Moves) {
        self.to_host.store(&moves.to_host);
        self.to_device.store(&moves.to_device);
    }

    /// The copies, as last published.
    pub fn load(&self) -> Moves {
        Moves {
            to_host: self.to_host.load(),
            to_device: self.to_device.load(),
        }
    }

    /// Faults, and nanoseconds that threads waited for them, as the client counts them, but not less than before.
    pub fn take(&self, counts: &FaultCounts) -> (u64, u64) {
        self.claimed.take(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_counted_by_their_direction() {
        let mut moves = Moves::default();
        for (to, bytes) in [
            (Side::Device, 10),
            (Side::Host, 3),
            (Side::Device, u64::MAX),
        ] {
            moves.add(to, bytes);
        }
        let expected = |bytes, copies| Moved { bytes, copies };
        assert_eq!(moves.to_host, expected(3, 1));
        assert_eq!(moves.to_device, expected(u64::MAX, 2));
        let published = Published::default();
        published.store(&moves);
        assert_eq!(published.load(), moves);
    }

    #[test]
    fn numbers_of_the_client_never_shrink() {
        let (claimed, counts) = (Claimed::default(), FaultCounts::default());
        let claims = |faults, waited| {
            counts.faults.store(faults, Ordering::Relaxed);
            counts.waited_ns.store(waited, Ordering::Relaxed);
            claimed.take(&counts)
        };
        assert_eq!(claims(5, 100), (5, 100));
        assert_eq!(claims(2, u64::MAX), (5, u64::MAX));
        assert_eq!(claims(6, 0), (6, u64::MAX));
    }
}
