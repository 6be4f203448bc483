//! Managed memory of a session that is moved.

use super::Pieces;
use crate::engine::base::call::Incoming;
use crate::engine::base::call_error::CallError;
use crate::engine::gpu::copy_kernel::{MoveKernel, Moves};
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::{CUDA_ERROR_INVALID_VALUE, CUresult};
use mpsshim_proto::arena;
use mpsshim_proto::message::{ManagedMove, NO_FLAG, PIECES_MAX, Piece, Side};
use zerocopy::{FromZeros, IntoBytes};

/// Copies the pieces out of a message.
///
/// # Errors
/// A violation if there are too many, if they do not fit the message, or if there is no such side.
pub fn pieces(
    session: &Session,
    message: Incoming<'_>,
    body: &ManagedMove,
) -> Result<Pieces, CallError> {
    let violation = |why: String| Err(CallError::Violation(why));
    let to = match Side::from_u8(body.to as u8) {
        Some(side @ (Side::Device | Side::Host)) if body.to <= u32::from(u8::MAX) => side,
        _ => return violation(format!("managed memory moved to side {}", body.to)),
    };
    let count = body.pieces as usize;
    if count > PIECES_MAX {
        return violation(format!("{count} pieces of managed memory"));
    }
    let mut pieces = [Piece::new_zeroed(); PIECES_MAX];
    if !message.copy_out(size_of::<ManagedMove>(), pieces[..count].as_mut_bytes()) {
        return violation("pieces of managed memory do not fit the message".into());
    }
    if body.slot != NO_FLAG {
        session.shared.segment.check_slot(body.slot)?;
    }
    Ok(Pieces { to, pieces, count })
}

/// The kernel that moves the pieces in the stream at `index`, and its parameters; `None` if copies of the driver must
/// do it. The device's context must be current.
///
/// The kernel copies between managed and pinned memory only, which the server has mapped for reading and writing;
/// elsewhere, as at a registered file that devices may only read, it could fault, and all clients would lose the
/// context. Beside blocks that last long it would wait for room, and a thread of
/// the client that waits for its flag with it.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE` for memory that is not the session's.
pub fn move_kernel(
    session: &Session,
    shared: &Shared,
    index: usize,
    body: &ManagedMove,
    pieces: &Pieces,
) -> Result<Option<(MoveKernel, Moves)>, CUresult> {
    let stream = session.objects.streams.at(index)?;
    let mut moves = Moves::default();
    let gpu = &shared.gpu;
    let mut fits = !stream.capturing
        && gpu.devices.len() == 1
        && gpu.flags.host_is_device()
        && !shared.roster.fairness.has_long_blocks(stream.device);
    for (piece, slot) in pieces.all().iter().zip(&mut moves.pieces) {
        let device = session.lasting.place_of(piece.device);
        session.check_device(device, piece.len)?;
        session.check_reachable(piece.host, piece.len)?;
        let (to, from) = pieces.ends(&Piece { device, ..*piece });
        session.check_writable(to)?;
        let bits = device | piece.host | piece.len;
        fits &= arena::is_managed(device)
            && arena::is_host(piece.host)
            && bits.is_multiple_of(Moves::UNIT);
        *slot = [to, from, piece.len];
    }
    if body.slot != NO_FLAG {
        let address = session.shared.segment.flag_address(body.slot);
        moves.flag = address.map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        moves.value = body.value;
    }
    let fits = fits && pieces.len() <= Moves::MOST;
    let kernel = fits
        .then(|| gpu.devices[stream.device].move_kernel())
        .flatten();
    Ok(kernel.map(|kernel| (kernel, moves)))
}

/// Counts pieces that were submitted to the stream at `index`, as one operation.
pub fn note_moved(session: &mut Session, index: usize, pieces: &Pieces) {
    if let Ok(stream) = session.objects.streams.at_mut(index) {
        stream.moves += 1;
    }
    count_moved(session, pieces);
    session.flow.counts.copies += pieces.all().len() as u64;
}

/// Counts pieces as managed memory that was moved.
pub fn count_moved(session: &mut Session, pieces: &Pieces) {
    for piece in pieces.all() {
        session.flow.counts.managed.add(pieces.to, piece.len);
    }
}
