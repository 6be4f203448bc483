//! Copies and memsets. All device ranges are checked to be the session's own.

use crate::engine::base::call::Call;
use crate::engine::base::call_error::CallError;
use crate::engine::base::ordinal::Ordinal;
use crate::engine::calls::sharing::{copy_between_devices, copy_elsewhere, device_at};
use crate::engine::calls::stream;
use crate::engine::calls::stream::mark_failed;
use crate::engine::gpu::copy_kernel::{CopyKernel, LARGE};
use crate::engine::objects::levels::Level;
use crate::engine::objects::moves::Pieces;
use crate::engine::objects::moves::session::{count_moved, move_kernel, note_moved, pieces};
use crate::engine::objects::pace::Runs;
use crate::engine::objects::pace::session::prepare_work;
use crate::engine::session::Session;
use crate::engine::threads::shared::Shared;
use mpsshim_api::cuda::*;
use mpsshim_proto::arena;
use mpsshim_proto::message::{
    Copy, CopyInline, INLINE_COPY_MAX, ManagedMove, Mark, Memset, NO_FLAG, SIDES_UNNAMED, Side,
};

/// Address of a captured memset whose memory is not the client's. The driver accepts any address in a graph, but
/// refuses to instantiate the graph if the address is no memory of the process. The client's own address cannot be
/// passed on, because the memory of all clients belongs to the process.
const NOBODYS: u64 = 16;

/// The side of a copy that lies in memory.
pub struct Rows {
    /// Where the box begins: bytes, rows, slices.
    pub at: [u64; 3],
    /// Bytes from row to row; 0: up to the end of the box.
    pub pitch: u64,
    /// Rows from slice to slice; 0: up to the end of the box.
    pub rows: u64,
}

impl Rows {
    /// Bytes from the side's address to the end of a box of `size`, as the driver computes them.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE`: rows or slices overlap, which the driver refuses too, or the length overflows.
    pub fn extent(&self, size: [u64; 3]) -> Result<u64, CUresult> {
        if size.contains(&0) {
            return Ok(0);
        }
        let [x, y, z] = self.at;
        let extent = || {
            let (width, height) = (x.checked_add(size[0])?, y.checked_add(size[1])?);
            let or = |given: u64, least: u64| if given == 0 { least } else { given };
            let (pitch, rows) = (or(self.pitch, width), or(self.rows, height));
            if pitch < width || rows < height {
                return None;
            }
            let slices = match z.checked_add(size[2])? - 1 {
                0 => 0,
                slices => rows.checked_mul(slices)?,
            };
            let last = slices.checked_add(height - 1)?;
            last.checked_mul(pitch)?.checked_add(width)
        };
        extent().ok_or(CUDA_ERROR_INVALID_VALUE)
    }
}

