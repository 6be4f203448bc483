//! Pieces of managed memory that a client moves between host and device in the order of one of its streams.

pub mod session;

use mpsshim_proto::message::{PIECES_MAX, Piece, Side};

/// A message's pieces, which the client cannot change any more.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// The side that they are copied to: a device, or the host.
    pub to: Side,
    pieces: [Piece; PIECES_MAX],
    count: usize,
}

impl Pieces {
    /// All of them.
    pub fn all(&self) -> &[Piece] {
        &self.pieces[..self.count]
    }

    /// Addresses to and from which a piece is copied.
    pub fn ends(&self, piece: &Piece) -> (u64, u64) {
        match self.to {
            Side::Device => (piece.device, piece.host),
            _ => (piece.host, piece.device),
        }
    }

    /// Bytes of all of them.
    pub fn len(&self) -> u64 {
        let lens = self.all().iter().map(|piece| piece.len);
        lens.fold(0, u64::saturating_add)
    }
}