/// Bytes from the first to the last that a memset of `height` rows writes.
///
/// # Errors
/// `CUDA_ERROR_INVALID_VALUE`: rows overlap, which the driver refuses too, or the length overflows.
pub fn memset_extent(element: u32, width: u64, height: u64, pitch: u64) -> Result<u64, CUresult> {
    let extent = || {
        let row = width.checked_mul(element.into())?;
        if height == 1 {
            return Some(row);
        }
        let gaps = pitch.checked_mul(height.checked_sub(1)?)?;
        gaps.checked_add(row).filter(|_| row <= pitch)
    };
    extent().ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// Copies the data in a message to a device. The driver takes the data before the call returns.
pub fn copy_inline(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, CopyInline>,
) -> Result<(), CallError> {
    let Call { body, message } = call;
    if body.len > INLINE_COPY_MAX as u64 {
        return Err(CallError::Violation(format!(
            "inline copy of {} bytes",
            body.len
        )));
    }
    let data = message.in_place(size_of::<CopyInline>(), body.len as usize)?;
    let to = session.lasting.place_of(body.to);
    session.check_device(to, body.len)?;
    session.check_writable(to)?;
    let (index, stream) = prepare_work(session, &shared.gpu, body.stream, Runs::Nothing)?;
    let copy = |stream| {
        let len = body.len as usize;
        shared
            .gpu
            .driver
            .memcpy_htod_async(to, data as u64, len, stream)
    };
    if let Some(device) = elsewhere(session, shared, index, body.to)? {
        copy_elsewhere(session, shared, (device, index), copy)?;
    } else {
        copy(stream)?;
    }
    session.flow.counts.copies += 1;
    session.submitted(&shared.gpu, index, 1)
}

/// A copy between memories that the server can access.
pub fn copy(session: &mut Session, shared: &Shared, body: Copy) -> Result<(), CallError> {
    let side = |number: u32| {
        Side::from_u8(number as u8)
            .ok_or_else(|| CallError::Violation(format!("copy side {number}")))
    };
    let (to_side, from_side) = (side(body.sides & 0xff)?, side(body.sides >> 8 & 0xff)?);
    let to = resolve(session, to_side, body.to, body.len)?;
    session.check_writable(to)?;
    let from = resolve(session, from_side, body.from, body.len)?;
    let (index, stream) = prepare_work(session, &shared.gpu, body.stream, Runs::Nothing)?;
    let (driver, len) = (&shared.gpu.driver, body.len as usize);
    let is_unnamed = body.sides & SIDES_UNNAMED != 0;
    match (to_side, from_side) {
        _ if is_unnamed && session.objects.streams.at(index)?.capturing => {
            driver.graph.memcpy_async(to, from, len, stream)?
        }
        (Side::Device, Side::Device) => {
            match copy_between_devices(session, shared, (to, from), body.len, stream) {
                Some(done) => done?,
                None => driver.memcpy_dtod_async(to, from, len, stream)?,
            }
        }
        (Side::Device, _) => {
            let copy = |stream| driver.memcpy_htod_async(to, from, len, stream);
            copy_with_host(
                session,
                shared,
                (index, stream),
                to,
                (to, from, body.len),
                copy,
            )?;
        }
        (_, Side::Device) => {
            let copy = |stream| driver.memcpy_dtoh_async(to, from, len, stream);
            copy_with_host(
                session,
                shared,
                (index, stream),
                from,
                (to, from, body.len),
                copy,
            )?;
        }
        _ if session.objects.streams.at(index)?.capturing => {
            driver.graph.memcpy_async(to, from, len, stream)?
        }
        _ => {
            return Err(CallError::Violation(
                "a copy from host to host needs no server".into(),
            ));
        }
    }
    session.flow.counts.copies += 1;
    session.submitted(&shared.gpu, index, 1)
}

/// Moves pieces of managed memory, and writes a flag behind them.
pub fn managed_move(
    session: &mut Session,
    shared: &Shared,
    call: Call<'_, ManagedMove>,
) -> Result<(), CallError> {
    let Call { body, message } = call;
    let pieces = pieces(session, message, &body)?;
    let moved = move_pieces(session, shared, &body, &pieces);
    if matches!(
        moved,
        Err(CallError::Full | CallError::Alone | CallError::Violation(_))
    ) || body.slot == NO_FLAG
    {
        return moved.map(drop);
    }
    let mark = Mark {
        stream: body.stream,
        slot: body.slot,
        value: body.value,
    };
    match moved {
        // If there is no room for the mark, the message is executed again: the same copies in the same order.
        Ok(false) => stream::mark(session, shared, mark),
        Ok(true) => Ok(()),
        Err(error) => mark_failed(session, &shared.gpu, &mark, error),
    }
}

/// Returns whether the flag is written too.
fn move_pieces(
    session: &mut Session,
    shared: &Shared,
    body: &ManagedMove,
    pieces: &Pieces,
) -> Result<bool, CallError> {
    let (index, stream) = prepare_work(session, &shared.gpu, body.stream, Runs::Nothing)?;
    if let Some((kernel, moves)) = move_kernel(session, shared, index, body, pieces)? {
        kernel.launch(&shared.gpu.driver, stream, moves)?;
        note_moved(session, index, pieces);
        session.submitted(&shared.gpu, index, 1)?;
        return Ok(true);
    }
    let other = match pieces.to {
        Side::Device => Side::Host,
        _ => Side::Device,
    };
    for piece in pieces.all() {
        let (to, from) = pieces.ends(piece);
        let body = Copy {
            to,
            from,
            len: piece.len,
            stream: body.stream,
            sides: pieces.to as u32 | (other as u32) << 8,
            pad: 0,
        };
        copy(session, shared, body)?;
    }
    count_moved(session, pieces);
    Ok(false)
}

/// Copies between registered host memory and memory at `address` on a device, which may differ from the stream's
/// device: by a kernel of the server's where the copy would wait behind large copies of others, otherwise by `copy`.
///
/// The kernel copies memory of the device's arena only, which the server has mapped for reading and writing. For other
/// addresses the driver checks more than the server: virtual memory may be mapped for another device or for reading
/// only, and memory of a graph's node exists after a launch only. There a kernel would fault, and all clients would
/// lose the context. After copies to constants, the driver also invalidates caches.
fn copy_with_host(
    session: &mut Session,
    shared: &Shared,
    (index, stream): (usize, CUstream),
    address: u64,
    (to, from, len): (u64, u64, u64),
    copy: impl FnOnce(CUstream) -> Result<(), CUresult>,
) -> Result<(), CUresult> {
    let other = elsewhere(session, shared, index, address)?;
    let stream_of = session.objects.streams.at(index)?;
    let (home, capturing) = (stream_of.device, stream_of.capturing);
    let device = &shared.gpu.devices[other.unwrap_or(home)];
    if len >= LARGE && !capturing {
        device.note_large_copy(session.shared.info.session, len);
    }
    if let Some(other) = other {
        return copy_elsewhere(session, shared, (other, index), copy);
    }
    let overtakes = (1..=CopyKernel::most(to, from, len)).contains(&len)
        && !capturing
        && device.copies_beside(session.shared.info.session)
        && session.shared.standing.level(home) == Level::First
        && !shared.roster.fairness.has_long_blocks(home)
        && arena::is_device(address)
        && shared.gpu.flags.host_is_device();
    match overtakes.then(|| device.copy_kernel()).flatten() {
        Some(kernel) => kernel.launch(&shared.gpu.driver, stream, (to, from, len)),
        None => copy(stream),
    }
}

/// The device of memory at `address`, if it is not the stream's.
fn elsewhere(
    session: &Session,
    shared: &Shared,
    index: usize,
    address: u64,
) -> Result<Option<Ordinal>, CUresult> {
    if shared.gpu.devices.len() == 1 {
        return Ok(None);
    }
    let home = session.objects.streams.at(index)?.device;
    let device = device_at(session, shared, address);
    Ok(device.filter(|device| *device != home))
}

fn resolve(session: &Session, side: Side, address: u64, len: u64) -> Result<u64, CallError> {
    match side {
        Side::Device => {
            let place = session.lasting.place_of(address);
            session.check_device(place, len)?;
            return Ok(place);
        }
        Side::Host => session.check_reachable(address, len)?,
        Side::Staging => return session.shared.segment.staging_address(address, len),
    }
    Ok(address)
}

/// `cuMemsetD8/16/32Async`, `cuMemsetD2D8/16/32Async`.
pub fn memset(session: &mut Session, shared: &Shared, body: Memset) -> Result<(), CallError> {
    let flat = body.height == 1;
    let len = memset_extent(body.element, body.width, body.height, body.pitch)?;
    let place = session.lasting.place_of(body.to);
    let owned = session
        .check_device(place, len)
        .and_then(|()| session.check_writable(place));
    let (index, stream) = prepare_work(session, &shared.gpu, body.stream, Runs::Nothing)?;
    let to = match owned {
        Ok(()) => place,
        Err(_) if session.objects.streams.at(index)?.capturing => NOBODYS,
        Err(status) => return Err(status.into()),
    };
    let (driver, value) = (&shared.gpu.driver, body.value);
    let (width, height, pitch) = (
        body.width as usize,
        body.height as usize,
        body.pitch as usize,
    );
    match (body.element, flat) {
        (1, true) => driver.memset_d8_async(to, value as u8, width, stream)?,
        (2, true) => driver.memset_d16_async(to, value as u16, width, stream)?,
        (4, true) => driver.memset_d32_async(to, value, width, stream)?,
        (1, false) => driver.memset_d2d8_async(to, pitch, value as u8, width, height, stream)?,
        (2, false) => driver.memset_d2d16_async(to, pitch, value as u16, width, height, stream)?,
        (4, false) => driver.memset_d2d32_async(to, pitch, value, width, height, stream)?,
        _ => {
            return Err(CallError::Violation(format!(
                "memset of {}-byte elements",
                body.element
            )));
        }
    }
    session.flow.counts.copies += 1;
    session.submitted(&shared.gpu, index, 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::{
        FAULT, Fixture, Function, counts, obeys, others, records, sealed,
    };
    use mpsshim_proto::message::memory::FileRegister;
    use mpsshim_proto::message::{Op, PIECES_MAX, Piece};
    use mpsshim_proto::segment::STAGING_LEN;
    use zerocopy::IntoBytes;

    fn extent(at: [u64; 3], pitch: u64, rows: u64, size: [u64; 3]) -> Result<u64, CUresult> {
        Rows { at, pitch, rows }.extent(size)
    }

    #[test]
    fn a_box_ends_with_the_last_byte_of_its_last_row() {
        // Rows of 10 bytes at 16 bytes, 4 rows a slice.
        assert_eq!(extent([0; 3], 16, 4, [10, 1, 1]), Ok(10));
        assert_eq!(extent([0; 3], 16, 4, [10, 3, 1]), Ok(2 * 16 + 10));
        assert_eq!(extent([0; 3], 16, 4, [10, 3, 2]), Ok((4 + 2) * 16 + 10));
        assert_eq!(extent([5, 1, 3], 16, 4, [10, 3, 2]), Ok((16 + 3) * 16 + 15));
        assert_eq!(extent([5, 1, 3], 16, 4, [10, 0, 2]), Ok(0));
    }

    #[test]
    fn what_is_not_given_is_what_the_box_reaches_to() {
        assert_eq!(extent([0; 3], 0, 0, [10, 3, 2]), Ok(60));
        assert_eq!(extent([6, 1, 0], 0, 0, [10, 3, 2]), Ok((4 + 3) * 16 + 16));
    }

    #[test]
    fn rows_and_slices_of_a_box_do_not_overlap() {
        let refused = Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(extent([0; 3], 10, 3, [10, 3, 1]), Ok(30));
        assert_eq!(extent([0; 3], 9, 3, [10, 3, 1]), refused);
        assert_eq!(extent([1, 0, 0], 10, 3, [10, 3, 1]), refused);
        assert_eq!(extent([0; 3], 10, 2, [10, 3, 1]), refused);
        assert_eq!(extent([0, 1, 0], 10, 3, [10, 3, 1]), refused);
    }

    #[test]
    fn the_extent_of_a_box_does_not_overflow() {
        let refused = Err(CUDA_ERROR_INVALID_VALUE);
        const HALF: u64 = 1 << 63;
        assert_eq!(extent([HALF, 0, 0], 0, 0, [HALF, 1, 1]), refused);
        assert_eq!(extent([0, HALF, 0], 0, 0, [1, HALF, 1]), refused);
        assert_eq!(extent([0, 0, HALF], 0, 0, [1, 1, HALF]), refused);
        assert_eq!(extent([0; 3], HALF, 3, [1, 3, 1]), refused);
        assert_eq!(extent([0; 3], 1, HALF, [1, 1, 3]), refused);
    }

    #[test]
    fn a_memset_ends_with_its_last_element() {
        let refused = Err(CUDA_ERROR_INVALID_VALUE);
        assert_eq!(memset_extent(4, 3, 1, 0), Ok(12));
        assert_eq!(memset_extent(2, 3, 4, 8), Ok(3 * 8 + 6));
        assert_eq!(memset_extent(2, 4, 4, 8), Ok(4 * 8));
        assert_eq!(memset_extent(2, 5, 4, 8), refused);
        assert_eq!(memset_extent(1, 1, 0, 8), refused);
        assert_eq!(memset_extent(4, 1 << 62, 1, 0), refused);
        assert_eq!(memset_extent(1, 1, 3, 1 << 63), refused);
    }
    const UNIT: u64 = 2 << 20;
    const DEVICE: u32 = Side::Device as u32;
    const HOST: u32 = Side::Host as u32;
    const STAGING: u32 = Side::Staging as u32;

    /// A registered file of one page that devices may only read.
    fn read_only_file(test: &mut Fixture) -> u64 {
        test.sends(sealed(&[0; 4096]));
        let body = FileRegister {
            len: 4096,
            flags: CU_MEMHOSTREGISTER_READ_ONLY,
            ..FileRegister::default()
        };
        let start = test.reply::<u64>(Op::FileRegister, &body, &[]);
        start.expect("a file")
    }

    fn raw(test: &Fixture, stream: u64) -> u64 {
        let stream = test.session.objects.streams.get(stream);
        stream.expect("a stream").raw.0
    }

    #[test]
    fn an_inline_copy_needs_memory_and_a_stream_of_the_session() {
        let mut test = Fixture::new(&[("cuMemcpyHtoDAsync_v2", records as Function)]);
        let (to, stream) = (test.memory(UNIT), test.stream());
        let file = read_only_file(&mut test);
        let copy = |to, stream| CopyInline { to, stream, len: 8 };
        for to in [0, to - 1, to + UNIT - 7, to + UNIT, file, u64::MAX - 7] {
            let status = test.status(Op::CopyInline, &copy(to, stream), &[0; 8]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{to:#x}");
        }
        for stream in others(stream) {
            let status = test.status(Op::CopyInline, &copy(to, stream), &[0; 8]);
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
        }
        assert_eq!((test.calls(), test.session.flow.counts.copies), (0, 0));
        let last = copy(to + UNIT - 8, stream);
        assert_eq!(test.status(Op::CopyInline, &last, &[0; 8]), CUDA_SUCCESS);
        let [at, _, len, on, ..] = test.recorded()[0];
        assert_eq!((at, len, on), (last.to, 8, raw(&test, stream)));
    }

    #[test]
    fn the_data_of_an_inline_copy_lies_in_its_message() {
        let mut test = Fixture::new(&[("cuMemcpyHtoDAsync_v2", counts as Function)]);
        let (to, stream) = (test.memory(UNIT), test.stream());
        for len in [9, INLINE_COPY_MAX as u64 + 1, u64::MAX] {
            let body = CopyInline { to, stream, len };
            let data = vec![0; len.min(8 << 10) as usize - 1];
            assert!(test.is_violation(Op::CopyInline, &body, &data), "{len}");
        }
        assert_eq!(test.calls(), 0);
        let len = INLINE_COPY_MAX as u64;
        let body = CopyInline { to, stream, len };
        let most = [0; INLINE_COPY_MAX];
        assert_eq!(test.status(Op::CopyInline, &body, &most), CUDA_SUCCESS);
    }

    const MOVES: [(&str, Function); 3] = [
        ("cuMemcpyHtoDAsync_v2", records as Function),
        ("cuMemcpyDtoHAsync_v2", records as Function),
        ("cuStreamWriteValue32_v2", records as Function),
    ];

    /// A move of pieces of 64 bytes to the device, and a flag behind it.
    fn moves(stream: u64, pieces: &[Piece]) -> ManagedMove {
        ManagedMove {
            stream,
            len: pieces.iter().map(|piece| piece.len).sum(),
            to: DEVICE,
            pieces: pieces.len() as u32,
            slot: 3,
            value: 7,
        }
    }

    fn piece(device: u64, host: u64) -> Piece {
        let len = 64;
        Piece { device, host, len }
    }

    #[test]
    fn pieces_are_copied_in_their_order_and_a_flag_is_written_behind_them() {
        let mut test = Fixture::new(&MOVES);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let stream = test.stream();
        let pieces = [piece(device + 128, host), piece(device, host + 64)];
        let body = moves(stream, &pieces);
        let bytes = pieces.as_bytes();
        assert_eq!(test.status(Op::ManagedMove, &body, bytes), CUDA_SUCCESS);
        let on = raw(&test, stream);
        let recorded = test.recorded();
        assert_eq!(recorded[0][..4], [device + 128, host, 64, on]);
        assert_eq!(recorded[1][..4], [device, host + 64, 64, on]);
        assert_eq!((recorded[2][0], recorded[2][2]), (on, 7));
        let body = ManagedMove {
            to: HOST,
            slot: NO_FLAG,
            ..body
        };
        assert_eq!(test.status(Op::ManagedMove, &body, bytes), CUDA_SUCCESS);
        let recorded = test.recorded();
        assert_eq!(recorded[0][..4], [host, device + 128, 64, on]);
        assert_eq!(recorded.len(), 2, "no flag");
        let moved = test.session.flow.counts.managed;
        let counts = [moved.to_device, moved.to_host].map(|moved| (moved.bytes, moved.copies));
        assert_eq!(counts, [(128, 2); 2]);
    }

    #[test]
    fn pieces_that_do_not_fit_the_message_and_flags_that_are_none_break_the_protocol() {
        let mut test = Fixture::new(&MOVES);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let pieces = [piece(device, host); PIECES_MAX + 1];
        let good = moves(test.stream(), &pieces[..PIECES_MAX]);
        let bytes = pieces.as_bytes();
        let most = size_of::<Piece>() * PIECES_MAX;
        for (body, len) in [
            (good, most - 1),
            (ManagedMove { pieces: 9, ..good }, bytes.len()),
            (
                ManagedMove {
                    pieces: u32::MAX,
                    ..good
                },
                most,
            ),
            (
                ManagedMove {
                    to: STAGING,
                    ..good
                },
                most,
            ),
            (ManagedMove { to: 256, ..good }, most),
            (
                ManagedMove {
                    slot: NO_FLAG - 1,
                    ..good
                },
                most,
            ),
        ] {
            let rest = &bytes[..len];
            assert!(test.is_violation(Op::ManagedMove, &body, rest), "{body:?}");
        }
        assert_eq!((test.calls(), test.session.flow.counts.copies), (0, 0));
        let status = test.status(Op::ManagedMove, &good, &bytes[..most]);
        assert_eq!(status, CUDA_SUCCESS);
    }

    #[test]
    fn pieces_outside_the_sessions_memory_are_refused_and_the_flag_is_written() {
        let mut test = Fixture::new(&MOVES);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let (file, stream) = (read_only_file(&mut test), test.stream());
        for (value, (to, from)) in (1..).zip([
            (device + UNIT - 63, host),
            (device - UNIT, host),
            (file, host),
            (device, host + 4096 - 63),
            (device, device),
            (0, host),
            (u64::MAX - 31, host),
        ]) {
            let pieces = [piece(to, from)];
            let body = ManagedMove {
                value,
                ..moves(stream, &pieces)
            };
            let status = test.told(Op::ManagedMove, &body, pieces.as_bytes());
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{to:#x} {from:#x}");
            let flag = test.session.shared.segment.flag(3);
            assert_eq!(flag, value);
        }
        assert_eq!((test.calls(), test.session.flow.counts.copies), (0, 0));
        let pieces = [piece(device, file)];
        let body = ManagedMove {
            to: HOST,
            ..moves(stream, &pieces)
        };
        let status = test.told(Op::ManagedMove, &body, pieces.as_bytes());
        assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "a file to be read only");
        assert_eq!(test.calls(), 0);
        let pieces = [piece(device, host)];
        for other in others(stream) {
            let body = moves(other, &pieces);
            let status = test.told(Op::ManagedMove, &body, pieces.as_bytes());
            assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{other:#x}");
        }
    }

    #[test]
    fn a_copy_outside_the_sessions_memory_is_refused() {
        let mut test = Fixture::new(&[
            ("cuMemcpyHtoDAsync_v2", counts as Function),
            ("cuMemcpyDtoHAsync_v2", counts as Function),
            ("cuMemcpyDtoDAsync_v2", counts as Function),
        ]);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let (file, stream) = (read_only_file(&mut test), test.stream());
        for (sides, to, from) in [
            (DEVICE | DEVICE << 8, device + UNIT - 7, device),
            (DEVICE | DEVICE << 8, device, device + UNIT - 7),
            (DEVICE | HOST << 8, device, host + 4096 - 7),
            (HOST | DEVICE << 8, host + 4096 - 7, device),
            (HOST | DEVICE << 8, file, device),
            (DEVICE | HOST << 8, device, device),
            (DEVICE | STAGING << 8, device - UNIT, 0),
        ] {
            let body = Copy {
                to,
                from,
                len: 8,
                stream,
                sides,
                pad: 0,
            };
            let status = test.status(Op::Copy, &body, &[]);
            assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{sides:#x} {to:#x}");
        }
        assert_eq!((test.calls(), test.session.flow.counts.copies), (0, 0));
    }

    #[test]
    fn a_copy_of_sides_that_do_not_exist_breaks_the_protocol() {
        let mut test = Fixture::new(&[("cuMemcpyHtoDAsync_v2", counts as Function)]);
        let (device, host) = (test.memory(UNIT), test.pinned(4096));
        let stream = test.stream();
        let area = STAGING_LEN as u64;
        for (sides, to, from) in [
            (3 | DEVICE << 8, device, device),
            (DEVICE | 3 << 8, device, device),
            (HOST | HOST << 8, host, host),
            (DEVICE | STAGING << 8, device, area - 7),
            (DEVICE | STAGING << 8, device, u64::MAX),
        ] {
            let body = Copy {
                to,
                from,
                len: 8,
                stream,
                sides,
                pad: 0,
            };
            assert!(test.is_violation(Op::Copy, &body, &[]), "{sides:#x}");
        }
        assert_eq!(test.calls(), 0);
        let body = Copy {
            to: device,
            from: area - 8,
            len: 8,
            stream,
            sides: DEVICE | STAGING << 8,
            pad: 0,
        };
        assert_eq!(test.status(Op::Copy, &body, &[]), CUDA_SUCCESS);
    }

    #[test]
    fn each_copy_is_one_call_of_the_driver_and_returns_its_error() {
        let (htod, dtoh, dtod) = (
            "cuMemcpyHtoDAsync_v2",
            "cuMemcpyDtoHAsync_v2",
            "cuMemcpyDtoDAsync_v2",
        );
        // Sides, whether the stream captures, the function.
        for (to_side, from_side, capturing, name) in [
            (DEVICE, DEVICE, false, dtod),
            (DEVICE, HOST, false, htod),
            (DEVICE, STAGING, false, htod),
            (HOST, DEVICE, false, dtoh),
            (HOST, HOST, true, "cuMemcpyAsync"),
            (DEVICE, DEVICE | SIDES_UNNAMED >> 8, true, "cuMemcpyAsync"),
            (DEVICE, DEVICE, true, dtod),
        ] {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let (device, host) = (test.memory(UNIT), test.pinned(4096));
            let stream = test.stream();
            if capturing {
                test.captures(stream);
            }
            let place = |side| [device, host, 0][(side & 0xff) as usize];
            let body = Copy {
                to: place(to_side),
                from: place(from_side),
                len: 8,
                stream,
                sides: to_side | from_side << 8,
                pad: 0,
            };
            test.orders(CUDA_ERROR_NOT_SUPPORTED);
            let status = test.status(Op::Copy, &body, &[]);
            assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED, "{:#x}", body.sides);
            assert_eq!(test.session.flow.counts.copies, 0, "{name}");
            test.orders(CUDA_SUCCESS);
            assert_eq!(test.status(Op::Copy, &body, &[]), CUDA_SUCCESS);
            assert_eq!(test.session.flow.counts.copies, 1, "{name}");
        }
    }

    /// A copy to the host beside large copies.
    #[derive(Clone, Copy)]
    struct Beside {
        /// Level of the session that copies.
        level: Level,
        /// The session whose large copy is in flight.
        large_of: Option<u64>,
        len: u64,
        capturing: bool,
        /// Kernels with long blocks are in flight.
        long_blocks: bool,
        /// Its source is pinned memory, which calls accept as memory of a device.
        from_pinned: bool,
    }

    impl Beside {
        const OWN: u64 = 1;
        const OTHER: u64 = 2;
        const USUAL: Beside = Beside {
            level: Level::First,
            large_of: Some(Beside::OTHER),
            len: 4,
            capturing: false,
            long_blocks: false,
            from_pinned: false,
        };

        /// Whether the server's kernel makes it, and not the driver's copy.
        fn is_by_kernel(self) -> bool {
            let used = ["cuMemcpyDtoHAsync_v2", "cuLaunchKernel"].map(|name| {
                let mut test = Fixture::new(&[(name, counts as Function)]);
                let (memory, host) = (test.memory(UNIT), test.pinned(UNIT));
                let from = match self.from_pinned {
                    true => test.pinned(UNIT),
                    false => memory,
                };
                let stream = test.stream();
                if self.capturing {
                    test.captures(stream);
                }
                let shared = test.shared.clone();
                let home = shared.gpu.devices.first().expect("a device");
                let at = home.ordinal.index();
                assert_eq!(test.session.shared.info.session, Beside::OWN);
                if let Some(session) = self.large_of {
                    home.note_large_copy(session, 1 << 40);
                }
                shared
                    .roster
                    .fairness
                    .note_long_blocks(at, self.long_blocks);
                test.session.shared.standing.set_level(at, self.level);
                let body = Copy {
                    to: host,
                    from,
                    len: self.len,
                    stream,
                    sides: HOST | DEVICE << 8,
                    pad: 0,
                };
                let before = test.calls();
                assert_eq!(test.status(Op::Copy, &body, &[]), CUDA_SUCCESS);
                assert_eq!(test.session.flow.counts.copies, 1);
                test.calls() - before
            });
            assert_eq!(used.iter().sum::<u32>(), 1, "{used:?}");
            used[1] == 1
        }
    }

    #[test]
    fn small_copies_do_not_wait_behind_large_ones_of_others() {
        let usual = Beside::USUAL;
        let of_len = |len| Beside { len, ..usual };
        assert!(usual.is_by_kernel());
        assert!(of_len(64 << 10).is_by_kernel());
        for len in [0, (4 << 10) + 1, (64 << 10) + 16, UNIT] {
            assert!(!of_len(len).is_by_kernel(), "{len} bytes");
        }
        for large_of in [None, Some(Beside::OWN)] {
            let beside = Beside { large_of, ..usual };
            assert!(!beside.is_by_kernel(), "{large_of:?}");
        }
        let captured = Beside {
            capturing: true,
            ..usual
        };
        assert!(!captured.is_by_kernel());
    }

    #[test]
    fn copies_of_sessions_whose_kernels_may_wait_are_left_to_the_copy_engines() {
        let usual = Beside::USUAL;
        let long_blocks = Beside {
            long_blocks: true,
            ..usual
        };
        assert!(!long_blocks.is_by_kernel());
        for level in [
            Level::Own,
            Level::Middle,
            Level::Last,
            Level::Raised,
            Level::LastRaised,
            Level::Below,
        ] {
            assert!(!Beside { level, ..usual }.is_by_kernel(), "{level:?}");
        }
    }

    #[test]
    fn the_kernel_for_copies_touches_no_memory_outside_the_arena_of_its_device() {
        let pinned = Beside {
            from_pinned: true,
            ..Beside::USUAL
        };
        assert!(!pinned.is_by_kernel());
    }

    #[test]
    fn a_copy_that_faults_ends_the_session() {
        let mut test = Fixture::new(&[("cuMemcpyHtoDAsync_v2", obeys as Function)]);
        let body = CopyInline {
            to: test.memory(UNIT),
            stream: test.stream(),
            len: 8,
        };
        for (status, ends) in [(CUDA_ERROR_INVALID_VALUE, false), (FAULT, true)] {
            test.orders(status);
            assert_eq!(test.told(Op::CopyInline, &body, &[0; 8]), status);
            assert_eq!(test.has_ended(), ends, "{status}");
        }
    }

    #[test]
    fn a_copy_between_two_devices_is_made_by_both_contexts() {
        let mut test = Fixture::with_devices(
            2,
            &[
                ("cuMemcpyPeerAsync", obeys as Function),
                ("cuMemcpyDtoDAsync_v2", counts as Function),
            ],
        );
        let body = Copy {
            to: test.memory_of(0, UNIT),
            from: test.memory_of(1, UNIT),
            len: 8,
            stream: test.stream(),
            ..Copy::default()
        };
        test.orders(CUDA_ERROR_NOT_SUPPORTED);
        let status = test.status(Op::Copy, &body, &[]);
        assert_eq!(status, CUDA_ERROR_NOT_SUPPORTED);
        test.orders(CUDA_SUCCESS);
        assert_eq!(test.status(Op::Copy, &body, &[]), CUDA_SUCCESS);
        assert_eq!((test.calls(), test.session.flow.counts.copies), (0, 1));
    }

    /// A memset of 4 rows of 3 elements at 64 bytes, or of one row.
    fn set(to: u64, stream: u64, element: u32, height: u64) -> Memset {
        Memset {
            to,
            stream,
            width: 3,
            height,
            pitch: 64,
            value: 0x0102_0304,
            element,
        }
    }

    const MEMSETS: [(u32, u64, &str); 6] = [
        (1, 1, "cuMemsetD8Async"),
        (2, 1, "cuMemsetD16Async"),
        (4, 1, "cuMemsetD32Async"),
        (1, 4, "cuMemsetD2D8Async"),
        (2, 4, "cuMemsetD2D16Async"),
        (4, 4, "cuMemsetD2D32Async"),
    ];

    #[test]
    fn a_memset_outside_the_sessions_memory_is_refused() {
        let mut test = Fixture::new(&MEMSETS.map(|(.., name)| (name, counts as Function)));
        let (to, stream) = (test.memory(UNIT), test.stream());
        let file = read_only_file(&mut test);
        for (element, height, _) in MEMSETS {
            let len = 64 * (height - 1) + 3 * u64::from(element);
            for to in [to - 1, to + UNIT - len + 1, file, 0] {
                let body = set(to, stream, element, height);
                let status = test.status(Op::Memset, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_VALUE, "{element} {to:#x}");
            }
            for stream in others(stream) {
                let body = set(to, stream, element, height);
                let status = test.status(Op::Memset, &body, &[]);
                assert_eq!(status, CUDA_ERROR_INVALID_HANDLE, "{stream:#x}");
            }
            assert_eq!(test.calls(), 0);
            let body = set(to + UNIT - len, stream, element, height);
            assert_eq!(test.status(Op::Memset, &body, &[]), CUDA_SUCCESS);
            assert_eq!(test.calls(), 1);
        }
    }

    #[test]
    fn a_memset_of_other_elements_breaks_the_protocol() {
        let mut test = Fixture::new(&[]);
        let (to, stream) = (test.memory(UNIT), test.stream());
        for element in [0, 3, 8] {
            assert!(test.is_violation(Op::Memset, &set(to, stream, element, 1), &[]));
            assert!(test.is_violation(Op::Memset, &set(to, stream, element, 4), &[]));
        }
        assert_eq!(test.session.flow.counts.copies, 0);
    }

    #[test]
    fn a_memset_returns_the_error_of_the_driver() {
        for (element, height, name) in MEMSETS {
            let mut test = Fixture::new(&[(name, obeys as Function)]);
            let body = set(test.memory(UNIT), test.stream(), element, height);
            for status in [CUDA_ERROR_NOT_SUPPORTED, CUDA_SUCCESS] {
                test.orders(status);
                assert_eq!(test.status(Op::Memset, &body, &[]), status, "{name}");
            }
            assert_eq!(test.session.flow.counts.copies, 1, "{name}");
            test.orders(FAULT);
            assert_eq!(test.told(Op::Memset, &body, &[]), FAULT, "{name}");
            assert!(test.has_ended(), "{name}");
        }
    }

    #[test]
    fn a_captured_memset_of_other_memory_gets_an_address_of_no_client() {
        let mut test = Fixture::new(&[("cuMemsetD8Async", records as Function)]);
        let (own, stream) = (test.memory(UNIT), test.stream());
        test.captures(stream);
        for (to, named) in [(own, own), (own + UNIT, NOBODYS)] {
            let body = set(to, stream, 1, 1);
            assert_eq!(test.status(Op::Memset, &body, &[]), CUDA_SUCCESS);
            assert_eq!(test.recorded()[0][..3], [named, 0x0102_0304 & 0xff, 3]);
        }
    }
}
